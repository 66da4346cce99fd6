# SPDX-License-Identifier: Apache-2.0
"""Conversion of tensors, and of safetensors files in memory, to and from arrays on the wire."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastagg import tensor_file
from fastagg.integrations._npy import npy_header
from fastagg.integrations._wire import Arrays, Values, WireError, WireLayout
from fastagg.tensor_file import DTYPES

_NUMPY = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in DTYPES.values()
    if dtype != torch.bfloat16  # NumPy has none
}
_TORCH = {name: dtype for dtype, name in _NUMPY.items()}


def pack(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the tensors of a model as arrays on the wire; the values are copied.

    Args:
        tensors: name -> tensor.

    Raises:
        WireError: a value is no dense tensor with a dtype that NumPy has.
    """
    return {name: _pack(name, tensor) for name, tensor in _dense(tensors).items()}


def pack_answer(tensors: Mapping[str, Tensor], layout: WireLayout) -> dict[str, bytes | Values]:
    """Return the tensors of an answer as arrays on the wire; the values are copied.

    bfloat16 tensors stay tensors; see :func:`pack` for the others.

    Raises:
        WireError: as :func:`pack`; or they are larger than any answer with this layout, before
            anything is copied: a small file can make a tensor that repeats one number.
    """
    dense = _dense(tensors)
    size, most = sum(t.numel() * t.element_size() for t in dense.values()), answer_limit(layout)
    if size > most:
        raise WireError(f"expected at most {most} bytes, got {size}")
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        if tensor.dtype == torch.bfloat16
        else _pack(name, tensor)
        for name, tensor in dense.items()
    }


def _dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, without gradients.

    Raises:
        WireError: they have no names, or a value is no dense tensor.
    """
    if not isinstance(tensors, Mapping):
        raise WireError(f"expected a dict from names to tensors, got {type(tensors).__name__}")
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise WireError(f"array {name!r}: expected a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
            raise WireError(f"array {name!r}: expected a dense tensor with values")
        found[name] = tensor.detach().cpu()
    return found


def _pack(name: str, tensor: Tensor) -> bytes:
    """Return a tensor on the CPU as the bytes of a .npy file."""
    header = npy_header(_numpy_name(name, tensor.dtype), tuple(tensor.shape))
    values = tensor.resolve_neg().contiguous()
    return b"".join((header, tensor_file.bytes_of(values)))


def unpack(layout: WireLayout, arrays: Arrays) -> dict[str, Tensor]:
    """Return arrays of a model as tensors of their own, in the order of the layout."""
    tensors = {}
    for slot in layout.sent:
        values = torch.empty(slot.shape, dtype=_TORCH[slot.dtype], device="cpu")
        data = arrays[slot.name]
        if values.nbytes:
            tensor_file.bytes_of(values)[:] = memoryview(data)[len(data) - values.nbytes :]
        tensors[slot.name] = values
    return tensors


def to_safetensors(tensors: Mapping[str, Tensor], layout: WireLayout) -> bytes:
    """Return a model as the bytes of a safetensors file."""
    return tensor_file.dump(tensors, {}, limit=header_limit(layout))


def from_safetensors(data: object, layout: WireLayout) -> dict[str, bytes | Values]:
    """Return the tensors in a safetensors file as arrays on the wire, like :func:`pack_answer`.

    Sizes are compared with those of the model before anything is parsed or copied.

    Args:
        data: the bytes of the file, from anybody: bytes or another object with a buffer.
        layout: the model of which the tensors are said to be.

    Raises:
        TensorFileError, WireError: the file is not valid, or larger than any answer.
    """
    view = _view(data)
    if len(view) > answer_limit(layout):
        raise WireError(f"expected at most {answer_limit(layout)} bytes, got {len(view)}")
    header = tensor_file.header_of(view, header_limit(layout))
    arrays: dict[str, bytes | Values] = {}
    for name, entry in header.entries.items():
        values = view[entry.offset : entry.offset + entry.nbytes]
        if entry.dtype == torch.bfloat16:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            tensor_file.bytes_of(tensor)[:] = values
            arrays[name] = tensor
        else:
            arrays[name] = b"".join(
                (npy_header(_numpy_name(name, entry.dtype), entry.shape), values)
            )
    return arrays


def _view(data: object) -> memoryview:
    """Return the bytes of an object, not copied.

    Raises:
        WireError: it has no buffer, or a strided one.
    """
    try:
        view = memoryview(data)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # ValueError: it was released
        raise WireError(f"expected bytes, got {type(data).__name__}") from None
    if not view.c_contiguous:
        raise WireError(f"expected contiguous bytes, got a strided {type(data).__name__}")
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses shapes with a 0


def header_limit(layout: WireLayout) -> int:
    """Return the largest size in bytes of the header of a safetensors file with a model."""
    # A character of a name takes up to 12 bytes of JSON. A line of metadata fits, too.
    return (1 << 16) + sum(512 + 12 * len(slot.name) for slot in layout.slots)


def answer_limit(layout: WireLayout) -> int:
    """Return the largest size in bytes of a safetensors file with a model."""
    values = sum(slot.size * _TORCH[slot.dtype].itemsize for slot in layout.slots)
    return 8 + header_limit(layout) + values


def _numpy_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _NUMPY:
        raise WireError(f"array {name!r}: expected one of {[*_NUMPY.values()]}, got {dtype}")
    return _NUMPY[dtype]
