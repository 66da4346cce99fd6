# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: written row by row, and read without trusting them.

Files are read with ``pread`` and never mapped. If another process cuts a file while it is read,
``pread`` reports the end of the file, whereas access to a mapping ends the process (SIGBUS). The
header is checked completely before anything is allocated for a tensor: the writer of a file decides
neither how much memory its header takes nor which bytes of the file a tensor gets.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from fastagg.options import shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that this library reads and writes, by their names in headers."""

_FOREIGN = {"U16": 2, "U32": 4, "U64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
"""Further dtypes that a header may name, and their sizes in bytes; such tensors are not read."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_SIZE = 1 << 48  # of a dimension and of a shape, so that no size or stride overflows an int64
_MOST_DIMENSIONS = 32
_CHUNK = 1 << 20  # bytes
_LARGEST_READ = 1 << 30  # bytes; macOS refuses to read 2^31 bytes at once


class TensorFileError(ValueError):
    """Raised if a file is not a safetensors file, is damaged, or changes while it is read."""


class RowsOf(Protocol):
    """An object with dtype and shape of a tensor [n, m], whose rows are computed one by one."""

    dtype: torch.dtype
    shape: torch.Size

    def __getitem__(self, index: int) -> Tensor: ...


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        name: its name.
        kind: its dtype, as the header names it.
        shape: its shape.
        offset: where it begins, in bytes from the beginning of the file.
        nbytes: its size.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype.

        Raises:
            TensorFileError: this library does not read this dtype.
        """
        if self.kind not in DTYPES:
            raise TensorFileError(
                f"{self.name}: expected one of the dtypes {[*DTYPES]}, got {self.kind}"
            )
        return DTYPES[self.kind]


@dataclass(frozen=True)
class Header:
    """The checked header of a file.

    Attributes:
        raw: its bytes, with the 8 bytes of their number.
        metadata: strings by name.
        entries: the tensors, in the order of the file. They fill it without gaps.
    """

    raw: bytes
    metadata: dict[str, str]
    entries: dict[str, Entry]


# --- reading ----------------------------------------------------------------------------------


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a regular file for reading, for a block; return its descriptor.

    Raises:
        OSError: the file cannot be opened.
        TensorFileError: it is a pipe, a folder or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TensorFileError("expected a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def identity(descriptor: int) -> tuple[int, ...]:
    """Return a key of an open file that changes when the file is replaced or written to."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_header(descriptor: int, limit: int) -> Header:
    """Read and check the header of an open file. Its tensors are not read.

    Args:
        descriptor: of the file.
        limit: largest size of the header in bytes.

    Raises:
        TensorFileError: the file is not a safetensors file, is truncated, or its header is damaged
            or larger than ``limit``.
        OSError: the file cannot be read.
    """
    size = os.fstat(descriptor).st_size
    return _checked_header(size, limit, lambda count, offset: _read(descriptor, count, offset))


def header_of(data: bytes | memoryview, limit: int) -> Header:
    """Check the header of a file that is in memory, as :func:`read_header` does.

    Args:
        data: all bytes of the file.
        limit: largest size of the header in bytes.

    Raises:
        TensorFileError: as for :func:`read_header`.
    """
    return _checked_header(
        len(data), limit, lambda count, offset: bytes(data[offset : offset + count])
    )


def load(path: str | os.PathLike[str], *, limit: int) -> dict[str, Tensor]:
    """Read all tensors of a file into memory; the file is not mapped.

    Args:
        path: the file.
        limit: largest size of its header in bytes.

    Raises:
        TensorFileError: the file is not a safetensors file, is truncated or damaged, or changes
            while it is read.
        OSError: the file cannot be read.
    """
    with opened(path) as descriptor:
        before = identity(descriptor)
        found = {}
        for name, entry in read_header(descriptor, limit).entries.items():
            found[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            read_into(descriptor, found[name], entry.offset)
        if identity(descriptor) != before:
            raise TensorFileError("the file changed while it was read")
    return found


def parse_json(text: bytes | str) -> Any:
    """Parse JSON from an untrusted file.

    Raises:
        TensorFileError: it is no JSON, has a name twice, numbers that are not finite, or is nested
            too deeply.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except TensorFileError:
        raise
    except RecursionError:
        raise TensorFileError("expected JSON, but it is nested too deeply") from None
    except ValueError as error:
        raise TensorFileError(f"expected JSON: {error}") from None


def read_into(descriptor: int, out: Tensor, offset: int) -> None:
    """Fill a contiguous tensor on the CPU from a file, beginning at byte ``offset``.

    Raises:
        TensorFileError: the file ends before.
        OSError: the file cannot be read.
    """
    view = bytes_of(out)
    while view:
        count = os.preadv(descriptor, [view[:_LARGEST_READ]], offset)
        if count == 0:
            raise TensorFileError(f"the file is truncated: it ends at byte {offset}")
        view, offset = view[count:], offset + count


def pass_over(descriptor: int, entry: Entry, note: Callable[[memoryview], object]) -> None:
    """Read a tensor in pieces, and call ``note`` with each; nothing is kept."""
    piece = torch.empty(min(_CHUNK, entry.nbytes), dtype=torch.uint8, device="cpu")
    for begin in range(0, entry.nbytes, _CHUNK):
        part = piece[: min(_CHUNK, entry.nbytes - begin)]
        read_into(descriptor, part, entry.offset + begin)
        note(bytes_of(part))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, not copied."""
    flat = tensor.view(-1)
    if flat.numel() == 1:  # its stride may be 0, with which no view has another dtype
        flat = flat.as_strided((1,), (1,))
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def _read(descriptor: int, count: int, offset: int) -> bytes:
    parts = []
    while count > 0:
        part = os.pread(descriptor, count, offset)
        if not part:
            raise TensorFileError(f"the file is truncated: it ends at byte {offset}")
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def _checked_header(size: int, limit: int, read: Callable[[int, int], bytes]) -> Header:
    """Check a header; ``read(count, offset)`` returns bytes of the file, which has ``size``."""
    if size < 8:
        raise TensorFileError(f"the file is truncated: it has {size} bytes")
    first = read(8, 0)
    length = int.from_bytes(first, "little")
    if length > size - 8:
        raise TensorFileError(
            f"the file is truncated, or not a safetensors file: expected a header of {length} "
            f"bytes, got a file of {size}"
        )
    if length > limit:
        raise TensorFileError(f"expected a header of at most {limit} bytes, got {length}")
    text = read(length, 8)
    content = _parse(text)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorFileError("the header is damaged: expected strings as __metadata__")
    entries = [_entry(name, value, 8 + length) for name, value in content.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = 8 + length
    for entry in entries:
        if entry.offset != end:
            raise TensorFileError(
                f"the header is damaged: {entry.name!r} begins at byte {entry.offset}, not at {end}"
            )
        end += entry.nbytes
    if end != size:
        raise TensorFileError(f"the file is truncated or damaged: expected {end} bytes, got {size}")
    return Header(first + text, metadata, {entry.name: entry for entry in entries})


def _parse(text: bytes) -> dict[str, Any]:
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        raise TensorFileError("not a safetensors file: the header is not UTF-8") from None
    content = parse_json(decoded)
    if not isinstance(content, dict):
        raise TensorFileError("not a safetensors file: expected a JSON object as the header")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise TensorFileError("expected JSON without duplicates, got a name twice")
    return content


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # beyond the range of float64, as 1e999 is
        _no_constant(text[:100])
    return number


def _no_constant(text: str) -> None:
    raise TensorFileError(f"expected JSON with finite numbers, got {text}")


def _entry(name: str, value: object, start: int) -> Entry:
    """Check the description of a tensor; ``start`` is the first byte after the header."""
    said = f"the header is damaged: {shown(name)}: expected"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"{said} dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in {*DTYPES, *_FOREIGN}:
        raise TensorFileError(f"{said} a dtype of {[*DTYPES, *_FOREIGN]}, got {shown(kind)}")
    if not fits(shape):
        raise TensorFileError(
            f"{said} a shape of at most {_MOST_DIMENSIONS} dimensions and 2^48 numbers (0 counts "
            f"as 1), got {str(shape)[:200]}"
        )
    if not _sizes(offsets) or len(offsets) != 2:
        raise TensorFileError(f"{said} two offsets, got {str(offsets)[:200]}")
    itemsize = DTYPES[kind].itemsize if kind in DTYPES else _FOREIGN[kind]
    nbytes = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise TensorFileError(f"{said} {nbytes} bytes, got the offsets {offsets}")
    return Entry(name, kind, tuple(shape), start + offsets[0], nbytes)


def fits(shape: object) -> bool:
    """Return whether a value of a header is a shape of which tensors and arrays can be made.

    A tensor without elements has strides, too, so dimensions of size 0 count as 1.
    """
    if not _sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        return False
    return math.prod(max(1, size) for size in shape) <= _MOST_SIZE


def _sizes(value: object) -> TypeGuard[list[int]]:
    """Return whether a value of a header is a list of ints in [0, 2^48]."""
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= _MOST_SIZE for size in value
    )


# --- writing ----------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor | RowsOf],
    metadata: Mapping[str, str],
    *,
    limit: int,
    note: Callable[[bytes | memoryview], object] = len,
) -> int:
    """Write a safetensors file. The writer of the safetensors library needs all bytes at once.

    Args:
        path: the file; an existing one is overwritten.
        tensors: tensors by name. Those with two dimensions are written row by row, so that only
            one row is in memory at a time.
        metadata: metadata of the header.
        limit: largest size of the header in bytes.
        note: is called with all bytes of the file, in order.

    Returns:
        Size of the header in bytes.

    Raises:
        TypeError: a tensor has an unsupported dtype.
        ValueError: the header would be larger than ``limit``.
        OSError: the file cannot be written.
    """
    text, ordered = _described(tensors, metadata, limit)
    with open(path, "wb") as file:
        for part in _parts(text, ordered):
            note(part)
            file.write(part)
    return len(text)


def dump(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, limit: int) -> bytes:
    """Return the bytes that :func:`save` would write.

    Raises:
        TypeError, ValueError: as for :func:`save`.
    """
    return b"".join(_parts(*_described(tensors, metadata, limit)))


def _described(
    tensors: Mapping[str, Tensor | RowsOf], metadata: Mapping[str, str], limit: int
) -> tuple[bytes, list[Tensor | RowsOf]]:
    """Return the text of a header, and the tensors in the order of the file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: expected one of the dtypes {[*_NAMES]}, got {tensor.dtype}")
        end = offset + tensor.shape.numel() * tensor.dtype.itemsize
        entry = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape]}
        header[name] = entry | {"data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors begin at a multiple of 8 bytes
    if len(text) > limit:
        raise ValueError(f"expected a header of at most {limit} bytes, got {len(text)}")
    return text, [tensor for _, tensor in ordered]


def _parts(text: bytes, tensors: Iterable[Tensor | RowsOf]) -> Iterator[bytes | memoryview]:
    """Iterate over a file's bytes: tensors with two dimensions row by row, others whole."""
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        if len(tensor.shape) == 2:
            for row in range(tensor.shape[0]):
                yield bytes_of(tensor[row].detach().cpu().contiguous())
        elif isinstance(tensor, Tensor):
            yield bytes_of(tensor.detach().cpu().contiguous())
