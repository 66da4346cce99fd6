# SPDX-License-Identifier: Apache-2.0
"""Read the argument ``weights`` of a step: the weights of the active clients in one round."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.options import FLOAT32_LIMIT


def read_weights(value: object, count: int) -> Tensor:
    """Return the weights of a round as a new float64 tensor [S] on the CPU.

    Args:
        value: S finite numbers >= 0, at least one of them > 0 if S > 0: a tensor, an array or a
            sequence.
        count: S.

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    try:
        weights = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"weights: expected {count} numbers, got {type(value).__name__}: {error}"
        ) from error
    if weights.shape != (count,):
        raise ValueError(
            f"weights: expected one per client, shape [{count}], got {list(weights.shape)}"
        )
    if not bool(((weights >= 0) & (weights <= FLOAT32_LIMIT)).all()):
        raise ValueError(
            f"weights: expected finite numbers >= 0, got {weights.min().item()} to "
            f"{weights.max().item()}"
        )
    if count and not bool((weights > 0).any()):
        raise ValueError("weights: expected at least one weight > 0, got all zeros")
    return weights
