# SPDX-License-Identifier: Apache-2.0
"""The compiled operators, and the table in which every wrapper of :mod:`fastagg.ops` is entered."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastagg import _C
from fastagg.ops._examples import ExampleData

compiled: Any = SimpleNamespace()
"""The operators that the extension registers when it is imported (csrc/bindings/op_table.h).

``torch.ops.fastagg.gram`` looks for the overload that fits its arguments at every call. There is
only one, ``torch.ops.fastagg.gram.default``, and that is ``compiled.gram``.
"""

# float32 results are rounded once or twice, 6e-8 each.
ROUNDED = 2e-7

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])
Example = Callable[[Callable[..., Any], ExampleData], object]


@dataclass(frozen=True)
class Op:
    """One op: its name, and what the self-check and the tests need to call and judge it."""

    name: str
    wrapper: Callable[..., Any]
    example: Example
    bound: float
    cuda_bound: float


TABLE: dict[str, Op] = {}
"""All ops by name, in the order in which the wrappers are defined."""


def op(
    *,
    example: Example,
    fake: Callable[..., object] | None = None,
    bound: float = ROUNDED,
    cuda_bound: float | None = None,
) -> Callable[[Wrapper], Wrapper]:
    """Enter a wrapper into :data:`TABLE` and register the fake kernel of its operator.

    The wrapper is returned unchanged: calls cost nothing more, and its signature and docstring stay
    visible to tools.

    Args:
        example: ``example(f, x)`` calls ``f``, which is the op, its oracle or a recorder, once or
            more with valid arguments taken from the data ``x``. The self-check compares these calls
            with the oracle, and ``tests/ops/test_registration.py`` checks their registration.
        fake: the fake kernel. It takes the arguments of the operator's schema, in which rows are
            lists of tensors, and returns empty tensors with the result's shapes, dtypes and device.
            Leave it out for an operator that returns nothing.
        bound: largest error that the self-check accepts on a CPU, relative to the largest
            magnitude in the oracle's result.
        cuda_bound: the same on a GPU. Default: ``bound``.
    """

    def enter(wrapper: Wrapper) -> Wrapper:
        name = wrapper.__name__
        setattr(compiled, name, getattr(torch.ops.fastagg, name).default)
        torch.library.register_fake(f"fastagg::{name}", _fake_kernel(wrapper, fake))
        there = bound if cuda_bound is None else cuda_bound
        TABLE[name] = Op(name, wrapper, example, bound, there)
        return wrapper

    return enter


_ON_CPU = {"clients", "splits", "weights"}
"""Arguments that may be on the CPU when the others are not."""


def _fake_kernel(wrapper: Wrapper, fake: Callable[..., object] | None) -> Callable[..., object]:
    """Return a fake kernel that refuses a mixture of tensors with data and on device meta.

    The dispatcher calls it for such a mixture, and its results would not be computed.
    """
    compute, parameters = fake or _returns_nothing, inspect.signature(wrapper).parameters
    names = list(parameters)

    @functools.wraps(compute)
    def checked(*args: object, **kwargs: object) -> object:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, value in given.items():
            if value is None and parameters[name].default is inspect.Parameter.empty:
                raise TypeError(f"{name}: expected a tensor, got None")
        kinds = {
            _is_meta(tensor)
            for name, value in given.items()
            for tensor in _tensors_in(value)
            if name not in _ON_CPU or _is_meta(tensor)
        }
        if len(kinds) > 1:
            raise ValueError("expected all tensors on one device, got some on device meta")
        return compute(*args, **kwargs)

    return checked


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Tensor))


def _is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor has no data, as those of device meta and those of torch.compile."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _returns_nothing(*args: object, **kwargs: object) -> None:
    return None


MOST_ROWS = 2**24
"""No op takes more rows (``kMostRows`` of ``check_rows.h``)."""


def gram_scratch(num_rows: int, num_params: int, threads: int | None = None) -> int:
    """Return the bytes of temporary memory that ``gram`` and ``gram_and_sum_`` take on the CPU.

    Kernels take such memory from one pool, which keeps at most 128 MB between calls for the whole
    process.

    Args:
        num_rows: S, at most 2^24.
        num_params: d of one call.
        threads: number of threads; None: ``torch.get_num_threads()``.
    """
    threads = torch.get_num_threads() if threads is None else threads
    for name, value, least in (
        ("num_rows", num_rows, 0),
        ("num_params", num_params, 0),
        ("threads", threads, 1),
    ):
        if value < least:
            raise ValueError(f"{name}: expected {least} or more, got {value}")
    if num_rows > MOST_ROWS:
        raise ValueError(f"num_rows: expected at most {MOST_ROWS}, got {num_rows}")
    return _C.gram_scratch(num_rows, num_params, threads)


def devices() -> tuple[str, ...]:
    """Return the device types that this build has kernels for and this machine has.

    Returns:
        ``("cpu",)``, or ``("cpu", "cuda")``.
    """
    cuda = bool(_C.build_info()["cuda_archs"]) and torch.cuda.is_available()
    return ("cpu", "cuda") if cuda else ("cpu",)


_is_compiling = torch.compiler.is_compiling
_mark_changed = _C.mark_changed


def mark_changed(*tensors: Tensor) -> None:
    """Bump the version counters of arguments that an operator changed.

    A backward pass that saved one of them then fails instead of using the new content. Inference
    tensors have no version counter.
    """
    if not _is_compiling():
        _mark_changed(tensors)


def count_rows(rows: list[Tensor]) -> int:
    """Return S for a list of rows whose tensors hold one row (1-D) or several (2-D)."""
    return sum(row.shape[0] if row.dim() == 2 else 1 for row in rows)
