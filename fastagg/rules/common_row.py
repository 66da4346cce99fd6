# SPDX-License-Identifier: Apache-2.0
"""Distances of nearly equal rows: a Gram matrix of the rows minus a common row.

**Why.** Let e bound the error of a Gram matrix, ``|G_ij - <x_i, x_j>| <= e |x_i| |x_j|``. The
squared distance ``G_ii + G_jj - 2 G_ij`` is then off by at most ``e (|x_i| + |x_j|)^2``, and the
distance by at most ``sqrt(e) (|x_i| + |x_j|)``. For float32 rows on a CPU, e is about 1e-8 from
1000 columns on, and below 1e-7 for fewer, so a distance below 2e-4 (6e-4) of the norms can be
noise.

**How.** A distance is the same if one row c is subtracted from all rows. With ``r_i = |x_i - c|``,
and u = 2^-24 for the rounding of the subtraction in float32 (2^-53 in float64), the distance is
then off by at most ``(sqrt(e) + u) (r_i + r_j)``: the norms are replaced by the distances from c.

**Which row.** c is the row with the smallest median distance to the rows, itself included, by the
first Gram matrix. Suppose that more than half of the rows are within a distance D of each other and
have norms of at most N. The median of each of these is at most ``D + 2 sqrt(e) N``, by the errors
above, so that of c is, too. At least one row of the majority is therefore this close to c, and all
of them are within ``2 D + 4 sqrt(e) N`` of c (up to factors 1 + sqrt(e)), wherever the other rows
are: less than half of the rows, however large, cannot spoil c. Distances among the majority
are then off by at most ``4 (sqrt(e) + u) (D + 2 sqrt(e) N)``, which is 4e-4 D + 8e-8 N for e =
1e-8. The last term is at the rounding of the rows themselves, 6e-8 N.

**When.** The second Gram matrix is computed only if it pays: if for some pair of rows the squared
distance is below ``limit (G_ii + G_jj)``, and subtracting c divides ``G_ii + G_jj`` by four or
more. Otherwise squared distances have a relative error of at most ``2 e / limit``, 1.3e-6 for e =
1e-8, or else belong to pairs that are far from the majority, relative to their norms. The choice is
a function of the first Gram matrix, so it is the same for all forms of rows and on all ranks.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fastagg.rules.gram_policy import distances_of, square_distances

CLOSE = 2.0**-6
"""``limit`` for float32 rows: rows are close if their distance is below about 0.18 of the norm."""

_FEW = 24
"""Rows up to which plain Python is faster than NumPy, whose code is not in the cache here."""
_GAIN = 4.0  # by which the squared norms of a close pair must shrink


def find_common_row(gram: Tensor, num_rows: int, limit: float = CLOSE) -> int | None:
    """Return the position of the row to subtract; None if that would not pay.

    Args:
        gram: [n + e, n + e] float64, the Gram matrix of the rows.
        num_rows: n; the common row is one of the first n, the first one on ties.
        limit: a pair of rows is close if ``|x_i - x_j|^2 < limit * (|x_i|^2 + |x_j|^2)``.
    """
    if _all_apart(gram, limit):
        return None
    products = gram.numpy()
    squares = products.diagonal()
    halves = 0.5 * (1.0 - limit) * squares
    close = products > halves[:, None] + halves  # a row other than zero is close to itself
    if np.count_nonzero(close) <= np.count_nonzero(squares):
        return None
    sums = squares[:, None] + squares
    distances = distances_of(products)
    medians = np.partition(distances[:num_rows, :num_rows], num_rows // 2, axis=1)
    common = int(np.nan_to_num(medians[:, num_rows // 2], nan=np.inf).argmin())
    after = distances[common]  # the squared norms that are left
    np.fill_diagonal(close, False)
    return common if bool((close & (_GAIN * (after[:, None] + after) <= sums)).any()) else None


def _all_apart(gram: Tensor, limit: float) -> bool:
    """Return whether few rows clearly have no close pair: the usual case, so it must be fast."""
    if len(gram) > _FEW:
        return False
    rows: list[list[float]] = gram.tolist()
    least = math.inf  # of the rows so far
    for i, row in enumerate(rows):
        half = 0.5 * (1.0 - limit) * row[i]
        if i and max(row[:i]) > half + least:
            return False
        if half < least:
            least = half
    return True


def with_common_row(gram: Tensor, around: Tensor) -> Tensor:
    """Return a Gram matrix of the rows minus the common row that has the more exact distances.

    A row far from the others may be closer to zero than to the common row. The distance of two such
    rows is taken from the first matrix, whose error is then smaller, so no distance gets worse.

    Args:
        gram: [m, m] float64, the Gram matrix of the rows.
        around: [m, m] float64, that of the rows minus the common row.

    Returns:
        [m, m] float64, symmetric. Its distances are those of one of the two matrices, up to
        2^-51 (r_i^2 + r_j^2). ``gram`` itself, if a difference left the range of float32, which
        takes elements beyond 1.7e38.
    """
    squares, left = gram.diagonal(), around.diagonal()
    if not bool(torch.isfinite(left).all()):
        return gram
    before, after = squares[:, None] + squares, left[:, None] + left
    distances = torch.where(after < before, square_distances(around), square_distances(gram))
    return (after - distances) / 2.0
