# SPDX-License-Identifier: Apache-2.0
"""The threads of the kernels: any number of callers, fork, signals, and the caller's arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastagg import ops

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
ROWS = (12, 200_001)  # 10 MB: enough work for several threads


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=600,  # an emulator needs a minute to import torch on a busy machine
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_concurrent_callers_share_the_threads_and_get_the_same_bits() -> None:
    rows = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(12)
    expected = ops.gram(rows), ops.weighted_sum_(torch.zeros(ROWS[1]), rows, weights)

    def work(_: int) -> bool:
        torch.set_num_threads(4)  # the setting belongs to the thread
        gram = ops.gram(rows)
        total = ops.weighted_sum_(torch.zeros(ROWS[1]), rows, weights)
        return torch.equal(gram, expected[0]) and torch.equal(total, expected[1])

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(work, range(30)))


@pytest.mark.slow
def test_a_forked_process_starts_its_own_threads() -> None:
    run(
        """
        import os, torch
        from fastagg import ops
        torch.set_num_threads(4)
        rows = torch.randn(12, 200_001)
        expected = ops.gram(rows)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(ops.gram(rows), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(ops.gram(rows), expected)
        """
    )


@pytest.mark.slow
def test_a_fork_during_calls_of_other_threads_locks_nothing() -> None:
    """Without the handlers of scratch.cpp, some of these children wait for ever for its mutex."""
    run(
        """
        import os, signal, threading, torch
        from fastagg import ops
        torch.set_num_threads(1)
        rows = torch.ones(2, 8)
        ops.abs_max(rows)  # torch makes its own state at the first call, and locks it then
        def call():
            while True:
                ops.abs_max(rows)
        for _ in range(2):
            threading.Thread(target=call, daemon=True).start()
        for _ in range(150):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends a child that waits for ever
                ops.abs_max(rows)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        os._exit(0)  # a thread may be in an op
        """
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_small_calls_start_no_thread_and_helpers_block_signals() -> None:
    """Handlers run in the caller's threads. A fault is a helper's own: if it is blocked, the kernel
    ends the process without a call of its handler, such as that of faulthandler."""
    run(
        """
        import pathlib, signal, torch
        from fastagg import ops
        def helpers():
            status = [p.read_text() for p in pathlib.Path("/proc/self/task").glob("*/status")]
            return [dict(line.split(":\\t") for line in text.splitlines() if ":\\t" in line)
                    for text in status if text.startswith("Name:\\tfastagg")]
        torch.set_num_threads(4)
        ops.gram(torch.randn(20, 610))
        ops.abs_max(torch.randn(10, 5000))
        assert helpers() == []
        for _ in range(3):
            ops.gram(torch.randn(12, 200_001))
        assert len(helpers()) == 3
        faults = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS", "SIGABRT"}
        for one in helpers():
            mask = int(one["SigBlk"], 16)
            blocked = {s.name for s in signal.Signals if mask >> s - 1 & 1}
            assert blocked >= {"SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGUSR1"}
            assert not blocked & faults
        """
    )


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="needs two cores, and Linux")
def test_a_helper_wakes_on_another_core_than_that_of_the_caller() -> None:
    run(
        """
        import os, pathlib, time, torch
        from fastagg import ops
        def until(condition):  # `run` limits the time
            while not (found := condition()):
                time.sleep(0.001)
            return found
        def helpers():
            return [int(p.parent.name) for p in pathlib.Path("/proc/self/task").glob("*/status")
                    if p.read_text().startswith("Name:\tfastagg")]
        def has_helped_and_sleeps():
            ops.gram(rows)
            time.sleep(0.02)
            return len(os.sched_getaffinity(helper)) == len(cores) - 1
        torch.set_num_threads(2)
        rows, cores = torch.randn(20, 400_001), os.sched_getaffinity(0)
        ops.gram(rows)
        (helper,) = until(helpers)
        for core in sorted(cores)[:2] * 6:
            os.sched_setaffinity(0, {core})
            ops.gram(rows)
            # Before it was woken, it was kept off this core, and off no other. Awake, it has all.
            assert os.sched_getaffinity(helper) in (cores, cores - {core})
            until(has_helped_and_sleeps)  # it expects the core of the last caller
            assert os.sched_getaffinity(helper) == cores - {core}
        # A restriction from outside is kept.
        until(has_helped_and_sleeps)
        os.sched_setaffinity(helper, {core})
        for _ in range(20):
            ops.gram(rows)
        time.sleep(0.02)
        assert os.sched_getaffinity(helper) == {core}
        """
    )


def test_all_threads_compute_in_the_arithmetic_of_the_caller() -> None:
    # A product of this row with 0.5 is a denormal number, which this setting replaces by zero.
    row = torch.full((4, 400_001), 1.5 * 2.0**-126)
    results = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        for flush in (False, True):
            assert torch.set_flush_denormal(flush)
            try:
                out = ops.weighted_sum_(torch.zeros(row.shape[1]), row[:1], torch.tensor([0.5]))
            finally:
                torch.set_flush_denormal(False)
            results.append(out)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert results[0].min() > 0
    assert results[1].max() == 0
