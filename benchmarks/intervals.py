# SPDX-License-Identifier: Apache-2.0
"""Intervals for medians of ratios that were measured in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence


def interval(ratios: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return order statistics between which the median lies with probability >= ``level``.

    With fewer than six ratios no such interval exists; the result is then (0, inf).
    """
    ordered, n = sorted(ratios), len(ratios)
    below, tail = 0.0, 0  # P(at most tail - 1 of n ratios lie below the median)
    while True:
        more = below + math.comb(n, tail) / 2**n
        if 2 * more > 1 - level:
            break
        below, tail = more, tail + 1
    return (ordered[tail - 1], ordered[n - tail]) if tail else (0.0, math.inf)
