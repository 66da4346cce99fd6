# SPDX-License-Identifier: Apache-2.0
"""Sets of pairs of clients as packed bits, in an eighth of the memory of bool tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastagg.ops.memory import tensor_of


def _places(device: torch.device) -> Tensor:
    """Return 1, 2, 4, ..., 128. Made on the device, since a copy from the CPU waits for a GPU."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


def packed_bytes(size: int) -> int:
    """Return the number of bytes in a row of ``size`` flags: ceil(size / 8)."""
    return -(-size // 8)


def pack(flags: Tensor) -> Tensor:
    """Pack flags into bits.

    Flag i is bit i % 8 of byte i // 8; bit 0 is the lowest. Bits beyond n are 0.

    Args:
        flags: bool [K, n].

    Returns:
        uint8 [K, ceil(n / 8)].

    Raises:
        TypeError: flags are not bool.
    """
    if flags.dtype != torch.bool:
        raise TypeError(f"flags: expected dtype bool, got {flags.dtype}")
    rows, size = flags.shape
    padded = flags.new_zeros(rows, packed_bytes(size), 8, dtype=torch.uint8)
    padded.view(rows, -1)[:, :size] = flags
    return (padded * _places(flags.device)).sum(dim=-1, dtype=torch.uint8)


def unpack(bits: Tensor, size: int) -> Tensor:
    """Unpack ``size`` flags of each row: uint8 [K, ceil(size / 8)] -> bool [K, size].

    Raises:
        ValueError: rows have another number of bytes.
    """
    if bits.shape[1] != packed_bytes(size):
        raise ValueError(
            f"bits: expected {packed_bytes(size)} bytes in a row, for {size} flags, got "
            f"{bits.shape[1]}"
        )
    return (bits[:, :, None] & _places(bits.device)).ne(0).flatten(1)[:, :size].contiguous()


def pick(bits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Unpack the flags at the given rows and columns.

    Args:
        bits: uint8 [K, ceil(n / 8)].
        rows: int64 [R], ids in [0, K).
        columns: int64 [C], ids in [0, n).

    Returns:
        bool [R, C].
    """
    rows, columns = rows.to(bits.device), columns.to(bits.device)
    if bits.is_cpu:  # for 2^15 pairs, torch would start threads, which keep cores busy afterwards
        place = columns.numpy()
        flags = bits.numpy()[rows.numpy()].take(place // 8, axis=1)
        flags >>= (place % 8).astype(np.uint8)
        flags &= 1
        return tensor_of(flags.view(np.bool_))
    return (bits[rows][:, columns // 8] & _places(bits.device)[columns % 8]).ne(0)


def ones(rows: int, size: int, device: str | torch.device = "cpu") -> Tensor:
    """Return bits of ``size`` flags per row that are all set: uint8 [rows, ceil(size / 8)]."""
    bits = torch.full((rows, packed_bytes(size)), 255, dtype=torch.uint8, device=device)
    if size % 8:
        bits[:, -1] = (1 << size % 8) - 1
    return bits
