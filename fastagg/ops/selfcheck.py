# SPDX-License-Identifier: Apache-2.0
"""Compare every op with the float64 oracle on random data, in about two seconds per device.

``python -m fastagg`` runs this on a user's machine. The test suite checks far more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference
from fastagg.ops._dispatch import TABLE, Op
from fastagg.ops._examples import ExampleData


class OnDevice:
    """The ops, computed on another device for tensors on the CPU.

    Arguments are copied to the device with their whole storages, so that offsets, strides and
    overlaps are the same there; results and changed arguments are copied back. Client ids and
    splits (int64) stay on the CPU, where they are checked.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            pairs: list[tuple[Tensor, Tensor]] = []  # on the CPU, on the device
            memory: dict[int, Tensor] = {}  # of whole storages: what overlaps here overlaps there

            def moved(value: Any) -> Any:
                if isinstance(value, list | tuple):
                    return [moved(item) for item in value]
                if not isinstance(value, Tensor):
                    return value
                if value.dtype == torch.int64:  # ids and splits
                    return value
                storage = value.untyped_storage()
                if storage.data_ptr() not in memory:
                    own = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                    memory[storage.data_ptr()] = own.to(self.device, copy=True)
                there = torch.empty(0, dtype=value.dtype, device=self.device).set_(
                    memory[storage.data_ptr()].untyped_storage(),
                    value.storage_offset(),
                    value.shape,
                    value.stride(),
                )
                pairs.append((value, there))
                return there

            result = op(*map(moved, args), **{key: moved(v) for key, v in kwargs.items()})
            if not name.endswith("_"):
                if isinstance(result, tuple):
                    return tuple(part.cpu() for part in result)
                return result.cpu()
            for here, there in pairs:
                here.copy_(there)
            return args[0]

        return call


@dataclass(frozen=True)
class Check:
    """The outcome of one op: its largest relative error, and the bound for it."""

    op: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in an argument or a result, including those in lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _copied(value: Any) -> Any:
    """Return a copy of an argument, so that an op can change it."""
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def _outcome(op: Op, implementation: Any, data: ExampleData) -> list[Tensor]:
    """Run the example calls of an op.

    Returns:
        The tensors that the calls return or, for an op in place, all tensors that they were given.
    """
    function = getattr(implementation, op.name)
    found: list[Tensor] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [_copied(value) for value in args]
        named = {name: _copied(value) for name, value in kwargs.items()}
        result = function(*given, **named)
        changed = [*given, *named.values()]
        found.extend(tensors_in(changed if op.name.endswith("_") else result))
        return result

    op.example(call, data)
    return found


def _error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error, relative to the largest magnitude in each expected tensor.

    It is infinite if a result is NaN where the oracle has a number, or has another shape or dtype.
    """
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return math.inf
        if torch.equal(a, b):  # arguments that the op does not change, mostly
            continue
        scale = max(b.double().abs().max().item(), 1e-300)
        error = (a.double() - b.double()).abs().max().item() / scale
        worst = max(worst, math.inf if math.isnan(error) else error)  # max() passes over NaN
    return worst


def run(
    K: int = 40,
    S: int = 23,
    d: int = 100_003,
    seed: int = 0,
    device: str = "cpu",
) -> list[Check]:
    """Compare every op of a device with the oracle on its example calls.

    Args:
        K: number of clients.
        S: number of active clients.
        d: number of parameters.
        seed: of the random data.
        device: "cpu" or "cuda".

    Returns:
        One check per op, in the order of the table of ops.
    """
    ours: Any = ops if device == "cpu" else OnDevice(device)
    data = ExampleData.random(K, S, d, seed)
    return [
        Check(
            op.name,
            _error(_outcome(op, ours, data), _outcome(op, reference, data)),
            op.bound if device == "cpu" else op.cuda_bound,
        )
        for op in TABLE.values()
    ]
