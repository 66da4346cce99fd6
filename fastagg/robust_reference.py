# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle of the robust rules' ops on n x n numbers, a part of
:mod:`fastagg.reference`."""

from __future__ import annotations

import torch
from torch import Tensor


def replace_rows(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    """A Gram matrix [m, m] with new rows and columns [C, n] at ``changed``: [n, n]."""
    result = torch.full((rows.shape[1],) * 2, torch.nan, dtype=torch.float64)
    result[: len(gram), : len(gram)] = gram
    result[changed], result[:, changed] = rows, rows.T
    return result


def bucketed_gram(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Gram matrix of weighted means of buckets and of further rows; see ``ops``."""
    n, further = len(order), range(len(order), len(gram))
    pieces = sorted(sorted(piece.tolist()) for piece in order.split(bucket_size)) if n else []
    mixing = torch.zeros(len(pieces) + len(further), len(gram), dtype=torch.float64)
    for bucket, piece in enumerate(pieces):
        mixing[bucket, piece] = weights[piece]
    sums = mixing[: len(pieces)].sum(dim=1)
    mixing[: len(pieces)] /= sums[:, None]
    for bucket, row in enumerate(further, len(pieces)):
        mixing[bucket, row] = 1.0
    return mixing @ gram @ mixing.T, (mixing > 0).int().argmax(dim=0), mixing.sum(dim=0), sums


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
