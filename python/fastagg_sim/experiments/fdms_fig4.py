# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS, figure 4: candidate elimination on clustered CIFAR-10 at alpha = 0.5.

FDMS without complexity reduction (CR) and with the threshold sequences Theta_t (case 1) and
0.5 Theta_t (case 2). Panel a) shows the "computation per round": the number of ordered pairs (i, j)
of active clients for which j is a candidate of i; it is S (S - 1) = 90 without CR. Panel b) shows
the accuracy.

Theta_t is that of Theorem 2 with the constants of the released code, including beta = 0.5. This
beta violates the theorem's Assumption 6, since two clients are both active in only a quarter of the
rounds. With `--beta 0.25` no candidate is eliminated in most of the 500 rounds. `--as-released`
uses the formula of the released code, which has an additional factor of 2 under the root; its
case 2 only halves the root.

`--quick` runs fewer rounds and scales the thresholds, so that they reach their values at the same
fraction of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastagg_sim.config import Config, Method
from fastagg_sim.experiments import _figures
from fastagg_sim.experiments._base import Claim, Expected, Experiment
from fastagg_sim.experiments._fdms import (
    NUM_CLIENTS,
    PAPER,
    FdmsOptions,
    cifar_clustered,
    dropouts,
)
from fastagg_sim.experiments._panel import Panel, not_below
from fastagg_sim.experiments._statistics import (
    Statistic,
    Trace,
    combine,
    everything,
    from_fraction,
    over_rounds,
)
from fastagg_sim.records import read_columns, read_curves
from fastagg_sim.verdicts import Statement

ROUNDS = 500
NAMES = ("Without CR", "With CR case 1", "With CR case 2")


@dataclass(frozen=True)
class EliminationOptions(FdmsOptions):
    """Figure 4 of the FL-FDMS paper: candidate elimination."""

    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratio; only the first one is used."""
    as_released: bool = False
    """Use the thresholds of the released code instead of those of Theorem 2."""
    beta: float = 0.5
    """The beta of Theorem 2: the fraction of rounds in which two clients are both active."""


def thresholds(options: EliminationOptions, rounds: int) -> list[Any]:
    """Return the option `elimination` of the three methods."""
    if options.as_released and not options.quick:
        return [None, "released_case1", "released_case2"]
    scale = math.sqrt(rounds / ROUNDS)  # thresholds fall as 1 / sqrt(t)
    # The additional factor of 2 under the root in the released code is equivalent to twice beta.
    beta = min(1.0, (2.0 if options.as_released else 1.0) * options.beta)
    constants = {"rounds": ROUNDS, "beta": beta, "p": 0.01, "b_max": 3, "delta_f": 0.01}
    kind = {"kind": "Theorem2Threshold", "num_clients": NUM_CLIENTS, **constants}
    return [None, {**kind, "factor": scale}, {**kind, "factor": 0.5 * scale}]


def configs(options: EliminationOptions) -> Mapping[str, Config]:
    rounds = options.chosen_rounds(ROUNDS, quick=60)
    config = Config(
        name="fdms-fig4",
        task=cifar_clustered(options, rounds),
        methods=tuple(
            Method(
                name,
                "fdms",
                {} if elimination is None else {"elimination": elimination},
                full_first_round=not options.as_written,
            )
            for name, elimination in zip(NAMES, thresholds(options, rounds), strict=True)
        ),
        dropouts=dropouts(options.alphas[:1], options.as_written),
        seeds=options.chosen_seeds(),
    )
    return {"": config}


PAIRS_END = Statistic("pairs per round, last tenth of the rounds", over_rounds, from_fraction(0.9))
PAIRS_MEAN = Statistic("pairs per round, mean over the run", over_rounds, everything)


def pairs(folder: Path, options: EliminationOptions) -> dict[str, list[Trace]]:
    """Return the pairs per round of each method, one series per seed.

    If all clients are active in the first round, it is left out: it has 380 pairs, which is outside
    the paper's axis.
    """
    start = 0 if options.as_written else 1
    columns = read_columns(folder / "metrics.csv", ["pairs"])
    return {
        name: [
            Trace(
                seed,
                np.arange(start + 1.0, len(values["pairs"]) + 1),
                np.array(values["pairs"][start:]),
            )
            for (method, seed), values in columns.items()
            if method == name
        ]
        for name in NAMES
    }


def claims(folders: Mapping[str, Path], options: EliminationOptions) -> Sequence[Claim]:
    counts = pairs(folders[""], options)
    mean, tail = (
        {name: round(combine([(1, counts[name])], statistic).value, 2) for name in NAMES}
        for statistic in (PAIRS_MEAN, PAIRS_END)
    )
    without, first, second = NAMES

    def fewer(text: str, name: str, other: str, statistic: Statistic) -> Claim:
        estimate = combine([(1, counts[name]), (-1, counts[other])], statistic)
        shown = tail if statistic is PAIRS_END else mean
        numbers = {key: shown[key] for key in (other, name)}
        statements = [Statement("difference", estimate, high=0)]
        return Claim.about(f"{text} ({statistic.text})", statements, numbers)

    panel = Panel(read_curves(folders[""] / "metrics.csv"), _setting(options))
    found = [
        fewer(f"{name}: fewer pairs than without", name, without, PAIRS_END)
        for name in (first, second)
    ]
    found.append(fewer("the smaller thresholds eliminate sooner", second, first, PAIRS_MEAN))
    return found + [not_below("accuracy", panel, name, without) for name in (first, second)]


def _setting(options: EliminationOptions) -> str:
    return dropouts(options.alphas[:1], options.as_written)[0].label


def draw(folders: Mapping[str, Path], options: EliminationOptions, path: Path) -> Path:
    counts = pairs(folders[""], options)
    lines = {
        name: [(list(trace.x), list(trace.y)) for trace in traces]
        for name, traces in counts.items()
    }
    panel = Panel(read_curves(folders[""] / "metrics.csv"), _setting(options))
    accuracy = {name: _figures.over_rounds(curves) for name, curves in panel.curves.items()}
    return _figures.draw(
        [
            _figures.Plot("computation complexity", lines, (10, 100), "Computation Per Round"),
            _figures.Plot("learning performance", accuracy, (0.1, 0.5)),
        ],
        path,
    )


EXPERIMENT = Experiment(
    name="fdms-fig4",
    title="candidate elimination on clustered CIFAR-10",
    options=EliminationOptions,
    configs=configs,
    claims=claims,
    paper=PAPER,
    figure="4",
    expected=Expected(cpu=20, quick=2),
    draw=draw,
)
