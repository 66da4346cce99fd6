# SPDX-License-Identifier: Apache-2.0
"""Reading the options of rules: each failure names the option, what was expected and what came."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

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


def read_count(name: str, value: object, *, least: int) -> int:
    """An int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return int(value)


def read_size(name: str, value: object) -> int:
    """An int >= 1."""
    return read_count(name, value, least=1)


def read_positive(name: str, value: object, *, infinite: bool = False) -> float:
    """A number > 0, which may be infinite if ``infinite`` says so."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    if not 0.0 < number <= (math.inf if infinite else math.nextafter(math.inf, 0.0)):
        raise ValueError(f"{name}: expected a number > 0, got {number}")
    return number


def read_mapping(name: str, value: object) -> dict[str, Any]:
    """A mapping with string keys, or None for an empty one, as a new dict."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name}: expected a mapping of option names, got {value!r}")
    return dict(value)


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
