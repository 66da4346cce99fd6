# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.cuda``: ops and server steps on a GPU, against its ceilings and torch.

Only needs torch and fastagg, so that it runs on a GPU machine without other packages.

Times are medians over passes, measured with CUDA events. A pass goes over several sets of operands
that together are larger than the L2 cache. Contenders are launched call by call and, if they can be
captured, also replayed from a CUDA graph. The ceilings are measured in the same run: a copy within
the GPU (bytes read and written), a reading pass, and a dense bfloat16 product. At the end the
results are compared with the targets for an H200; the exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from benchmarks.cuda_cases import Case, Way, cases
from fastagg import ops

_PASSES = 15
_SECONDS = 0.4  # approximate time spent on measuring one contender


@dataclass(frozen=True)
class Ceilings:
    """The bytes/s and flops/s that this GPU achieves."""

    copy: float
    read: float
    bfloat16: float


@dataclass(frozen=True)
class Row:
    """A row of the table and of the CSV file; NaN if there is no value."""

    op: str
    mode: str  # "tf32", or the dtype of the rows if it is not float32
    K: int
    S: int
    d: int
    by: str
    role: str
    us: float  # the smaller of the next two
    us_launched: float
    us_graph: float
    gbytes_per_s: float
    tflops: float
    percent: float  # of the ceiling; fastagg only
    ceiling: str
    speedup: float  # of fastagg over this contender
    error: float  # of a cosine, or relative to the largest element
    floor: str  # the target; fastagg only
    met: str


class Timer:
    """Measures median times of passes: with events on a GPU, with a clock on a CPU (dry runs)."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def seconds(self, one_pass: Callable[[], object]) -> float:
        """Return the median time of a pass."""
        one_pass()
        self._wait()
        begin = time.perf_counter()
        one_pass()
        self._wait()
        once = max(time.perf_counter() - begin, 1e-6)
        passes = max(3, min(_PASSES, int(_SECONDS / once)))
        return statistics.median(self._timed(one_pass) for _ in range(passes))

    def graph_seconds(self, one_pass: Callable[[], object]) -> float:
        """Return the median time of a pass replayed from a CUDA graph; NaN on a CPU."""
        if not self.cuda:
            return math.nan
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            one_pass()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_pass()
        return self.seconds(graph.replay)

    def _timed(self, one_pass: Callable[[], object]) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            one_pass()
            return time.perf_counter() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        one_pass()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def measure_ceilings(timer: Timer, device: str, dry: bool) -> Ceilings:
    n, m = (1 << 16, 64) if dry else (1 << 30, 8192)
    x, y = torch.randn(n, device=device), torch.empty(n, device=device)
    copy = timer.seconds(lambda: y.copy_(x))
    read = min(timer.seconds(x.sum), timer.seconds(x.amax))
    a, b = (torch.randn(m, m, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = timer.seconds(lambda: a @ b)
    return Ceilings(8 * n / copy, 4 * n / read, 2 * m**3 / product)


def measure(case: Case, timer: Timer, ceilings: Ceilings) -> list[Row]:
    """Measure one case and return a row for each contender."""
    setup = case.make()
    found = []
    for way in setup.ways:
        launched, graph = _time(way, setup.sets, timer)
        error = setup.error(way) if setup.error else math.nan
        found.append((way, launched, graph, error))
    ours = next(_best(a, b) for way, a, b, _ in found if way.role == "ours")
    careful = [_best(a, b) for way, a, b, _ in found if way.role == "careful"]
    return [_row(case, ceilings, *result, ours, min(careful)) for result in found]


def _time(way: Way, sets: int, timer: Timer) -> tuple[float, float]:
    """Return the seconds of one call, launched and from a graph (NaN if not capturable)."""

    def one_pass() -> None:
        for index in range(sets):
            way.call(index)

    launched = timer.seconds(one_pass) / sets
    graph = timer.graph_seconds(one_pass) / sets if way.capturable else math.nan
    return launched, graph


def _best(launched: float, graph: float) -> float:
    return launched if math.isnan(graph) else min(launched, graph)


def _row(
    case: Case,
    ceilings: Ceilings,
    way: Way,
    launched: float,
    graph: float,
    error: float,
    ours: float,
    careful: float,
) -> Row:
    seconds = _best(launched, graph)
    rates = {
        "copy": case.num_bytes / ceilings.copy,
        "read": case.num_bytes / ceilings.read,
        "arithmetic": case.flops * case.products / ceilings.bfloat16,
    }
    mine = way.role == "ours"
    floor, met = [], True
    if mine and case.share:
        floor.append(f"{case.share:.0%} of {case.ceiling}")
        met = met and rates[case.ceiling] / seconds >= case.share
    if mine and case.speedup:
        floor.append(f"{case.speedup} x careful")
        met = met and careful / seconds >= case.speedup
    return Row(
        op=case.op,
        mode=case.mode,
        K=case.K,
        S=case.S,
        d=case.d,
        by=way.name,
        role=way.role,
        us=seconds * 1e6,
        us_launched=launched * 1e6,
        us_graph=graph * 1e6,
        gbytes_per_s=case.num_bytes / seconds * 1e-9,
        tflops=case.flops / seconds * 1e-12,
        percent=100 * rates[case.ceiling] / seconds if mine else math.nan,
        ceiling=case.ceiling if mine else "",
        speedup=seconds / ours,
        error=error,
        floor=", ".join(floor),
        met=("yes" if met else "NO") if floor else "",
    )


def cells(row: Row) -> dict[str, str]:
    """Return a row as text; NaN becomes an empty cell."""
    return {
        name: ("" if math.isnan(value) else f"{value:.4g}")
        if isinstance(value, float)
        else str(value)
        for name, value in asdict(row).items()
    }


def lines(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    names = [field.name for field in fields(Row)]
    yield f"| {' | '.join(names)} |"
    yield "|" + " --- |" * len(names)
    for row in rows:
        yield f"| {' | '.join(cells(row).values())} |"


def write(rows: list[Row], ceilings: Ceilings, about: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cuda.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(cells, rows))
    head = ["# CUDA", "", about, "", describe(ceilings), ""]
    text = "\n".join([*head, *lines(rows)]) + "\n"
    (folder / "cuda.md").write_text(text, encoding="utf-8")


def describe(ceilings: Ceilings) -> str:
    return (
        f"Ceilings: copy {ceilings.copy * 1e-9:.0f} GB/s (read and written), "
        f"read {ceilings.read * 1e-9:.0f} GB/s, bfloat16 {ceilings.bfloat16 * 1e-12:.0f} TFLOP/s."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write cuda.csv and cuda.md to this folder"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only cases whose title contains TEXT"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no new case after this many seconds"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run tiny sizes on the CPU; the measurements are meaningless",
    )
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    device = "cpu" if options.dry_run else "cuda"
    if device not in ops.devices():
        raise SystemExit(
            "this build has no CUDA kernels, or there is no GPU; use --dry-run to test the script"
        )
    torch.manual_seed(0)
    timer = Timer(device)
    name = "a CPU, dry run" if options.dry_run else torch.cuda.get_device_name()
    about = f"{name}, torch {torch.__version__}"
    ceilings = measure_ceilings(timer, device, options.dry_run)
    print(about, describe(ceilings), sep="\n", flush=True)
    rows: list[Row] = []
    left_out = []
    for case in cases(device, options.dry_run):
        if options.only not in case.title:
            continue
        if time.perf_counter() - begin > options.seconds:
            left_out.append(case.title)
            continue
        fresh = measure(case, timer, ceilings)
        rows += fresh
        print(*list(lines(fresh))[2:], sep="\n", flush=True)
        if options.out:
            write(rows, ceilings, about, options.out)
        if device == "cuda":
            torch.cuda.empty_cache()
    if left_out:
        print("not measured because of --seconds:", *left_out, sep="\n  ")
    return 0 if options.dry_run else _compare_with_floors(rows)


def _compare_with_floors(rows: list[Row]) -> int:
    """Print how many targets were met and which were missed; return the exit status."""
    missed = [
        f"{row.op} {row.mode} ({row.S}, {row.d}): {row.floor}" for row in rows if row.met == "NO"
    ]
    targets = sum(bool(row.floor) for row in rows)
    print(f"{targets - len(missed)} of {targets} targets met; missed:", *missed, sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
