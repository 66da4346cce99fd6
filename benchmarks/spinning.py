# SPDX-License-Identifier: Apache-2.0
"""Steps right after an operation of PyTorch, whose threads look for more work for a while.

PyTorch's wheels for Linux contain GNU's OpenMP library. After an operation its threads spin for
some milliseconds, on the cores that the helpers of a step need. An environment variable shortens
that. The library reads it when it is loaded, so each setting is timed in a process of its own; the
processes take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.intervals import interval
from benchmarks.machine import ROOT
from benchmarks.operands import normal, zeros
from benchmarks.regress.worker import Call, step_call

SETTINGS: dict[str, dict[str, str]] = {
    "no variable": {},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
RULES = ("fedavg", "fdms", "mifa")
OPERATION = "torch.add"
_S, _D = 20, 1_000_000
_CALLS = 7  # of each kind in a turn
_REST = 0.03  # seconds after which no thread spins


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=15, help="of each setting; default: 15")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write spinning.md")


def seconds(call: Call, before: Call) -> float:
    """Return the median time of a call, each of which follows ``before``."""
    taken = []
    for _ in range(_CALLS):
        before()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def serve(S: int, d: int) -> None:
    """Answer each line of standard input with the times of one turn, as a line of JSON."""
    rows, other = normal(S, d), zeros(S, d)
    steps = {rule: step_call(rule, S, d, "copied") for rule in RULES}

    def operation() -> None:
        torch.add(rows, 1.0, out=other)

    def rest() -> None:
        time.sleep(_REST)

    for _ in sys.stdin:
        turn: dict[str, float] = {}
        rest()
        turn[OPERATION] = seconds(operation, lambda: None)
        for rule, step in steps.items():
            rest()
            step()  # wakes the helpers
            turn[rule] = seconds(step, lambda: None)
            turn[f"{rule} after"] = seconds(step, operation)
        print(json.dumps(turn), flush=True)


def environment(setting: str) -> dict[str, str]:
    """Return the environment of a process: that of this one, with what the setting says alone."""
    usual = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_WAIT"))}
    return usual | SETTINGS[setting]


@contextmanager
def _servers(S: int, d: int) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "benchmarks.spinning", str(S), str(d)]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            command, env=environment(name), cwd=ROOT, stdin=pipe, stdout=pipe, text=True
        )
        for name in SETTINGS
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _turn(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("spinning: a process has ended; its error is above")
    return dict(json.loads(line))


def run(options: argparse.Namespace, console: Console) -> None:
    if options.turns < 1:
        raise SystemExit(f"--turns: expected a number >= 1, got {options.turns}")
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    with _servers(_S, _D) as servers:
        for process in servers:
            _turn(process)
        for _ in track(range(options.turns), "turns", console=console, transient=True):
            for name, process in zip(SETTINGS, servers, strict=True):
                turns[name].append(_turn(process))
    text = markdown(turns)
    console.print(text, markup=False)
    if options.out:
        said = (
            f"{_S} rows of {_D:,} numbers, {torch.get_num_threads()} threads. Medians of "
            f"{options.turns} turns, and in brackets 95 % intervals of the ratios within a turn."
        )
        title = f"Steps right after {OPERATION}"
        report.write_page(options.out, "spinning", title, said, text)


def markdown(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return a table with a line for each setting and rule."""
    lines = [
        f"| environment | {OPERATION} | rule | step, ms | after {OPERATION}, ms | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]

    def ms(found: Sequence[Mapping[str, float]], name: str) -> str:
        return f"{statistics.median(turn[name] for turn in found) * 1e3:.2f}"

    for setting, found in turns.items():
        for rule in RULES:
            ratios = [turn[f"{rule} after"] / turn[rule] for turn in found]
            low, high = interval(ratios)
            lines.append(
                f"| {setting} | {ms(found, OPERATION)} | `{rule}` | {ms(found, rule)} "
                f"| {ms(found, f'{rule} after')} "
                f"| {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
