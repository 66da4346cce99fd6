# SPDX-License-Identifier: Apache-2.0
"""The mean of clients' statistics, the arrays with the role "mean"."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg import ops


def mean_(
    out: Tensor, rows: Sequence[Tensor], clients: Sequence[int], client_weights: Tensor | None
) -> bool:
    """Compute the weighted mean of statistics, in place.

    The mean is within the range of the rows, up to rounding: that of variances is not negative.

    Args:
        out: [m] float32, m > 0; overwritten, unless the sum of the weights is zero.
        rows: [m] float32 each, finite; at most about 1e30.
        clients: ids of the rows' clients, ascending.
        client_weights: [K] float64, >= 0; None: equal ones.

    Returns:
        Whether there is a mean: there are rows, and the sum of their weights is not zero.
    """
    weights = client_weights
    shares = [1.0] * len(rows) if weights is None else weights[list(clients)].tolist()
    whole = math.fsum(shares)
    if whole == 0.0:
        return False
    factors = torch.tensor([share / whole for share in shares], dtype=torch.float64, device="cpu")
    ops.weighted_sum_(out, rows, factors, beta=0.0)
    return True
