# SPDX-License-Identifier: Apache-2.0
"""The progress line of a run whose output is not a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fastagg_sim import progress
from fastagg_sim.config import Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.progress import Progress


def make_job(seed: int) -> Job:
    training = LocalTraining(local_epochs=1)
    task = Task("digits", "clustered", "logistic", training, rounds=100)
    return Job(task, Method("a", "fedavg"), Dropout(), seed)


def test_lines_say_how_far_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    jobs = [make_job(0), make_job(1)]
    with Progress(jobs, Console(file=out, width=40)) as shown:
        shown.started(jobs[0])
        shown.refresh()
        clock[0] += progress.PLAIN_SECONDS
        shown.refresh()
        assert out.getvalue() == "  0 %  0/2 jobs  0/200 rounds  0:00:15 elapsed\n"
        shown.advanced(jobs[0], 20, None)  # from a checkpoint
        shown.advanced(jobs[0], 50, 0.5)
        clock[0] += progress.PLAIN_SECONDS - 1
        shown.refresh()
        assert out.getvalue().count("\n") == 1  # too early for another line
        clock[0] += 1
        shown.refresh()
        # 30 rounds in 30 seconds, and 150 to go
        line = " 25 %  0/2 jobs  50/200 rounds  1 rounds/s, 0:00:30 elapsed, about 0:02:30 left\n"
        assert out.getvalue().splitlines(keepends=True)[-1] == line
        for job in jobs:
            shown.ended(job, "finished")
    assert out.getvalue().splitlines()[-1].startswith("100 %  2/2 jobs  200/200 rounds  6 rounds/s")
