# SPDX-License-Identifier: Apache-2.0
"""Read weights of clients: those of one round, and the option ``client_weights``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastagg.options import FLOAT32_LIMIT

_COMPLEX = frozenset(
    {
        *(torch.complex32, torch.complex64, torch.complex128),
        *map(np.dtype, (np.complex64, np.complex128, np.clongdouble)),
    }
)


def read_weights(name: str, value: object, count: int) -> Tensor:
    """Return weights as a new float64 tensor [n] on the CPU.

    Args:
        name: of the argument.
        value: n finite numbers >= 0, at least one of them > 0 if n > 0: a tensor, an array or a
            sequence.
        count: n.

    Raises:
        TypeError, ValueError: ``value`` is not as described; the message begins with ``name``.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected {count} numbers, got a masked array; call filled()")
    if isinstance(value, Tensor | np.ndarray) and value.dtype in _COMPLEX:
        raise TypeError(f"{name}: expected real numbers, got {value.dtype}")
    try:
        weights = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"{name}: expected {count} numbers, got {type(value).__name__}: {error}"
        ) from error
    if weights.layout != torch.strided:
        raise TypeError(f"{name}: expected {count} numbers, got a sparse tensor")
    if weights.shape != (count,):
        raise ValueError(
            f"{name}: expected one per client, shape [{count}], got {list(weights.shape)}"
        )
    if not bool(((weights >= 0) & (weights <= FLOAT32_LIMIT)).all()):
        raise ValueError(
            f"{name}: expected finite numbers >= 0, got {weights.min().item()} to "
            f"{weights.max().item()}; at most {FLOAT32_LIMIT:.3g} is accepted"
        )
    if count and not bool((weights > 0).any()):
        raise ValueError(f"{name}: expected at least one weight > 0, got all zeros")
    return weights
