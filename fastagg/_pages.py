# SPDX-License-Identifier: Apache-2.0
"""Memory in huge pages: with pages of 4 KB, looking up addresses costs kernels up to a fifth."""

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
