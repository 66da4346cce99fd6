# SPDX-License-Identifier: Apache-2.0
"""Client weights: read once, divided by an exact sum where a rule takes a mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastagg.options import FLOAT32_LIMIT


def read_client_weights(value: object, num_clients: int) -> Tensor:
    """Client weights as a float64 tensor [K]: finite, >= 0, not all zero. None: 1/K each."""
    if value is None:
        return torch.full((num_clients,), 1.0 / num_clients, dtype=torch.float64)
    try:
        weights = torch.as_tensor(value, dtype=torch.float64).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"client_weights: expected {num_clients} numbers, got {type(value).__name__}: {error}"
        ) from error
    if weights.shape != (num_clients,):
        raise ValueError(
            f"client_weights: expected shape [{num_clients}], got {list(weights.shape)}"
        )
    if not bool(((weights >= 0) & (weights <= FLOAT32_LIMIT)).all()):
        raise ValueError(
            f"client_weights: expected finite numbers >= 0, got {weights.min().item()} to "
            f"{weights.max().item()}"
        )
    if not bool((weights > 0).any()):
        raise ValueError("client_weights: expected at least one weight > 0, got all zeros")
    return weights


def relative(weights: Tensor, clients: str) -> Tensor:
    """Weights divided by their sum, which is taken exactly: [n] float64 -> [n] float64.

    Raises:
        ValueError: they are all zero; ``clients`` says whose they are.
    """
    whole = math.fsum(weights.tolist())
    if whole == 0.0:
        raise ValueError(f"client_weights: expected a weight > 0 among {clients}, got all zeros")
    return weights / whole
