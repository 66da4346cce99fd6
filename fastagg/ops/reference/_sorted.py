# SPDX-License-Identifier: Apache-2.0
"""Statistics of the sorted values of each column: median, trimmed mean, mean around the median."""

from __future__ import annotations

from torch import Tensor

from fastagg.ops.reference._row_lists import Rows, float64_rows, scaled

__all__ = ["meamed_", "trimmed_mean_"]


def trimmed_mean_(
    out: Tensor, peak: Tensor, rows: Rows, trim: int, scales: Tensor | None = None
) -> Tensor:
    """Set ``out`` to the mean of each column without its extreme values, in place.

    Args:
        out: [d] float32; changed in place.
        peak: [1] float32; changed in place: the largest magnitude in all rows.
        rows: S >= 1 rows of length d.
        trim: values left out at each end, 0 <= 2 trim < S.
        scales: [S] float; the rows are multiplied by them, in float32. By default all are 1.

    Returns:
        ``out``.
    """
    x = float64_rows(scaled(rows, scales))
    _write_peak(peak, x)
    ascending = x.sort(dim=0).values
    return out.copy_(ascending[trim : len(x) - trim].mean(dim=0))


def meamed_(
    out: Tensor, peak: Tensor, rows: Rows, keep: int, scales: Tensor | None = None
) -> Tensor:
    """Set ``out`` to the mean of the values of each column nearest to its median, in place.

    Args:
        out, peak, rows: as for :func:`trimmed_mean_`.
        keep: number of values in the mean, 1 <= keep <= S. The smaller one of two values at the
            same distance is nearer.
        scales: as for :func:`trimmed_mean_`.

    Returns:
        ``out``.
    """
    x = float64_rows(scaled(rows, scales))
    _write_peak(peak, x)
    ascending = x.sort(dim=0).values
    median = (ascending[(len(x) - 1) // 2] + ascending[len(x) // 2]) / 2.0
    nearest = (ascending - median).abs().sort(dim=0, stable=True).indices[:keep]
    return out.copy_(ascending.gather(0, nearest).mean(dim=0))


def _write_peak(peak: Tensor, rows: Tensor) -> None:
    peak.fill_(rows.abs().max() if rows.numel() > 0 else 0.0)
