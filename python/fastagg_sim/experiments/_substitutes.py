# SPDX-License-Identifier: Apache-2.0
"""Common parts of the experiments that compare ways to choose friends: ours, on the paper's tasks.

They run on clustered MNIST and CIFAR-10. Claims are about accuracy, and about the share of
substitutes of another group ("wrong friends") over a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from fastagg_sim.config import Config, Dropout, Method, Task
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment
from fastagg_sim.experiments._fdms import FdmsOptions, cifar_clustered, mnist_clustered
from fastagg_sim.experiments._panel import Panel
from fastagg_sim.experiments._statistics import AREA, END
from fastagg_sim.records import Curve, read_curves
from fastagg_sim.tables import Grid
from fastagg_sim.verdicts import Estimate, Statement, over_seeds

ROUNDS = {"mnist": 40, "cifar10": 100}
QUICK_ROUNDS = 10
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
LIMITS = {"mnist": (0.1, 1.0), "cifar10": (0.1, 0.4)}
MOST_FLOORED = 0.75
"""Largest dropout ratio at which five groups of 20 clients can have an active client each."""
WRONG = "share of substitutes of another group, over the run"

Compare = Callable[[str, Panel], Sequence[Claim]]
"""`compare(name of a panel, panel)` returns the claims about it."""


@dataclass(frozen=True)
class SubstitutesOptions(FdmsOptions):
    """Options of the experiments on ways to choose friends."""

    datasets: tuple[Literal["mnist", "cifar10"], ...] = ("mnist", "cifar10")
    """Data sets; --quick uses the first one. The other one can be added to the results later."""


def tasks(options: SubstitutesOptions) -> dict[str, Task]:
    """Return the tasks of figure 1, in fewer rounds: wrong friends are a matter of early rounds."""
    make = {"mnist": mnist_clustered, "cifar10": cifar_clustered}
    chosen = options.datasets[:1] if options.quick else options.datasets
    return {
        name: make[name](options, options.chosen_rounds(ROUNDS[name], quick=QUICK_ROUNDS))
        for name in chosen
    }


def setting(alpha: float) -> Dropout:
    """Return the dropout of figure 1, or a uniform one if there are fewer clients than groups."""
    process = "cluster-floor" if alpha <= MOST_FLOORED else "exact"
    return Dropout(process, {"alpha": alpha})


def wrong(curve: Curve) -> float:
    """Return the share of wrong friends over a run; NaN without substitutes."""
    count = sum(n for _, n in curve.wrong_friends)
    return sum(rate * n for rate, n in curve.wrong_friends) / count if count else math.nan


def fewer_wrong(
    name: str, panel: Panel, method: str, other: str, margin: float | None = None
) -> Claim:
    """Claim: `method` has fewer wrong friends than `other`, or at most `margin` more."""
    by_seed = [
        {curve.seed: wrong(curve) for curve in panel.curves[label]} for label in (method, other)
    ]
    seeds = sorted(set(by_seed[0]) & set(by_seed[1]))
    differences = [by_seed[0][seed] - by_seed[1][seed] for seed in seeds]
    estimate = (
        over_seeds(differences) if len(seeds) > 1 else Estimate(differences[0], None, 0, len(seeds))
    )
    means = {
        label: round(sum(rates[seed] for seed in seeds) / len(seeds), 4)
        for label, rates in zip((method, other), by_seed, strict=True)
    }
    text = f"{method} has fewer wrong friends than {other}"
    if margin is not None:
        text = f"{method} has at most {margin:g} more wrong friends than {other}"
    high = margin or 0.0
    return Claim.about(
        f"{name}: {text} ({WRONG})", [Statement("difference", estimate, high=high)], means
    )


def experiment(
    name: str,
    title: str,
    options: type[SubstitutesOptions],
    methods: Sequence[Method],
    quick: float,
    compare: Compare,
    expected: Expected,
    *,
    base: str | None = None,
) -> Experiment:
    """Create an experiment: methods on both data sets, at each dropout ratio.

    quick: the ratio that --quick uses.
    base: a method; a second row of panels shows the accuracy of the others minus that of this one,
        and bands are 95 % intervals.
    """

    def configs(chosen: SubstitutesOptions) -> Mapping[str, Config]:
        return {
            folder: Config(
                name=f"{name} {folder}",
                task=task,
                methods=tuple(methods),
                dropouts=tuple(map(setting, chosen.chosen_alphas(quick=quick))),
                seeds=chosen.chosen_seeds(),
            )
            for folder, task in tasks(chosen).items()
        }

    def panels(
        folders: Mapping[str, Path], chosen: SubstitutesOptions
    ) -> dict[tuple[str, float], Panel]:
        found = {}
        for folder in tasks(chosen):
            curves = read_curves(folders[folder] / "metrics.csv")
            for alpha in chosen.chosen_alphas(quick=quick):
                found[folder, alpha] = Panel(curves, setting(alpha).label)
        return found

    def claims(folders: Mapping[str, Path], chosen: SubstitutesOptions) -> Sequence[Claim]:
        return [
            claim
            for (folder, alpha), panel in panels(folders, chosen).items()
            for claim in compare(f"{NAMES[folder]}, alpha={alpha:g}", panel)
        ]

    def draw(folders: Mapping[str, Path], chosen: SubstitutesOptions, path: Path) -> object:
        found = panels(folders, chosen)
        plots = []
        for folder, other in product(tasks(chosen), [None] if base is None else [None, base]):
            for alpha in chosen.chosen_alphas(quick=quick):
                curves = found[folder, alpha].curves
                title = f"{NAMES[folder]} (alpha={alpha:g})"
                if other is None:
                    lines = {n: _figures.over_rounds(c) for n, c in curves.items()}
                    plots.append(_figures.Plot(title, lines, LIMITS[folder]))
                else:
                    lines = {n: _figures.minus(c, curves[other]) for n, c in curves.items()}
                    label = f"Accuracy minus That of {other}"
                    plots.append(_figures.Plot(title, lines, ylabel=label))
        columns = len(chosen.chosen_alphas(quick=quick))
        return _figures.draw(plots, path, columns=columns, interval=base is not None)

    def table(folders: Mapping[str, Path], chosen: SubstitutesOptions) -> Grid:
        rows = []
        for (folder, alpha), panel in panels(folders, chosen).items():
            for label, curves in panel.curves.items():
                rates = [rate for rate in map(wrong, curves) if not math.isnan(rate)]
                share = f"{100 * sum(rates) / len(rates):.1f} %" if rates else ""
                levels = (panel.level(label, END), panel.level(label, AREA))
                numbers = [f"{level:.3f}" for level in levels]
                rows.append((NAMES[folder], f"{alpha:g}", label, share, *numbers, str(len(curves))))
        return Grid(
            title,
            ("data", "alpha", "method", "wrong friends", "last 10", "mean", "seeds"),
            rows,
            "wrong friends: share of substitutes of another group; last 10: accuracy, mean of the "
            "last ten evaluations; mean: of all evaluations",
        )

    return Experiment(
        name=name,
        title=title,
        options=options,
        configs=configs,
        claims=claims,
        expected=expected,
        draw=draw,
        table=table,
    )
