# SPDX-License-Identifier: Apache-2.0
"""Other frameworks, which take part if they are installed (``make bench-peers``)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

Results = list[tuple[list[np.ndarray], int]]
FlowerAggregate = Callable[[Results], list[np.ndarray]]
FlowerKrum = Callable[[Results, int, int], list[np.ndarray]]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def announce(console: Console) -> None:
    """Print which frameworks take part."""
    for name in ("flwr", "byzfl"):
        text = (
            f"{name} {version(name)}"
            if installed(name)
            else f"{name} is not installed: skipped (make bench-peers installs it)"
        )
        console.print(text, style="dim")


def flower_aggregate() -> FlowerAggregate | None:
    """Return Flower's weighted average of lists of arrays, or None if it is not installed."""
    module = _flower_strategies()
    return None if module is None else module.aggregate


def flower_krum() -> FlowerKrum | None:
    """Return Flower's Krum of lists of arrays (results, f, number to average), or None."""
    module = _flower_strategies()
    return None if module is None else module.aggregate_krum


def _flower_strategies() -> ModuleType | None:
    if not installed("flwr"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Flower's dependencies
        return importlib.import_module("flwr.server.strategy.aggregate")


def byzfl_aggregators() -> ModuleType | None:
    """Import ``byzfl.aggregators`` without ``byzfl/__init__.py``; None if it is not installed.

    That file imports ByzFL's experiments, which need a torchvision that matches the installed
    torch. The aggregators only need torch, numpy and scipy.
    """
    if not installed("byzfl"):
        return None
    if "byzfl" not in sys.modules:
        spec = importlib.util.find_spec("byzfl")
        assert spec is not None  # see installed()
        sys.modules["byzfl"] = importlib.util.module_from_spec(spec)  # created, but not executed
    return importlib.import_module("byzfl.aggregators")


def one_layer_results(rows: Tensor) -> Results:
    """Convert updates [S, d] to Flower's format: one array per client, with one example each."""
    return [([row.numpy()], 1) for row in rows]


def as_tensor(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(arrays[0])
