# SPDX-License-Identifier: Apache-2.0
"""Simulated time: the schedule of a job, and the updates that are on their way to the server."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import fastagg
from fastagg.updates.row_pool import RowPool
from fastagg_sim.client_parts import client_parts
from fastagg_sim.config import ConfigError, Job, Schedule
from fastagg_sim.dropout.base import changes_clients
from fastagg_sim.latency import make_latency, needs
from fastagg_sim.schedules import Plan, ServerSchedule, Work, make_schedule

ROWS = "in-flight.safetensors"


class SimulatedTime:
    """The clock of a job with latencies.

    A client computes its update when it starts, and the update waits here until its answer takes
    part in a step. Memory is needed for the updates of the clients that are at work.

    schedule: the schedule of the job's method.
    rows: the updates of all work that has started and has not taken part in a step, each [d].
    """

    def __init__(self, schedule: ServerSchedule) -> None:
        self.schedule = schedule
        self.rows: dict[Work, Tensor] = {}

    @property
    def time(self) -> float:
        """The end of the last round, in simulated seconds."""
        return self.schedule.time

    def collect(self, plan: Plan, round: int, buffer: RowPool) -> list[Tensor]:
        """Take the rows of `plan.starts` from `buffer`, which gets other rows in exchange, and
        return the rows of `plan.answers`, in their order."""
        spare = [torch.empty_like(row) for row in buffer.rows(plan.starts)]
        own = buffer.exchange(plan.starts, spare)
        self.rows.update(zip((Work(k, round) for k in plan.starts), own, strict=True))
        return [self.rows.pop(work) for work in plan.answers]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the waiting rows to `folder` and return the state of the schedule for JSON."""
        if self.schedule.late_answers:
            rows = {_name(work): row for work, row in self.rows.items()}
            save_file(rows, folder / ROWS)
        return self.schedule.state()

    def restored(self, state: Any, round: int, path: Path) -> SimulatedTime:
        """Return the clock whose schedule had the `state` before `round`, without its rows.

        Raises ConfigError, naming the file `path` that holds the state, if it is damaged.
        """
        schedule = copy.copy(self.schedule)
        try:
            schedule.load(state, round)
        except ValueError as error:
            raise ConfigError(f"{path}: damaged: {error}") from error
        return SimulatedTime(schedule)

    def names(self) -> list[str]:
        """Return the names of the rows in the file that `save` writes."""
        return [_name(work) for work in self.schedule.waiting()]

    def put(self, rows: dict[str, Tensor]) -> None:
        """Let the waiting rows be `rows`, which have the names `names()`."""
        self.rows = {work: rows[_name(work)] for work in self.schedule.waiting()}


def _name(work: Work) -> str:
    return f"{work.client}.{work.round}"


def simulated_time(
    job: Job, groups: Sequence[int] | None, aggregator: fastagg.Aggregator
) -> SimulatedTime | None:
    """Return the clock of a job; None if it has no latencies.

    groups: the group of each client, if they are known.
    aggregator: the rule of the job.

    Raises ConfigError if the schedule takes late answers and something in the job cannot.
    """
    setting = job.task.latency
    if setting is None:
        return None
    needed = "groups" in needs(setting.process, setting.options)
    latency = make_latency(
        setting.process,
        num_clients=job.task.num_clients,
        seed=job.seed,
        groups=groups if needed else None,
        **setting.options,
    )
    chosen = job.method.schedule or Schedule()
    schedule = make_schedule(chosen.name, latency, **chosen.options)
    if schedule.late_answers:
        schedule.repeats = aggregator.repeats_clients
        _check_takes_late_answers(job, aggregator, chosen.label)
    return SimulatedTime(schedule)


def _check_takes_late_answers(job: Job, aggregator: fastagg.Aggregator, schedule: str) -> None:
    """Raise ConfigError if something in `job` cannot take answers from earlier models.

    Rules that cannot take them at all refuse every `staleness` with the reason.
    """
    found: dict[str, bool] = {
        f"rule {job.method.rule}: expected the option staleness, which says how late answers "
        "count": aggregator.staleness is None,
        "clients that keep something between rounds must know at once which answers counted": (
            job.method.echo is not None or client_parts(aggregator) is not None
        ),
        f"dropout {job.dropout.process}: a client that has left could still answer": (
            changes_clients(job.dropout.process, job.dropout.options_of(job.seed))
        ),
        "distances: measured among clients that start from the same model": job.task.distances,
        "norm_rounds: measured among clients that start from the same model": bool(
            job.task.norm_rounds
        ),
    }
    for reason, applies in found.items():
        if applies:
            raise ConfigError(f"schedule {schedule}: {reason}")
