# SPDX-License-Identifier: Apache-2.0
"""Sets of pairs of clients as packed bits: an eighth of the memory of bool."""

from __future__ import annotations

import torch
from torch import Tensor


def _places(device: torch.device) -> Tensor:
    """1, 2, 4, ..., 128, made where they are needed: a copy from the CPU would wait for a GPU."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


def packed_bytes(size: int) -> int:
    """Bytes of a row of ``size`` flags: ceil(size / 8)."""
    return -(-size // 8)


def pack(flags: Tensor) -> Tensor:
    """Flags [K, n] bool as bits [K, ceil(n / 8)] uint8.

    Flag i is bit i % 8 of byte i // 8, the lowest bit being bit 0; bits beyond n are 0.
    """
    rows, size = flags.shape
    padded = flags.new_zeros(rows, packed_bytes(size), 8, dtype=torch.uint8)
    padded.view(rows, -1)[:, :size] = flags
    return (padded * _places(flags.device)).sum(dim=-1, dtype=torch.uint8)


def unpack(bits: Tensor, size: int) -> Tensor:
    """The ``size`` flags [K, size] bool in each row of bits [K, ceil(size / 8)] uint8."""
    return (bits[:, :, None] & _places(bits.device)).ne(0).flatten(1)[:, :size].contiguous()


def pick(bits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The flags [len(rows), len(columns)] bool at these rows and columns, both int64 ids."""
    rows, columns = rows.to(bits.device), columns.to(bits.device)
    return (bits[rows][:, columns // 8] & _places(bits.device)[columns % 8]).ne(0)


def ones(rows: int, size: int, device: str | torch.device = "cpu") -> Tensor:
    """Bits [rows, ceil(size / 8)] uint8 of flags that are all set."""
    bits = torch.full((rows, packed_bytes(size)), 255, dtype=torch.uint8, device=device)
    if size % 8:
        bits[:, -1] = (1 << size % 8) - 1
    return bits
