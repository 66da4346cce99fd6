# SPDX-License-Identifier: Apache-2.0
"""Where the time of a local step goes: time per PyTorch operation, and the rate of arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.simulation_products import time_products

_SHOWN = 7  # operations per way


def profile_ways(
    title: str, ways: Mapping[tuple[str, int], Callable[[], Any]], steps: int, console: Console
) -> None:
    """Print, for every way, the operations that take most of the time of a local step, and the
    products of the last way one by one.

    ways: implementations of `steps` local steps, by (name, clients at once). The first one is the
        plain loop; its multiplications and additions count for all.
    """
    operations = _operations(next(iter(ways.values()))) / steps
    table = Table(title=f"{title}: {operations / 1e6:.1f} million operations per local step")
    for heading in ("way", "operation", "calls per step", "ms per step", "share"):
        table.add_column(heading, justify="left" if heading in ("way", "operation") else "right")
    times = []
    for (name, count), call in ways.items():
        call()
        start = time.thread_time()
        call()
        seconds = (time.thread_time() - start) / steps
        times.append(seconds)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        spent = sorted(profile.key_averages(), key=lambda e: -e.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in spent)
        for i, event in enumerate(spent[:_SHOWN]):
            way = f"{name}, {count} clients" if i == 0 else ""
            share = event.self_cpu_time_total / total
            table.add_row(
                way,
                event.key.removeprefix("aten::"),
                f"{event.count / steps:.1f}",
                f"{share * seconds * 1e3:.3f}",
                f"{share:.0%}",
            )
        rate = f"{operations / seconds / 1e9:.1f} GFLOP/s"
        table.add_row("", rate, "", f"{seconds * 1e3:.3f}", "100%", end_section=True)
    console.print(table)
    console.print(f"product of two 512 x 512 matrices: {_product_rate() / 1e9:.1f} GFLOP/s")
    time_products(list(ways.values())[-1], steps, times[-1], times[0], console)


def _operations(call: Callable[[], Any]) -> int:
    """Return the floating-point operations of the products and convolutions in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def _product_rate() -> float:
    """Return the operations per second of one thread in a large matrix product, the best of 20."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    out, best = torch.empty(512, 512), float("inf")
    for _ in range(20):
        start = time.thread_time()
        torch.mm(a, b, out=out)
        best = min(best, time.thread_time() - start)
    return 2 * 512**3 / best
