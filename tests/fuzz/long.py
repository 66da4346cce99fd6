# SPDX-License-Identifier: Apache-2.0
"""Run every rule for very many steps: memory, descriptors and time per step must stay flat.

    make fuzz-long ARGS="--steps 1000000 --out benchmarks/results"

Each rule runs in a process of its own, with one thread. A run is measured in tenths. Resident
memory and descriptors are read at the end of the first tenth and of the last one. The time is that
of the processor, and that of a tenth is the lowest of its ten parts, because other processes of the
machine only ever add to it.
The command fails if memory or descriptors grow, or if the time per step grows by half or more.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import fastagg
from benchmarks.machine import describe
from tests.rules.conftest import CONFIGURATIONS

ROOT = Path(__file__).resolve().parents[2]
K, S, D = 10, 5, 1000
ROUNDS = 64  # different rounds of clients and updates, repeated
PARTS = 100
MOST_BYTES = 1 << 20  # growth of resident memory that counts as noise: arenas of allocators
MOST_SLOWER = 1.5  # last tenth to first tenth


@dataclass(frozen=True)
class Run:
    """What one rule's steps took.

    resident_first, resident_last: bytes after the first and the last tenth of the steps.
    open_first, open_last: open descriptors, then.
    us_first, us_last: microseconds of the processor per step of the first and the last tenth.
    commit: of the tree that ran.
    """

    rule: str
    steps: int
    resident_first: int
    resident_last: int
    open_first: int
    open_last: int
    us_first: float
    us_last: float
    commit: str

    def problems(self) -> list[str]:
        found = []
        if self.resident_last - self.resident_first > MOST_BYTES:
            found.append(f"memory {self.resident_first} to {self.resident_last} bytes")
        if self.open_last > self.open_first:
            found.append(f"descriptors {self.open_first} to {self.open_last}")
        if self.us_last > MOST_SLOWER * self.us_first:
            found.append(f"time {self.us_first:.1f} to {self.us_last:.1f} us a step")
        return found


def measure(name: str, options: dict[str, Any], steps: int) -> Run:
    """Run the steps of a rule in this process."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    params = torch.zeros(D)
    rounds = [
        (
            0.01 * torch.randn(S, D, generator=generator),
            torch.randperm(K, generator=generator)[:S],
        )
        for _ in range(ROUNDS)
    ]
    times, resident, opened = [], [], []
    for part in range(PARTS):
        begin, end = part * steps // PARTS, (part + 1) * steps // PARTS
        start = time.process_time()
        for step in range(begin, end):
            updates, clients = rounds[step % ROUNDS]
            agg.step(params, updates, clients)
        times.append(1e6 * (time.process_time() - start) / max(1, end - begin))
        resident.append(_resident())
        opened.append(len(os.listdir("/proc/self/fd")))
        if not bool(torch.isfinite(params).all()):
            raise AssertionError(f"{name}: parameters are not finite after {end} steps")
    tenth = PARTS // 10
    return Run(
        name,
        steps,
        resident[tenth - 1],
        resident[-1],
        opened[tenth - 1],
        opened[-1],
        round(min(times[:tenth]), 2),
        round(min(times[-tenth:]), 2),
        describe()["commit"],
    )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def configurations() -> dict[str, dict[str, Any]]:
    """Return the first configuration of every rule in the tests, without weights for K = 6."""
    found: dict[str, dict[str, Any]] = {}
    for name, options in CONFIGURATIONS:
        found.setdefault(name, {k: v for k, v in options.items() if k != "client_weights"})
    return dict(sorted(found.items()))


def write(folder: Path, runs: list[Run], command: str) -> list[Path]:
    """Write long_runs.csv and long_runs.md."""
    table, page = folder / "long_runs.csv", folder / "long_runs.md"
    with table.open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Run)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(run) for run in sorted(runs, key=lambda run: run.rule))
    machine = ", ".join(f"{k} {value}" for k, value in describe().items() if k != "commit")
    lines = [
        "# Long runs",
        "",
        f"Written by `{command}`: K = {K}, S = {S}, d = {D},",
        "one thread. Memory and descriptors after the first and last tenth of the steps; processor",
        "time of a tenth: the lowest of its ten parts, because other processes only add to it.",
        "",
        f"Machine: {machine}.",
        "",
        "| rule | steps | resident MB | descriptors | µs a step | flat | commit |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for run in sorted(runs, key=lambda run: run.rule):
        megabytes = f"{run.resident_first / 1e6:.1f} → {run.resident_last / 1e6:.1f}"
        flat = "; ".join(run.problems()) or "yes"
        lines.append(
            f"| `{run.rule}` | {run.steps:,} | {megabytes} | {run.open_first} → {run.open_last} | "
            f"{run.us_first:.1f} → {run.us_last:.1f} | {flat} | {run.commit} |"
        )
    page.write_text("\n".join(lines) + "\n")
    return [table, page]


def read(folder: Path, steps: int) -> list[Run]:
    """Return the runs of ``steps`` steps in long_runs.csv; none if it does not exist."""
    table = folder / "long_runs.csv"
    if not table.exists():
        return []
    with table.open(newline="") as file:
        kinds = {"rule": str, "us_first": float, "us_last": float, "commit": str}
        rows = [
            Run(**{name: kinds.get(name, int)(value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]
    return [run for run in rows if run.steps == steps]


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--steps", type=int, default=100_000, help="steps of each rule")
    command.add_argument("--only", help="one rule")
    command.add_argument(
        "--out",
        type=Path,
        help="folder for long_runs.csv and long_runs.md; rules that are there, with as many steps, "
        "are not run again",
    )
    command.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return command


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    known = configurations()
    if options.here:
        print(json.dumps(asdict(measure(options.only, known[options.only], options.steps))))
        return 0
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    runs = read(options.out, options.steps) if options.out else []
    finished = {run.rule for run in runs}
    for name in [options.only] if options.only else known:
        if name in finished:
            continue
        command = [sys.executable, "-m", "tests.fuzz.long", "--here"]
        command += [f"--only={name}", f"--steps={options.steps}"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        run = Run(**json.loads(done.stdout.splitlines()[-1]))
        runs.append(run)
        print(f"{run.rule}: {'; '.join(run.problems()) or 'flat'}  {run}", flush=True)
        if options.out:
            write(options.out, runs, f'make fuzz-long ARGS="--steps {options.steps}"')
    if finished and options.out:
        write(options.out, runs, f'make fuzz-long ARGS="--steps {options.steps}"')
    wrong = sum(bool(run.problems()) for run in runs)
    print(f"{len(runs)} rules, {options.steps} steps of each: {wrong} not flat")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
