# SPDX-License-Identifier: Apache-2.0
"""Checks of a state before a rule takes it: form, finite values, and what rules declare.

A state may come from an untrusted file. Every check raises an error that names the tensor, what was
expected and what came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fastagg.memory.rows import RowMemory
from fastagg.options import few

State = Mapping[str, Tensor | RowMemory]
"""A state to be checked. A row memory is either a tensor [K, d] or a memory without references."""

MOST_ROUNDS = 1 << 62
"""Largest number of rounds; one more round never overflows an int64."""

_BLOCK = 256  # rows
_PART = 1 << 22  # numbers


def check_names(own: Collection[str], given: Collection[str]) -> None:
    """Raise ValueError if a state has other names than that of the rule."""
    if set(given) != set(own):
        got = few(sorted(map(str, given)))
        raise ValueError(f"state: expected the tensors {sorted(own)}, got {got}")


def check_form(name: str, value: object, own: Tensor | RowMemory) -> Tensor:
    """Return ``value`` detached from any graph, if it has the dtype and shape of ``own``.

    Raises:
        TypeError: it is not a dense tensor, or has another dtype.
        ValueError: it has another shape, or no data.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"state[{name!r}]: expected a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        raise TypeError(f"state[{name!r}]: expected a dense tensor, got layout {value.layout}")
    if value.dtype != own.dtype:
        raise TypeError(f"state[{name!r}]: expected dtype {own.dtype}, got {value.dtype}")
    if value.shape != own.shape:
        raise ValueError(
            f"state[{name!r}]: expected shape {list(own.shape)}, got {list(value.shape)}"
        )
    if value.device.type == "meta":
        raise ValueError(f"state[{name!r}]: expected a tensor with data, got one on device meta")
    return value.detach().resolve_neg()


def check_finite(name: str, value: Tensor | RowMemory) -> None:
    """Raise ValueError if a tensor or row memory holds NaN or Inf."""
    if not value.dtype.is_floating_point:
        return
    rows = rows_of(value) if len(value.shape) == 2 else [value]
    for row in rows:
        if not all(bool(torch.isfinite(part).all()) for part in _parts(row)):
            raise ValueError(f"state[{name!r}]: expected finite values, got NaN or Inf")


def check_rounds(name: str, value: Tensor) -> None:
    """Raise ValueError if numbers of rounds or intervals are negative or close to overflow."""
    check_range(name, value, 0, MOST_ROUNDS)


def check_range(name: str, value: Tensor, low: float, high: float) -> None:
    """Raise ValueError if a number is outside of [low, high]."""
    for part in _parts(value):
        least, most = part.min().item(), part.max().item()
        if not low <= least <= most <= high:
            raise ValueError(
                f"state[{name!r}]: expected numbers in [{low:.9g}, {high:.9g}], got {least:.9g} to "
                f"{most:.9g}"
            )


def check_symmetric(name: str, value: Tensor) -> None:
    """Raise ValueError if a matrix [K, K] differs from its transpose."""
    for begin in range(0, len(value), _BLOCK):
        end = begin + _BLOCK
        if not torch.equal(value[begin:end], value[:, begin:end].T):
            raise ValueError(f"state[{name!r}]: expected a symmetric matrix")


def check_blank(name: str, value: Tensor, blank: Tensor, when: str) -> None:
    """Raise ValueError if numbers are not 0 where ``blank`` says that they are."""
    for begin in range(0, len(value), _BLOCK):
        end = begin + _BLOCK
        if bool(value[begin:end][blank[begin:end]].any()):
            raise ValueError(f"state[{name!r}]: expected zeros where {when}")


def check_blank_rows(name: str, value: Tensor | RowMemory, blank: Tensor, when: str) -> None:
    """Raise ValueError if one of the rows ``blank`` [K] bool is not zero; ``when`` says why."""
    rows = rows_of(value)
    for client in blank.nonzero().flatten().tolist():
        if bool(rows[client].any()):
            raise ValueError(f"state[{name!r}]: expected zeros for client {client}, because {when}")


def require(valid: bool, name: str, expected: str) -> None:
    """Raise ValueError if a relation does not hold."""
    if not valid:
        raise ValueError(f"state[{name!r}]: expected {expected}")


def rows_of(value: Tensor | RowMemory) -> Sequence[Tensor]:
    """Return the rows [d] of a memory in a state to be checked."""
    return value.rows if isinstance(value, RowMemory) else value.unbind(0)


def _parts(value: Tensor | RowMemory) -> Sequence[Tensor]:
    assert isinstance(value, Tensor)
    return [part for part in value.reshape(-1).split(_PART) if part.numel()]
