# SPDX-License-Identifier: Apache-2.0
"""Large operands, the same for all contenders: in huge pages, as the rows of an UpdateBuffer."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.updates import allocation


def zeros(rows: int, columns: int) -> Tensor:
    """[rows, columns] float32, contiguous."""
    size = rows * columns
    return allocation.zeros(1, size, size)[0].view(rows, columns)


def normal(rows: int, columns: int) -> Tensor:
    """The same with standard normal numbers."""
    return zeros(rows, columns).copy_(torch.randn(rows, columns))
