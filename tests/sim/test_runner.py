# SPDX-License-Identifier: Apache-2.0
"""Whole runs in worker processes: failed, repeated, resumed."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from fastagg_sim import runner
from fastagg_sim.config import Config, ConfigError, Dropout, LocalTraining, Method, Task
from fastagg_sim.job_folder import JobFolder
from fastagg_sim.results import ResultsFolder
from fastagg_sim.runner import run_job, run_jobs


def config(rounds: int = 4, seeds: tuple[int, ...] = (0,)) -> Config:
    return Config(
        name="tiny",
        task=Task(
            dataset="digits",
            partition="clustered",
            model="logistic",
            training=LocalTraining(batch_size=10, local_epochs=1),
            rounds=rounds,
            num_clients=10,
            partition_options={"samples_per_client": 20},
        ),
        methods=(Method("fedavg", "fedavg"), Method("fdms", "fdms")),
        dropouts=(Dropout("exact", {"alpha": 0.5}),),
        seeds=seeds,
    )


def run_all(path: Path, settings: Config) -> ResultsFolder:
    folder = ResultsFolder(path, settings)
    folder.prepare()
    outcome = run_jobs(folder.job_folders(), workers=2)
    assert not outcome.failures
    folder.merge()
    return folder


@pytest.mark.slow
def test_two_runs_give_the_same_bytes_and_finished_jobs_are_reused(tmp_path: Path) -> None:
    first = run_all(tmp_path / "a", config())
    second = run_all(tmp_path / "b", config())
    metrics = (first.path / "metrics.csv").read_bytes()
    assert metrics == (second.path / "metrics.csv").read_bytes()
    assert metrics.count(b"\n") == 1 + 2 * 4

    stamps = {f: f.stat().st_mtime_ns for f in first.path.glob("jobs/*/metrics.csv")}
    more = ResultsFolder(first.path, config(seeds=(0, 1)))
    more.prepare()
    outcome = run_jobs(more.job_folders(), workers=2)
    assert outcome.reused == 2
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in stamps.items())


@pytest.mark.slow
def test_a_failed_job_does_not_stop_the_others(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path, config())
    folder.prepare()
    jobs = folder.job_folders()
    (jobs[0].path / "metrics.csv").mkdir()  # this job cannot write its rows
    outcome = run_jobs(jobs, workers=1)
    assert list(outcome.failures) == [jobs[0].job.key]
    assert "metrics.csv" in outcome.failures[jobs[0].job.key]
    assert [job.finished for job in jobs] == [False, True]


def test_stopping_in_this_process_and_going_on(tmp_path: Path) -> None:
    """Stop after each round, without worker processes."""
    job = config().jobs()[1]
    whole = JobFolder(tmp_path / "whole", job)
    whole.prepare()
    assert run_job(whole, lambda done, accuracy: None, lambda: False)
    parts = JobFolder(tmp_path / "parts", job)
    parts.prepare()
    attempts = 1
    while not run_job(parts, lambda done, accuracy: None, lambda: True):
        attempts += 1
    assert attempts == 4
    for name in ("metrics.csv", "scores.csv", "done.json", "job.json"):
        assert (parts.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_rows_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    job = config().jobs()[0]
    folder = JobFolder(tmp_path, job)
    folder.prepare()
    run_job(folder, lambda done, accuracy: None, lambda: True)  # one round and a checkpoint
    expected = (tmp_path / "metrics.csv").read_text()
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("fedavg,fedavg,exact-0.5,0,1,10,5,0.1")  # a row that was being written
    while not run_job(folder, lambda done, accuracy: None, lambda: False):
        pass
    lines = (tmp_path / "metrics.csv").read_text().splitlines(keepends=True)
    assert "".join(lines[:2]) == expected
    assert len(lines) == 5 and all(line.count(",") == lines[0].count(",") for line in lines)


def test_a_disk_that_takes_a_part_of_a_row_ends_the_run(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job", config(rounds=2).jobs()[0])
    folder.prepare()
    run_job(folder, lambda done, accuracy: None, lambda: True)  # one round and a checkpoint
    whole = JobFolder(tmp_path / "whole", config(rounds=2).jobs()[0])
    whole.prepare()
    run_job(whole, lambda done, accuracy: None, lambda: False)
    metrics = folder.path / "metrics.csv"

    def fill_the_disk(done: int, accuracy: float | None) -> None:
        if done == 1:  # the folder is open; the next row, which is the last one, does not fit
            resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 9, -1))

    try:
        with pytest.raises(OSError, match=r"cannot be written.*metrics\.csv"):
            run_job(folder, fill_the_disk, lambda: False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    run_job(folder, lambda done, accuracy: None, lambda: False)
    assert metrics.read_bytes() == (whole.path / "metrics.csv").read_bytes()


def test_metrics_shorter_than_the_checkpoint_are_an_error(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, config().jobs()[0])
    folder.prepare()
    run_job(folder, lambda done, accuracy: None, lambda: True)
    header = (tmp_path / "metrics.csv").read_text().splitlines(keepends=True)[0]
    (tmp_path / "metrics.csv").write_text(header)
    with pytest.raises(ValueError, match=r"delete .* to compute this job again"):
        run_job(folder, lambda done, accuracy: None, lambda: False)


def test_a_worker_computes_with_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run side by side, one per core."""
    seen: list[int] = []
    sent: list[tuple[str, ...]] = []

    class Pipe:
        send = sent.append

        def poll(self) -> bool:
            return False

    def compute(*_: object) -> bool:
        seen.append(torch.get_num_threads())
        return True

    monkeypatch.setattr(runner, "run_job", compute)
    monkeypatch.setattr(
        runner.signal, "signal", lambda *_: None
    )  # the threads of this process are unchanged
    folder = ResultsFolder(tmp_path, config()).job_folders()[0]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        runner._worker(folder, Pipe(), 1.0, None)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert seen == [1] and sent == [("finished",)]


@pytest.mark.parametrize("workers", [0, -1])
def test_fewer_workers_than_one_are_an_error(workers: int) -> None:
    with pytest.raises(ConfigError, match="workers: expected at least 1"):
        run_jobs([], workers=workers)


def test_as_many_workers_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert runner.default_workers() == 3  # the cores that the process may use
