# SPDX-License-Identifier: Apache-2.0
"""Hostile variants of arguments, for the fuzzer of ops and rules.

A mutation takes a valid value, a random generator and the other tensors of the call. It returns
the value to pass instead.
"""

from __future__ import annotations

import math
import mmap
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Mutation = Callable[[Tensor, random.Random, Sequence[Tensor]], Any]

_FLOATS = [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 1e20, -1.0, 0.0, -0.0]
_INTS = [-1, 0, 1, 6, 7, 2**15, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)]
_DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
]


def _imaginary(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    if t.dtype == torch.bool:
        return t  # a negated view of flags cannot be printed: torch's error fails in its message
    return torch.complex(t, t).conj().imag if t.is_floating_point() else torch._neg_view(t)


def _zero(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def _dtype(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t.to(draw.choice(_DTYPES))


def _viewed_dtype(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    if t.is_nested or t.is_quantized or t.layout != torch.strided:
        return t  # torch crashes when it reads such a view
    same_size = {1: torch.bool, 2: torch.float16, 4: torch.int32, 8: torch.int64}
    return t.view(same_size.get(t.element_size(), torch.complex128))


def _every_second(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    wide = torch.stack([t, t], dim=-1).flatten(-2) if t.dim() else t
    return wide[..., ::2]


def _row_stride(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return torch.cat([t, t], dim=-1)[..., : t.shape[-1]] if t.dim() else t


def _transposed(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t.mT.contiguous().mT if t.dim() >= 2 else t


def _expanded(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t[:1].expand(t.shape) if t.dim() and len(t) else t


def _overlapping(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    memory = torch.zeros(t.numel() + 8, dtype=t.dtype)
    return memory.as_strided(t.shape, [1] * t.dim())


def _empty(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t.narrow(draw.randrange(t.dim()), 0, 0) if t.dim() else t.reshape(1)[:0]


def _shorter(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    dim = draw.randrange(t.dim()) if t.dim() else 0
    return t.narrow(dim, 0, t.shape[dim] - 1).contiguous() if t.dim() and t.shape[dim] else t


def _longer(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return torch.cat([t, t], dim=draw.randrange(t.dim())) if t.dim() else t.repeat(2)


def _more_dimensions(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t[None] if draw.random() < 0.7 else t[(None,) * 40]


def _fewer_dimensions(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t[0] if t.dim() and len(t) else t


def _requires_grad(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    if not t.is_floating_point():
        return t
    leaf = t.detach().clone().requires_grad_()
    return draw.choice([leaf, leaf * 1, torch.nn.Parameter(t)])


def _inference(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def _other_layout(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Any:
    kind = draw.randrange(6)
    if kind == 0:
        return t.to_sparse()
    if kind == 1 and t.dim() == 2:
        return t.to_sparse_csr()
    if kind == 2 and t.dtype == torch.float32:
        return t.to_mkldnn()
    if kind == 3 and t.dtype == torch.float32:
        return torch.quantize_per_tensor(torch.nan_to_num(t), 0.1, 0, torch.qint8)
    if kind == 4 and t.dim() == 2 and len(t):
        return torch.nested.nested_tensor(list(t))
    return t.to("meta")


def _resized(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    own = t.clone()
    own.untyped_storage().resize_(draw.choice([0, 1, max(own.nbytes - 1, 0), own.nbytes // 2]))
    return own


def _lazy_copy(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t if t.is_quantized else torch._lazy_clone(t)  # torch cannot print such a copy


def _unaligned(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    """Return a copy whose elements begin one element after the storage, or one byte after it."""
    flat = torch.cat([t.flatten()[:1], t.flatten()]) if t.numel() else t.flatten()
    return flat[1:].view(t.shape) if t.numel() else t


def _aliased(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    """Return memory of another argument, from its beginning or shifted by some elements."""
    same = [o for o in others if o.element_size() == t.element_size() and o.numel()]
    if not same:
        return t
    flat = draw.choice(same).flatten()
    flat = flat.view(t.dtype) if flat.dtype != t.dtype else flat
    shift = draw.choice([0, 1, 3, max(len(flat) - 1, 0)])
    parts = flat[shift:]
    return parts[: t.numel()].view(t.shape) if len(parts) >= t.numel() else flat


def _values(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    own = t.clone()
    if not own.numel():
        return own
    place = draw.choice([slice(None), slice(draw.randrange(own.numel()), None), 0])
    if own.is_floating_point():
        own.view(-1)[place] = draw.choice(_FLOATS)
    elif own.dtype == torch.bool:
        own.view(-1)[place] = draw.random() < 0.5
    else:
        info = torch.iinfo(own.dtype)
        own.view(-1)[place] = min(max(draw.choice(_INTS), info.min), info.max)
    return own


def _bits(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    own = t.clone()
    raw = own.view(-1).view(torch.uint8) if own.numel() else own
    if own.numel():
        raw.copy_(torch.tensor(list(draw.randbytes(len(raw))), dtype=torch.uint8))
    return own if own.dtype != torch.bool else own.view(torch.uint8).bitwise_and(1).view(torch.bool)


def _permuted(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    return t.flip(0) if t.dim() else t


def _repeated(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    own = t.clone()
    if own.dim() and len(own) > 1:
        own[-1] = own[0]
    return own


def _huge(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    size = draw.choice([2**25, 2**31, 2**33, 2**40, 2**62])
    shape = [size, *t.shape[1:]] if draw.random() < 0.7 else [0, size]
    if math.prod(shape) >= 2**62 and 0 not in shape:
        shape = [size]
    return torch.zeros(1, dtype=t.dtype).expand(*shape) if 0 not in shape else torch.empty(0, size)


def _read_only(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Tensor:
    """Return a copy in memory that the process may not write to; for arguments that are read."""
    content = t.contiguous().numpy().tobytes()
    if not content or t.dtype == torch.bool:
        return t
    region = mmap.mmap(-1, len(content))
    region.write(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = np.frombuffer(region, dtype=t.numpy().dtype)
        _protect(array)
        return torch.from_numpy(array).view(t.shape)


def _protect(array: np.ndarray) -> None:
    import ctypes

    address, page = array.ctypes.data, mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    assert (
        ctypes.CDLL(None, use_errno=True).mprotect(
            ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ
        )
        == 0
    )


def _object(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Any:
    if t._is_zerotensor():
        return None  # torch crashes when it converts one to a list
    return draw.choice(
        [
            None,
            3,
            1.5,
            "x",
            b"x",
            [],
            {},
            object(),
            t[:9].tolist() if t.dim() else 1,
            t.numpy(),
            [None],
            [t, None],
        ]
    )


def _nested_list(t: Tensor, draw: random.Random, others: Sequence[Tensor]) -> Any:
    rows = list(t[:20]) if t.dim() else [t]
    return draw.choice([rows, tuple(rows), [*rows, t], [t], rows[:1], [rows]])


TENSORS: dict[str, Mutation] = {
    name.__name__.lstrip("_"): name
    for name in (
        *(_imaginary, _zero, _dtype, _viewed_dtype, _every_second, _row_stride, _transposed),
        *(_expanded, _overlapping, _empty, _shorter, _longer, _more_dimensions),
        *(_fewer_dimensions, _requires_grad, _inference, _other_layout, _resized, _lazy_copy),
        *(_unaligned, _aliased, _values, _bits, _permuted, _repeated, _huge, _read_only),
        *(_object, _nested_list),
    )
}
"""Mutations of tensors by name."""

TENSORS["negated"] = lambda t, draw, others: torch._neg_view(t) if t.dtype != torch.bool else t

NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 99_999, 100_001),
    *(0.0, -0.0, 0.5, -1.0, 1e-320, 1e-40, 1e30, 3.4e38, 1e300, math.nan, math.inf, -math.inf),
    *(None, True, False, "", "x", "tf32", "highest", "x\0y", b"x", [], [1], {}, 1j),
]
"""What is passed instead of numbers, strings and flags."""
