# SPDX-License-Identifier: Apache-2.0
"""Allocate large operands, the same for all contenders: in huge pages, like an UpdateBuffer."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.updates import allocation


def zeros(rows: int, columns: int) -> Tensor:
    """Return zeros, contiguous float32 [rows, columns]."""
    size = rows * columns
    return allocation.zeros(1, size, size)[0].view(rows, columns)


def normal(rows: int, columns: int) -> Tensor:
    """Return standard normal numbers, contiguous float32 [rows, columns]."""
    return zeros(rows, columns).copy_(torch.randn(rows, columns))
