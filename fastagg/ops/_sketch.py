# SPDX-License-Identifier: Apache-2.0
"""Sketches: random projections of rows to k numbers."""

from __future__ import annotations

from torch import Tensor

from fastagg.ops._dispatch import compiled, mark_changed, op
from fastagg.ops.row_lists import Rows, row_list

__all__ = ["sketch_", "sketch_and_sum_"]


@op(
    example=lambda f, x: (
        f(x.gram.new_zeros(len(x.updates), 64), x.weights.clone(), x.updates, 7),
        f(x.updates.new_zeros(len(x.updates), 128), x.weights.clone(), list(x.updates), -3, 1000),
    )
)
def sketch_(out: Tensor, squares: Tensor, rows: Rows, seed: int, begin: int = 0) -> Tensor:
    """Add the sketches and the squared norms of rows, in one pass over the rows, in place.

    A sketch is a sparse Johnson-Lindenstrauss transform with one nonzero for each column, also
    called CountSketch (Charikar, Chen and Farach-Colton, 2002; Weinberger et al., 2009): column j
    is added to, or subtracted from, one of k buckets::

        out[s, bucket(j)] += sign(j) * rows[s][j - begin]    for j in [begin, begin + d)

    Bucket and sign depend on ``seed``, j and k alone. So sketches with one seed can be added and
    compared: for rows x and y, and a random seed, the inner product of their sketches has::

        mean      x @ y
        variance  sum over i != j of P(i, j) (x_i^2 y_j^2 + x_i y_i x_j y_j)
                  <= (|x|^2 |y|^2 + (x @ y)^2) / k

    P(i, j) is the probability that columns i and j share a bucket: 0 if both are in one of the
    blocks of k columns [0, k), [k, 2 k), ..., and 1/k otherwise.

    Args:
        out: float64 or float32 [S, k]; changed in place. k is a power of two from 64 to 16384.
        squares: float64 [S]; changed in place: the exact squared norms are added. They are finite
            if and only if the row is.
        rows: S rows of d float32 or short. None may share memory with ``out`` or ``squares``.
        seed: any int64.
        begin: the column of the rows' first element, in [0, 2^62].

    Returns:
        ``out``. Every bucket is summed in float64, in ascending order of columns; float32 is
        rounded once. A row's bits depend on that row alone. On a CPU they are the same for any
        instruction set and thread count, and, in float64, if neighbouring ranges of columns are
        added by several calls, in ascending order. The squares of such calls differ in their last
        bits. A GPU sums parts of 2^15 columns, or more, and adds them in order.
    """
    compiled.sketch_(out, squares, row_list(rows, "rows"), seed, begin)
    mark_changed(out, squares)
    return out


@op(
    example=lambda f, x: f(
        x.params.clone(),
        x.gram.new_zeros(len(x.updates), 64),
        x.weights.clone(),
        x.updates,
        x.weights,
        7,
    )
)
def sketch_and_sum_(
    sum: Tensor,
    out: Tensor,
    squares: Tensor,
    rows: Rows,
    weights: Tensor,
    seed: int,
    begin: int = 0,
) -> Tensor:
    """Add the sketches and squared norms of rows, and set ``sum = weights @ rows``, in place.

    Rows are read from memory once (on a GPU twice). The results have the bits of :func:`sketch_`
    and of :func:`weighted_sum_` with ``beta=0``.

    Args:
        sum: float32 [d]; changed in place. Its old content is not read.
        out: float64 [S, k]; changed in place. k is a power of two from 64 to 16384.
        squares: float64 [S]; changed in place.
        rows: S rows of d float32 or short. None may share memory with what is changed.
        weights: float32 or float64 [S]; rounded as in :func:`weighted_sum_`.
        seed, begin: see :func:`sketch_`.

    Returns:
        ``sum``.
    """
    compiled.sketch_and_sum_(sum, out, squares, row_list(rows, "rows"), weights, seed, begin)
    mark_changed(sum, out, squares)
    return sum
