# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, conference version ("Friends to Help"), figure 1: updates of friends and of all clients.

sigma_F^2 is the largest expected squared distance between the updates of two friends (here two
clients of the same group), sigma_P^2 that between the updates of any two clients. All clients are
active, on a clustered data set. The paper does not state the data set; the default is CIFAR-10. The
paper takes the expectation over mini-batches, of which every seed is one draw. Updates are
differences of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from fastagg_sim.config import Config, ConfigError, Dropout
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment
from fastagg_sim.experiments._fdms import (
    FdmsOptions,
    cifar_clustered,
    methods,
    mnist_clustered,
)
from fastagg_sim.experiments._statistics import (
    Statistic,
    Trace,
    combine,
    everything,
    over_rounds,
)
from fastagg_sim.records import read_columns
from fastagg_sim.verdicts import Statement

RATIO = Statistic("ratio per round, mean over the run", over_rounds, everything)
COLUMNS = {"sigma_F^2": "distance2_friends", "sigma_P^2": "distance2_all"}


@dataclass(frozen=True)
class FriendsOptions(FdmsOptions):
    """Figure 1 of the conference version of FL-FDMS: distances between updates."""

    alphas: tuple[float, ...] = ()
    """Not supported: in this experiment all clients are active."""
    dataset: str = "cifar10"
    """Data set: cifar10 or mnist, in the clustered setting."""


def configs(options: FriendsOptions) -> Mapping[str, Config]:
    if options.dataset == "cifar10":
        task = cifar_clustered(options, options.chosen_rounds(500, quick=26))
    elif options.dataset == "mnist":
        task = mnist_clustered(options, options.chosen_rounds(100, quick=26))
    else:
        raise ConfigError(f"dataset: expected cifar10 or mnist, got {options.dataset!r}")
    config = Config(
        name="friends-fig1",
        task=replace(task, distances=True),
        methods=methods(options.as_written)[:1],
        dropouts=(Dropout(),),
        seeds=options.chosen_seeds(),
    )
    return {"": config}


def distances(folder: Path) -> dict[str, list[list[float]]]:
    """Return sigma_F^2 and sigma_P^2 per round, by name, with one list per seed."""
    jobs = read_columns(folder / "distances.csv", list(COLUMNS.values())).values()
    return {name: [job[column] for job in jobs] for name, column in COLUMNS.items()}


def claims(folders: Mapping[str, Path], options: FriendsOptions) -> Sequence[Claim]:
    found = distances(folders[""])
    friends, all_pairs = ([fmean(t) for t in zip(*found[name], strict=True)] for name in COLUMNS)
    ratios = [f / p for f, p in zip(friends, all_pairs, strict=True)]
    of_seeds = [
        Trace(seed, np.arange(1.0, len(f) + 1), np.array(f) / np.array(p))
        for seed, (f, p) in enumerate(zip(*found.values(), strict=True))
    ]
    mean = combine([(1, of_seeds)], RATIO)
    return [
        Claim.counted(
            "sigma_F^2 below sigma_P^2 in every round",
            max(ratios) < 1.0,
            {"largest ratio": round(max(ratios), 4), "in round": ratios.index(max(ratios)) + 1},
        ),
        Claim.about(
            f"much below: less than half of it ({RATIO.text})",
            [Statement("mean ratio", mean, high=0.5)],
            {"last": round(ratios[-1], 4)},
        ),
    ]


def draw(folders: Mapping[str, Path], options: FriendsOptions, path: Path) -> Path:
    legend = {"sigma_F^2": r"$\sigma_F^2$", "sigma_P^2": r"$\sigma_P^2$"}
    lines = {
        legend[name]: [(range(1, len(seed) + 1), seed) for seed in seeds]
        for name, seeds in distances(folders[""]).items()
    }
    title = {"cifar10": "CIFAR-10", "mnist": "MNIST"}[options.dataset]
    plot = _figures.Plot(title, lines, ylabel="Local Model Update Difference")
    return _figures.draw([plot], path)


EXPERIMENT = Experiment(
    name="friends-fig1",
    title="distances between the updates of friends and of all clients",
    options=FriendsOptions,
    configs=configs,
    claims=claims,
    paper="FL-FDMS, conference",
    figure="1",
    expected=Expected(cpu=22, quick=1),
    draw=draw,
    unused=("alphas",),
)
