# SPDX-License-Identifier: Apache-2.0
"""Make small CPU tensors through NumPy, which takes a third of the time of PyTorch's functions.

A step of a small model makes about ten such tensors, so they decide how long it takes. Values have
the same bits either way. If memory runs out they raise, where torch.from_numpy ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastagg.ops.memory import tensor_of

_NO_IDS = torch.empty(0, device="cpu", dtype=torch.int64)


def ids_tensor(ids: Sequence[int]) -> Tensor:
    """Return ids as an int64 tensor [n]."""
    if not ids:
        return _NO_IDS.detach()  # a new tensor, without an allocation
    return tensor_of(np.array(ids, dtype=np.int64))


def factors_tensor(factors: Sequence[float]) -> Tensor:
    """Return factors as a float64 tensor [n], n >= 1."""
    return tensor_of(np.array(factors, dtype=np.float64))


def flags_of(ids: Sequence[int], count: int) -> Tensor:
    """Return bool [count] with True at ``ids``."""
    flags = np.zeros(count, dtype=np.bool_)
    flags[ids] = True
    return tensor_of(flags)


def zeros(count: int, device: torch.device) -> Tensor:
    """Return float64 zeros [count].

    On a CPU no thread of PyTorch takes part: its threads would spin afterwards, on the cores that
    the threads of the next op need.
    """
    if device.type != "cpu":
        return torch.zeros(count, dtype=torch.float64, device=device)
    return tensor_of(np.zeros(count))


def rounded(factors: Tensor) -> Tensor:
    """Return a copy of float64 ``factors`` [n] rounded to float32, on their device."""
    if factors.device.type != "cpu":
        return factors.to(torch.float32)
    return tensor_of(factors.numpy().astype(np.float32))


def rows_in_order(matrix: Tensor, order: Sequence[int]) -> Tensor:
    """Return a copy of the rows ``order`` of a matrix [n, d]: [len(order), d]."""
    if matrix.device.type != "cpu":
        return matrix.index_select(0, ids_tensor(order).to(matrix.device))
    return tensor_of(matrix.detach().numpy().take(order, axis=0))
