# SPDX-License-Identifier: Apache-2.0
"""Where memory rows are stored: in memory or in a mapped file, as float32 or bfloat16."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastagg.updates.allocation import allocate_rows

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PAGE = 4096  # bytes


@dataclass(frozen=True)
class RowStore:
    """How rows are allocated.

    Attributes:
        dtype: of the rows.
        folder: folder of the file that holds them, which is deleted with the process; None: they
            are in memory.
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
            ValueError: rows in a file would have to be on another device than the CPU.
            OSError: there is no room on the disk.
        """
        if self.folder is not None:
            if device.type != "cpu":
                raise ValueError(f"memory_folder: expected None on {device}, got {self.folder}")
            return self._map(count, num_params)
        if self.dtype == torch.float32:
            return allocate_rows(count, num_params, device)
        with torch.inference_mode(False):
            return [torch.zeros(num_params, dtype=self.dtype, device=device) for _ in range(count)]

    def _map(self, count: int, num_params: int) -> list[Tensor]:
        """Map rows from a file that has no name.

        Its blocks are reserved, so that a disk that fills up later cannot end the process.
        """
        size = self.dtype.itemsize
        stride = -(-num_params * size // _PAGE) * _PAGE
        descriptor, name = tempfile.mkstemp(prefix=".fastagg-", suffix=".rows", dir=self.folder)
        try:
            os.posix_fallocate(descriptor, 0, count * stride)
            with torch.inference_mode(False):
                whole = torch.from_file(
                    name, shared=True, size=count * stride // size, dtype=self.dtype
                )
        finally:
            os.close(descriptor)
            os.unlink(name)
        return list(whole.view(count, stride // size)[:, :num_params].unbind(0))


def read_store(dtype: object, folder: str | os.PathLike[str] | None) -> RowStore:
    """Return the store that the options of a rule ask for.

    Raises:
        ValueError: there is no such dtype or folder.
    """
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"memory_dtype: expected one of {[*_DTYPES]}, got {dtype!r}")
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"memory_folder: expected a folder, got {os.fspath(folder)!r}")
    return RowStore(_DTYPES[dtype], None if folder is None else Path(folder))


def element_bytes(options: Mapping[str, Any]) -> int:
    """Return the bytes of a number in a memory row, for the options of a rule."""
    return _DTYPES[options.get("memory_dtype", "float32")].itemsize


def dtype_name(store: RowStore) -> str:
    """Return the ``memory_dtype`` option of a store."""
    return next(name for name, dtype in _DTYPES.items() if dtype == store.dtype)


class SpareRows:
    """Rows of a store that a step may write, to be exchanged for memory rows by its commit.

    Args:
        store: allocates rows when a cohort needs more than there are.
        num_params: d.
        device: where the rows live.
    """

    def __init__(self, store: RowStore, num_params: int, device: torch.device) -> None:
        self._store, self._num_params, self._device = store, num_params, device
        self._rows: list[Tensor] = []

    def rows(self, clients: Sequence[int]) -> list[Tensor]:
        """Return a row of any content for each of ``clients``, which replace the last call's.

        Raises:
            OSError, MemoryError: there is no room for more rows.
        """
        missing = len(clients) - len(self._rows)
        if missing > 0:
            self._rows += self._store.allocate(missing, self._num_params, self._device)
        return self._rows[: len(clients)]

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Give the rows of ``clients`` away and take ``rows`` in their place. Copies nothing.

        Args:
            clients: as in the last call of :meth:`rows`.
            rows: one for each of them.
        """
        given = self._rows[: len(clients)]
        self._rows[: len(clients)] = rows
        return given
