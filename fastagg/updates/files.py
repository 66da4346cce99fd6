# SPDX-License-Identifier: Apache-2.0
"""Updates in safetensors files, one per client, read in pieces.

Files are read with ``pread`` and never mapped, the header included: if a file is truncated while it
is read, ``pread`` reports an error, whereas access to a mapping would end the process. Nothing is
unpickled. A header is checked before anything is allocated for it, and its size is limited by that
of the layout, so a client does not decide how much memory the server needs.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastagg import tensor_file
from fastagg.options import few, read_count, read_size
from fastagg.tensor_file import TensorFileError
from fastagg.updates.any_rows import StreamedRow
from fastagg.updates.layout import FlatLayout
from fastagg.updates.streams import BUDGET, ColumnSource

_DTYPES = ("F32", "F16", "BF16", "F64")
_HEADER, _PER_TENSOR = 1 << 16, 1 << 9  # bytes of a header: in any case, and per tensor
_CONVERTED = 1 << 20  # numbers per read, if they have to be converted to float32


class ClientFiles(ColumnSource):
    """Updates in safetensors files, one per client, with the tensors of a layout.

    A file that cannot be read, is truncated, or has other tensors than the layout is treated like
    an update that is not finite. With ``nonfinite="raise"`` the step raises a ValueError that names
    the client, the file and the reason; with "drop" the client is left out and listed in
    ``rejected``. A file that changes during a step raises a ValueError, which is noticed by its
    size and time of modification. After a ValueError parameters and state are unchanged.

    Args:
        paths: S files, in the order of ``clients``.
        layout: names, shapes and order of the tensors. The tensors in the files may be float32,
            float16, bfloat16 or float64, independent of the layout's dtypes. Tensors that the
            layout excludes and further names of tied tensors are optional, and not read.
        base: [n] float32, where n is the number of columns read: the global model, if the files
            hold local models. It is subtracted from each. None if the files hold updates.
        columns: the columns [begin, end) to read, such as those of a rank. None reads all.
        budget: bytes of scratch memory for the rows' pieces.

    Raises:
        TypeError, ValueError: an argument is not as described. Files are opened in a step.
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
        if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
            raise TypeError(f"paths: expected a sequence of paths, got {paths!r}")
        if not isinstance(layout, FlatLayout):
            raise TypeError(f"layout: expected a FlatLayout, got {type(layout).__name__}")
        if base is not None and not isinstance(base, Tensor):
            raise TypeError(f"base: expected a tensor, got {type(base).__name__}")
        given = (0, layout.num_params) if columns is None else columns
        if not isinstance(given, Sequence) or len(given) != 2:
            raise TypeError(f"columns: expected two ints (begin, end), got {columns!r}")
        first, last = given
        begin, end = read_count("columns", first, least=0), read_count("columns", last, least=0)
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
            with tensor_file.opened(self._path) as descriptor:
                # Before the header is read, so that a change meanwhile is noticed in read().
                self._identity = tensor_file.identity(descriptor)
                self._places = _places(descriptor, self._layout)
        except (OSError, ValueError) as error:
            return f"{self._path}: {error}"
        return None

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        """Read columns [begin, end) into ``scratch`` and subtract the base, if there is one."""
        try:
            with tensor_file.opened(self._path) as descriptor:
                if tensor_file.identity(descriptor) != self._identity:
                    raise TensorFileError("the file changed during the step")
                self._fill(descriptor, self._first + begin, self._first + end, scratch)
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
                tensor_file.read_into(descriptor, part, offset)
            else:
                narrow = torch.empty(len(part), dtype=place.dtype, device="cpu")
                tensor_file.read_into(descriptor, narrow, offset)
                part.copy_(narrow)
            column = stop
            if column == place.stop:
                index += 1


def _places(descriptor: int, layout: FlatLayout) -> list[_Place]:
    """Find the layout's tensors in a file; return their places in the order of columns.

    Raises:
        OSError, TensorFileError: the file cannot be read, is truncated or is damaged.
        ValueError: the file has other tensors than the layout.
    """
    known = {*layout.names, *layout.tied, *layout.excluded}
    names = sum(len(name.encode()) for name in known)
    # JSON writes a byte of a name as 6 at most.
    limit = _HEADER + _PER_TENSOR * len(known) + 6 * names
    entries = tensor_file.read_header(descriptor, limit).entries
    missing = sorted(set(layout.names) - set(entries))
    unknown = sorted(set(entries) - known)
    if missing or unknown:
        raise ValueError(
            f"expected the tensors of the layout: missing {missing}, unknown {few(unknown)}"
        )
    places = []
    for slot in layout.slots:
        entry = entries[slot.name]
        if entry.shape != tuple(slot.shape):
            raise ValueError(f"{slot.name}: expected shape {[*slot.shape]}, got {[*entry.shape]}")
        if entry.kind not in _DTYPES:
            raise ValueError(f"{slot.name}: expected one of {[*_DTYPES]}, got {entry.kind}")
        if slot.stop > slot.start:
            places.append(_Place(slot.start, slot.stop, entry.offset, entry.dtype))
    return places
