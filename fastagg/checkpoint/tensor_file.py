# SPDX-License-Identifier: Apache-2.0
"""Writing of safetensors files row by row, so that a file may be larger than memory.

The writer of the safetensors library needs all bytes at once. Files are read with that library,
which maps them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class RowsOf(Protocol):
    """An object with dtype and shape of a tensor [n, m], whose rows are computed one by one."""

    dtype: torch.dtype
    shape: torch.Size

    def __getitem__(self, index: int) -> Tensor: ...


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor | RowsOf],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file.

    Args:
        path: the file; an existing one is overwritten.
        tensors: tensors by name. Those with two dimensions are written row by row, so that only
            one row is in memory at a time.
        metadata: metadata of the header.

    Raises:
        TypeError: a tensor has an unsupported dtype.
        OSError: the file cannot be written.
    """
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
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for part in _parts(tensor):
                file.write(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)


def _parts(tensor: Tensor | RowsOf) -> Iterator[Tensor]:
    """Iterate over the rows of a tensor with two dimensions; yield any other tensor whole."""
    if len(tensor.shape) == 2:
        for row in range(tensor.shape[0]):
            yield tensor[row]
    elif isinstance(tensor, Tensor):
        yield tensor
