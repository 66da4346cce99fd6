# SPDX-License-Identifier: Apache-2.0
"""Conversion between models on the wire, named arrays in .npy format, and flat vectors [d].

A client's arrays are not copied: one pass over the received bytes subtracts the global model and
writes the client's row. Nothing is unpickled, and shapes and dtypes in a header are used only after
they were found equal to those that the server expects.
"""

from __future__ import annotations

import ast
import io
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = Mapping[str, bytes]
"""Names -> the bytes of a .npy file."""

_FLOATS = ("float16", "float32", "float64")
# Version of the .npy format -> struct format of the field that holds the length of the header.
_LENGTHS = {b"\x01\x00": "<H", b"\x02\x00": "<I", b"\x03\x00": "<I"}
_NUMBERS = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")  # dtypes of bools and numbers
_MAX_HEADER = 10_000  # bytes; the header of an array of numbers has about a hundred


class WireError(ValueError):
    """Arrays do not match the server's model. The message names the array and what was expected."""


@dataclass(frozen=True)
class WireSlot:
    """One array of a model.

    Attributes:
        name: name of the array on the wire.
        shape: shape of the array.
        dtype: NumPy's name of its dtype, in native byte order.
        start: first column of the array in the flat vector; None for arrays of integers and bools,
            which are not in the vector.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class WireLayout:
    """The arrays of a model, and their places in the flat float32 vector [d].

    Arrays of float16, float32 and float64 are placed one after another, in the order of the model.
    The server computes in float32: float16 is represented exactly, float64 is rounded. Arrays of
    integers and bools cannot be averaged: the server sends its own unchanged, and those of clients
    are checked and then ignored.

    Attributes:
        slots: the arrays, in order.
        num_params: d.
    """

    def __init__(self, slots: Sequence[WireSlot]) -> None:
        self.slots = tuple(slots)
        self.num_params = sum(slot.size for slot in slots if slot.start is not None)

    @classmethod
    def of(cls, arrays: Arrays) -> WireLayout:
        """Make the layout of a model.

        Raises:
            WireError: an array cannot be read or has an unsupported dtype, or the model has no
                array of floats.
        """
        slots = []
        start = 0
        for name, data in arrays.items():
            dtype, shape, _, _ = _read_header(name, data)
            kind = dtype.newbyteorder("=").name
            if kind not in _FLOATS and dtype.kind not in "biu":
                raise WireError(f"array {name!r}: expected floats, integers or bools, got {kind}")
            is_float = kind in _FLOATS
            slots.append(WireSlot(name, shape, kind, start if is_float else None))
            start += slots[-1].size if is_float else 0
        if start == 0:
            raise WireError(
                f"arrays: expected at least one array of {', '.join(_FLOATS)}, got {list(arrays)}"
            )
        return cls(slots)

    def flatten(self, arrays: Arrays) -> Tensor:
        """Convert a model to one vector, [d] float32.

        Raises:
            WireError: the model does not have this layout, or holds NaN or Inf.
        """
        vector = torch.zeros(self.num_params, dtype=torch.float32)
        self.subtract(arrays, torch.zeros(self.num_params, dtype=torch.float32), vector)
        if not bool(torch.isfinite(vector).all()):
            raise WireError("arrays: expected finite values, got NaN or Inf (as float32)")
        return vector

    def subtract(self, arrays: Arrays, params: Tensor, row: Tensor) -> None:
        """Compute ``row = arrays - params``, a client's update from its weights, in one pass.

        Args:
            arrays: a model of this layout, with any values; not changed.
            params: [d] float32, contiguous: the model that the client started from.
            row: [d] float32, contiguous; overwritten, in part also if a WireError is raised.

        Raises:
            WireError: names, shapes, dtypes or lengths differ from those of the layout.
        """
        self._check_names(arrays)
        start, out = params.numpy(), row.numpy()
        for slot in self.slots:
            values = _values(slot, arrays[slot.name])
            if slot.start is None:
                continue
            place = slice(slot.start, slot.start + slot.size)
            with np.errstate(all="ignore"):  # the rule handles NaN and Inf
                np.subtract(
                    values,
                    start[place].reshape(slot.shape),
                    out=out[place].reshape(slot.shape),
                    casting="same_kind",
                )

    def carried(self, arrays: Arrays) -> dict[str, bytes]:
        """Return the arrays that are not in the vector, unchanged."""
        return {slot.name: arrays[slot.name] for slot in self.slots if slot.start is None}

    def unflatten(self, params: Tensor, carried: Arrays) -> dict[str, bytes]:
        """Convert a vector to a model to send, with the dtypes and shapes of this layout.

        Args:
            params: [d] float32, contiguous, finite.
            carried: the arrays that are not in the vector, from :meth:`carried`.

        Raises:
            WireError: a value is too large for float16.
        """
        vector = params.numpy()
        arrays = {}
        for slot in self.slots:
            if slot.start is None:
                arrays[slot.name] = carried[slot.name]
                continue
            part = vector[slot.start : slot.start + slot.size]
            with np.errstate(over="ignore"):
                values = part.astype(slot.dtype, copy=False)
            if slot.dtype == "float16" and not np.isfinite(values).all():
                raise WireError(
                    f"array {slot.name!r}: expected values in the range of float16, got larger "
                    "ones; use a float32 model"
                )
            arrays[slot.name] = _header(slot) + values.tobytes()
        return arrays

    def to_json(self) -> list[list[Any]]:
        """Return the layout as values that JSON represents, for :meth:`from_json`."""
        return [[slot.name, list(slot.shape), slot.dtype] for slot in self.slots]

    @classmethod
    def from_json(cls, listed: Sequence[Sequence[Any]]) -> WireLayout:
        """Make the layout that :meth:`to_json` returned."""
        slots = []
        start = 0
        for name, shape, dtype in listed:
            is_float = dtype in _FLOATS
            slots.append(WireSlot(name, tuple(shape), dtype, start if is_float else None))
            start += slots[-1].size if is_float else 0
        return cls(slots)

    def _check_names(self, arrays: Arrays) -> None:
        """Check that the arrays have the names of the layout."""
        expected = {slot.name for slot in self.slots}
        if set(arrays) != expected:
            missing, unknown = sorted(expected - set(arrays)), sorted(set(arrays) - expected)
            raise WireError(
                f"arrays: expected the {len(expected)} arrays of the model, got {len(arrays)}: "
                f"missing {missing[:5]}, unknown {unknown[:5]}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WireLayout) and self.slots == other.slots

    def __hash__(self) -> int:
        return hash(self.slots)

    def __repr__(self) -> str:
        return f"WireLayout(num_params={self.num_params}, arrays={len(self.slots)})"


def _read_header(name: str, data: object) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return dtype, shape, whether the order is Fortran's, and the byte where the values begin."""
    if not isinstance(data, bytes):
        raise WireError(f"array {name!r}: expected bytes, got {type(data).__name__}")
    try:
        text, end = _header_text(data)
        fields = ast.literal_eval(text)
        descr, fortran, shape = (fields[key] for key in ("descr", "fortran_order", "shape"))
        if not isinstance(descr, str) or not _NUMBERS.fullmatch(descr):  # a list means records
            raise ValueError(f"the dtype {descr!r}, which is not one of plain numbers")
        dtype = np.dtype(descr)
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError) as error:
        raise WireError(f"array {name!r}: expected a .npy header, got {error}") from error
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"array {name!r}: expected a .npy header, got the shape {shape!r}")
    return dtype, shape, bool(fortran), end


def _header_text(data: bytes) -> tuple[str, int]:
    """Return the dict in the header of a .npy file, as text, and the byte where it ends.

    Raises:
        ValueError: there is no complete header; the text is what was found instead.
    """
    if data[:6] != b"\x93NUMPY" or data[6:8] not in _LENGTHS:
        raise ValueError(f"the first bytes {data[:8]!r}")
    length = struct.Struct(_LENGTHS[data[6:8]])
    start = 8 + length.size
    if len(data) < start:
        raise ValueError(f"only {len(data)} bytes")
    (size,) = length.unpack_from(data, 8)
    if size > min(_MAX_HEADER, len(data) - start):
        raise ValueError(f"a header of {size} bytes in {len(data)} bytes")
    return data[start : start + size].decode("latin1"), start + size


def _values(slot: WireSlot, data: object) -> np.ndarray[Any, Any]:
    """Return the values of an array as a view of ``data``, checked to match the slot."""
    dtype, shape, fortran, offset = _read_header(slot.name, data)
    assert isinstance(data, bytes)  # _read_header checked it
    if shape != slot.shape:
        raise WireError(
            f"array {slot.name!r}: expected shape {list(slot.shape)}, got {list(shape)}"
        )
    if dtype.newbyteorder("=").name != slot.dtype:
        raise WireError(f"array {slot.name!r}: expected dtype {slot.dtype}, got {dtype}")
    expected = slot.size * dtype.itemsize
    if len(data) - offset != expected:
        raise WireError(
            f"array {slot.name!r}: expected {expected} bytes after the header, "
            f"got {len(data) - offset}"
        )
    if slot.size == 0:
        return np.empty(shape, dtype)
    flat = np.frombuffer(data, dtype, offset=offset)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _header(slot: WireSlot) -> bytes:
    """Return the header of a .npy file with the slot's dtype and shape."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(slot.dtype))
    fields = {"descr": descr, "fortran_order": False, "shape": slot.shape}
    np.lib.format.write_array_header_1_0(stream, fields)
    return stream.getvalue()
