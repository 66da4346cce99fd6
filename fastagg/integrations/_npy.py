# SPDX-License-Identifier: Apache-2.0
"""The .npy format for arrays of numbers: reads headers without evaluating Python literals.

NumPy reads a header with ``ast.literal_eval``, which is not safe in threads on Python 3.11: its
depth is counted once per interpreter, and two calls at a time may end in a SystemError. Servers of
federated learning read answers in threads.
"""

from __future__ import annotations

import functools
import io
import re
import struct
from typing import Any, NamedTuple

import numpy as np

# Version of the format -> the field that holds the length of the header.
_LENGTHS = {
    b"\x01\x00": struct.Struct("<H"),
    b"\x02\x00": struct.Struct("<I"),
    b"\x03\x00": struct.Struct("<I"),
}
_MAX_HEADER = 10_000  # bytes; the header of an array of numbers has about a hundred
_NUMBERS = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")  # dtypes of bools and numbers
_SIZE = "(?: 0 | [1-9][0-9]* )"
# One entry of the dict in a header: a key, and a string, a bool or a tuple of sizes.
_ENTRY = re.compile(
    rf"""\s* (?P<quote>['"]) (?P<key>\w+) (?P=quote) \s*:\s*
    (?: (?P<mark>['"]) (?P<text>[^'"\\]*) (?P=mark) | (?P<flag>True|False)
      | \( \s* (?P<sizes> (?: {_SIZE} \s*,\s* )* (?: {_SIZE} \s* )? ) \) )
    \s* (?: , | (?=\}}) ) """,
    re.VERBOSE | re.ASCII,
)
_KEYS = {"descr": "text", "fortran_order": "flag", "shape": "sizes"}


class NpyHeader(NamedTuple):
    """What the header of a .npy file says.

    Attributes:
        dtype: dtype of the values: bools or numbers.
        shape: shape of the array.
        fortran: whether the first index varies fastest.
        offset: byte where the values begin.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


def read_header(data: object) -> NpyHeader:
    """Return the header of a .npy file with bools or numbers. Nothing is evaluated.

    Raises:
        ValueError: ``data`` is not bytes that begin with a complete header of the format, or the
            dtype is another one, as of records or objects. The message says what was expected.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"expected bytes, got {type(data).__name__}")
    try:
        text, end = _header_text(data)
        return NpyHeader(*_parsed(text), end)
    except (ValueError, TypeError) as error:  # np.dtype raises a TypeError
        raise ValueError(f"expected a .npy header, got {error}") from error


def view(data: bytes, header: NpyHeader) -> np.ndarray[Any, Any]:
    """Return the values of a .npy file as a view of its bytes.

    Raises:
        ValueError: the number of bytes after the header is another one.
    """
    size = 1
    for n in header.shape:
        size *= n
    expected = size * header.dtype.itemsize
    if len(data) - header.offset != expected:
        raise ValueError(
            f"expected {expected} bytes after the header, got {len(data) - header.offset}"
        )
    if size == 0:
        return np.empty(header.shape, header.dtype)
    flat = np.frombuffer(data, header.dtype, offset=header.offset)
    shape = header.shape
    return flat.reshape(shape[::-1]).T if header.fortran else flat.reshape(shape)


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file of this dtype, by NumPy's name, and this shape."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    fields = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, fields)
    return stream.getvalue()


def _header_text(data: bytes) -> tuple[str, int]:
    """Return the dict in the header of a .npy file, as text, and the byte where it ends.

    Raises:
        ValueError: there is no complete header; the text is what was found instead.
    """
    if data[:6] != b"\x93NUMPY" or data[6:8] not in _LENGTHS:
        raise ValueError(f"the first bytes {data[:8]!r}")
    length = _LENGTHS[data[6:8]]
    start = 8 + length.size
    if len(data) < start:
        raise ValueError(f"only {len(data)} bytes")
    (size,) = length.unpack_from(data, 8)
    if size > min(_MAX_HEADER, len(data) - start):
        raise ValueError(f"a header of {size} bytes in {len(data)} bytes")
    return data[start : start + size].decode("latin1"), start + size


@functools.lru_cache(maxsize=1024)  # all clients send the same few headers
def _parsed(text: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return dtype, shape and order in the dict of a header.

    Raises:
        ValueError: it is no such dict; the text is what was found instead.
        TypeError: NumPy has no such dtype.
    """
    body = text.strip()
    fields: dict[str, str] = {}
    at = 1
    while entry := _ENTRY.match(body, at):
        key = entry["key"]
        value = entry[_KEYS[key]] if key in _KEYS else None
        if value is None or key in fields:
            break
        fields[key], at = value, entry.end()
    if not body.startswith("{") or body[at:].strip() != "}" or fields.keys() != _KEYS.keys():
        raise ValueError(f"{_shortened(body)}, which does not describe an array of plain numbers")
    descr, sizes = fields["descr"], fields["shape"]
    if not _NUMBERS.fullmatch(descr):
        raise ValueError(f"the dtype {_shortened(descr)}, which is not one of plain numbers")
    if "," not in sizes and sizes.strip():  # "(3)" is a number in Python
        raise ValueError(f"the shape ({sizes})")
    shape = tuple(int(n) for n in sizes.split(",") if n.strip())
    return np.dtype(descr), shape, fields["fortran_order"] == "True"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]} ...")
