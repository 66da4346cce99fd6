# SPDX-License-Identifier: Apache-2.0
"""Steps on small models with one thread: how much of the time is in ops, and careful eager code.

A step is timed twice: as it is, and with a clock around every call of a compiled op. The ops' time
includes their argument checks. The rest is Python: checks of the step, policy, the report. All that
is in one row of the table is timed in turns, so that a busy moment of the machine meets all of it.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import fastagg
from benchmarks import memory_ops, report, robust, steps
from benchmarks.machine import describe
from benchmarks.regress.worker import RULES, rule_name
from fastagg.ops import _gram, _int8_rows, _moments, _robust, _rows, _scores, _sketch, _sorted

Call = Callable[[], object]
SIZES = [(20, 10), (100, 50), (1000, 100)]  # K, S
WIDTHS = [610, 62_006]
TURNS = 8
_EAGER = {
    "fedavg": steps.fedavg,
    "mimic": memory_ops.mimic,
    "mifa": memory_ops.memory_update,
    "stale": memory_ops.memory_update,
    "geometric-median": robust.geometric_median,
    "multi-krum": robust.multi_krum,
    "nnm": robust.nnm,
}
"""Comparisons whose careful contenders do the same arithmetic, for any K."""


@dataclass(frozen=True)
class Timed:
    """Median times of one step in microseconds; NaN where there is no such code."""

    rule: str
    K: int
    S: int
    d: int
    step: float
    ops: float  # in compiled ops
    eager_torch: float  # the fastest careful code
    eager_numpy: float
    profile: str  # the ops that take most of the time


class _TimedOps:
    """Stands for the compiled operators, and adds up the time of their calls by name."""

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.seconds = compiled, defaultdict[str, float](float)

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self.compiled, name)

        def timed(*arguments: object, **options: object) -> object:
            start = time.perf_counter()
            result = call(*arguments, **options)
            self.seconds[name] += time.perf_counter() - start
            return result

        return timed


@contextmanager
def _clocks() -> Iterator[_TimedOps]:
    modules = (_gram, _int8_rows, _moments, _robust, _rows, _scores, _sketch, _sorted)
    before = _rows.compiled
    timed = _TimedOps(before)
    for module in modules:
        module.compiled = timed  # type: ignore[attr-defined]
    try:
        yield timed
    finally:
        for module in modules:
            module.compiled = before  # type: ignore[attr-defined]


class _Clock:
    """Times a call in several turns."""

    def __init__(self, call: Call) -> None:
        self.call, self._found = call, list[float]()
        for _ in range(3):
            call()

    def turn(self, seconds: float) -> None:
        """Time the call for about ``seconds``."""
        self.call()  # it finds its data in the caches, as in a loop of its own
        end = time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            self.call()
            now = time.perf_counter()
            self._found.append(now - start)
            if now >= end:
                return

    def median_us(self) -> float:
        return statistics.median(self._found) * 1e6


class _OpsClock(_Clock):
    """Times the compiled ops of a call in several turns."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._ops: list[dict[str, float]] = []

    def turn(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        with _clocks() as clocks:
            self.call()
            while True:
                clocks.seconds.clear()
                self.call()
                self._ops.append(dict(clocks.seconds))
                if time.perf_counter() >= end:
                    return

    def median_us(self) -> float:
        return statistics.median(sum(one.values()) for one in self._ops) * 1e6

    def longest(self) -> str:
        """Return the ops that take most of the time."""
        names = {name for one in self._ops for name in one}
        medians = {n: statistics.median(one.get(n, 0.0) for one in self._ops) * 1e6 for n in names}
        longest = sorted(medians, key=medians.__getitem__, reverse=True)[:3]
        return ", ".join(f"{name} {medians[name]:.0f}" for name in longest)


def step_call(rule: str, K: int, S: int, d: int) -> Call:
    """Return a call of a step with S of K clients, another cohort each time."""
    torch.manual_seed(0)
    name = fastagg.RuleName(rule_name(rule))
    agg = fastagg.make(name, num_clients=K, num_params=d, **RULES[rule])
    params, updates = torch.zeros(d), torch.randn(S, d).mul_(0.01)
    cohorts = [torch.randperm(K)[:S] for _ in range(8)]
    turn = 0

    def call() -> None:
        nonlocal turn
        agg.step(params, updates, cohorts[turn % len(cohorts)])
        turn += 1

    return call


def _torch_calls(rule: str, K: int, S: int, d: int) -> list[Call]:
    if rule == "fdms":
        state, clients = steps.FdmsState(K, S, d), torch.randperm(K)[:S].sort().values
        updates = torch.randn(S, d).mul_(1e-3)
        return [lambda: state.careful_step(updates, clients)]
    if rule not in _EAGER:
        return []
    return [c.call for c in _EAGER[rule](S, d).contenders if c.role == "careful"]


def _numpy_call(rule: str, S: int, d: int) -> Call | None:
    """Return a careful step in NumPy, without temporaries of more than d numbers where possible."""
    rng = np.random.default_rng(0)
    updates = rng.standard_normal((S, d), dtype=np.float32)
    params, v = np.zeros(d, np.float32), np.empty(d, np.float32)
    shares = np.full(S, 1 / S, np.float32)
    if rule == "fedavg":

        def fedavg() -> None:
            np.dot(shares, updates, out=v)
            np.add(params, v, out=params)

        return fedavg
    memory, scratch = np.zeros((S, d), np.float32), np.empty((S, d), np.float32)
    mean, rate = np.zeros(d, np.float32), np.float32(1e-3)
    if rule in ("mifa", "stale"):

        def mifa() -> None:
            np.subtract(updates, memory, out=scratch)
            np.dot(shares, scratch, out=v)
            np.add(mean, v, out=mean)
            np.copyto(memory, updates)
            np.multiply(mean, rate, out=v)
            np.add(params, v, out=params)

        return mifa
    if rule == "mimic":

        def mimic() -> None:
            np.add(updates, memory, out=scratch)
            np.dot(shares, scratch, out=v)
            np.subtract(v, updates, out=memory)
            np.multiply(v, rate, out=v)
            np.add(params, v, out=params)

        return mimic
    return None


def measure(rule: str, K: int, S: int, d: int, seconds: float) -> Timed:
    """Time one rule at one size, and careful code for the same, in turns."""
    call, numpy = step_call(rule, K, S, d), _numpy_call(rule, S, d)
    step, inside = _Clock(call), _OpsClock(call)
    eager = [_Clock(one) for one in _torch_calls(rule, K, S, d)]
    others = [_Clock(numpy)] if numpy else []
    for _ in range(TURNS):
        for clock in (step, inside, *eager, *others):
            clock.turn(seconds / TURNS)
    fastest = min((clock.median_us() for clock in eager), default=np.nan)
    other = min((clock.median_us() for clock in others), default=np.nan)
    own = step.median_us(), inside.median_us()
    return Timed(rule, K, S, d, *own, fastest, other, inside.longest())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="RULE", help="only this rule")
    parser.add_argument("--seconds", type=float, default=0.2, help="time per number; default: 0.2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write small.csv and small.md")


def run(options: argparse.Namespace, console: Console) -> None:
    """Time all rules at all sizes and print the table."""
    from threadpoolctl import threadpool_limits

    cases = [(r, *s, d) for r in RULES if options.only in ("", r) for d in WIDTHS for s in SIZES]
    if not cases:
        raise SystemExit(f"--only: expected one of {sorted(RULES)}, got {options.only!r}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            results = [
                measure(*case, options.seconds)
                for case in track(cases, "steps", console=console, transient=True)
            ]
    finally:
        torch.set_num_threads(before)
    text = markdown(results)
    console.print(text, markup=False)
    if options.out:
        said = (
            "One thread, medians in microseconds; what is in a row is timed in turns. Python: the "
            "time of a step that is not in a compiled op."
        )
        page = report.write_page(options.out, "small", "Steps on small models", said, text)
        with page.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            machine = describe()
            table.writerow([*(field.name for field in fields(Timed)), *machine])
            table.writerows([*astuple(r), *machine.values()] for r in results)


def markdown(results: list[Timed]) -> str:
    """Return the table."""
    heads = ("rule", "K", "S", "d", "step", "ops", "Python", "torch", "numpy", "longest ops")
    lines = [
        (
            r.rule, str(r.K), str(r.S), f"{r.d:,}", f"{r.step:,.0f}", f"{r.ops:,.0f}",
            f"{max(r.step - r.ops, 0.0):,.0f}", *(
                "-" if np.isnan(x) else f"{x:,.0f}" for x in (r.eager_torch, r.eager_numpy)
            ), r.profile,
        )
        for r in results
    ]  # fmt: skip
    return report.markdown(heads, lines)
