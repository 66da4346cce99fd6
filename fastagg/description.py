# SPDX-License-Identifier: Apache-2.0
"""Describe an aggregator in one line: its class and the options that are not the defaults."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastagg.norm_bound import read_max_norm, resolve_max_norm
from fastagg.options import option_defaults
from fastagg.server_optimizer import read_server_optimizer
from fastagg.staleness import read_staleness

_ALWAYS = ("num_clients", "num_params", "server_lr")
_READERS: MappingProxyType[str, Callable[[object], Any]] = MappingProxyType(
    {
        "max_norm": read_max_norm,
        "server_optimizer": read_server_optimizer,
        "staleness": read_staleness,
    }
)
"""Options whose attribute is an object, and what makes it of a default."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def describe(aggregator: object) -> str:
    """Return the class of an aggregator with its sizes and the options that are not defaults."""
    kind: type = type(aggregator)
    shown = {name: getattr(aggregator, name) for name in _ALWAYS}
    own: Mapping[str, Any] = getattr(aggregator, "own_defaults", {})
    for name, default in {**option_defaults(kind), **own}.items():
        if name == "max_norm":
            others = (getattr(aggregator, other) for other in ("nonfinite", "noise_multiplier"))
            default = resolve_max_norm(default, *others)
        if name in _READERS:
            default = _READERS[name](default)
        if name not in shown and not _is(getattr(aggregator, name, default), default):
            shown[name] = getattr(aggregator, name)
    plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in shown.items()}
    options = ", ".join(f"{name}={_short.repr(value)}" for name, value in plain.items())
    return f"{kind.__name__}({options})"


def _is(value: object, default: object) -> bool:
    """Return whether an option has its default. Equal weights of all clients are the default."""
    if isinstance(value, torch.device):
        return str(value) == str(default)
    if isinstance(value, Tensor):
        return default is None and bool((value == value.view(-1)[:1]).all())
    return bool(value == default)
