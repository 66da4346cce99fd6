# SPDX-License-Identifier: Apache-2.0
"""How fast this machine is, for :func:`fastagg.plan`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import read_device

_ROWS, _COLUMNS = 16, 1 << 20  # 64 MB: more than most caches
_REPEATS = 3


@dataclass(frozen=True)
class Rates:
    """What a step of the server can expect.

    Attributes:
        bytes_per_s: of memory, reading.
        flops_per_s: of the Gram kernel.
        wire_bytes_per_s: between ranks; 10 Gbit/s unless you know better.
    """

    bytes_per_s: float
    flops_per_s: float
    wire_bytes_per_s: float = 1.25e9


@cache
def measure(device: str | torch.device = "cpu") -> Rates:
    """The rates of a device with the threads that torch has now: a third of a second, once.

    Raises:
        ValueError: there is no such device.
    """
    rows = torch.ones(_ROWS, _COLUMNS, device=read_device(device))
    reading = _seconds(lambda: ops.abs_max(rows))
    narrow = rows[:, : _COLUMNS // 16].repeat(8, 1)  # 128 rows: bound by arithmetic
    computing = _seconds(lambda: ops.gram(narrow))
    size, columns = narrow.shape
    return Rates(rows.nbytes / reading, size * (size + 1) * columns / computing)


def _seconds(call: Callable[[], Tensor]) -> float:
    """The best of a few."""
    best = float("inf")
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        call().sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return best
