# SPDX-License-Identifier: Apache-2.0
"""Ours: MIFA and Stale with remembered rows of float32, bfloat16 and int8.

Clustered MNIST as in figure 1 of FL-FDMS, in 40 rounds, at 50 and 70 % dropout. Rows of half or a
quarter of the size must not cost accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastagg_sim.config import Config, Method
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment
from fastagg_sim.experiments._curves import compare
from fastagg_sim.experiments._fdms import FdmsOptions, dropouts, mnist_clustered
from fastagg_sim.experiments._panel import Panel
from fastagg_sim.experiments._statistics import AREA, END
from fastagg_sim.records import read_curves
from fastagg_sim.tables import Grid

RULES = {"MIFA": "mifa", "Stale": "stale"}
NARROW = ("bfloat16", "int8")
ROUNDS, QUICK_ROUNDS = 40, 10
QUICK_ALPHA = 0.7
CLOSE = 0.02


@dataclass(frozen=True)
class MemoryOptions(FdmsOptions):
    """Remembered rows of float32, bfloat16 and int8."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; the experiment is repeated once per seed."""
    alphas: tuple[float, ...] = (0.5, 0.7)
    """Dropout ratios; --quick uses one of them."""


def methods() -> list[Method]:
    """Return both rules with each dtype; float32 is the default and has the rule's name."""
    return [
        Method(f"{label} {dtype}".strip(), rule, {"memory_dtype": dtype} if dtype else {})
        for label, rule in RULES.items()
        for dtype in ("", *NARROW)
    ]


def configs(options: MemoryOptions) -> Mapping[str, Config]:
    alphas = options.chosen_alphas(quick=QUICK_ALPHA)
    config = Config(
        name="memory-dtypes",
        task=mnist_clustered(options, options.chosen_rounds(ROUNDS, quick=QUICK_ROUNDS)),
        methods=tuple(methods()),
        dropouts=dropouts(alphas, options.as_written),
        seeds=options.chosen_seeds(),
    )
    return {"": config}


def panels(folders: Mapping[str, Path], options: MemoryOptions) -> dict[float, Panel]:
    curves = read_curves(folders[""] / "metrics.csv")
    alphas = options.chosen_alphas(quick=QUICK_ALPHA)
    settings = dropouts(alphas, options.as_written)
    return {a: Panel(curves, s.label) for a, s in zip(alphas, settings, strict=True)}


def claims(folders: Mapping[str, Path], options: MemoryOptions) -> Sequence[Claim]:
    return [
        compare(
            f"alpha={alpha:g}: {label} {dtype} within {CLOSE:g} of float32",
            panel,
            f"{label} {dtype}",
            label,
            statistic,
            -CLOSE,
            CLOSE,
        )
        for alpha, panel in panels(folders, options).items()
        for label in RULES
        for dtype in NARROW
        for statistic in (END, AREA)
    ]


def draw(folders: Mapping[str, Path], options: MemoryOptions, path: Path) -> object:
    plots = [
        _figures.Plot(
            f"MNIST (alpha={alpha:g})",
            {name: _figures.over_rounds(curves) for name, curves in panel.curves.items()},
            (0.0, 1.0),
        )
        for alpha, panel in panels(folders, options).items()
    ]
    return _figures.draw(plots, path, columns=len(plots))


def table(folders: Mapping[str, Path], options: MemoryOptions) -> Grid:
    rows = [
        (
            f"{alpha:g}",
            method,
            *(f"{panel.level(method, statistic):.3f}" for statistic in (END, AREA)),
            str(len(curves)),
        )
        for alpha, panel in panels(folders, options).items()
        for method, curves in panel.curves.items()
    ]
    return Grid(
        "Remembered rows of float32, bfloat16 and int8",
        ("alpha", "method", "last 10", "mean", "seeds"),
        rows,
        "last 10: accuracy, mean of the last ten evaluations; mean: of all evaluations",
    )


EXPERIMENT = Experiment(
    name="memory-dtypes",
    title="MIFA and Stale with rows of float32, bfloat16 and int8",
    options=MemoryOptions,
    configs=configs,
    claims=claims,
    expected=Expected(cpu=15, quick=2),
    draw=draw,
    table=table,
)
