# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark in order, those that are finished left out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.attacks.runs import (
    HIJACK_SEEDS,
    HIJACKED,
    POISON_SEEDS,
    Task,
    accuracy_results,
    hijack_results,
    poison_results,
)
from benchmarks.attacks.setting import ATTACKS, ROUNDS, SEEDS, TASKS, K, Result, S, configurations
from benchmarks.attacks.tables import markdown, page, read, write

Part = Callable[[set[tuple[object, ...]]], list[Result]]
"""(runs that are finished) -> results of the others."""


def parts(quick: bool) -> Iterator[Part]:
    """Yield the parts of the benchmark, the short ones first."""

    def hijack(seed: int) -> Part:
        def part(done: set[tuple[object, ...]]) -> list[Result]:
            run = ("hijack", TASKS[0], "hijack", 1 / K)
            made = [one for one in HIJACKED if (*run, one[0], seed) not in done]
            return hijack_results(seed, made, 25 if quick else 60) if made else []

        return part

    def poison(seed: int) -> Part:
        def part(done: set[tuple[object, ...]]) -> list[Result]:
            if any(run[0] == "poison once" and run[-1] == seed for run in done):
                return []
            return poison_results(seed, 50 if quick else 1000)

        return part

    for seed in list(HIJACK_SEEDS)[: 2 if quick else None]:
        yield hijack(seed)
    for seed in list(POISON_SEEDS)[: 2 if quick else None]:
        yield poison(seed)
    for fraction in (0.2,) if quick else (0.2, 0.1, 0.4, 0.05):
        for seed in SEEDS[: 2 if quick else None]:
            for name in TASKS[: 1 if quick else None]:
                yield from _accuracy_parts(name, seed, fraction, 12 if quick else ROUNDS)


def _accuracy_parts(name: str, seed: int, fraction: float, rounds: int) -> Iterator[Part]:
    loaded: list[Task] = []
    for attack in ATTACKS:
        if attack == "none" and fraction != 0.2:
            continue
        rate = 0.0 if attack == "none" else fraction

        def part(
            done: set[tuple[object, ...]], attack: str = attack, rate: float = rate
        ) -> list[Result]:
            made = [
                one
                for one in configurations(max(1, round(rate * S)))
                if ("accuracy", name, attack, rate, one[0], seed) not in done
            ]
            if not made:
                return []
            if not loaded:
                loaded.append(Task(name, seed))
            return accuracy_results(name, seed, attack, rate, made, rounds, loaded[0])

        yield part


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="one task, two seeds and few rounds, under a minute"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="write attacks.csv and attacks.md; finished parts there are not run again",
    )  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in batched products depend on the number of threads
    try:
        rows = read(options.out / "attacks.csv") if options.out else []
        done: set[tuple[object, ...]] = {row.run for row in rows}
        rounds = 12 if options.quick else ROUNDS
        for part in track(list(parts(options.quick)), "attacks", console=console):
            fresh = part(done)
            rows += fresh
            if fresh and options.out:
                write(options.out, rows, rounds)
        if options.out:
            write(options.out, rows, rounds)
        console.print(markdown(rows, rounds).partition("## Accuracy")[0], markup=False)
        if not options.quick:
            console.print(f"Tables of docs/security.md:\n\n{page(rows)}", markup=False)
    finally:
        torch.set_num_threads(threads)
