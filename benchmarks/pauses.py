# SPDX-License-Identifier: Apache-2.0
"""Calls after a pause, as in a server, whose rounds are far apart.

During a pause all threads sleep. In a virtual machine the system then often wakes a thread on the
core of the thread that wakes it. So the same calls are timed in a loop, and after pauses of
different lengths, in turn, beside an operation of torch on its own threads. Unlike elsewhere in
this suite, threads may run on every core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

import fastagg
from benchmarks import report
from benchmarks.operands import normal, zeros
from benchmarks.regress.worker import Call, step_call

PAUSES = (0.0, 0.001, 0.01, 0.03, 0.1)  # seconds
_S, _D = 20, 1_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=31, help="calls per number; default: 31")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write pauses.md")


def calls() -> dict[str, Call]:
    """Return what is timed, by name; all of it takes milliseconds."""
    rows, other = normal(_S, _D), zeros(_S, _D)
    out, weights = torch.zeros(_D), torch.rand(_S, dtype=torch.float64)
    return {
        "weighted_sum_": lambda: fastagg.ops.weighted_sum_(out, rows, weights),
        "step fedavg": step_call("fedavg", _S, _D, "copied"),
        "step mifa": step_call("mifa", _S, _D, "copied"),
        "torch.add": lambda: torch.add(rows, 1.0, out=other),
    }


def median_ms(call: Call, pause: float, repeats: int) -> float:
    """Return the median time of a call in milliseconds; ``pause`` seconds pass before each call."""
    taken = []
    for _ in range(repeats):
        if pause:
            time.sleep(pause)
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def run(options: argparse.Namespace, console: Console) -> None:
    cases = calls()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for call in cases.values():
        median_ms(call, 0.0, 5)  # starts threads, touches memory
    for pause in track(PAUSES, "pauses", console=console, transient=True):
        for name, call in cases.items():
            found[name].append(median_ms(call, pause, options.repeats))
    lines = [
        "| pause | " + " | ".join(cases) + " |",
        "| --- |" + " --- |" * len(cases),
    ]
    for place, pause in enumerate(PAUSES):
        cells = [f"{ms[place]:.2f} ms, {ms[place] / ms[0]:.2f} x" for ms in found.values()]
        lines.append(f"| {pause * 1e3:g} ms | " + " | ".join(cells) + " |")
    text = "\n".join(lines)
    console.print(text, markup=False)
    if options.out:
        said = f"Medians of {options.repeats} calls with {_S} rows of {_D:,} numbers and "
        said += f"{torch.get_num_threads()} threads, and ratios to those without a pause."
        report.write_page(options.out, "pauses", "Calls after a pause", said, text)
