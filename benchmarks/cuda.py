# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.cuda``: ops and server steps on a GPU, against its ceilings and torch.

Only needs torch and fastagg, so that it runs on a GPU machine without other packages.

Times are medians over passes, measured with CUDA events. A pass goes over several sets of operands
that together are larger than the L2 cache. Contenders are launched call by call and, if they can
be captured and a pass takes less than 20 ms, also replayed from a CUDA graph. The ceilings are
measured in the same run: a copy within the GPU (bytes read and written), a reading pass, and a
dense bfloat16 product.

fastagg is measured first, in all cases; then the contenders. All measurements are made in another
process. If one raises an error, takes more than 20 seconds or ends the process, the others go on.
The files are written after each measurement and have a row for every case from the beginning. At
the end the results are compared with the targets for an H200; the exit status is 1 if a target is
missed or could not be determined (with --dry-run: if a measurement failed).
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks import cuda_timing, cuda_verdict
from benchmarks.cuda_cases import Case, cases
from benchmarks.cuda_timing import Ceilings, Timing
from benchmarks.cuda_worker import CaseError, Worker
from fastagg import ops

_MOST = 20.0  # seconds for one contender, with its operands and the start of a process


@dataclass(frozen=True)
class Row:
    """A row of the table and of the CSV file; NaN if there is no value."""

    op: str
    mode: str  # "high" or "tf32", or the dtype of the rows if it is not float32
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
    met: str  # "yes", "NO", or "unknown" if a time is missing
    problem: str  # why a time is missing


@dataclass
class Run:
    """All measurements so far. Each is written when it is known."""

    dry: bool
    todo: dict[int, Case]  # by number in `cases`
    stop: float  # no measurement starts after this time
    folder: Path | None
    about: str = ""
    ceilings: Ceilings = field(default_factory=Ceilings)
    timings: dict[int, dict[str, Timing]] = field(default_factory=dict)
    worker: Worker = field(default_factory=lambda: Worker(cuda_timing.run))

    def measure_all(self) -> None:
        """Measure the ceilings, fastagg in all cases, then the contenders in all cases."""
        self.write()
        try:
            self.about, self.ceilings = self._call("ceilings", 2 * _MOST, self.dry)
        except CaseError as error:
            self.about = "ceilings not measured"
            print(error, flush=True)
        print(self.about, describe(self.ceilings), sep="\n", flush=True)
        for ours in (True, False):
            for index in self.todo:
                self._measure_case(index, ours)
        self.worker.close()

    def _measure_case(self, index: int, ours: bool) -> None:
        """Measure fastagg, or else the contenders."""
        known = self.timings.setdefault(index, {})
        if time.perf_counter() > self.stop or (not ours and not known):
            return
        try:
            names = self._call("contenders", _MOST, index, self.dry)
        except CaseError as error:
            self._note(index, Timing("fastagg", "ours", problem=_last_line(error)), str(error))
            return
        for number, (name, role) in enumerate(names):
            if (role == "ours") != ours or time.perf_counter() > self.stop:
                continue
            try:
                self._note(index, self._call("measure", _MOST, index, number, self.dry))
            except CaseError as error:
                self._note(index, Timing(name, role, problem=_last_line(error)), str(error))

    def _call(self, command: str, seconds: float, *arguments: Any) -> Any:
        left = max(5.0, self.stop - time.perf_counter())
        return self.worker.call(command, *arguments, seconds=min(seconds, left))

    def _note(self, index: int, timing: Timing, details: str = "") -> None:
        self.timings[index].setdefault(timing.name, timing)
        case = self.todo[index]
        result = details or f"{timing.seconds * 1e6:.4g} us"
        print(f"{case.title}, {timing.name}: {result}", timing.problem, flush=True)
        self.write()

    def rows(self) -> list[Row]:
        """Return a row for each measured contender, and one for each case without any."""
        found = []
        for index, case in self.todo.items():
            timings = list(self.timings.get(index, {}).values())
            found += rows_of(case, timings, self.ceilings)
        return found

    def write(self) -> None:
        """Write the files."""
        if self.folder:
            write(self.rows(), self.ceilings, self.about, self.folder)


def _last_line(error: CaseError) -> str:
    return str(error).strip().splitlines()[-1][:200]


def rows_of(case: Case, timings: list[Timing], ceilings: Ceilings) -> list[Row]:
    """Return the rows of one case; the first is that of fastagg, measured or not."""
    ours = next(
        (timing for timing in timings if timing.role == "ours"),
        Timing("fastagg", "ours", problem="not measured"),
    )
    others = [timing for timing in timings if timing is not ours]
    careful = [t.seconds for t in others if t.role == "careful" and not math.isnan(t.seconds)]
    fastest = min(careful, default=math.nan)
    return [_row(case, ceilings, timing, ours.seconds, fastest) for timing in (ours, *others)]


def _row(case: Case, ceilings: Ceilings, timing: Timing, ours: float, careful: float) -> Row:
    seconds = timing.seconds
    rates = {
        "copy": case.num_bytes / ceilings.copy,
        "read": case.num_bytes / ceilings.read,
        "arithmetic": case.flops * case.products / ceilings.bfloat16,
    }
    mine = timing.role == "ours"
    floors = []  # text, what was reached (NaN: unknown), the least
    if mine and case.share:
        reached = rates[case.ceiling] / seconds
        floors.append((f"{case.share:.0%} of {case.ceiling}", reached, case.share))
    if mine and case.speedup:
        floors.append((f"{case.speedup} x careful", careful / seconds, case.speedup))
    return Row(
        op=case.op,
        mode=case.mode,
        K=case.K,
        S=case.S,
        d=case.d,
        by=timing.name,
        role=timing.role,
        us=seconds * 1e6,
        us_launched=timing.launched * 1e6,
        us_graph=timing.graph * 1e6,
        gbytes_per_s=case.num_bytes / seconds * 1e-9,
        tflops=case.flops / seconds * 1e-12,
        percent=100 * rates[case.ceiling] / seconds if mine else math.nan,
        ceiling=case.ceiling if mine else "",
        speedup=seconds / ours,
        error=timing.error,
        floor=", ".join(text for text, _, _ in floors),
        met=_met([(reached, least) for _, reached, least in floors]),
        problem=timing.problem,
    )


def _met(floors: list[tuple[float, float]]) -> str:
    """Return the verdict on pairs (reached, least); empty without any."""
    if not floors:
        return ""
    if any(reached < least for reached, least in floors):
        return "NO"
    return "unknown" if any(math.isnan(reached) for reached, _ in floors) else "yes"


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
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells(row).values())} |"


def write(rows: list[Row], ceilings: Ceilings, about: str, folder: Path) -> None:
    """Write cuda.csv and cuda.md. A reader sees the old file or the new one, never a part."""
    folder.mkdir(parents=True, exist_ok=True)
    csv_file, text_file = folder / ".cuda.csv", folder / ".cuda.md"
    with csv_file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(cells, rows))
    head = ["# CUDA", "", about, "", describe(ceilings), ""]
    text_file.write_text("\n".join([*head, *lines(rows)]) + "\n", encoding="utf-8")
    csv_file.replace(folder / "cuda.csv")
    text_file.replace(folder / "cuda.md")


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
        "--seconds",
        type=float,
        default=math.inf,
        help="start no new measurement after this many seconds",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run tiny sizes on the CPU; the measurements are meaningless",
    )
    options = parser.parse_args(arguments)
    stop = time.perf_counter() + options.seconds
    device = "cpu" if options.dry_run else "cuda"
    if device not in ops.devices():
        raise SystemExit(
            "this build has no CUDA kernels, or there is no GPU; use --dry-run to test the script"
        )
    todo = {
        index: case
        for index, case in enumerate(cases(device, options.dry_run))
        if options.only in case.title
    }
    run = Run(options.dry_run, todo, stop, options.out)
    run.measure_all()
    table: list[cuda_verdict.Cells] = [cells(row) for row in run.rows()]
    print(*cuda_verdict.lines(table), sep="\n")
    if options.dry_run:
        return 1 if any(row["problem"] for row in table) else 0
    return 0 if cuda_verdict.passed(table) else 1


if __name__ == "__main__":
    sys.exit(main())
