# SPDX-License-Identifier: Apache-2.0
"""Ours: friends by mean directions (``fdms-means``) beside FL-FDMS's mean similarities of pairs.

Clustered MNIST (40 rounds) and CIFAR-10 (100 rounds) as in figure 1 of FL-FDMS, at 30 to 90 %
dropout, with and without a first round in which all clients are active. A pair of clients must be
active together before FL-FDMS can compare it; at high dropout this takes many rounds.

At 90 % two clients are active, fewer than the five groups. Dropout is then uniform, and most
substitutes have to be of another group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg_sim.config import Method
from fastagg_sim.experiments._base import Claim, Expected
from fastagg_sim.experiments._panel import Panel, above, faster
from fastagg_sim.experiments._substitutes import SubstitutesOptions, experiment, fewer_wrong

METHODS = (
    Method("Dropout", "fedavg"),
    Method("FDMS", "fdms"),
    Method("Means", "fdms-means", seeded=True),
    Method("FDMS first", "fdms", full_first_round=True),
    Method("Means first", "fdms-means", full_first_round=True, seeded=True),
)


@dataclass(frozen=True)
class MeansOptions(SubstitutesOptions):
    """Friends by mean directions, beside mean similarities of pairs."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    """Seeds; the experiment is repeated once per seed."""
    alphas: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    """Dropout ratios; --quick uses one of them."""


def claims(name: str, panel: Panel) -> Sequence[Claim]:
    found = []
    for means, pairs in (("Means", "FDMS"), ("Means first", "FDMS first")):
        found.append(fewer_wrong(name, panel, means, pairs))
        for other in (pairs, "Dropout"):
            found += [above(name, panel, means, other), faster(name, panel, means, other)]
    return found


EXPERIMENT = experiment(
    name="friends-from-means",
    title="friends by mean directions and by similarities of pairs",
    options=MeansOptions,
    methods=METHODS,
    quick=0.7,
    compare=claims,
    base="Dropout",
    expected=Expected(cpu=120, quick=1),
)
