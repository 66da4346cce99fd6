# SPDX-License-Identifier: Apache-2.0
"""Inner products of rows, and updates of a Gram matrix when some rows change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, count_rows, mark_changed, op
from fastagg.ops.row_lists import Rows, row_list

__all__ = ["difference_gram_and_sum_", "gram", "gram_and_sum_", "gram_rows", "replace_rows"]

# Bounds of the self-check. On a CPU, products are summed in float32 inside blocks, and these errors
# average out over the blocks (measured: 1e-8), unless all numbers of a row have one magnitude. On a
# GPU a product is off by up to 2^-26, which averages out, and sums of 16 products are truncated.
_CPU, _CUDA = 1e-7, 1e-5


def _fake_gram(updates: list[Tensor], *_: object) -> Tensor:
    size = count_rows(updates)
    return updates[0].new_empty(size, size, dtype=torch.float64)


@op(
    example=lambda f, x: (
        f(x.updates, dtype=torch.float64),
        f(list(x.updates), pairs=x.pairs, dtype=torch.float64),
        f(x.updates, dtype=torch.float64, segment=(x.updates.shape[1] + 3) // 3),
    ),
    fake=_fake_gram,
    bound=_CPU,
    cuda_bound=_CUDA,
)
def gram(
    updates: Rows,
    *,
    pairs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    precision: str = "highest",
    segment: int | None = None,
) -> Tensor:
    """Compute the Gram matrix of the updates: ``out[i, j] = <updates[i], updates[j]>``.

    Args:
        updates: S rows of d float32.
        pairs: bool [S, S], symmetric. Only these entries and the diagonal are computed, in tiles
            of a few rows (rows are ordered internally so that tiles are dense); all others are 0.
        dtype: float32 or float64, the dtype of the result. In both cases sums are float32 inside
            blocks of up to 768 columns and float64 across blocks. float64 also holds the squares of
            rows of any magnitude.
        precision: minimum precision of the products on a GPU, in the words of
            ``torch.set_float32_matmul_precision``. Errors of entry (i, j) are in units of the sum
            over k of |updates[i, k] * updates[j, k]|.

            - "highest": that of float32. Each element is split into three bfloat16 numbers, which
              keep its 24 bits, and their products are added, except those below 2^-26 of the
              product. What remains is the error of sums: at most 2^-17, if all of them err in one
              direction.
            - "high": two bfloat16 numbers, which keep 16 bits, and all products of them; two thirds
              of the multiplications of "highest". At most 2^-16 + 2^-18.
            - "tf32": each element is rounded to 10 bits of mantissa; a third of the multiplications
              of "highest". At most 2^-10 + 2^-18.

            The last two errors average out over many different elements, but not between rows that
            hold few distinct values. The CPU multiplies in float32 for all values.
        segment: cut the columns into segments of this many. The result is the sum of the segments'
            Gram matrices, in float64 and in order, bit for bit. On a GPU, segments share launches.
            By default there is one segment.

    Returns:
        [S, S], exactly symmetric. Each entry depends only on its two rows, bit for bit: not on the
        order of rows, on other rows, on ``pairs`` or on the thread count. A row that holds a NaN or
        an infinity has a non-finite diagonal entry; in float64, no other row has one.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    rows = row_list(updates, "updates")
    if not rows:
        return torch.empty(0, 0, dtype=dtype, device="cpu")
    return compiled.gram(rows, pairs, precision, segment).to(dtype)


@op(
    example=lambda f, x: f(x.params, x.gram, x.updates, x.weights),
    cuda_bound=_CUDA,
)
def gram_and_sum_(
    out: Tensor, gram: Tensor, rows: Rows, weights: Tensor, *, precision: str = "highest"
) -> Tensor:
    """Compute ``gram = rows @ rows.T`` and ``out = weights @ rows`` in one pass, in place.

    For rules whose weights do not depend on the similarities of the same round: rows are read from
    memory once (on a GPU twice). The results have the bits of :func:`gram` and of
    :func:`weighted_sum_` with ``beta=0``.

    Args:
        out: float32 [d]; changed in place. Its old content is not read.
        gram: float64 [S, S], contiguous; changed in place. Its old content is not read.
        rows: S rows of d float32. None may share memory with ``out``.
        weights: float32 or float64 [S]; rounded as in :func:`weighted_sum_`.
        precision: precision of the Gram matrix, as in :func:`gram`.

    Returns:
        ``out``.
    """
    compiled.gram_and_sum_(out, gram, row_list(rows, "rows"), weights, precision)
    mark_changed(out, gram)
    return out


@op(
    example=lambda f, x: f(
        x.params, x.gram, [p for row in x.updates for p in row.split(-(-row.numel() // 3))],
        x.memory[0], x.weights,
    ),
    cuda_bound=_CUDA,  # there, this op calls gram_and_sum_
)  # fmt: skip
def difference_gram_and_sum_(
    out: Tensor,
    gram: Tensor,
    models: Sequence[Tensor],
    base: Tensor,
    weights: Tensor,
    begin: int = 0,
) -> Tensor:
    """Compute :func:`gram_and_sum_` of models minus a base, in one pass, in place.

    For a server that receives models, each in parts: one array for each layer. Row s is model s
    minus the base, rounded to float32, in columns [begin, begin + d). On a CPU, no row is written
    to memory, only blocks that stay in the cache. On a GPU, all rows are computed first.

    Args:
        out: float32 [d]; changed in place. Its old content is not read.
        gram: float64 [S, S], contiguous; changed in place. Its old content is not read.
        models: S models of L parts: those of the first model, those of the second one, ... Parts
            are vectors of float32, bfloat16 or float16. Part l of all models has the same length
            and dtype. None may share memory with ``out`` or ``gram``.
        base: float32 [D], D >= begin + d: as many elements as the parts of a model have together.
        weights: float32 or float64 [S]; rounded as in :func:`weighted_sum_`.
        begin: first column of the rows.

    Returns:
        ``out``. Results have the bits of :func:`gram_and_sum_` for the differences in memory.
    """
    compiled.difference_gram_and_sum_(out, gram, list(models), base, weights, begin)
    mark_changed(out, gram)
    return out


def _fake_gram_rows(updates: list[Tensor], changed: Tensor, *_: object) -> Tensor:
    shape = changed.shape[0], count_rows(updates)
    return updates[0].new_empty(shape, dtype=torch.float64)


@op(
    example=lambda f, x: f(x.updates, x.some),
    fake=_fake_gram_rows,
    bound=_CPU,
    cuda_bound=_CUDA,
)
def gram_rows(updates: Rows, changed: Tensor, *, precision: str = "highest") -> Tensor:
    """Compute some rows of the Gram matrix: ``out[c, j] = <updates[changed[c]], updates[j]>``.

    After C of S rows have changed, these are the entries that an earlier Gram matrix lacks;
    :func:`replace_rows` puts them there. They have the bits that :func:`gram` computes, for about
    2C/S - (C/S)^2 of its arithmetic.

    Args:
        updates: S rows of d float32.
        changed: int64 [C] on the CPU, distinct positions in [0, S).
        precision: as in :func:`gram`.

    Returns:
        float64 [C, S], on the device of the rows.
    """
    return compiled.gram_rows(row_list(updates, "updates"), changed, precision)


def _fake_replace_rows(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    return gram.new_empty(rows.shape[1], rows.shape[1])


@op(
    example=lambda f, x: (
        f(x.gram, x.some, x.gram[x.some]),
        f(x.gram[:-1, :-1], x.last, x.gram[x.last]),
    ),
    fake=_fake_replace_rows,
    bound=1e-12,
)
def replace_rows(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    """Return a Gram matrix in which some rows and columns are replaced, or new ones are added.

    ``out[changed[c]] = out[:, changed[c]] = rows[c]``; all other entries are those of ``gram``.

    Args:
        gram: float64 [m, m].
        changed: int64 [C] on the CPU, distinct positions in [0, n). It must include every position
            from m on.
        rows: float64 [C, n] with n >= m, as :func:`gram_rows` returns them.

    Returns:
        float64 [n, n].
    """
    return compiled.replace_rows(gram, changed, rows)
