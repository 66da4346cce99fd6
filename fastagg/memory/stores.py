# SPDX-License-Identifier: Apache-2.0
"""Allocate memory rows: in memory or in a memory-mapped file, as float32, bfloat16 or int8."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastagg.ops.memory import tensor_of
from fastagg.ops.scales import num_scales
from fastagg.options import shown
from fastagg.updates.allocation import allocate_rows, outside_inference_mode

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_PAGE = 4096  # bytes
_PIECE = 1 << 20  # bytes


@dataclass(frozen=True)
class RowStore:
    """Where rows are allocated, and their dtype.

    Attributes:
        dtype: torch.float32, torch.bfloat16 or torch.int8.
        folder: folder for a memory-mapped file that holds the rows and that is deleted when the
            process ends; None: rows are in memory.
    """

    dtype: torch.dtype = torch.float32
    folder: Path | None = None

    @property
    def plain(self) -> bool:
        """Whether rows are float32 in memory, like the rows of a caller's buffer."""
        return self.dtype == torch.float32 and self.folder is None

    def allocate(self, count: int, num_params: int, device: torch.device) -> list[Tensor]:
        """Return ``count`` rows [num_params] of zeros.

        Raises:
            ValueError: there is a folder, but ``device`` is not the CPU.
            OSError: the file cannot be created, or the disk has no room for it.
        """
        if self.folder is not None:
            if device.type != "cpu":
                raise ValueError(f"memory_folder: expected None on {device}, got {self.folder}")
            return self._map(count, num_params)
        return allocate_rows(count, num_params, device, self.dtype)

    def _map(self, count: int, num_params: int) -> list[Tensor]:
        """Return rows in a new memory-mapped file without a name.

        Its blocks are reserved: a write to a mapped page without a block would kill the process
        (SIGBUS) if the disk were full by then.
        """
        size = self.dtype.itemsize
        stride = -(-num_params * size // _PAGE) * _PAGE
        try:
            descriptor = _nameless(self.folder)
            try:
                _reserve(descriptor, count * stride)
                memory = mmap.mmap(descriptor, count * stride)
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = f"no room for {count * stride} bytes of memory rows: {error.strerror}"
            raise OSError(error.errno, problem, str(self.folder)) from error
        with outside_inference_mode():
            whole = tensor_of(memory).view(self.dtype)
        return list(whole.view(count, stride // size)[:, :num_params].unbind(0))


def _reserve(descriptor: int, size: int) -> None:
    """Give a new file ``size`` bytes of zeros that have blocks on the disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = memoryview(bytes(min(size, _PIECE)))  # macOS
    while size:
        size -= os.write(descriptor, zeros[:size])


def _nameless(folder: Path | None) -> int:
    """Open a new file in a folder; the file disappears when it is closed."""
    assert folder is not None
    with suppress(OSError, AttributeError):  # not on every platform and file system
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, name = tempfile.mkstemp(prefix=".fastagg-", suffix=".rows", dir=folder)
    try:
        os.unlink(name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_store(dtype: object, folder: str | os.PathLike[str] | None) -> RowStore:
    """Return the store for the options ``memory_dtype`` and ``memory_folder``.

    Raises:
        TypeError: the folder is no path.
        ValueError: the dtype is not supported, or the folder does not exist.
    """
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"memory_dtype: expected one of {[*_DTYPES]}, got {dtype!r}")
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise TypeError(f"memory_folder: expected a folder, got {shown(folder)}")
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"memory_folder: expected a folder, got {os.fspath(folder)!r}")
    return RowStore(_DTYPES[dtype], None if folder is None else Path(folder))


def row_bytes(options: Mapping[str, Any], num_params: int) -> int:
    """Return the size in bytes of a memory row [d], with its scales, for the options of a rule.

    Raises:
        ValueError: the option ``memory_dtype`` is not supported.
    """
    dtype = read_store(options.get("memory_dtype", "float32"), None).dtype
    scales = 4 * num_scales(num_params) if dtype == torch.int8 else 0
    return dtype.itemsize * num_params + scales


class AddressRange:
    """The addresses between the beginning of the first and the end of the last of some rows."""

    def __init__(self, rows: Sequence[Tensor] = ()) -> None:
        self._begin, self._end = sys.maxsize, 0
        self.add(rows)

    def add(self, rows: Sequence[Tensor]) -> None:
        """Widen the range to further rows, all of one size."""
        if rows:
            begins = [row.data_ptr() for row in rows]
            self._begin = min(self._begin, *begins)
            self._end = max(self._end, max(begins) + rows[0].nbytes)

    def meets(self, vector: Tensor) -> bool:
        """Return whether a part of a vector is in the range."""
        begin = vector.data_ptr()
        return begin < self._end and self._begin < begin + vector.nbytes


class SpareRows:
    """Spare rows: a step writes them, and its commit exchanges them for memory rows.

    Args:
        store: allocates further rows when a cohort has more clients than all before.
        num_params: d.
        device: where the rows live.

    Attributes:
        addresses: those of all rows that were allocated here, wherever they are now.
    """

    def __init__(self, store: RowStore, num_params: int, device: torch.device) -> None:
        self._store, self._num_params, self._device = store, num_params, device
        self._rows: list[Tensor] = []
        self.addresses = AddressRange()

    @property
    def every_row(self) -> list[Tensor]:
        """All spare rows, not copied."""
        return self._rows

    def rows(self, clients: Sequence[int]) -> list[Tensor]:
        """Return one spare row with undefined content for each of ``clients``.

        Further calls return the same rows until :meth:`exchange`.

        Raises:
            OSError, MemoryError: there is no room for more rows.
        """
        missing = len(clients) - len(self._rows)
        if missing > 0:
            further = self._store.allocate(missing, self._num_params, self._device)
            self.addresses.add(further)
            self._rows += further
        return self._rows[: len(clients)]

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of the last :meth:`rows`, and keep ``rows`` instead. Copies nothing.

        Args:
            clients: those of the last call of :meth:`rows`.
            rows: the new spare rows, one for each client.
        """
        given = self._rows[: len(clients)]
        self._rows[: len(clients)] = rows
        return given
