# SPDX-License-Identifier: Apache-2.0
"""Inner products of rows, and updates of a Gram matrix when some rows change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.ops.reference._row_lists import Rows, float64_rows
from fastagg.ops.reference._sums import weighted_sum_

__all__ = ["difference_gram_and_sum_", "gram", "gram_and_sum_", "gram_rows", "replace_rows"]


def gram(
    updates: Rows,
    *,
    pairs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    precision: str = "highest",
    segment: int | None = None,
) -> Tensor:
    """Compute the inner products of all rows with each other.

    Args:
        updates: S rows of length d.
        pairs: symmetric bool [S, S]; only these pairs and the diagonal are computed, every other
            entry is 0. By default all pairs are computed.
        dtype: dtype of the result, float32 or float64.
        precision: minimum precision; ignored, since float64 exceeds every value.
        segment: columns that are summed together; ignored.

    Returns:
        [S, S], exactly symmetric.
    """
    x = float64_rows(updates)  # [S, d]
    products = x @ x.T
    products = torch.triu(products) + torch.triu(products, diagonal=1).T  # exactly symmetric
    if pairs is not None:
        wanted = pairs | torch.eye(len(x), dtype=torch.bool, device="cpu")
        products = torch.where(wanted, products, torch.zeros_like(products))
    return products.to(dtype)


def gram_rows(updates: Rows, changed: Tensor, *, precision: str = "highest") -> Tensor:
    """Compute the rows ``changed`` [C] of the Gram matrix of S updates: [C, S] float64."""
    return gram(updates, dtype=torch.float64)[changed]


def gram_and_sum_(
    out: Tensor, gram: Tensor, rows: Rows, weights: Tensor, *, precision: str = "highest"
) -> Tensor:
    """Compute ``gram = rows @ rows.T`` and ``out = weights @ rows``, in place.

    Args:
        out: [d] float32; changed in place. Its old content is ignored.
        gram: [S, S] float64; changed in place.
        rows: S rows of length d.
        weights: [S] float32 or float64.
        precision: minimum precision; ignored, since float64 exceeds every value.

    Returns:
        ``out``.
    """
    x = float64_rows(rows)
    gram.copy_(x @ x.T)
    return weighted_sum_(out, rows, weights, beta=0.0)


def difference_gram_and_sum_(
    out: Tensor,
    gram: Tensor,
    models: Sequence[Tensor],
    base: Tensor,
    weights: Tensor,
    begin: int = 0,
) -> Tensor:
    """Compute :func:`gram_and_sum_` of models [S, D], in parts, minus the base [D], in place."""
    count = len(models) // max(1, len(weights))
    wide = [torch.cat([*models[s : s + count]]) for s in range(0, len(models), max(1, count))]
    here = slice(begin, begin + len(out))
    rows = torch.zeros(len(wide), len(out), dtype=torch.float64, device="cpu")
    for row, model in zip(rows, wide, strict=True):
        row.copy_(model.to(torch.float64)[here] - base.to(torch.float64)[here])
    return gram_and_sum_(out, gram, rows, weights)


def replace_rows(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    """Return a Gram matrix [m, m] with the rows and columns ``changed`` replaced: [n, n].

    Args:
        gram: [m, m] float64.
        changed: [C] int64, distinct positions, among them all in [m, n).
        rows: [C, n] float64.
    """
    result = torch.full((rows.shape[1],) * 2, torch.nan, dtype=torch.float64, device="cpu")
    result[: len(gram), : len(gram)] = gram
    result[changed], result[:, changed] = rows, rows.T
    return result
