# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle of the robust rules' ops on n x n numbers, a part of
:mod:`fastagg.reference`."""

from __future__ import annotations

import torch
from torch import Tensor


def bucketed_gram(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Gram matrix of weighted means of buckets and of further rows; see ``ops``."""
    n = len(order)
    pieces = sorted(sorted(piece.tolist()) for piece in order.split(bucket_size)) if n else []
    mixing = torch.zeros(len(pieces), n, dtype=torch.float64)
    buckets = torch.zeros(n, dtype=torch.int64)
    for bucket, piece in enumerate(pieces):
        mixing[bucket, piece], buckets[piece] = weights[piece], bucket
    sums = mixing.sum(dim=1)
    mixing /= sums[:, None]
    whole = torch.block_diag(mixing, torch.eye(len(gram) - n, dtype=torch.float64))
    return whole @ gram @ whole.T, buckets, mixing.sum(dim=0), sums


def _distances_to(gram: Tensor, factors: Tensor) -> Tensor:
    """|x_i - z| of n rows to z, their combination by ``factors``: [n, n], [n] -> [n]."""
    products = gram @ factors
    return (gram.diagonal() - 2 * products + factors @ products).clamp_min(0).sqrt()


def weiszfeld(gram: Tensor, weights: Tensor, start: Tensor, nu: float, iterations: int) -> Tensor:
    """Factors [n] of the rows after steps of the smoothed Weiszfeld algorithm from ``start``."""
    factors = start
    for _ in range(iterations):
        factors = weights / _distances_to(gram, factors).clamp_min(nu)
        factors = factors / factors.sum()
    return factors.clone()


def clip_towards(gram: Tensor, weights: Tensor, tau: float, iterations: int) -> Tensor:
    """Factors [n + 1] after steps of centered clipping (Su et al. eq. 43) from the last row."""
    factors = torch.zeros(len(gram), dtype=torch.float64)
    factors[-1] = 1.0
    for _ in range(iterations):
        scale = weights * (tau / _distances_to(gram, factors)[:-1]).clamp_max(1.0)
        own = torch.cat([scale, 1.0 - scale.sum(dim=0, keepdim=True)])
        factors = own[-1] * factors + torch.cat([scale, scale.new_zeros(1)])
    return factors
