# SPDX-License-Identifier: Apache-2.0
"""Memory for rows: vectors that start on a cache line, in huge pages where the system has them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20
"""Bytes of a huge page of x86-64 and, mostly, of ARM."""


def zeros(count: int, size: int, step: int) -> list[Tensor]:
    """Vectors of zeros [size] float32 on the CPU, ``count`` of them, ``step`` numbers apart.

    Where they fill some huge pages and the system has them (Linux; it decides by
    `/sys/kernel/mm/transparent_hugepage/enabled`) they are there. Each is a tensor with a storage
    of its own; the memory is given back with the last of them.

    Raises:
        MemoryError: the system has not so much.
    """
    if count == 0:
        return []
    num_bytes = 4 * count * step
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as found:
        raise MemoryError(f"no memory for {count} rows of {size} numbers: {found}") from None
    if num_bytes >= 2 * HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    starts = range(0, num_bytes, 4 * step)
    return [torch.frombuffer(memory, dtype=torch.float32, count=size, offset=k) for k in starts]


_ALIGNMENT = 16  # floats: 64 bytes, a cache line and the alignment of torch's allocations
_PAGE = 1024  # floats: 4 KiB
_LARGE = 1 << 14  # floats: from here on it matters where in a page a row begins


def allocate_rows(count: int, num_params: int, device: str | torch.device) -> list[Tensor]:
    """``count`` zero vectors [num_params] float32, each a tensor of its own that starts on a cache
    line. Rows can change owners one by one; their memory is given back with the last one.

    On the CPU large rows are in huge pages where the system has them. Rows that begin at the same
    place of a memory page compete for the same cache sets when they are read side by side, so each
    large row begins some cache lines later in its page than the one before it, at a cost of up to
    4 KiB.
    """
    step = -(-num_params // _ALIGNMENT) * _ALIGNMENT
    if num_params >= _LARGE:
        step += (5 * _ALIGNMENT - step) % _PAGE
    with torch.inference_mode(False):  # rows outlive the mode in which they were made
        if torch.device(device).type == "cpu":
            return zeros(count, num_params, step)
        return [torch.zeros(num_params, device=device) for _ in range(count)]
