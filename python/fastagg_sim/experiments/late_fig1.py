# SPDX-License-Identifier: Apache-2.0
"""Ours: stragglers with data of their own, and what each way to treat them gives in equal time.

Clustered MNIST: each group of clients has two labels. Eight of 20 clients, those of the last two
groups, are slow: nobody else has their four labels. The median latency of a fast client is 10
simulated seconds, that of a slow one 40. A deadline of 20 seconds is met by nine of ten answers of
fast clients, and by one of twelve answers of slow ones.

Every method has the same simulated time. FedAvg, MIFA, MimiC and FDMS have the deadline, and late
clients are absent. "FedAvg waits" waits for all. "FedAvg late" has the deadline, too, and late
answers count in the round in which they arrive. FedBuff takes a step whenever ten answers are
there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from fastagg_sim.config import (
    Config,
    ConfigError,
    Dropout,
    Latency,
    LocalTraining,
    Method,
    Schedule,
    Task,
)
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options
from fastagg_sim.experiments._curves import compare
from fastagg_sim.experiments._panel import Panel
from fastagg_sim.experiments._statistics import (
    Statistic,
    everything,
    from_fraction,
    over_time,
)
from fastagg_sim.records import Curve, read_curves
from fastagg_sim.tables import Grid, time_to

SECONDS, QUICK_SECONDS = 1200.0, 200.0
DEADLINE = 20.0
FAST, SLOW = 10.0, 40.0
BUFFER = 10
TARGETS = (0.6, 0.7, 0.8, 0.9)
REMEDIES = ("FedBuff", "FedAvg late", "MIFA", "MimiC", "FDMS")


@dataclass(frozen=True)
class LateOptions(Options):
    """Stragglers with data of their own, in equal simulated time."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; the experiment is repeated once per seed."""
    seconds: float | None = None
    """Simulated seconds of every run; by default 1200, with --quick 200."""

    def chosen_seconds(self) -> float:
        """Return the simulated seconds of a run. Raises ConfigError if they are not positive."""
        if self.seconds is None:
            return QUICK_SECONDS if self.quick else SECONDS
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"--seconds: expected a finite number > 0, got {self.seconds}")
        return self.seconds


def methods() -> tuple[Method, ...]:
    deadline = Schedule("deadline", {"seconds": DEADLINE})
    kept = Schedule("deadline", {"seconds": DEADLINE, "late": "kept"})
    buffered = Schedule("buffered", {"size": BUFFER})
    return (
        Method("FedAvg waits", "fedavg"),
        Method("FedAvg", "fedavg", schedule=deadline),
        Method("FedAvg late", "fedavg", {"staleness": "polynomial"}, schedule=kept),
        Method("FedBuff", "fedbuff", schedule=buffered),
        Method("MIFA", "mifa", schedule=deadline),
        Method("MimiC", "mimic", schedule=deadline),
        Method("FDMS", "fdms", schedule=deadline),
    )


def configs(options: LateOptions) -> Mapping[str, Config]:
    seconds = options.chosen_seconds()
    task = Task(
        dataset="mnist",
        partition="clustered",
        model="mnist-cnn",
        # As in figure 1 of FL-FDMS, with one pass over the data instead of two.
        training=LocalTraining(batch_size=5, local_epochs=1, lr=0.1, clients_at_once=20),
        rounds=max(1, round(seconds)),  # no method takes a step every second
        num_clients=20,
        data_options={"normalize": "unit"},
        partition_options={"num_groups": 5, "samples_per_client": 200},
        train_fraction=0.8,
        eval_every=options.eval_every,
        device=options.device,
        latency=Latency(
            "classes",
            {"medians": [FAST, SLOW], "shares": [3, 2], "sigma": 0.5, "by": "group"},
        ),
        max_seconds=seconds,
    )
    dropouts = (Dropout(),)
    return {"": Config("late-fig1", task, methods(), dropouts, options.chosen_seeds())}


def statistics(options: LateOptions) -> tuple[Statistic, Statistic]:
    """Return the mean accuracy in the last fifth of the simulated time, and in all of it."""
    trace = partial(over_time, seconds=options.chosen_seconds())
    return (
        Statistic("mean of the last fifth of the simulated time", trace, from_fraction(0.8)),
        Statistic("mean over the simulated time", trace, everything),
    )


def panel(folders: Mapping[str, Path]) -> Panel:
    return Panel(read_curves(folders[""] / "metrics.csv"), Dropout().label)


def claims(folders: Mapping[str, Path], options: LateOptions) -> Sequence[Claim]:
    found = panel(folders)
    end, whole = statistics(options)
    return [
        claim
        for method in REMEDIES
        for claim in (
            compare(f"{method} above FedAvg", found, method, "FedAvg", end, low=0),
            compare(f"{method} learns faster than FedAvg", found, method, "FedAvg", whole, low=0),
            compare(
                f"{method} learns faster than by waiting",
                found,
                method,
                "FedAvg waits",
                whole,
                low=0,
            ),
        )
    ]


def draw(folders: Mapping[str, Path], options: LateOptions, path: Path) -> object:
    lines = {
        method: [(curve.time, curve.accuracy) for curve in curves]
        for method, curves in panel(folders).curves.items()
    }
    plot = _figures.Plot("MNIST (slow clients have their own labels)", lines, (0.0, 1.0))
    return _figures.draw([plot], path, xlabel="Simulated Seconds")


def table(folders: Mapping[str, Path], options: LateOptions) -> Grid:
    found = panel(folders)
    rows = []
    for method, curves in found.curves.items():
        levels = [f"{found.level(method, statistic):.3f}" for statistic in statistics(options)]
        times = [time_to(curves, target) for target in TARGETS]
        rows.append((method, *levels, *times, *_counts(curves)))
    return Grid(
        "Stragglers with data of their own, in equal simulated time",
        (
            *("method", "last fifth", "mean"),
            *(f"to {target:g}" for target in TARGETS),
            *("steps", "answers"),
        ),
        rows,
        "last fifth, mean: accuracy over the simulated time; to 0.6: simulated seconds until an "
        "evaluation first has this accuracy; steps, answers: of a run; means over seeds",
    )


def _counts(curves: Sequence[Curve]) -> tuple[str, str]:
    """Return the numbers of steps and of answers of a run, means over seeds."""
    return (
        f"{fmean(curve.rounds[-1] + 1 for curve in curves):.0f}",
        f"{fmean(curve.uploads[-1] for curve in curves):.0f}",
    )


EXPERIMENT = Experiment(
    name="late-fig1",
    title="stragglers with data of their own, in equal simulated time",
    options=LateOptions,
    configs=configs,
    claims=claims,
    expected=Expected(cpu=5, quick=1),
    draw=draw,
    table=table,
    unused=("rounds",),
)
