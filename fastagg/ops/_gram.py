# SPDX-License-Identifier: Apache-2.0
"""Inner products of rows, and what changes of them when some rows change."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, count_rows, mark_changed, returns_nothing
from fastagg.ops.row_lists import Rows, row_list


def gram(
    updates: Rows,
    *,
    pairs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    precision: str = "highest",
) -> Tensor:
    """Inner products of the updates: ``out[i, j] = <updates[i], updates[j]>``.

    Args:
        updates: S rows of d float32.
        pairs: bool [S, S], symmetric. Only these entries and the diagonal are computed, in tiles
            of a few rows (rows are ordered internally so that tiles are dense); all others are 0.
        dtype: float32 or float64, of the result. Sums are float64 across blocks of up to 768
            columns in either case; float64 also holds the squares of rows of any magnitude.
        precision: "highest" or "tf32": the least that will do. With "tf32" a GPU rounds elements to
            10 bits of mantissa: entry (i, j) is then off by at most 2^-10 + 2^-18, times the sum of
            |updates[i, k] * updates[j, k]| over k. Such errors average out over many elements of
            any sign, but do not between rows of few values. The CPU has nothing faster than
            "highest" and computes that.

    Returns:
        [S, S], exactly symmetric. Each entry depends on its two rows alone, bit for bit: not on
        the order of rows, on other rows, on ``pairs`` or on threads. A row with a NaN or an
        infinity has a non-finite diagonal entry, and only such a row (in float64).
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    rows = row_list(updates, "updates")
    if not rows:
        return torch.empty(0, 0, dtype=dtype)
    return compiled.gram(rows, pairs, precision).to(dtype)


@torch.library.register_fake("fastagg::gram")
def _(updates: list[Tensor], pairs: Tensor | None = None, precision: str = "highest") -> Tensor:
    size = count_rows(updates)
    return updates[0].new_empty(size, size, dtype=torch.float64)


def gram_and_sum_(
    out: Tensor, gram: Tensor, rows: Rows, weights: Tensor, *, precision: str = "highest"
) -> Tensor:
    """``gram = rows @ rows.T`` and ``out = weights @ rows`` in one pass over the rows, in place.

    For rules whose weights do not depend on this round's similarities: rows come from memory once
    (on a GPU still twice).
    The bits are those of :func:`gram` and of :func:`weighted_sum_` with ``beta=0``.

    Args:
        out: float32 [d]; changed. Its old content is not read.
        gram: float64 [S, S], contiguous; changed.
        rows: S rows of d float32, none of which may share memory with ``out``.
        weights: float32 or float64 [S].
        precision: of the Gram matrix, as in :func:`gram`.

    Returns:
        ``out``.
    """
    compiled.gram_and_sum_(out, gram, row_list(rows, "rows"), weights, precision)
    mark_changed(out, gram)
    return out


returns_nothing("gram_and_sum_")


def gram_rows(updates: Rows, changed: Tensor, *, precision: str = "highest") -> Tensor:
    """Some rows of :func:`gram`: ``out[c, j] = <updates[changed[c]], updates[j]>``, float64.

    What is missing of a Gram matrix after C of S rows have changed, with the bits that
    :func:`gram` has there, at about 2C/S - (C/S)^2 of its arithmetic.

    Args:
        updates: S rows of d float32.
        changed: int64 [C] on the CPU, distinct positions in [0, S).
        precision: as in :func:`gram`.

    Returns:
        [C, S] float64, where the rows are.
    """
    return compiled.gram_rows(row_list(updates, "updates"), changed, precision)


@torch.library.register_fake("fastagg::gram_rows")
def _(updates: list[Tensor], changed: Tensor, precision: str = "highest") -> Tensor:
    shape = changed.shape[0], count_rows(updates)
    return updates[0].new_empty(shape, dtype=torch.float64)


def replace_rows(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    """A Gram matrix after some rows have changed, or come: ``out[changed[c]] = rows[c]``, the same
    for columns, and ``gram`` elsewhere. What :func:`gram_rows` is made for.

    Args:
        gram: float64 [m, m].
        changed: int64 [C] on the CPU, distinct positions in [0, n); all from m on are among them.
        rows: float64 [C, n], n >= m.

    Returns:
        float64 [n, n].
    """
    return compiled.replace_rows(gram, changed, rows)


@torch.library.register_fake("fastagg::replace_rows")
def _(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    return gram.new_empty(rows.shape[1], rows.shape[1])
