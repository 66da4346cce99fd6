# SPDX-License-Identifier: Apache-2.0
"""Steps of server optimizers on the flat vector."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_adaptive_", "add_momentum_"]


def _aggregate(params: Tensor, aggregate: Tensor, norm: float, models: bool) -> Tensor:
    """Return v of a server optimizer, [d] float64."""
    mean = norm * aggregate.to(torch.float64)
    return mean - params.to(torch.float64) if models else mean


def add_momentum_(
    params: Tensor,
    m: Tensor,
    aggregate: Tensor,
    lr: float,
    beta_1: float,
    nesterov: bool = False,
    norm: float = 1.0,
    models: bool = False,
) -> Tensor:
    """Move the parameters along an aggregate with momentum, in place.

    Args:
        params: [d] float32; changed in place.
        m: [d] float32, the momentum; changed in place.
        aggregate: [d] float32 or float64.
        lr: server learning rate.
        beta_1: in [0, 1).
        nesterov: take the step of Nesterov's momentum.
        norm: factor that makes ``aggregate`` a mean.
        models: ``aggregate`` is a sum of models, not of updates.

    Returns:
        ``params``.
    """
    v = _aggregate(params, aggregate, norm, models)
    moment = beta_1 * m.to(torch.float64) + v
    m.copy_(moment)
    return params.copy_(
        params.to(torch.float64) + lr * (v + beta_1 * moment if nesterov else moment)
    )


def add_adaptive_(
    params: Tensor,
    m: Tensor,
    s: Tensor,
    aggregate: Tensor,
    kind: str,
    lr: float,
    beta_1: float,
    beta_2: float,
    tau: float,
    norm: float = 1.0,
    models: bool = False,
) -> Tensor:
    """Move the parameters by an adaptive server optimizer, in place (Reddi et al., Algorithm 2).

    Args:
        params: [d] float32; changed in place.
        m: [d] float32, the first moment; changed in place.
        s: [d] float32, >= 0, the second moment; changed in place.
        aggregate: [d] float32 or float64.
        kind: "adagrad", "adam" or "yogi".
        lr: server learning rate.
        beta_1, beta_2: in [0, 1).
        tau: > 0.
        norm: factor that makes ``aggregate`` a mean.
        models: ``aggregate`` is a sum of models, not of updates.

    Returns:
        ``params``.
    """
    v = _aggregate(params, aggregate, norm, models)
    first, second, square = beta_1 * m.to(torch.float64) + (1.0 - beta_1) * v, s.double(), v * v
    if kind == "adagrad":
        second = second + square
    elif kind == "adam":
        second = beta_2 * second + (1.0 - beta_2) * square
    else:
        second = second - (1.0 - beta_2) * square * torch.sign(second - square)
    m.copy_(first)
    s.copy_(second)
    return params.copy_(params.to(torch.float64) + lr * first / (second.sqrt() + tau))
