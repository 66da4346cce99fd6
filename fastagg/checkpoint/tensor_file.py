# SPDX-License-Identifier: Apache-2.0
"""Writing safetensors files row by row, so that a file may be larger than memory.

The library's own writer wants all bytes at once. Reading is the library's: it maps the file.
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
    """What looks like a tensor [n, m] whose rows are made one by one."""

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
        path: the file; replaced if it is there.
        tensors: by name; of two-dimensional ones, one row at a time is in memory.
        metadata: of the header.

    Raises:
        TypeError: a tensor has a dtype that is not supported.
        OSError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: expected one of {[*_NAMES]}, got {tensor.dtype}")
        end = offset + tensor.shape.numel() * tensor.dtype.itemsize
        entry = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape]}
        header[name] = entry | {"data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors begin at a multiple of 8
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for part in _parts(tensor):
                file.write(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)


def _parts(tensor: Tensor | RowsOf) -> Iterator[Tensor]:
    if len(tensor.shape) == 2:
        for row in range(tensor.shape[0]):
            yield tensor[row]
    elif isinstance(tensor, Tensor):
        yield tensor
