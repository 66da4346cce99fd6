# SPDX-License-Identifier: Apache-2.0
"""Computations of the robust rules on a Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "bucketed_gram",
    "clip_towards",
    "krum_scores",
    "krum_selection",
    "nearest_means",
    "weiszfeld",
]


def bucketed_gram(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the Gram matrix of weighted means of buckets of rows.

    Args and results are those of :func:`fastagg.ops.bucketed_gram`.
    """
    n, further = len(order), range(len(order), len(gram))
    pieces = sorted(sorted(piece.tolist()) for piece in order.split(bucket_size)) if n else []
    mixing = torch.zeros(len(pieces) + len(further), len(gram), dtype=torch.float64, device="cpu")
    for bucket, piece in enumerate(pieces):
        mixing[bucket, piece] = weights[piece]
    sums = mixing[: len(pieces)].sum(dim=1)
    mixing[: len(pieces)] /= sums[:, None]
    for bucket, row in enumerate(further, len(pieces)):
        mixing[bucket, row] = 1.0
    return mixing @ gram @ mixing.T, (mixing > 0).int().argmax(dim=0), mixing.sum(dim=0), sums


def _square_distances(gram: Tensor) -> Tensor:
    """Return the squared distances of all pairs of rows, [n, n], with -1 on the diagonal."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares - 2.0 * gram).clamp_min(0)
    return distances.fill_diagonal_(-1.0)


def krum_scores(gram: Tensor, num_byzantine: int) -> Tensor:
    """Add the squared distances of each row to its max(1, n - f - 2) nearest others: [n]."""
    count = max(1, len(gram) - num_byzantine - 2)
    return _square_distances(gram).sort(dim=1).values[:, 1 : 1 + count].sum(dim=1)


def krum_selection(gram: Tensor, num_byzantine: int, count: int) -> Tensor:
    """Choose ``count`` rows, each by its Krum score among the rows that are left: [count]."""
    left, chosen = list(range(len(gram))), []
    for _ in range(count):
        scores = krum_scores(gram[left][:, left], num_byzantine).tolist()
        chosen.append(left.pop(scores.index(min(scores))))
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")


def nearest_means(gram: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute the Gram matrix of the means of rows with their nearest ones, and the shares.

    Args and results are those of :func:`fastagg.ops.nearest_means`.
    """
    n = len(weights)
    order = _square_distances(gram[:n, :n]).sort(dim=1, stable=True).indices
    mixing = torch.eye(len(gram), dtype=torch.float64, device="cpu")
    for i in range(n):
        mixing[i, i] = 0.0
        nearest = order[i, :count]
        mixing[i, nearest] = weights[nearest] / weights[nearest].sum()
    return mixing @ gram @ mixing.T, mixing


def _distances_to(gram: Tensor, factors: Tensor) -> Tensor:
    """Return the distances |x_i - z| of the rows to z = sum_i factors[i] * x_i, [n]."""
    products = gram @ factors
    return (gram.diagonal() - 2 * products + factors @ products).clamp_min(0).sqrt()


def weiszfeld(gram: Tensor, weights: Tensor, start: Tensor, nu: float, iterations: int) -> Tensor:
    """Apply steps of the smoothed Weiszfeld algorithm to the factors ``start``: [n]."""
    factors = start
    for _ in range(iterations):
        factors = weights / _distances_to(gram, factors).clamp_min(nu)
        factors = factors / factors.sum()
    return factors.clone()


def clip_towards(gram: Tensor, weights: Tensor, tau: float, iterations: int) -> Tensor:
    """Apply steps of centered clipping (Su et al. eq. 43) from the last row: factors [n + 1]."""
    factors = torch.zeros(len(gram), dtype=torch.float64, device="cpu")
    factors[-1] = 1.0
    for _ in range(iterations):
        scale = weights * (tau / _distances_to(gram, factors)[:-1]).clamp_max(1.0)
        own = torch.cat([scale, 1.0 - scale.sum(dim=0, keepdim=True)])
        factors = own[-1] * factors + torch.cat([scale, scale.new_zeros(1)])
    return factors
