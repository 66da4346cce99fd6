# SPDX-License-Identifier: Apache-2.0
"""Ours: friends among 10^5 clients, of which the server samples 1 % in a round.

The clients are in 50 hidden groups; those of a group share a distribution (Synthetic(1,1) with
`groups`). Groups answer differently often: a client of group g is available in a round with
probability 0.1 + 0.9 g / 49, and the server samples 1,000 of the available clients. FedAvg
therefore learns more from some groups than from others. `fdms-means` lets friends stand in for
absent clients; its state is a sketch per client. `mifa` uses the last update of every client, which
it remembers.

There are no published values. Seconds and memory are those of the machine that ran it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastagg_sim.config import Config, Dropout, LocalTraining, Method, Task
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options
from fastagg_sim.experiments._panel import Panel, above, not_below
from fastagg_sim.experiments._statistics import AREA, END, Statistic, Trace, contrast, everything
from fastagg_sim.records import Curve, read_columns, read_curves
from fastagg_sim.tables import Grid
from fastagg_sim.verdicts import Statement

MEMORY_DTYPE = "int8"
"""Of the rows that MIFA remembers."""
METHODS = (
    Method("FedAvg", "fedavg"),
    Method("Means", "fdms-means", seeded=True),
    Method("MIFA", "mifa", {"memory_dtype": MEMORY_DTYPE}),
)
NUM_CLIENTS, QUICK_CLIENTS = 100_000, 10_000
NUM_GROUPS = 50
LEAST_AVAILABLE = 0.1
MOST_WRONG = 0.1
"""Of random substitutes, 98 % are of another group."""
MOST_MB = 600
NAME = f"{NUM_GROUPS} groups"


@dataclass(frozen=True)
class ScaleOptions(Options):
    """10^5 clients in 50 hidden groups, of which 1 % are sampled in a round."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; the experiment is repeated once per seed."""

    @property
    def num_clients(self) -> int:
        return QUICK_CLIENTS if self.quick else NUM_CLIENTS


def configs(options: ScaleOptions) -> Mapping[str, Config]:
    num_clients = options.num_clients
    task = Task(
        dataset="synthetic",
        partition="natural",
        model="logistic",
        training=LocalTraining(batch_size=10, local_steps=5, lr=0.1, clients_at_once=128),
        rounds=options.chosen_rounds(150, quick=40),
        num_clients=num_clients,
        data_options={"num_clients": num_clients, "groups": NUM_GROUPS, "samples": 40},
        eval_every=options.eval_every,
        memory=True,
    )
    available = {"p": LEAST_AVAILABLE, "levels": NUM_GROUPS}
    sampled = {
        "sample": num_clients // 100,
        "among": "available",
        "process": "bernoulli",
        "options": available,
    }
    config = Config(
        name="scale-friends",
        task=task,
        methods=METHODS,
        dropouts=(Dropout("sampled", sampled),),
        seeds=options.chosen_seeds(),
    )
    return {"": config}


def wrong_over_rounds(curve: Curve) -> Trace:
    """Return the share of substitutes of another group in each round that has substitutes."""
    rates, counts = np.array(curve.wrong_friends, dtype=float).reshape(-1, 2).T
    return Trace(curve.seed, np.arange(len(rates), dtype=float), rates, counts)


WRONG = Statistic(
    "share of substitutes of another group, over the run", wrong_over_rounds, everything
)


def peaks(folder: Path) -> dict[str, float]:
    """Return the largest resident memory of a method's processes in MB, over all seeds."""
    found: dict[str, float] = {}
    for (method, _), columns in read_columns(folder / "memory.csv", ["peak_mb"]).items():
        found[method] = max(found.get(method, 0.0), *columns["peak_mb"])
    return found


def seconds(folder: Path, part: str) -> dict[str, float]:
    """Return the mean seconds of a round that a method spends in "training" or "aggregation"."""
    found: dict[str, list[float]] = {}
    column = f"seconds_{part}"
    for (method, _), columns in read_columns(folder / "timings.csv", [column]).items():
        found.setdefault(method, []).extend(columns[column])
    return {method: float(np.mean(values)) for method, values in found.items()}


def panel_of(folder: Path) -> Panel:
    curves = read_curves(folder / "metrics.csv")
    return Panel(curves, curves[0].dropout)


def claims(folders: Mapping[str, Path], options: ScaleOptions) -> Sequence[Claim]:
    folder = folders[""]
    panel = panel_of(folder)
    wrong = contrast([(1, panel.curves["Means"])], WRONG)
    memory = {method: round(peak) for method, peak in peaks(folder).items()}
    server, training = (seconds(folder, part) for part in ("aggregation", "training"))
    return [
        not_below(NAME, panel, "Means", "FedAvg"),
        above(NAME, panel, "Means", "FedAvg"),
        above(NAME, panel, "Means", "MIFA"),
        Claim.about(
            f"{NAME}: at most {MOST_WRONG:.0%} of Means's substitutes are wrong ({WRONG.text})",
            [Statement("share", wrong, high=MOST_WRONG)],
        ),
        Claim.counted(
            f"no process takes more than {MOST_MB} MB, PyTorch included",
            max(memory.values()) <= MOST_MB,
            memory,
        ),
        Claim.counted(
            f"sketches take less memory than MIFA's rows in {MEMORY_DTYPE}",
            memory["Means"] < memory["MIFA"],
            {method: memory[method] for method in ("Means", "MIFA")},
        ),
        Claim.counted(
            "the server's step takes less time than local training, with every method",
            all(server[method] < training[method] for method in server),
            {
                method: f"{server[method]:.3f} of {server[method] + training[method]:.3f} s"
                for method in server
            },
        ),
    ]


def draw(folders: Mapping[str, Path], options: ScaleOptions, path: Path) -> object:
    panel = panel_of(folders[""])
    lines = {name: _figures.over_rounds(curves) for name, curves in panel.curves.items()}
    title = f"{options.num_clients:,} clients, {NUM_GROUPS} groups"
    return _figures.draw([_figures.Plot(title, lines)], path)


def table(folders: Mapping[str, Path], options: ScaleOptions) -> Grid:
    folder = folders[""]
    panel, memory = panel_of(folder), peaks(folder)
    server, training = (seconds(folder, part) for part in ("aggregation", "training"))
    rows: list[tuple[str, ...]] = []
    for method, curves in panel.curves.items():
        share = contrast([(1, curves)], WRONG).value
        rows.append(
            (
                method,
                "" if math.isnan(share) else f"{100 * share:.1f} %",
                f"{panel.level(method, END):.3f}",
                f"{panel.level(method, AREA):.3f}",
                f"{memory[method]:.0f}",
                f"{server[method]:.3f}",
                f"{training[method]:.3f}",
                str(len(curves)),
            )
        )
    return Grid(
        f"{options.num_clients:,} clients in {NUM_GROUPS} hidden groups, 1 % sampled per round",
        (
            "method",
            "wrong friends",
            "last 10",
            "mean",
            "peak MB",
            "server s",
            "training s",
            "seeds",
        ),
        rows,
        "wrong friends: share of substitutes of another group; last 10: accuracy, mean of the last "
        "ten evaluations; mean: of all evaluations; peak MB: resident memory of a process; seconds "
        "per round",
    )


EXPERIMENT = Experiment(
    name="scale-friends",
    title="friends among 10^5 clients, 1 % of them sampled in a round",
    options=ScaleOptions,
    configs=configs,
    claims=claims,
    expected=Expected(cpu=10, quick=1),
    draw=draw,
    table=table,
)
