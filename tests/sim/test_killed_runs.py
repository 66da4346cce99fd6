# SPDX-License-Identifier: Apache-2.0
"""Whole runs in other processes that are killed or stopped, and then resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fastagg_sim.cli import main
from tests.scripts import HANG

ROUNDS = 500  # seconds, of which the first checkpoint takes 0.2: time to be interrupted
RUN = [
    "run",
    *("--rules", "fdms", "mifa", "--model", "logistic", "--rounds", str(ROUNDS)),
    *("--num-clients", "10", "--partition-options", "samples_per_client=20"),
    *("--full-first-round", "--checkpoint-seconds", "0.2", "--workers", "2"),
]


def prepare() -> None:
    """Restore SIGINT, which background jobs of shells ignore, and let the test go before the run.

    Else, on a busy machine, the run can end before the test has seen its checkpoints.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.nice(19)


@contextmanager
def started(out: Path) -> Iterator[subprocess.Popen[str]]:
    """Start RUN in a separate process group; however the test ends, end the group and its pipe."""
    with subprocess.Popen(
        [sys.executable, "-m", "fastagg_sim", *RUN, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=prepare,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def checkpoints(out: Path) -> set[Path]:
    return set(out.glob("jobs/*/checkpoint/round-*"))


def wait_for_checkpoints(out: Path, process: subprocess.Popen[str], count: int) -> None:
    """Wait until there are `count` checkpoints."""
    deadline = time.monotonic() + HANG
    while len(checkpoints(out)) < count:
        assert process.poll() is None, process.communicate(timeout=HANG)[0]
        assert time.monotonic() < deadline, f"fewer than {count} checkpoints in {HANG:.0f} s"
        time.sleep(0.02)


def wait_until_workers_are_gone(out: Path, group: int) -> None:
    """Wait for the workers to end; they check for a dead parent at the end of a round.

    Dead workers that nothing reaps stay in their process group, but write nothing for 3 seconds.
    """
    deadline = time.monotonic() + HANG
    sizes: list[list[int]] = []
    while len(sizes) < 7 or any(size != sizes[-1] for size in sizes[-7:]):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, "workers still write although the parent was killed"
        sizes.append([file.stat().st_size for file in sorted(out.glob("jobs/*/metrics.csv"))])
        time.sleep(0.5)


def finish(out: Path) -> bytes:
    """Run the same command in this process, where PyTorch is already imported."""
    assert main([*RUN, "--out", str(out)]) == 0
    return (out / "metrics.csv").read_bytes()


def interrupt(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal to a run and its workers; return what the run has printed."""
    os.killpg(process.pid, number)
    output = process.communicate(timeout=HANG)[0]
    assert process.returncode == 130, output
    assert "stopped" in output and "Traceback" not in output and "failed" not in output
    return output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return finish(tmp_path_factory.mktemp("reference"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["everything", "parent"])
def test_killed_run_ends_with_the_same_csv(
    victim: str, tmp_path: Path, uninterrupted: bytes
) -> None:
    with started(tmp_path) as process:
        wait_for_checkpoints(tmp_path, process, 2)
        if victim == "everything":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate(timeout=HANG)
        wait_until_workers_are_gone(tmp_path, process.pid)
    assert not (tmp_path / "metrics.csv").exists()
    assert checkpoints(tmp_path), "killed too late to test anything"
    assert finish(tmp_path) == uninterrupted
    assert not list(tmp_path.glob("jobs/*/checkpoint"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_interrupted_while_its_workers_start(
    seconds: float, tmp_path: Path, uninterrupted: bytes
) -> None:
    """The fork server imports torch then; Ctrl-C reaches it, too."""
    with started(tmp_path) as process:
        deadline = time.monotonic() + HANG
        while not list(tmp_path.glob("jobs/*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(seconds)
        interrupt(process, signal.SIGINT)
    assert finish(tmp_path) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_saves_and_goes_on(
    number: signal.Signals, tmp_path: Path, uninterrupted: bytes
) -> None:
    with started(tmp_path) as process:
        wait_for_checkpoints(tmp_path, process, 1)
        output = interrupt(process, number)
    assert "run the same command again to resume" in output
    assert finish(tmp_path) == uninterrupted
