# SPDX-License-Identifier: Apache-2.0
"""Reading the options of rules: each failure names the option, what was expected and what came."""

from __future__ import annotations

import numbers

import torch

from fastagg.ops import devices

FLOAT32_LIMIT = 3.4e38
"""Bounds of magnitudes must stay below this: the float32 maximum less 0.08 % for rounding."""


def read_factor(name: str, value: object) -> float:
    """A finite factor >= 0 that float32 can hold, as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    if not 0.0 <= number <= FLOAT32_LIMIT:
        raise ValueError(f"{name}: expected a finite number >= 0, got {number}")
    return number


def read_size(name: str, value: object) -> int:
    """An int >= 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return int(value)


def read_device(value: str | torch.device) -> torch.device:
    """A device that has kernels here; a GPU with its number, as tensors on it have."""
    known = devices()
    expected = " or ".join(map(repr, known))
    try:
        device = torch.device(value)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"device: expected {expected}, got {value!r}") from error
    if device.type not in known:
        raise ValueError(
            f"device: expected {expected}, for which this build has kernels on this machine, "
            f"got {str(value)!r}"
        )
    if device.type == "cpu":
        return torch.device("cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)
