# SPDX-License-Identifier: Apache-2.0
"""Allocation of rows: aligned to cache lines, in huge pages where the system supports them."""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

from fastagg.ops.memory import rows_of

HUGE = 2 << 20
"""Bytes of a huge page: on x86-64, and on ARM with 4 KiB base pages."""


def zeros(count: int, size: int, step: int) -> list[Tensor]:
    """Allocate ``count`` zero vectors [size] float32 on the CPU, ``step`` elements apart.

    If they fill at least two huge pages, huge pages are requested; Linux grants them according to
    `/sys/kernel/mm/transparent_hugepage/enabled`. Each vector is a tensor with its own storage. The
    memory is freed with the last of them.

    Raises:
        MemoryError: the system does not have enough memory.
    """
    if count == 0:
        return []
    num_bytes = 4 * count * step
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as found:
        raise MemoryError(f"no memory for {count} rows of {size} numbers: {found}") from None
    if num_bytes >= 2 * HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel was built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return rows_of(memory, count, size, step)


def outside_inference_mode() -> AbstractContextManager[object]:
    """Leave inference mode if it is on. Otherwise nothing is entered, so nothing is allocated."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


_ALIGNMENT = 16  # floats: 64 bytes, a cache line and the alignment of torch's allocations
_PAGE = 1024  # floats: 4 KiB
_LARGE = 1 << 14  # floats: from this size on, where a row begins in its page affects speed


def allocate_rows(
    count: int, num_params: int, device: str | torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Allocate ``count`` zero vectors [num_params] of ``dtype``, each aligned to a cache line.

    Rows can be exchanged one by one; on the CPU, rows that were allocated together share one block
    of memory, which is freed with the last of them.

    On the CPU large rows are in huge pages where the system supports them. Rows that begin at the
    same offset of a memory page compete for the same cache sets when they are read side by side. So
    each large row begins a few cache lines later in its page than the row before, which costs up to
    4 KiB per row.
    """
    size = -(-num_params * dtype.itemsize // 4)  # in floats
    step = -(-size // _ALIGNMENT) * _ALIGNMENT
    if size >= _LARGE:
        step += (5 * _ALIGNMENT - step) % _PAGE
    with outside_inference_mode():  # rows outlive it
        if torch.device(device).type != "cpu":
            return [torch.zeros(num_params, device=device, dtype=dtype) for _ in range(count)]
        rows = zeros(count, size, step)
        return rows if dtype == torch.float32 else [r.view(dtype)[:num_params] for r in rows]


def allocate_vector(
    num_params: int, device: str | torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Allocate a zero vector [num_params] of float32 or float64, for a rule's state or scratch.

    On the CPU a large vector is in huge pages where the system supports them. Between two steps it
    leaves the caches, and a step reads it faster if it has few pages.
    """
    return allocate_rows(1, num_params, device, dtype)[0]
