# SPDX-License-Identifier: Apache-2.0
"""Statistics of the sorted values of each column: median, trimmed mean, mean around the median."""

from __future__ import annotations

from torch import Tensor

from fastagg.ops._dispatch import compiled, mark_changed, op
from fastagg.ops.row_lists import Rows, row_list

__all__ = ["meamed_", "trimmed_mean_"]


@op(
    example=lambda f, x: (
        f(x.params, x.peaks[:1], x.updates, 1),
        f(x.params, x.peaks[:1], list(x.updates), (len(x.updates) - 1) // 2),
        f(x.params, x.peaks[:1], x.updates, 1, x.weights),
    )
)
def trimmed_mean_(
    out: Tensor, peak: Tensor, rows: Rows, trim: int, scales: Tensor | None = None
) -> Tensor:
    """Compute the trimmed mean of each column, and the largest magnitude, in one pass, in place.

    ``out[k]`` is the mean of the S values of column k without the ``trim`` smallest and the
    ``trim`` largest ones. With ``trim = (S - 1) // 2`` it is the median: the middle value, or for
    even S the mean of the two middle ones.

    Args:
        out: float32 [d]; changed in place. Its old content is not read.
        peak: float32 [1]; changed in place: the largest magnitude in all rows, NaN if any value is
            NaN, 0 if d = 0. If it is not finite, ``out`` is of no use: trimming may have left out
            NaN and infinity.
        rows: S >= 1 rows of d float32 or short. None may share memory with ``out`` or ``peak``.
        trim: values left out at each end, 0 <= 2 trim < S.
        scales: float32 or float64 [S], rounded to float32: ``rows[s]`` stands for the float32
            product ``scales[s] * rows[s]``. By default all are 1.

    Returns:
        ``out``. The values that are left are added in ascending order, in float64; their mean is
        rounded once. So the bits are invariant to the order of rows and to the instruction set.
    """
    compiled.trimmed_mean_(out, peak, row_list(rows, "rows"), trim, scales)
    mark_changed(out, peak)
    return out


@op(
    example=lambda f, x: (
        f(x.params, x.peaks[:1], x.updates, len(x.updates) - 1),
        f(x.params, x.peaks[:1], list(x.updates), 1),
        f(x.params, x.peaks[:1], x.updates, 1, x.weights),
    )
)
def meamed_(
    out: Tensor, peak: Tensor, rows: Rows, keep: int, scales: Tensor | None = None
) -> Tensor:
    """Compute the mean around the median of each column, in one pass, in place.

    ``out[k]`` is the mean of the ``keep`` values of column k that are nearest to the median of all
    S values of the column. Of two values at the same distance, the smaller one is nearer.

    Args:
        out, peak, rows: as for :func:`trimmed_mean_`.
        keep: number of values in the mean, 1 <= keep <= S.
        scales: as for :func:`trimmed_mean_`.

    Returns:
        ``out``. The median and distances from it are float64. Sums are those of
        :func:`trimmed_mean_`, with the same promises.
    """
    compiled.meamed_(out, peak, row_list(rows, "rows"), keep, scales)
    mark_changed(out, peak)
    return out
