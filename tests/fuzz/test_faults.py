# SPDX-License-Identifier: Apache-2.0
"""Short runs of the fuzzers of disks and memory."""

from __future__ import annotations

import pytest

from tests.fuzz import disks, memory
from tests.fuzz.faults import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"faults: {why_not()}"),
]


@pytest.mark.parametrize("kind", ["io", "full", "read-only"])
def test_disks_that_fail(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    writers = ["save", "save, first", "save, keep=3", "sharded", "memory rows", "text"]
    code = disks.main(["--kinds", kind, "--writers", *writers])
    assert code == 0, capsys.readouterr().out


def test_runs_of_the_simulation_on_a_disk_that_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    code = disks.main(["--kinds", "full", "--writers", "run", "--every", "6"])
    assert code == 0, capsys.readouterr().out


def test_files_that_may_not_grow(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--kinds", "size", "--writers", "save", "text", "--every", "20"]
    code = disks.main(given)
    assert code == 0, capsys.readouterr().out


@pytest.mark.skipif(not disks.can_mount(), reason="this process may not mount a tmpfs")
def test_a_full_tmpfs(capsys: pytest.CaptureFixture[str]) -> None:
    code = disks.main(["--kinds", "tmpfs", "--writers", "save", "save, keep=3", "memory rows"])
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(("kind", "every"), [("one", "12"), ("full", "12"), ("space", "1")])
def test_memory_that_runs_out(kind: str, every: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--kinds", kind, "--every", every, "--limits", "3", "--rules", "fedavg", "mimic"]
    code = memory.main(given)
    assert code == 0, capsys.readouterr().out
