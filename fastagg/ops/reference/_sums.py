# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of rows, steps of totals [d], and the largest magnitudes of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastagg.ops.reference._row_lists import Rows, float64_rows

__all__ = [
    "abs_max",
    "add_total_",
    "apply_aggregate_",
    "apply_weighted_sum_",
    "difference_sum_",
    "lerp_total_",
    "weighted_sum_",
]


def weighted_sum_(
    out: Tensor,
    rows: Rows,
    weights: Tensor,
    beta: float = 1.0,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Compute ``out = beta * out + weights @ rows``, in place. Weights are not rounded.

    Args:
        out: [d] float32; changed in place. With ``beta == 0`` its old content is ignored.
        rows: S rows of length d.
        weights: [S] float32 or float64.
        beta: factor of the old content.
        when: [] bool; if False, nothing changes.

    Returns:
        ``out``.
    """
    if when is not None and not bool(when):
        return out
    total = torch.zeros_like(out, dtype=torch.float64)
    if beta != 0.0:
        total += beta * out.to(torch.float64)
    if len(rows) > 0:
        total += weights.to(torch.float64) @ float64_rows(rows)
    return out.copy_(total)


def apply_weighted_sum_(
    params: Tensor,
    before: Tensor,
    applied: Tensor,
    rows: Rows,
    weights: Tensor,
    lr: float,
    largest: float,
    limit: float,
) -> Tensor:
    """Compute ``params += lr * (weights @ rows)``, in place, unless a result is out of range.

    Args and results are those of :func:`fastagg.ops.apply_weighted_sum_`. Weights are not rounded.
    """
    before.copy_(params)
    total = weighted_sum_(torch.zeros_like(params, dtype=torch.float64), rows, weights, 0.0)
    known, added = (float(x.abs().max()) if len(x) else 0.0 for x in (params, total))
    fits = bool(params.isfinite().all() and total.isfinite().all())
    fits = fits and added <= largest and known + lr * added <= limit
    applied.fill_(fits)
    if fits:
        params.copy_(params.to(torch.float64) + lr * total)
    return params


def difference_sum_(
    out: Tensor, squares: Tensor, rows: Rows, base: Tensor, weights: Tensor
) -> Tensor:
    """Compute ``out = weights @ (rows - base)`` [d] and the squared norms [S], in place."""
    differences = torch.zeros(len(rows), len(base), dtype=torch.float64, device="cpu")
    for difference, row in zip(differences, rows, strict=True):
        difference.copy_(row.to(torch.float64) - base.to(torch.float64))
    squares.copy_(differences.square().sum(dim=1))
    return out.copy_(weights.to(torch.float64) @ differences)


def lerp_total_(total: Tensor, end: Tensor, weight: float) -> Tensor:
    """Compute ``total += weight * (end - total)``, in place.

    Args:
        total: [d] float64; changed in place.
        end: [d] float64.
        weight: from 0 to 1.

    Returns:
        ``total``.
    """
    return total.copy_(total + weight * (end - total))


def add_total_(
    params: Tensor, total: Tensor, lr: float, norm: float, models: bool = False
) -> Tensor:
    """Compute ``params += lr * norm * total``, in place.

    With ``models=True``: ``params += lr * (norm * total - params)``.

    Args:
        params: [d] float32; changed in place.
        total: [d] float64.
        lr: server learning rate.
        norm: factor that makes ``total`` a mean.
        models: ``total`` is a sum of models, not of updates.

    Returns:
        ``params``.
    """
    old = params.to(torch.float64)
    return params.copy_(old + lr * (norm * total - old if models else norm * total))


def apply_aggregate_(
    params: Tensor,
    applied: Tensor,
    aggregate: Tensor,
    lr: float,
    norm: float,
    peak: float,
    limit: float,
) -> Tensor:
    """Compute ``params += lr * norm * aggregate``, in place, unless a result is out of range.

    Args and results are those of :func:`fastagg.ops.apply_aggregate_`.
    """
    known, added = (float(x.abs().max()) if len(x) else 0.0 for x in (params, aggregate))
    added = peak if aggregate.dtype == torch.float64 else added
    fits = math.isfinite(known) and math.isfinite(added) and added <= peak
    fits = fits and known + lr * added <= limit
    applied.fill_(fits)
    return add_total_(params, aggregate, lr, norm) if fits else params


def abs_max(rows: Rows) -> Tensor:
    """Compute the largest magnitude of each row; NaN if the row holds a NaN.

    Args:
        rows: S rows of length d.

    Returns:
        [S] float32.
    """
    x = float64_rows(rows).abs()  # [S, d]
    if x.numel() == 0:
        return torch.zeros(len(x), dtype=torch.float32, device="cpu")
    return x.amax(dim=1).to(torch.float32)
