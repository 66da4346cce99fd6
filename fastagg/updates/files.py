# SPDX-License-Identifier: Apache-2.0
"""Updates in safetensors files, one per client, read in pieces.

Files are read with ``pread`` and not mapped: if a file is truncated while it is read, ``pread``
reports an error, whereas access to a mapping would end the process. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from fastagg.options import read_size
from fastagg.updates.columns import StreamedRow
from fastagg.updates.layout import FlatLayout
from fastagg.updates.streams import BUDGET, ColumnSource

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_CONVERTED = 1 << 20  # numbers per read, if they have to be converted to float32


class ClientFiles(ColumnSource):
    """Updates in safetensors files, one per client, with the tensors of a layout.

    A file that cannot be read, is truncated, or has other tensors than the layout is treated like
    an update that is not finite. With ``nonfinite="raise"`` the step raises a ValueError that names
    the client, the file and the reason; with "drop" the client is left out and listed in
    ``rejected``. A file that changes during a step always raises a ValueError. After a ValueError
    parameters and state are unchanged.

    Args:
        paths: S files, in the order of ``clients``.
        layout: names, shapes and order of the tensors. The tensors in the files may be float32,
            float16, bfloat16 or float64, independent of the layout's dtypes. Integer tensors that
            the layout excludes and further names of tied tensors are optional.
        base: [n] float32, where n is the number of columns read: the global model, if the files
            hold local models. It is subtracted from each. None if the files hold updates.
        columns: the columns [begin, end) to read, such as those of a rank. None reads all.
        budget: bytes of scratch memory for the rows' pieces.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        layout: FlatLayout,
        *,
        base: Tensor | None = None,
        columns: tuple[int, int] | None = None,
        budget: int = BUDGET,
    ) -> None:
        begin, end = columns or (0, layout.num_params)
        if not 0 <= begin < end <= layout.num_params:
            raise ValueError(f"columns: expected a part of 0:{layout.num_params}, got {columns}")
        self.num_params = end - begin
        if base is not None and (base.shape != (self.num_params,) or base.dtype != torch.float32):
            raise ValueError(
                f"base: expected [{self.num_params}] float32, got {[*base.shape]} {base.dtype}"
            )
        budget = read_size("budget", budget)
        self.rows = [
            _FileRow(Path(path), layout, base, begin, self.num_params, budget) for path in paths
        ]


@dataclass(frozen=True)
class _Place:
    """Columns [start, stop) of a tensor, and where it is in the file."""

    start: int
    stop: int
    offset: int  # bytes from the beginning of the file
    dtype: torch.dtype


class _FileRow(StreamedRow):
    def __init__(
        self,
        path: Path,
        layout: FlatLayout,
        base: Tensor | None,
        first: int,
        num_params: int,
        budget: int,
    ) -> None:
        self.num_params, self.budget = num_params, budget
        self._path, self._layout, self._base, self._first = path, layout, base, first
        self._places: list[_Place] = []
        self._identity: tuple[int, ...] = ()

    def problem(self) -> str | None:
        """Read the header. Return why the file cannot be used, or None if it can."""
        try:
            if not self._path.is_file():
                return f"{self._path}: there is no such file"
            # Before the header is read, so that a file replaced meanwhile is noticed in read().
            self._identity = _identity(os.stat(self._path))
            self._places = _places(self._path, self._layout)
        except (OSError, SafetensorError, ValueError) as error:
            return f"{self._path}: {error}"
        return None

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        """Read columns [begin, end) into ``scratch`` and subtract the base, if there is one."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                if _identity(os.fstat(descriptor)) != self._identity:
                    raise ValueError("the file changed during the step")
                self._fill(descriptor, self._first + begin, self._first + end, scratch)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise ValueError(f"updates: {self._path}: {error}") from error
        if self._base is not None:
            scratch.sub_(self._base[begin:end])
        return scratch

    def _fill(self, descriptor: int, begin: int, end: int, out: Tensor) -> None:
        """Read columns [begin, end) of the layout into ``out`` [end - begin] float32."""
        index = bisect_right(self._places, begin, key=lambda place: place.start) - 1
        column = begin
        while column < end:
            place = self._places[index]
            stop = min(end, place.stop)
            if place.dtype != torch.float32:
                stop = min(stop, column + _CONVERTED)
            offset = place.offset + (column - place.start) * place.dtype.itemsize
            part = out[column - begin : stop - begin]
            if place.dtype == torch.float32:
                _read_all(descriptor, part, offset)
            else:
                narrow = torch.empty(len(part), dtype=place.dtype)
                _read_all(descriptor, narrow, offset)
                part.copy_(narrow)
            column = stop
            if column == place.stop:
                index += 1


def _read_all(descriptor: int, out: Tensor, offset: int) -> None:
    """Fill a contiguous tensor from a file, beginning at byte ``offset``."""
    view = out.view(torch.uint8).numpy().data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise ValueError(f"the file is truncated: it ends at byte {offset}")
        view, offset = view[count:], offset + count


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Return a key that changes when a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _places(path: Path, layout: FlatLayout) -> list[_Place]:
    """Find the layout's tensors in a file; return their places in the order of columns.

    Raises:
        OSError, SafetensorError: the file cannot be read, is truncated or is damaged.
        ValueError: the file has other tensors than the layout.
    """
    with safetensors.safe_open(path, framework="pt"):
        pass  # checks the header, and that the tensors fill the rest of the file
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    missing = sorted(set(layout.names) - set(header))
    unknown = sorted(set(header) - {*layout.names, *layout.tied, *layout.excluded})
    if missing or unknown:
        raise ValueError(
            f"expected the tensors of the layout: missing {missing}, unknown {unknown}"
        )
    places = []
    for slot in layout.slots:
        entry = header[slot.name]
        if entry["shape"] != list(slot.shape):
            raise ValueError(f"{slot.name}: expected shape {[*slot.shape]}, got {entry['shape']}")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{slot.name}: expected one of {[*_DTYPES]}, got {entry['dtype']}")
        offset = 8 + length + entry["data_offsets"][0]
        if slot.stop > slot.start:
            places.append(_Place(slot.start, slot.stop, offset, _DTYPES[entry["dtype"]]))
    return places
