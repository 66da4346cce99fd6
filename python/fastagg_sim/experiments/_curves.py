# SPDX-License-Identifier: Apache-2.0
"""The curves of the methods of one setting, and the comparison of two methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fastagg_sim.config import NO_DROPOUT
from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._statistics import Statistic, contrast
from fastagg_sim.records import Curve
from fastagg_sim.verdicts import Estimate, Statement


class Curves:
    """The curves of one setting: for each method, one per seed.

    digits: the decimals of `levels`.
    """

    digits = 4

    def __init__(self, curves: Iterable[Curve], dropout: str | None = None) -> None:
        """Take the curves with `dropout` (the label of a setting; None: with any), and those
        without dropout."""
        self.curves: dict[str, list[Curve]] = {}
        for curve in curves:
            if dropout is None or curve.dropout in (dropout, NO_DROPOUT):
                self.curves.setdefault(curve.method, []).append(curve)

    def level(self, method: str, statistic: Statistic) -> float:
        """Return a statistic of a method, the mean over seeds."""
        return statistic.of(self.curves[method])

    def levels(self, methods: Sequence[str], statistic: Statistic) -> dict[str, float]:
        """Return a statistic of some methods, means over seeds, rounded for tables."""
        return {method: round(self.level(method, statistic), self.digits) for method in methods}

    def minus(self, method: str, other: str, statistic: Statistic) -> Estimate:
        """Return a statistic of `method` minus that of `other`."""
        return contrast([(1, self.curves[method]), (-1, self.curves[other])], statistic)

    def differences(
        self,
        pairs: Iterable[tuple[str, str]],
        statistic: Statistic,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> list[Statement]:
        """State, for each pair of methods, that the first one's statistic minus the second one's
        is between `low` and `high`."""
        return [
            Statement(f"{one} - {two}", self.minus(one, two, statistic), low, high)
            for one, two in pairs
        ]


def compare(
    text: str,
    curves: Curves,
    method: str,
    other: str,
    statistic: Statistic,
    low: float = -math.inf,
    high: float = math.inf,
) -> Claim:
    """Claim: the statistic of `method` minus that of `other` is between `low` and `high`."""
    estimate = curves.minus(method, other, statistic)
    return Claim.about(
        f"{text} ({statistic.text})",
        [Statement("difference", estimate, low, high)],
        curves.levels((method, other), statistic),
    )
