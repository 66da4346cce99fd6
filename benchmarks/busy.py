# SPDX-License-Identifier: Apache-2.0
"""Steps on small models, on an idle machine and with one busy process on each core.

On a busy machine, a call that waits for a thread that the system does not run takes as long as the
system's time slices. So each step is timed with one thread and with all threads, in turn, and the
ratio of the two is what counts.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.regress.worker import RULES, Call, step_call

SIZES = [(10, 610), (100, 610), (10, 62_006), (100, 62_006)]
LIMIT = 2.0  # of a busy machine: time with all threads by time with one


@dataclass(frozen=True)
class Timed:
    """Median times of one step in microseconds, by machine state and number of threads."""

    rule: str
    S: int
    d: int
    idle_one: float
    idle_all: float
    busy_one: float
    busy_all: float

    @property
    def ratio(self) -> float:
        return self.busy_all / self.busy_one


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="RULE", help="only this rule")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per number; default: 0.5")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write busy.csv and busy.md")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def times(call: Call, threads: Sequence[int], seconds: float) -> list[float]:
    """Return the median time of the call in microseconds for each number of threads, in turn."""
    found: list[list[float]] = [[] for _ in threads]
    end = time.perf_counter() + seconds * len(threads)
    while time.perf_counter() < end or len(found[-1]) < 7:
        for n, list_of_times in zip(threads, found, strict=True):
            torch.set_num_threads(n)
            for _ in range(5):
                start = time.perf_counter()
                call()
                list_of_times.append(time.perf_counter() - start)
    return [statistics.median(one) * 1e6 for one in found]


def run(options: argparse.Namespace, console: Console) -> None:
    cases = [(rule, S, d) for rule in RULES if options.only in ("", rule) for S, d in SIZES]
    if not cases:
        raise SystemExit(f"--only: expected one of {sorted(RULES)}, got {options.only!r}")
    calls = {case: step_call(*case, "copied") for case in cases}
    threads = (1, options.threads)
    idle, busy = {}, {}
    for case in track(cases, "idle", console=console, transient=True):
        idle[case] = times(calls[case], threads, options.seconds)
    with busy_processes(os.cpu_count() or 1):
        for case in track(cases, "busy", console=console, transient=True):
            busy[case] = times(calls[case], threads, options.seconds)
    results = [Timed(*case, *idle[case], *busy[case]) for case in cases]
    text = markdown(results, options.threads)
    console.print(text, markup=False)
    if options.out:
        title, said = "Small models, and a busy machine", "Medians in microseconds."
        page = report.write_page(options.out, "busy", title, said, text)
        with page.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            machine = describe()
            table.writerow([*(field.name for field in fields(Timed)), *machine])
            table.writerows([*astuple(r), *machine.values()] for r in results)


def markdown(results: Sequence[Timed], threads: int) -> str:
    many = f"{threads} threads"
    lines = [
        f"| rule | S | d | idle, 1 thread | idle, {many} | busy, 1 thread | busy, {many} | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        mark = "" if r.ratio <= LIMIT else " above 2"
        lines.append(
            f"| {r.rule} | {r.S} | {r.d:,} | {r.idle_one:,.0f} | {r.idle_all:,.0f} "
            f"| {r.busy_one:,.0f} | {r.busy_all:,.0f} | {r.ratio:.2f}{mark} |"
        )
    above = sum(r.ratio > LIMIT for r in results)
    lines.append(f"\n{above} of {len(results)} steps take more than twice as long with {many}.")
    return "\n".join(lines)
