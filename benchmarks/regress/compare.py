# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of this tree with that of an earlier commit.

Both are built and each runs in a process of its own, with the same Python and PyTorch. The two
processes time each case in turn, some milliseconds each, so that a change of the machine's speed
affects both. A round gives one ratio of times, this tree's by the other's. Reported are the median
ratio of the rounds and an interval that holds the true median with a probability of at least 95 %:
order statistics of the ratios, whose ranks follow from the binomial distribution.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fastagg
from benchmarks.intervals import interval
from benchmarks.machine import ROOT

TOLERANCE = 1.05  # a case is a regression above this ratio, if its interval excludes 1
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Compared:
    """The ratios of one case: time with this tree by time with the other one."""

    case: str
    seconds: float  # median with this tree
    other: float  # median with the other tree
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.ratio > TOLERANCE and self.low > 1:
            return "SLOWER"
        return "faster" if self.high < 1 else ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="HEAD", help="commit to compare with; default: HEAD")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose name contains every word of TEXT"
    )
    parser.add_argument("--rounds", type=int, default=21, help="rounds per case; default: 21")
    parser.add_argument(
        "--milliseconds", type=float, default=15, help="time per case, round and tree; default: 15"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the ratios to a file")


def build(commit: str, console: Console) -> Path:
    """Build a commit in ``build/regress``, unless it is there; return its tree."""
    sha = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    source = ROOT / "build" / "regress" / sha[:12]
    tree = source / "build" / "tree"
    if (source / ".built").exists():
        return tree
    console.print(f"building {commit} ({sha[:12]}) in {source.relative_to(ROOT)}: some minutes")
    source.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(source)], input=_git("archive", sha), check=True)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(tree)],
        cwd=source,
        env=os.environ | {"FASTAGG_CUDA": "0"},
        check=True,
    )
    (source / ".built").touch()
    return tree


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
    except subprocess.CalledProcessError:
        raise SystemExit(f"--base: git {' '.join(arguments)} failed (see above)") from None


class Worker:
    """A process that times cases with the fastagg of ``tree``."""

    def __init__(self, tree: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(threads)],
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *command: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(map(str, command)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended at {command} (see above)")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def compare(case: str, own: Worker, other: Worker, rounds: int) -> Compared:
    """Time one case that both workers have prepared."""
    times: dict[Worker, list[float]] = {own: [], other: []}
    for turn in range(rounds):
        for worker in (own, other) if turn % 2 else (other, own):
            times[worker].append(worker.ask("time")["seconds"])
    ratios = [a / b for a, b in zip(times[own], times[other], strict=True)]
    medians = [statistics.median(times[worker]) for worker in (own, other)]
    return Compared(case, medians[0], medians[1], statistics.median(ratios), *interval(ratios))


def run(options: argparse.Namespace, console: Console) -> int:
    """Compare all chosen cases; return the exit status: 1 if some case is slower."""
    own = Worker(ROOT, options.threads)
    words, known = options.only.split(), own.ask("list")
    chosen = [case for case in known if all(word in case for word in words)]
    if not chosen:
        own.close()
        names = sorted({case.split(" S=")[0].split(" Q=")[0] for case in known})
        raise SystemExit(f"--only: no case contains {options.only!r}; there are {', '.join(names)}")
    other = Worker(build(options.base, console), options.threads)
    results, missing = [], []
    for case in track(chosen, "comparing", console=console, transient=True):
        for worker, which in ((other, options.base), (own, "this tree")):
            answer = worker.ask("prepare", case, options.milliseconds / 1e3)
            if "error" in answer:
                missing.append(f"{case}: {which} cannot run it: {answer['error']}")
                break
        else:
            results.append(compare(case, own, other, options.rounds))
    own.close()
    other.close()
    for line in missing:
        console.print(line, style="yellow", markup=False)
    show(results, options, console)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("case", "seconds", "seconds_base", "ratio", "low", "high"))
            for r in results:
                writer.writerow((r.case, r.seconds, r.other, r.ratio, r.low, r.high))
    slower = [r.case for r in results if r.verdict == "SLOWER"]
    console.print(
        f"{len(results)} cases, {len(slower)} slower than {options.base} by more than 5 %; "
        f"geometric mean of the ratios "
        f"{math.exp(statistics.fmean(math.log(r.ratio) for r in results)):.3f}"
        if results
        else "no case ran with both trees"
    )
    return 1 if slower or not results else 0


def show(results: Sequence[Compared], options: argparse.Namespace, console: Console) -> None:
    table = Table(
        title=f"this tree by {options.base}: {fastagg.build_info()['isa']}, "
        f"{options.threads} threads, {options.rounds} rounds"
    )
    for heading in ("case", "this tree, us", "base, us", "ratio", "95 % interval", ""):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for r in results:
        table.add_row(
            r.case,
            f"{r.seconds * 1e6:.1f}",
            f"{r.other * 1e6:.1f}",
            f"{r.ratio:.3f}",
            f"{r.low:.3f} to {r.high:.3f}",
            r.verdict,
        )
    console.print(table)
