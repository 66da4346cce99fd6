# SPDX-License-Identifier: Apache-2.0
"""Sketches: random projections of rows to k numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastagg.ops.reference._row_lists import Rows, float64_rows
from fastagg.ops.reference._sums import weighted_sum_

__all__ = ["sketch_", "sketch_and_sum_"]


def sketch_(out: Tensor, squares: Tensor, rows: Rows, seed: int, begin: int = 0) -> Tensor:
    """Add the sketches [S, k] and the squared norms [S] of S rows, in place.

    Args and results are those of :func:`fastagg.ops.sketch_`.
    """
    x, k = float64_rows(rows), out.shape[1]
    columns = begin + np.arange(x.shape[1], dtype=np.int64)
    blocks = columns // k
    first = blocks * (1 + 8 * -(-k // 512))  # the number of a block's first output
    turns = (split_mix(seed, first) >> np.uint64(32)).astype(np.int64) * k >> 32
    buckets = (columns % k + turns) % k
    lanes = buckets % 16
    outputs = split_mix(seed, first + 1 + buckets // 512 * 8 + lanes // 2)
    places = lanes % 2 * 32 + 31 - buckets % 512 // 16  # the bit of the sign
    signs = 1.0 - 2.0 * (outputs >> places.astype(np.uint64) & np.uint64(1)).astype(np.float64)
    sums = torch.zeros(len(x), k, dtype=torch.float64, device="cpu")
    sums.index_add_(1, torch.from_numpy(buckets), x * torch.from_numpy(signs))
    squares += x.square().sum(dim=1)
    return out.add_(sums)


def sketch_and_sum_(
    sum: Tensor,
    out: Tensor,
    squares: Tensor,
    rows: Rows,
    weights: Tensor,
    seed: int,
    begin: int = 0,
) -> Tensor:
    """Compute :func:`sketch_`, and ``sum = weights @ rows`` [d], in place."""
    sketch_(out, squares, rows, seed, begin)
    return weighted_sum_(sum, rows, weights, beta=0.0)


def split_mix(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return the outputs ``numbers`` of the generator SplitMix64: int64 -> uint64."""
    z = np.uint64(seed % 2**64) + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
