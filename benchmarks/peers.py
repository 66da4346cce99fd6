# SPDX-License-Identifier: Apache-2.0
"""Other frameworks: used where they are installed (``make bench-peers``), reported where not."""

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
    """Say which peers take part."""
    for name in ("flwr", "byzfl"):
        there = (
            f"{name} {version(name)}" if installed(name) else f"{name} is not installed: skipped"
        )
        console.print(there if installed(name) else f"{there} (make bench-peers)", style="dim")


def flower_aggregate() -> FlowerAggregate | None:
    """Flower's weighted average of lists of arrays, or None where it is not installed."""
    module = _flower_strategies()
    return None if module is None else module.aggregate


def flower_krum() -> FlowerKrum | None:
    """Flower's Krum of lists of arrays (results, f, how many to average), or None."""
    module = _flower_strategies()
    return None if module is None else module.aggregate_krum


def _flower_strategies() -> ModuleType | None:
    if not installed("flwr"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower itself uses
        return importlib.import_module("flwr.server.strategy.aggregate")


def byzfl_aggregators() -> ModuleType | None:
    """``byzfl.aggregators`` without ``byzfl/__init__.py``, or None where it is not installed.

    That file imports ByzFL's own experiments, which need a torchvision that fits the installed
    torch; the aggregators need torch, numpy and scipy alone.
    """
    if not installed("byzfl"):
        return None
    if "byzfl" not in sys.modules:
        spec = importlib.util.find_spec("byzfl")
        assert spec is not None  # see installed()
        sys.modules["byzfl"] = importlib.util.module_from_spec(spec)  # made, but not executed
    return importlib.import_module("byzfl.aggregators")


def one_layer_results(rows: Tensor) -> Results:
    """Updates [S, d] as Flower gets them from clients: one array each, of one example."""
    return [([row.numpy()], 1) for row in rows]


def as_tensor(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(arrays[0])
