# SPDX-License-Identifier: Apache-2.0
"""MimiC, figure 6: accuracy on Fashion-MNIST against the active probability p.

FedAvg, MIFA and MimiC. The paper does not state the values of p. It compares accuracies after the
same number of rounds, not of uploads ("uploading more gradients means more communication"). We use
60 rounds, after which the learning rate is 5 % of its initial value. The paper says that the
accuracy rises with p, and that MimiC is the best at every p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from fastagg_sim.config import Config
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment
from fastagg_sim.experiments._mimic import (
    PAPER,
    MimicOptions,
    Results,
    Setting,
    best,
    check_ascending,
    fmnist,
    methods,
    static,
    table,
)
from fastagg_sim.experiments._statistics import UPLOADS_END, contrast
from fastagg_sim.verdicts import Statement

LABELS = ("FedAvg", "MIFA", "MimiC")


@dataclass(frozen=True)
class Fig6Options(MimicOptions):
    """Figure 6 of the MimiC paper: accuracy against the active probability."""

    p: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 0.7)
    """Active probabilities, ascending; --quick only uses the first and the fourth."""

    def chosen_p(self) -> tuple[float, ...]:
        return self.p[::3] if self.quick else self.p


def settings(options: Fig6Options) -> list[Setting]:
    check_ascending("p", options.p)
    task = fmnist(options, None, options.chosen_rounds(60, quick=30))
    return [Setting(f"p = {p:g}", task, static(options, p)) for p in options.chosen_p()]


def configs(options: Fig6Options) -> Mapping[str, Config]:
    found = settings(options)
    compared = methods(options, found[0].task.training)
    config = Config(
        name="mimic-fig6",
        task=found[0].task,
        methods=tuple(method for method in compared if method.label in LABELS),
        dropouts=tuple(setting.dropout for setting in found),
        seeds=options.chosen_seeds(),
    )
    return {"": config}


def read(folders: Mapping[str, Path], options: Fig6Options) -> list[Results]:
    return [Results(setting, folders[""]) for setting in settings(options)]


def claims(folders: Mapping[str, Path], options: Fig6Options) -> Sequence[Claim]:
    columns = read(folders, options)
    found = [claim for r in columns for claim in best(r.setting.column, r)]
    for label in LABELS if len(columns) > 1 else ():
        statements = [
            Statement(
                f"{high.setting.column} - {low.setting.column}",
                contrast([(1, high.curves[label]), (-1, low.curves[label])], UPLOADS_END),
                low=0,
            )
            for low, high in pairwise(columns)
        ]
        means = {r.setting.column: round(fmean(r.tails(label)), 2) for r in columns}
        text = f"{label}: accuracy rises with p ({UPLOADS_END.text})"
        found.append(Claim.about(text, statements, means))
    return found


def draw(folders: Mapping[str, Path], options: Fig6Options, path: Path) -> Path:
    columns, seeds = read(folders, options), range(len(options.chosen_seeds()))
    lines = {
        label: [(options.chosen_p(), [r.tails(label)[s] for r in columns]) for s in seeds]
        for label in LABELS
    }
    plot = _figures.Plot("Fashion-MNIST", lines, ylabel="Test Accuracy (%)")
    return _figures.draw([plot], path, xlabel="Active Probability", marker="o")


EXPERIMENT = Experiment(
    name="mimic-fig6",
    title="Fashion-MNIST, accuracy against the active probability",
    options=Fig6Options,
    configs=configs,
    claims=claims,
    paper=PAPER,
    figure="6",
    expected=Expected(cpu=190, quick=2),
    draw=draw,
    table=lambda folders, options: table(
        "mimic-fig6: after equally many rounds", read(folders, options)
    ),
)
