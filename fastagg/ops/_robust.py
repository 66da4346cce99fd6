# SPDX-License-Identifier: Apache-2.0
"""Computations of the robust rules on a Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, op

__all__ = [
    "bucketed_gram",
    "clip_towards",
    "krum_scores",
    "krum_selection",
    "nearest_means",
    "weiszfeld",
]


def _fake_bucketed_gram(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, members = gram.shape[0], order.shape[0]
    count = -(-members // bucket_size)
    size = rows - members + count
    buckets = gram.new_empty(rows, dtype=torch.int64)
    return gram.new_empty(size, size), buckets, gram.new_empty(rows), gram.new_empty(count)


_MOST_SIZE = 2**63 - 1  # of an int of an operator


@op(
    example=lambda f, x: f(x.gram, x.order, x.weights[1:], 3),
    fake=_fake_bucketed_gram,
    bound=1e-12,
)
def bucketed_gram(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the Gram matrix of the weighted means of buckets of rows, from that of the rows.

    Bucket b holds the rows ``order[b * bucket_size : (b + 1) * bucket_size]``; the last bucket may
    be smaller. The results number the buckets by the lowest row in them.

    Args:
        gram: float64 [n + e, n + e], symmetric. The last e rows are in no bucket; they follow the
            means unchanged.
        order: int64 [n], a permutation of [0, n).
        weights: float64 [n], > 0: the weight of each row in the mean of its bucket.
        bucket_size: >= 1; n or more gives one bucket.

    Returns:
        For m = ceil(n / bucket_size) buckets:

        - the Gram matrix, float64 [m + e, m + e], exactly symmetric. Products are added in the
          order of rows;
        - int64 [n + e]: the row of that matrix to which each row contributes;
        - float64 [n + e]: the factor with which it contributes, 1 for the last e rows;
        - float64 [m]: the weight of each bucket, which is the sum of the weights of its rows.
    """
    return compiled.bucketed_gram(gram, order, weights, min(bucket_size, _MOST_SIZE))


@op(
    example=lambda f, x: f(x.gram, 1),
    fake=lambda gram, num_byzantine: gram.new_empty(gram.shape[0]),
    bound=1e-12,
)
def krum_scores(gram: Tensor, num_byzantine: int) -> Tensor:
    """Compute the Krum score of each of n rows (Blanchard et al. 2017), from their Gram matrix.

    The score is the sum of the squared distances to the max(1, n - f - 2) nearest other rows. It
    does not depend on the order of the rows, and identical rows have identical scores.

    Args:
        gram: float64 [n, n], symmetric; see :func:`weiszfeld` for its accuracy.
        num_byzantine: f, the number of rows that may be faulty, >= 0.

    Returns:
        float64 [n].
    """
    return compiled.krum_scores(gram, min(num_byzantine, _MOST_SIZE))


@op(
    example=lambda f, x: f(x.gram, 1, len(x.gram) - 2),
    fake=lambda gram, num_byzantine, count: gram.new_empty(count, dtype=torch.int64),
    bound=0.0,
)
def krum_selection(gram: Tensor, num_byzantine: int, count: int) -> Tensor:
    """Choose rows one after the other by Krum, each among those that are left (El Mhamdi 2018).

    A choice is the row with the lowest :func:`krum_scores` among the r rows that are left, so its
    score has max(1, r - f - 2) distances. The first row wins a tie.

    Args:
        gram: float64 [n, n], symmetric.
        num_byzantine: f, the number of rows that may be faulty, >= 0.
        count: number of choices, 0 to n. All of them take O(n^2 (count + log^2 n)) operations.

    Returns:
        int64 [count], the positions of the rows in the order of the choices.
    """
    return compiled.krum_selection(gram, min(num_byzantine, _MOST_SIZE), count)


def _fake_nearest_means(gram: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return gram.new_empty(gram.shape), gram.new_empty(gram.shape)


@op(
    example=lambda f, x: f(x.gram, x.weights[1:], 3),
    fake=_fake_nearest_means,
    bound=1e-12,
)
def nearest_means(gram: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute the Gram matrix of the means of each row with its nearest rows.

    Mean i is the weighted mean of the ``count`` rows that are nearest to row i, itself included;
    the first rows win ties (nearest-neighbour mixing, Allouah et al. 2023).

    Args:
        gram: float64 [n + e, n + e], symmetric. The last e rows are in no mean; they follow the
            means unchanged.
        weights: float64 [n], > 0: the weight of each row in a mean.
        count: number of rows in a mean, 1 to n.

    Returns:
        - the Gram matrix, float64 [n + e, n + e], exactly symmetric;
        - float64 [n + e, n + e]: the share of each row (a column) in each mean (a row).
    """
    return compiled.nearest_means(gram, weights, count)


def _fake_factors(gram: Tensor, *_: object) -> Tensor:
    return gram.new_empty(gram.shape[0])


@op(
    example=lambda f, x: f(x.gram, x.weights, x.weights, 1.0, 3),
    fake=_fake_factors,
    bound=1e-12,
)
def weiszfeld(gram: Tensor, weights: Tensor, start: Tensor, nu: float, iterations: int) -> Tensor:
    """Approach the geometric median by steps of the smoothed Weiszfeld algorithm (RFA).

    With z the combination of the rows by ``factors``, which are ``start`` at first, one step is::

        factors[i] = weights[i] / max(nu, |x_i - z|), divided by their sum

    Args:
        gram: float64 [n, n], the Gram matrix of the rows x. Its squares are accurate to 1e-8 of the
            squared norms of the rows, so distances below 1e-4 of the norms are noise.
        weights: float64 [n], > 0; only their ratios matter.
        start: float64 [n], the first factors.
        nu: > 0, in units of the rows; the smoothing. At least 2^-900 is used, so that no
            factor is infinite.
        iterations: number of steps, 0 to 100,000.

    Returns:
        float64 [n], the factors. Their sum is 1 (up to rounding) after the first step.
    """
    return compiled.weiszfeld(gram, weights, start, max(nu, 2.0**-900), iterations)


@op(
    example=lambda f, x: f(x.gram, x.weights[1:] / x.weights[1:].sum(), 300.0, 3),
    fake=_fake_factors,
    bound=1e-12,
)
def clip_towards(gram: Tensor, weights: Tensor, tau: float, iterations: int) -> Tensor:
    """Apply steps of centered clipping (Su et al. eq. 43), starting from the last row.

    With v the last of n + 1 rows at first, one step is::

        v <- v + sum over i < n of weights[i] * (x_i - v) * min(1, tau / |x_i - v|)

    Args:
        gram: float64 [n + 1, n + 1], the Gram matrix of the rows x; see :func:`weiszfeld` for its
            accuracy.
        weights: float64 [n] with sum 1.
        tau: > 0, in units of the rows; may be infinite.
        iterations: number of steps, 0 to 100,000.

    Returns:
        float64 [n + 1], the factors of the rows in v.
    """
    return compiled.clip_towards(gram, weights, tau, iterations)
