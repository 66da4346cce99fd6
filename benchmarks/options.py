# SPDX-License-Identifier: Apache-2.0
"""Common parts of the timing subcommands: options, threads, progress, output files."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from threadpoolctl import threadpool_limits

from benchmarks.harness import Comparison, Row, compare, refused, slowed
from benchmarks.machine import describe

QUICK_SHRINK = 100  # --quick divides d by this
Make = Callable[[int, int], Comparison]  # (S, d) -> operands and contenders


@dataclass(frozen=True)
class Options:
    """Common options of ``ops``, ``steps`` and ``scaling``."""

    threads: int
    repeats: int
    quick: bool
    only: str

    def width(self, d: int) -> int:
        """Return `d`, reduced in a dry run."""
        return max(d // QUICK_SHRINK, 500) if self.quick else d


def add(parser: argparse.ArgumentParser) -> None:
    """Add the common options to a subcommand."""
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="number of threads of every contender; default: %(default)s",
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed batches of each contender")
    parser.add_argument(
        "--quick", action="store_true",
        help="dry run: d / 100, 3 repeats, no torch.compile; the measurements are meaningless",
    )  # fmt: skip
    parser.add_argument(
        "--only", default="", metavar="TEXT",
        help="run only comparisons whose name contains TEXT; with --out, the others in the folder "
        "stay there",
    )  # fmt: skip
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options --csv and --out to a subcommand."""
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write all measurements to this CSV file"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write CSV, Markdown and pictures to this folder"
    )


def check_numbers(namespace: argparse.Namespace, least: int = 1) -> None:
    """Check that every number is one that can be measured with.

    least: the smallest number of runs that the subcommand can take a median and quartiles of.

    Raises:
        SystemExit: a count is below 1, runs are fewer than `least`, or a time is not positive.
    """
    for name, value in vars(namespace).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, float) and not (math.isfinite(value) and value > 0.0):
            raise SystemExit(f"{option}: expected a finite number > 0, got {value}")
        lowest = least if name in ("repeats", "rounds") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < lowest:
            raise SystemExit(f"{option}: expected a number >= {lowest}, got {value}")


def parse(namespace: argparse.Namespace) -> Options:
    """Check the common options.

    Raises:
        SystemExit: an option is invalid.
    """
    if namespace.threads < 1 or namespace.repeats < 3:
        raise SystemExit("--threads: expected at least 1; --repeats: expected at least 3")
    repeats = 3 if namespace.quick else namespace.repeats
    return Options(namespace.threads, repeats, namespace.quick, namespace.only)


@dataclass(frozen=True)
class Case:
    """A comparison to measure. Its operands are created right before it and freed after it."""

    op: str
    S: int
    d: int
    make: Make
    threads: int | None = None  # None: as in the options

    @property
    def title(self) -> str:
        return f"{self.op} ({self.S}, {self.d:,})"


@dataclass(frozen=True)
class Results:
    """What :func:`run` has measured.

    rows: of all comparisons that were measured.
    complete: whether these are all comparisons that the options chose.
    """

    rows: list[Row]
    complete: bool


def run(cases: Iterable[Case], options: Options, console: Console) -> Results:
    """Measure the cases one after the other, and repeat those that were disturbed.

    Ctrl-C ends the measurement: the comparisons that were measured before it are returned.
    """
    about = describe()
    console.print("   ".join(f"{key} {value}" for key, value in about.items()))
    chosen = [case for case in cases if options.only in case.title]
    found: list[list[Row]] = []
    try:
        for case in chosen:
            hopeless = bool(found) and found[-1][-1].verdict == "busy"
            found.append(_timed(case, options, console, attempts=1 if hopeless else 3))
        for index, slow in enumerate(slowed(found)):
            if slow and not options.quick:
                found[index] = _timed(chosen[index], options, console, attempts=3)
    except KeyboardInterrupt:
        console.print(f"stopped: {len(found)} of {len(chosen)} comparisons are measured")
    for index, slow in enumerate(slowed(found)):
        if slow and not options.quick:
            found[index] = [refused(row) for row in found[index]]
    return Results([row for rows in found for row in rows], len(found) == len(chosen))


def _timed(case: Case, options: Options, console: Console, attempts: int) -> list[Row]:
    threads = case.threads or options.threads
    before, start = torch.get_num_threads(), time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads):  # for numpy and scipy
            rows = _measure(case, options, attempts)
    finally:
        torch.set_num_threads(before)
    seconds = time.perf_counter() - start
    console.print(f"{case.title}, {threads} threads: {seconds:.1f} s", style="dim")
    return rows


def _measure(case: Case, options: Options, attempts: int) -> list[Row]:
    comparison = case.make(case.S, case.d)
    if options.quick:
        return compare(comparison, repeats=options.repeats, settle=0.0, attempts=1)
    return compare(comparison, repeats=options.repeats, attempts=attempts)
