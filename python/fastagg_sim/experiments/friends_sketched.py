# SPDX-License-Identifier: Apache-2.0
"""Ours: FL-FDMS with similarities from random projections (``sketch=1024``) and with exact ones.

Clustered MNIST (40 rounds) and CIFAR-10 (100 rounds) as in figure 1 of FL-FDMS, at 50 and 70 %
dropout. A sketch must not cost accuracy, nor choose more friends of another group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg_sim.config import Method
from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._curves import compare
from fastagg_sim.experiments._panel import Panel
from fastagg_sim.experiments._statistics import AREA, END
from fastagg_sim.experiments._substitutes import SubstitutesOptions, experiment, fewer_wrong

EXACT, SKETCHED = "FDMS", "FDMS k=1024"
METHODS = (Method(EXACT, "fdms"), Method(SKETCHED, "fdms", {"sketch": 1024}, seeded=True))
MORE_WRONG = 0.01
"""Margin of wrong friends: one in a hundred substitutes."""
CLOSE = 0.02


@dataclass(frozen=True)
class SketchedOptions(SubstitutesOptions):
    """FDMS with exact and with sketched similarities."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; the experiment is repeated once per seed."""
    alphas: tuple[float, ...] = (0.5, 0.7)
    """Dropout ratios; --quick uses one of them."""


def claims(name: str, panel: Panel) -> Sequence[Claim]:
    close = f"{name}: {SKETCHED} within {CLOSE:g} of {EXACT}"
    return [
        fewer_wrong(name, panel, SKETCHED, EXACT, MORE_WRONG),
        compare(close, panel, SKETCHED, EXACT, END, -CLOSE, CLOSE),
        compare(close, panel, SKETCHED, EXACT, AREA, -CLOSE, CLOSE),
    ]


EXPERIMENT = experiment(
    name="friends-sketched",
    title="FDMS with exact and with sketched similarities",
    options=SketchedOptions,
    methods=METHODS,
    quick=0.7,
    compare=claims,
    expected=Expected(cpu=20, quick=1),
)
