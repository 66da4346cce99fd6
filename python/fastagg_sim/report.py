# SPDX-License-Identifier: Apache-2.0
"""Turn a configuration into a results folder: check, run, merge, tabulate, draw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from fastagg import Scaffold
from fastagg_sim import data
from fastagg_sim.client_parts import client_parts
from fastagg_sim.config import Config, ConfigError, Dropout, Job
from fastagg_sim.devices import require_device
from fastagg_sim.dropout import DropoutProcess
from fastagg_sim.files import write_atomically
from fastagg_sim.models import make_model
from fastagg_sim.partition import Partition
from fastagg_sim.plots import plot_folder
from fastagg_sim.results import ResultsFolder, read_sources
from fastagg_sim.runner import CHECKPOINT_SECONDS, Interrupted, check_settings, run_jobs
from fastagg_sim.schedules import ServerSchedule
from fastagg_sim.simulated_time import simulated_time
from fastagg_sim.simulation import dropout_process, make_aggregator, split_clients
from fastagg_sim.tables import summary


class JobsFailed(RuntimeError):
    """Some jobs failed; the results of the others are stored."""


def check(config: Config) -> None:
    """Build everything that the jobs of the first seed will need once, on the CPU.

    A wrong name or option, a missing GPU, or missing data thus causes one error before the run
    starts, and not one error per job. So does a rule that cannot take the clients of round 0.

    Raises ConfigError, or DataError if data are missing.
    """
    task = config.task
    require_device(task.device)
    seed = config.seeds[0]
    try:
        dataset = data.load(task.dataset, seed=seed, **task.data_options)
        split = split_clients(task, dataset, seed)
        make_model(
            task.model,
            num_classes=dataset.num_classes,
            in_shape=dataset.in_shape,
            seed=seed,
        )
        processes = {
            dropout.label: dropout_process(dropout, split, dataset, seed)
            for dropout in (Dropout(), *config.dropouts)
        }
        for job in config.jobs():
            if job.seed == seed:
                process = processes[job.dropout.label]
                _check_length(job, process)
                _check_job(job, split, process)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{config.name}: {error}") from error


def _check_length(job: Job, process: DropoutProcess) -> None:
    """Raise ConfigError if the dropout process of `job` ends before the job does.

    A job that may end after a number of uploads or of simulated seconds is not checked.
    """
    task, end = job.task, process.ends
    limited = task.max_uploads is not None or task.max_seconds is not None
    if end is not None and end < task.rounds and not limited:
        raise ConfigError(
            f"--dropout {job.dropout.process}: the trace has {end} rounds and --rounds is "
            f"{task.rounds}; after=repeat or after=empty continues after its end, or give "
            f"--rounds {end}"
        )


def _check_job(job: Job, split: Partition, process: DropoutProcess) -> None:
    """Make the rule and the clock of `job` as the job itself does, and run the rule's first step,
    with vectors of one number.

    process: the dropout process of the job.

    Raises ConfigError, naming the method and the dropout setting, if the job would fail there.
    """
    first, all_clients = process.joined(0), job.task.num_clients
    try:
        aggregator = make_aggregator(
            job.task, job.method, 1, split, seed=job.seed, num_clients=first
        )
        time = simulated_time(job, split.groups, aggregator)
        # With a clock, the answers of the first round are not known. Clients that keep something
        # take part in a step.
        if time is None and client_parts(aggregator) is None:
            every = job.method.full_first_round
            active = torch.arange(first) if every else process.active(0)
            aggregator.step(torch.zeros(1), list(torch.zeros(len(active), 1)), active)
        if time is not None and time.schedule.latency.incomplete:
            uploads = aggregator.uploads_per_client if isinstance(aggregator, Scaffold) else 1
            _check_times(job, process, time.schedule, uploads)
    except (ValueError, TypeError) as error:
        name = f"{job.method.label} with dropout {job.dropout.label}"
        if first < all_clients:
            name += f", which starts with {first} of {all_clients} clients"
        raise ConfigError(f"{name}: {error}") from error


def _check_times(
    job: Job, process: DropoutProcess, schedule: ServerSchedule, uploads_per_client: int
) -> None:
    """Go through all rounds of `job` without training: raise ConfigError if a client starts in a
    round for which there is no latency."""
    task = job.task
    history: list[torch.Tensor] = []
    uploads = 0
    for round in range(task.rounds):
        try:
            every = round == 0 and job.method.full_first_round
            history.append(
                torch.arange(process.joined(0)) if every else process.active(round, history)
            )
        except IndexError as error:
            raise ConfigError(f"--dropout: {error}") from error
        try:
            plan = schedule.next(round, history[-1].tolist())
        except (IndexError, ValueError) as error:
            raise ConfigError(f"--latency: {error}") from error
        uploads += len(plan.answers) * uploads_per_client
        if task.max_uploads is not None and uploads >= task.max_uploads:
            return
        if task.max_seconds is not None and plan.time >= task.max_seconds:
            return


def compute(
    parts: Sequence[tuple[Path, Config]],
    *,
    workers: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    reuse: Sequence[Path] = (),
    console: Console | None = None,
) -> list[ResultsFolder]:
    """Run every job of every (folder, config), then write and show tables and figures.

    Finished jobs that the folders already contain are reused, and so are jobs with the same
    settings in the results folders `reuse`, or below them.

    Raises ConfigError before any job runs, also if `workers` or `checkpoint_seconds` is out of
    range, if one of `reuse` has no results, or if another run uses one of the folders; Interrupted
    if the run was stopped; JobsFailed at the end if jobs failed.
    """
    console = console or Console()
    check_settings(workers, checkpoint_seconds)
    read_sources(reuse)  # before a folder is created
    for _, config in parts:
        check(config)
    folders = [ResultsFolder(path, config) for path, config in parts]
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(folder.held())
        for folder in folders:
            folder.prepare(reuse)
        return _compute(folders, workers, checkpoint_seconds, console)


def _compute(
    folders: list[ResultsFolder],
    workers: int | None,
    checkpoint_seconds: float,
    console: Console,
) -> list[ResultsFolder]:
    jobs = [job for folder in folders for job in folder.job_folders()]
    try:
        outcome = run_jobs(jobs, workers=workers, checkpoint_seconds=checkpoint_seconds)
    except Interrupted:
        for folder in folders:
            folder.merge()
        raise
    if outcome.reused:
        console.print(f"reused {outcome.reused} of {len(jobs)} jobs", highlight=False)
    for folder in folders:
        if any(job.finished for job in folder.job_folders()):
            show(folder, console)
    for key, text in outcome.failures.items():
        console.print(f"\nfailed: {key}\n{text}", markup=False, highlight=False)
    if outcome.failures:
        raise JobsFailed(f"{len(outcome.failures)} of {len(jobs)} jobs failed (see above)")
    return folders


def show(folder: ResultsFolder, console: Console) -> None:
    """Merge the CSV files, write table.md and the figures, and print the table and the paths."""
    folder.merge()
    grid = summary(folder)
    write_atomically(folder.path / "table.md", grid.to_markdown())
    console.print()
    grid.show(console)
    files = [folder.path / "metrics.csv", folder.path / "table.md"]
    for file in files + plot_folder(folder.path):
        console.print(str(file), markup=False, highlight=False, soft_wrap=True)
