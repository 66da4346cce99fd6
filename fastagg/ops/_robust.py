# SPDX-License-Identifier: Apache-2.0
"""What the robust rules compute from a Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled


def bucketed_gram(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Gram matrix of weighted means of buckets of rows, by that of the rows.

    Buckets are pieces of ``order``, the last one perhaps smaller, and are numbered by the lowest
    row in them.

    Args:
        gram: float64 [n + e, n + e], symmetric. The last e rows stay as they are, after the means.
        order: int64 [n], a permutation of [0, n).
        weights: float64 [n], > 0: the weight of each row in its bucket's mean.
        bucket_size: >= 1.

    Returns:
        For m = ceil(n / bucket_size) buckets: the Gram matrix, float64 [m + e, m + e], exactly
        symmetric; which of its rows each row went into, int64 [n + e]; the row's factor there,
        float64 [n + e], 1 for the last e; and the weight of each bucket, the sum of its rows',
        float64 [m]. Products are added in the order of rows.
    """
    return compiled.bucketed_gram(gram, order, weights, bucket_size)


@torch.library.register_fake("fastagg::bucketed_gram")
def _(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, members = gram.shape[0], order.shape[0]
    count = -(-members // bucket_size)
    size = rows - members + count
    buckets = gram.new_empty(rows, dtype=torch.int64)
    return gram.new_empty(size, size), buckets, gram.new_empty(rows), gram.new_empty(count)


def weiszfeld(gram: Tensor, weights: Tensor, start: Tensor, nu: float, iterations: int) -> Tensor:
    """Towards the geometric median: steps of the smoothed Weiszfeld algorithm (RFA).

    With z the combination of the rows by ``factors``, which are ``start`` at first::

        factors[i] = weights[i] / max(nu, |x_i - z|), divided by their sum

    Args:
        gram: float64 [n, n], of the rows x. It holds squares to 1e-8 of the rows' squared norms,
            so distances below 1e-4 of the norms are noise.
        weights: float64 [n], > 0; only their ratios matter.
        start: float64 [n].
        nu: > 0, in units of the rows.
        iterations: >= 0, the number of steps.

    Returns:
        float64 [n], of sum 1 (up to rounding) after the first step.
    """
    return compiled.weiszfeld(gram, weights, start, nu, iterations)


@torch.library.register_fake("fastagg::weiszfeld")
@torch.library.register_fake("fastagg::clip_towards")
def _(gram: Tensor, *args: object) -> Tensor:
    return gram.new_empty(gram.shape[0])


def clip_towards(gram: Tensor, weights: Tensor, tau: float, iterations: int) -> Tensor:
    """Centered clipping (Su et al. eq. 43) from v, the last of n + 1 rows::

        v <- v + sum over i < n of weights[i] * (x_i - v) * min(1, tau / |x_i - v|)

    Args:
        gram: float64 [n + 1, n + 1], of the rows x; see :func:`weiszfeld`.
        weights: float64 [n], of sum 1.
        tau: > 0, in units of the rows; may be infinite.
        iterations: >= 0.

    Returns:
        float64 [n + 1], the factors of the rows in v.
    """
    return compiled.clip_towards(gram, weights, tau, iterations)
