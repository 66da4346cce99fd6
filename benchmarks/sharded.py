# SPDX-License-Identifier: Apache-2.0
"""``sharded``: weak scaling in d, with columns distributed over processes of this machine.

Each rank has the same number of columns and one thread, so ideally a step takes as long with many
ranks as with one. On one machine it takes longer, because the processes share caches and memory.
Therefore each rank also runs, in turn with the common steps, steps of a separate aggregator on the
same rows: the same work at the same time, without messages. The efficiency is the time of the
separate steps divided by that of the common step. The loss is the time for messages and for waiting
for the slowest rank.

If there are more ranks than cores, they take turns on the cores. The throughput per core therefore
is reported too, relative to a single rank: columns per second, divided by the number of cores in
use.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.machine import Watch, describe
from fastagg.distributed import ShardedAggregator
from fastagg.distributed.ranks import Ranks

RULES: dict[str, dict[str, Any]] = {"fedavg": {}, "fdms": {}, "geometric-median": {}, "mifa": {}}
SUMMED = (100, 1000)  # S of the Gram matrices whose sum over ranks is timed separately
_TIMEOUT = 300.0  # seconds
_BUSY = 0.15  # cores that other processes may use


@dataclass(frozen=True)
class Line:
    """Medians of one rule and number of ranks."""

    what: str
    ranks: int
    S: int
    d: int
    ms: float
    ms_q3: float
    ms_apart: float  # of the separate steps of each rank; NaN for sums
    efficiency: float  # ms_apart / ms; NaN for sums, and if the machine was busy
    per_core: float  # throughput per core, relative to one rank; NaN as above, or without one rank
    sent_bytes: int  # by a rank, per step
    other_cores: float  # cores used by other processes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes to measure"
    )
    parser.add_argument("--columns", type=int, default=1 << 22, help="columns per rank")
    parser.add_argument(
        "--rows", type=int, default=16, help="number of active clients S, of K = 2 S"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed steps")
    parser.add_argument("--quick", action="store_true", help="dry run: 2^14 columns, 3 repeats")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write all measurements to this CSV file"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write CSV and Markdown to this folder"
    )


def run(namespace: argparse.Namespace, console: Console) -> list[Line]:
    """Measure every number of ranks in turn."""
    if namespace.quick:
        namespace.columns, namespace.repeats = 1 << 14, 3
    if min(namespace.ranks) < 1 or namespace.repeats < 3:
        raise SystemExit("--ranks: expected at least 1; --repeats: expected at least 3")
    console.print("   ".join(f"{key} {value}" for key, value in describe().items()))
    lines: list[Line] = []
    alone: dict[str, float] = {}  # ms of one rank, if that is measured first
    cores = os.cpu_count() or 1
    for ranks in namespace.ranks:
        start, own = time.perf_counter(), _children_seconds()
        with Watch() as watch:
            seen = _spawn(ranks, namespace.columns, namespace.rows, namespace.repeats)
        own = (_children_seconds() - own) / (time.perf_counter() - start)
        others = max(0.0, watch.others - own)  # the watch counts our child processes as others
        for what, (S, seconds, apart, sent) in seen.items():
            ms = 1e3 * statistics.median(seconds)
            q3 = 1e3 * statistics.quantiles(seconds, n=4)[2]
            ms_apart = 1e3 * statistics.median(apart) if apart else math.nan
            d = ranks * namespace.columns
            efficiency = math.nan if others > _BUSY else ms_apart / ms
            alone.setdefault(what, ms if ranks == 1 else math.nan)
            per_core = math.nan if others > _BUSY else throughput(alone[what], ms, ranks, cores)
            lines.append(
                Line(what, ranks, S, d, ms, q3, ms_apart, efficiency, per_core, sent, others)
            )
    console.print(_table(lines))
    if namespace.csv:
        _write_csv(namespace.csv, lines)
    if namespace.out:
        _write_csv(namespace.out / "sharded.csv", lines)
        (namespace.out / "sharded.md").write_text(_markdown(lines), encoding="utf-8")
    return lines


def throughput(ms_alone: float, ms: float, ranks: int, cores: int) -> float:
    """Return the columns per second and core, relative to one rank, which takes ``ms_alone``."""
    return ms_alone / ms * ranks / min(ranks, cores)


def _spawn(ranks: int, columns: int, rows: int, repeats: int) -> dict[str, Any]:
    """Run the ranks and return the measurements of rank 0, by name."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps({"folder": folder, "columns": columns, "rows": rows, "repeats": repeats})
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sharded", job],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=_TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"sharded: ranks failed, their exit codes are {codes}")
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# --- one rank ---------------------------------------------------------------------------------


def rank_main(job: dict[str, Any]) -> None:
    """Time the steps of every rule; rank 0 writes the results to a file."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['folder']}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    S, columns, repeats = job["rows"], job["columns"], job["repeats"]
    updates = torch.randn(S, columns, generator=torch.Generator().manual_seed(rank))
    params = torch.zeros(columns)
    clients = list(range(0, 2 * S, 2))
    triangle = 4 * S * (S + 1)
    apart = [dist.new_group([other]) for other in range(size)][rank]
    result: dict[str, Any] = {}
    for name, options in RULES.items():
        aggregators = [
            ShardedAggregator(
                name, num_clients=2 * S, num_params=d, segment=columns, group=group, **options
            )
            for d, group in ((size * columns, None), (columns, apart))
        ]
        calls = [partial(agg.step, params, updates, clients) for agg in aggregators]
        sums = triangle if name in ("fdms", "geometric-median") else 0
        result[f"step {name}"] = (S, *_times(calls, repeats), sums + 5 * 512)
    ranks = Ranks(None)
    for n in SUMMED:
        part = torch.ones(n * (n + 1) // 2, dtype=torch.float64)
        (seconds,) = _times([partial(ranks.add_in_order, [part])], repeats)
        result[f"sum of {n} x {n}"] = (n, seconds, [], part.nbytes)
    if rank == 0:
        Path(job["folder"], "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _times(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Time the calls in turn and return the seconds of each.

    All ranks start a call together. The first two calls of each are not timed.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 2):
        for call, times in zip(calls, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            if repeat >= 2:
                times.append(time.perf_counter() - start)
    return seconds


# --- results ------------------------------------------------------------------------------------

_HEAD = (
    "what",
    "ranks",
    "S",
    "d",
    "ms",
    "3rd quartile",
    "ms apart",
    "efficiency",
    "throughput of a core",
    "sent by a rank",
)


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.what,
        _ranks(line.ranks),
        str(line.S),
        f"{line.d:,}",
        f"{line.ms:.3g}",
        f"{line.ms_q3:.3g}",
        "" if math.isnan(line.ms_apart) else f"{line.ms_apart:.3g}",
        "" if math.isnan(line.ms_apart) else _percent(line.efficiency),
        "" if math.isnan(line.ms_apart) else _percent(line.per_core),
        f"{line.sent_bytes:,} B" if line.ranks > 1 else "",
    )


def _ranks(ranks: int) -> str:
    cores = os.cpu_count() or 1
    return f"{ranks} on {cores} cores" if ranks > cores else str(ranks)


def _percent(value: float) -> str:
    return "busy" if math.isnan(value) else f"{value:.0%}"


def _table(lines: list[Line]) -> Table:
    table = Table(*_HEAD, title="Weak scaling: the same columns on every rank, one thread each")
    for line in lines:
        table.add_row(*_cells(line))
    return table


def _markdown(lines: list[Line]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in describe().items())
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_cells, lines)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    return (
        "# Sharded\n\n`python -m benchmarks sharded`: the same columns on every rank, one thread "
        "each, gloo over loopback, medians. *ms apart*: as much work of every rank for itself at "
        "the same time; *efficiency*: that over *ms*. *Throughput of a core*: columns per second "
        "over the cores in use, relative to one rank. Where there are more ranks than cores they "
        f"take turns: then the two ratios are what counts.\n\n{about}\n\n{table}\n"
    )


def _write_csv(path: Path, lines: list[Line]) -> None:
    about = describe()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(lines[0]), *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(line), **about} for line in lines)


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]))
