# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 3: similarity scores of all pairs of clients after the last round.

FDMS on clustered MNIST (100 rounds) and CIFAR-10 (500 rounds) at alpha = 0.5, which the paper does
not state; the other settings are those of figure 1. The claims: scores within groups are higher
than across groups, and the difference is larger on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastagg_sim.config import Config, Task, job_key
from fastagg_sim.experiments._base import Claim, Expected, Experiment
from fastagg_sim.experiments._fdms import (
    PAPER,
    FdmsOptions,
    cifar_clustered,
    dropouts,
    methods,
    mnist_clustered,
)
from fastagg_sim.plots import similarity_figure
from fastagg_sim.records import Scores, read_scores
from fastagg_sim.verdicts import Estimate, Statement, difference, over_seeds

TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


@dataclass(frozen=True)
class Fig3Options(FdmsOptions):
    """Figure 3 of the FL-FDMS paper: heat maps of the similarity scores."""

    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratios."""


def configs(options: Fig3Options) -> Mapping[str, Config]:
    fdms = tuple(m for m in methods(options.as_written) if m.rule == "fdms")

    def config(part: str, task: Task) -> Config:
        return Config(
            name=f"fdms-fig3 {part}",
            task=task,
            methods=fdms,
            dropouts=dropouts(options.alphas, options.as_written),
            seeds=options.chosen_seeds(),
        )

    return {
        "mnist": config("mnist", mnist_clustered(options, options.chosen_rounds(100, quick=40))),
        "cifar10": config(
            "cifar10", cifar_clustered(options, options.chosen_rounds(500, quick=30))
        ),
    }


def claims(folders: Mapping[str, Path], options: Fig3Options) -> Sequence[Claim]:
    found = []
    for alpha, setting in zip(
        options.alphas, dropouts(options.alphas, options.as_written), strict=True
    ):
        gaps = {}
        for part, folder in folders.items():
            scores = [_scores(folder, setting.label, seed) for seed in options.chosen_seeds()]
            intra = np.concatenate([s.intra() for s in scores])
            inter = np.concatenate([s.inter() for s in scores])
            gaps[part] = gap(scores)
            found.append(
                Claim.about(
                    f"alpha={alpha:g}, {part}: mean score within groups above that across groups",
                    [Statement("difference", gaps[part], low=0)],
                    {"within": _range(intra), "across": _range(inter)},
                )
            )
        found.append(
            Claim.about(
                f"alpha={alpha:g}: the difference is larger on CIFAR-10 than on MNIST",
                [Statement("difference", difference(gaps["cifar10"], gaps["mnist"]), low=0)],
                {part: round(estimate.value, 4) for part, estimate in gaps.items()},
            )
        )
    return found


def gap(scores: Sequence[Scores]) -> Estimate:
    """Return the mean score within groups minus that across groups.

    scores: those of each seed. With a single seed, which has scores after the last round only, the
    interval is that of the differences of its groups: the scores of a group's clients within the
    group minus their scores with other clients.
    """
    if len(scores) > 1:
        return over_seeds([float(s.intra().mean() - s.inter().mean()) for s in scores])
    (one,) = scores
    assert one.groups is not None  # the partition is clustered
    groups = np.array(one.groups)
    values = []
    for group in np.unique(groups):
        rows = one.matrix[groups == group]
        within, across = rows[:, groups == group], rows[:, groups != group]
        if not np.isnan(within).all() and not np.isnan(across).all():
            values.append(float(np.nanmean(within) - np.nanmean(across)))
    mean = float(one.intra().mean() - one.inter().mean())
    if len(values) < 2:
        return Estimate(mean, None, 0, 1)
    return replace(over_seeds(values), value=mean, seeds=1)


def _scores(folder: Path, setting: str, seed: int) -> Scores:
    return read_scores(folder / "jobs" / job_key("FDMS", setting, seed) / "scores.csv")


def draw(folders: Mapping[str, Path], options: Fig3Options, path: Path) -> Path:
    """Draw the score matrices of the first dropout ratio and the first seed."""
    setting = dropouts(options.alphas, options.as_written)[0].label
    seed = options.chosen_seeds()[0]
    named = [(TITLES[part], _scores(folder, setting, seed)) for part, folder in folders.items()]
    return similarity_figure(named, path)


def _range(scores: np.ndarray) -> str:
    return f"{scores.mean():.3f} [{scores.min():.3f}, {scores.max():.3f}]"


EXPERIMENT = Experiment(
    name="fdms-fig3",
    title="similarity scores on clustered MNIST and CIFAR-10",
    options=Fig3Options,
    configs=configs,
    claims=claims,
    paper=PAPER,
    figure="3",
    expected=Expected(cpu=13, quick=1),
    draw=draw,
)
