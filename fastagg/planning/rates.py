# SPDX-License-Identifier: Apache-2.0
"""Measured memory bandwidth and arithmetic rate of a device, for :func:`fastagg.plan`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import read_device

_ROWS, _COLUMNS = 16, 1 << 20  # 64 MB: larger than most caches
_REPEATS = 3
_BUCKETS = 1024


@dataclass(frozen=True)
class Rates:
    """Rates of a device and of its network.

    Attributes:
        bytes_per_s: memory bandwidth of reading, in bytes per second.
        flops_per_s: rate of the Gram kernel, in flops per second.
        wire_bytes_per_s: bandwidth between ranks, in bytes per second. It is not measured: the
            default is 10 Gbit/s.
        sketched_per_s: numbers of rows in memory, per second, that are sketched and added up; None:
            as many as the other rates allow. Sketches are float64 sums and need signs, so the
            number of their operations says little about their time.
    """

    bytes_per_s: float
    flops_per_s: float
    wire_bytes_per_s: float = 1.25e9
    sketched_per_s: float | None = None


@cache
def measure(device: str | torch.device = "cpu") -> Rates:
    """Measure the rates of a device, with torch's current number of threads.

    Takes a third of a second. The result is cached for the life of the process.

    Raises:
        ValueError: this build has no kernels for the device, or the machine does not have it.
    """
    rows = torch.ones(_ROWS, _COLUMNS, device=read_device(device))
    reading = _seconds(lambda: ops.abs_max(rows))
    narrow = rows[:, : _COLUMNS // 16].repeat(8, 1)  # with 128 rows arithmetic is the limit
    computing = _seconds(lambda: ops.gram(narrow))
    size, columns = narrow.shape
    sketches, squares = rows.new_zeros(_ROWS, _BUCKETS).double(), rows.new_zeros(_ROWS).double()
    total, weights = torch.empty_like(rows[0]), rows.new_ones(_ROWS)
    sketching = _seconds(lambda: ops.sketch_and_sum_(total, sketches, squares, rows, weights, 0))
    return Rates(
        rows.nbytes / reading,
        size * (size + 1) * columns / computing,
        sketched_per_s=rows.numel() / sketching,
    )


def _seconds(call: Callable[[], Tensor]) -> float:
    """Return the shortest time of a few calls, in seconds."""
    best = float("inf")
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        call().sum().item()  # item() waits for the device
        best = min(best, time.perf_counter() - start)
    return best
