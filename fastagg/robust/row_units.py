# SPDX-License-Identifier: Apache-2.0
"""Float64 rows whose squares or sums would leave the range of float64.

**Why.** Norms and distances come from squares, and the square of 1e155 is infinite. One such row,
of whatever client, would turn the distances of all rows into NaN. The square of 1e-163 is zero.

**Squares.** A row is long if its largest magnitude is above ``LONG`` = 2^256; no float32 row is. If
there is a long row, products are computed from rows that are divided by powers of two:

1. All rows are divided by one unit, such that the median of their largest magnitudes is about
   2^128 or less, and so are the length ``nu`` or ``tau`` with which a rule compares distances and
   the starting point of a rule. The unit is 1 if these and half of the rows are below 2^128: these
   rows keep their bits. Distances of the size of the median row have the usual relative errors.
2. A row that is still long is divided until its largest magnitude is about ``LONG``.

The second step shortens a row and keeps its direction. Its client could have sent the shorter row,
so a rule that withstands f rows of any kind withstands f long ones. The shorter row is still about
2^128 times as long as the median one and as ``nu`` or ``tau``, so what depends on its length is
below the rounding of float64. Distances of two shortened rows from each other are not those of the
rows.

**Short rows.** If the median of the largest magnitudes and the length are below 2^-256, the unit is
such that the larger one is about 2^128, or less if they are below 2^-894. Rows that are still long
are divided further, as above.

**Sums.** Sums of values beyond 2^959 are computed from values divided by 2^64, and multiplied back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from torch import Tensor

LONG = 2.0**256
"""Largest magnitude up to which products are computed from the row itself."""
_SHORT = 2.0**-256
_HEADROOM = 2.0**64
_TYPICAL = 2.0**128
_SHORTEST = 2.0**-500  # of a length in a unit, so that a sum of reciprocals is finite
_MAX = sys.float_info.max


def common_unit(peaks: Sequence[float], length: float = 0.0, further: float = 0.0) -> float:
    """Return the power of two by which to divide all rows; 1 if none is long and most not short.

    Args:
        peaks: largest magnitude of each row.
        length: a length with which distances are compared, in the unit of the rows; may be
            infinite. It is at most about 2^128 in the unit that is returned.
        further: largest magnitude of a further row, which does not count in the median. It is at
            most about 2^128 in this unit, too, so the row is not shortened.
    """
    longest, middle = max(*peaks, further), sorted(peaks)[(len(peaks) - 1) // 2]
    if longest == 0.0:
        return 1.0
    typical = max(middle, min(length, _MAX), further)
    if (typical or longest) < _SHORT:
        return max(_power(typical or longest) / _TYPICAL, sys.float_info.min)
    return 1.0 if longest <= LONG else max(1.0, _power(typical) / _TYPICAL)


def divisors(peaks: Sequence[float], unit: float = 1.0) -> list[float]:
    """Return the power of two by which to divide each row: ``unit``, or more if it stays long."""
    return [max(unit, _power(peak) / LONG) for peak in peaks]


def own_units(peaks: Sequence[float]) -> list[float]:
    """Return the power of two by which to divide each row alone; 1 for those of usual length."""
    own = zip(peaks, divisors(peaks), strict=True)
    least = sys.float_info.min
    return [max(_power(p), least) if 0.0 < p < _SHORT else unit for p, unit in own]


def divided(rows: Sequence[Tensor], by: Sequence[float]) -> list[Tensor]:
    """Return rows divided by powers of two; a row divided by 1 is not copied."""
    return [row if unit == 1.0 else row / unit for row, unit in zip(rows, by, strict=True)]


def in_unit(length: float, unit: float) -> float:
    """Return ``length`` > 0 divided by ``unit``, and not 0."""
    return max(length / unit, _SHORTEST)


def headroom(peak: float) -> float:
    """Return the power of two by which to divide values up to ``peak`` before they are added."""
    return _HEADROOM if peak > 2.0**959 else 1.0


def multiplied(values: Tensor, unit: float) -> Tensor:
    """Multiply means of finite values by a power of two, in place; return them.

    What rounding moved beyond the range of float64 becomes its largest number.
    """
    return values if unit == 1.0 else values.mul_(unit).clamp_(-_MAX, _MAX)


def _power(value: float) -> float:
    """Return the largest power of two that is at most ``value`` > 0; 0.5 for 0."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1)
