# SPDX-License-Identifier: Apache-2.0
"""What macOS does in another way than Linux: syncing files, reserving blocks, long reads."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch

from fastagg import durable, tensor_file
from fastagg.checkpoint import atomic
from fastagg.memory import stores

FULL_SYNC = 51  # on macOS


class Drive:
    """Stands for a system with the command; its calls may fail with an error number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: int | None = None) -> None:
        self.calls: list[str] = []
        self._refusal = refusal
        monkeypatch.setattr(durable, "_FULL_SYNC", FULL_SYNC)
        monkeypatch.setattr(fcntl, "fcntl", self._command)
        monkeypatch.setattr(os, "fsync", lambda descriptor: self.calls.append("fsync"))

    def _command(self, descriptor: int, command: int) -> int:
        assert command == FULL_SYNC
        self.calls.append("full")
        if self._refusal is not None:
            raise OSError(self._refusal, os.strerror(self._refusal))
        return 0


def test_a_file_and_its_folder_reach_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(monkeypatch)
    atomic.replace_text(tmp_path / "a", "text")
    assert drive.calls == ["full", "full"]
    assert (tmp_path / "a").read_text() == "text"


def test_a_file_system_without_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch, errno.ENOTSUP)
    atomic.replace_text(tmp_path / "a", "text")
    assert drive.calls == ["full", "fsync"] * 2


def test_an_error_of_the_drive_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        atomic.replace_text(tmp_path / "a", "text")
    assert drive.calls == ["full"]
    assert not list(tmp_path.iterdir())


@pytest.fixture(name="no_fallocate")
def _no_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(stores, "_PIECE", 5000)


@pytest.mark.usefixtures("no_fallocate")
def test_rows_in_a_folder_without_posix_fallocate(tmp_path: Path) -> None:
    store = stores.read_store("float32", tmp_path)
    rows = store.allocate(3, 2500, torch.device("cpu"))
    for s, row in enumerate(rows):
        assert row.shape == (2500,) and not row.any()
        row.fill_(s + 1)
    assert [row.unique().item() for row in rows] == [1, 2, 3]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_fallocate")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_blocks_are_reserved_without_posix_fallocate() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            stores._reserve(descriptor, 12_345)
    finally:
        os.close(descriptor)


def test_long_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sizes = os.preadv, []

    def limited(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(sum(view.nbytes for view in views))
        return read(descriptor, views, offset)

    tensor = torch.randn(1000)
    (tmp_path / "a").write_bytes(b"12345678" + tensor.numpy().tobytes())
    monkeypatch.setattr(tensor_file, "_LARGEST_READ", 300)
    monkeypatch.setattr(os, "preadv", limited)
    out = torch.zeros(1000)
    with tensor_file.opened(tmp_path / "a") as descriptor:
        tensor_file.read_into(descriptor, out, 8)
    assert torch.equal(out, tensor)
    assert sizes == [300] * 13 + [100]
