# SPDX-License-Identifier: Apache-2.0
"""Two kernels with Google Highway beside ours: speed, compile time, size, bits.

The tiles of `gram` off the diagonal, 4 x 3 products of packed rows, and a weighted sum of rows,
both with AVX2 on one thread. highway.cpp has them with Highway, compiled for SSE2, AVX2 and AVX-512
as ours are; highway_ours.cpp calls ours.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import report
from benchmarks.machine import ROOT

HERE = Path(__file__).parent
KERNELS = ROOT / "csrc" / "kernels" / "cpu"
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-Wno-psabi"]
TARGETS = "-DHWY_DISABLED_TARGETS=(~(HWY_SSE2|HWY_AVX2|HWY_AVX3))"
OUR_SOURCES = [KERNELS / f"{name}.cpp" for name in ("weighted_sum", "simd", "scratch")]
# Rows that are multiplied with each other, one block of columns, and passes in one measurement.
TILED, COLUMNS, PASSES = 36, 768, 10
ROWS = 20
OLDEST = (1, 1)
WIDTHS = (16_384, 2_000_000)  # 1 MB, which stays in a cache, and 160 MB

POINTER, SIZE, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


@dataclass(frozen=True)
class Source:
    """Where Highway is: options of the compiler, and what to compile or link with its kernels."""

    include: list[str]
    rest: list[str]
    version: str


@dataclass(frozen=True)
class Line:
    """One row of the table; times are medians, `ratio` is the median of ratios."""

    what: str
    unit: str
    ours: float
    highway: float
    ratio: float


def find(folder: Path | None, compiler: str) -> Source:
    """Find Highway in a checkout, or where the compiler looks for headers."""
    include = [f"-I{HERE}", *([f"-I{folder}"] if folder else [])]
    if folder and not (folder / "hwy" / "highway.h").is_file():
        raise SystemExit(f"highway: --source: there is no hwy/highway.h in {folder}")
    done = subprocess.run(
        [compiler, "-std=c++17", *include, "-E", "-P", "-xc++", "-"],
        input="#include <hwy/highway.h>\nversion: HWY_MAJOR HWY_MINOR HWY_PATCH\n",
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(
            "highway: the compiler finds no hwy/highway.h; install Highway, or name a checkout: "
            "python -m benchmarks highway --source FOLDER"
        )
    version = tuple(int(part) for part in done.stdout.rpartition("version:")[2].split())
    name = ".".join(map(str, version))
    if version < OLDEST:
        raise SystemExit(f"highway: expected Highway 1.1 or newer, got {name}; see --source")
    if folder is None:
        return Source(include, ["-lhwy"], name)
    built = [folder / "hwy" / f"{part}.cc" for part in ("targets", "abort")]
    return Source(include, [str(path) for path in built if path.is_file()], name)


def compile_all(folder: Path, source: Source, compiler: str) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Compile and load the libraries: ours and Highway's."""
    ours, theirs = folder / "ours.so", folder / "highway.so"
    command = [compiler, *FLAGS, "-shared", "-pthread"]
    sources = [HERE / "highway_ours.cpp", *OUR_SOURCES]
    subprocess.run([*command, *map(str, sources), "-o", str(ours)], check=True)
    kernels = [*source.include, TARGETS, str(HERE / "highway.cpp"), *source.rest]
    subprocess.run([*command, *kernels, "-o", str(theirs)], check=True)
    return _declare(ours, "ours"), _declare(theirs, "highway")


def _declare(path: Path, prefix: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    arguments = {
        "tiles": [POINTER, SIZE, SIZE, SIZE, POINTER],
        "weighted_sum": [POINTER, POINTER, SIZE, SIZE, POINTER]
        + ([DOUBLE, POINTER, SIZE] if prefix == "highway" else []),
    }
    for name, types in arguments.items():
        function = getattr(library, f"{prefix}_{name}")
        function.argtypes, function.restype = types, None
    use = getattr(library, f"{prefix}_use_avx2")
    use.restype = ctypes.c_char_p
    isa = use().decode()
    if isa.lower() != "avx2":
        raise SystemExit(f"highway: compares code with AVX2, and this processor gets {isa}")
    return library


def tiles(ours: ctypes.CDLL, theirs: ctypes.CDLL) -> tuple[list[Callable[[], object]], bool]:
    """Return functions that compute the tiles, ours first, and whether their bits agree."""
    rows, others = ours.ours_rows_of_strip(), ours.ours_others_of_tile()
    if (rows, others) != (theirs.highway_rows_of_strip(), theirs.highway_others_of_tile()):
        raise RuntimeError("highway: expected tiles of the same shape")
    packed, count = torch.randn(TILED, COLUMNS), TILED // rows * (TILED // others)
    calls: list[Callable[[], object]] = []
    products = []
    for library, prefix in ((ours, "ours"), (theirs, "highway")):
        slots = getattr(library, f"{prefix}_slots")()
        sums = torch.zeros(count, slots, dtype=torch.float64)
        function = getattr(library, f"{prefix}_tiles")

        def call(function: Callable[..., None] = function, sums: Tensor = sums) -> None:
            function(packed.data_ptr(), TILED, COLUMNS, PASSES, sums.data_ptr())

        call()
        slot = getattr(library, f"{prefix}_slot")
        products.append(sums[:, [slot(k) for k in range(rows * others)]])
        calls.append(call)
    return calls, torch.equal(*products)


def sums(
    ours: ctypes.CDLL, theirs: ctypes.CDLL, width: int
) -> tuple[list[Callable[[], object]], bool]:
    """Return functions that add rows of `width` columns, ours first, and whether bits agree."""
    rows = [torch.randn(width) for _ in range(ROWS)]
    addresses = (POINTER * ROWS)(*[row.data_ptr() for row in rows])
    weights, quotients = torch.rand(ROWS, dtype=torch.float64), torch.empty(ROWS)
    ours.ours_scale.argtypes, ours.ours_scale.restype = [POINTER, SIZE, POINTER], DOUBLE
    factor = ours.ours_scale(weights.data_ptr(), ROWS, quotients.data_ptr())
    ours.ours_block.restype = SIZE
    block = ours.ours_block()
    memory = torch.empty(block, dtype=torch.float64)
    out = [torch.empty(width) for _ in range(2)]

    def our_call() -> None:
        # len(rows) also keeps the rows alive.
        ours.ours_weighted_sum(out[0].data_ptr(), addresses, len(rows), width, weights.data_ptr())

    def their_call() -> None:
        theirs.highway_weighted_sum(
            *(out[1].data_ptr(), addresses, len(rows), width, quotients.data_ptr()),
            *(factor, memory.data_ptr(), block),
        )

    our_call()
    their_call()
    return [our_call, their_call], torch.equal(*out)


def in_turn(
    calls: list[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.thread_time
) -> tuple[float, float, float]:
    """Return the medians of two calls in seconds, and of their ratio, second to first.

    The clock counts the time of this thread alone: other programs may use the machine.
    """
    times = []
    for _ in range(repeats):
        pair = []
        for call in calls:
            start = clock()
            call()
            pair.append(clock() - start)
        times.append(pair)
    first, second = (statistics.median(pair[k] for pair in times) for k in (0, 1))
    return first, second, statistics.median(b / a for a, b in times)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sizes(folder: Path, source: Source, compiler: str, compiles: int) -> list[Line]:
    """Compile the tiles alone several times; measure CPU time, lines read and machine code."""
    highway = [*source.include, TARGETS, "-DTILES_ONLY", str(HERE / "highway.cpp")]
    commands = {
        "ours": [compiler, *FLAGS, str(HERE / "highway_ours.cpp")],
        "highway": [compiler, *FLAGS, *highway],
    }
    objects = {name: folder / f"{name}.o" for name in commands}

    def compile_one(name: str) -> Callable[[], object]:
        return partial(_run, [*commands[name], "-c", "-o", str(objects[name])])

    first, second, ratio = in_turn([compile_one(name) for name in commands], compiles, _children)
    found = [Line("compiling the tiles", "s of CPU time", first, second, ratio)]
    first, second = (_run([*command, "-E", "-P"]).count("\n") for command in commands.values())
    found.append(Line("lines that the compiler reads for it", "", first, second, second / first))
    patterns = {"ours": r"run_avx2<.*::(Tiles,|PackedTile<)", "highway": r"N_AVX2::Tiles\("}
    code = []
    for name, path in objects.items():
        listed = _run(["nm", "-C", "-S", str(path)]).splitlines()
        code.append(sum(int(x.split()[1], 16) for x in listed if re.search(patterns[name], x)))
    first, second = code
    found.append(
        Line("machine code of the tiles with AVX2", "bytes", first, second, second / first)
    )
    return found


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measure(options: argparse.Namespace, source: Source, compiler: str) -> tuple[list[Line], bool]:
    """Return the table and whether all results have the same bits."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        libraries = compile_all(folder, source, compiler)
        calls, same = tiles(*libraries)
        flops = 2 * TILED**2 * COLUMNS * PASSES
        lines.append(_rate("tiles of `gram`, rows in L2", "GFLOP/s", flops, calls, options))
        for width in WIDTHS:
            calls, alike = sums(*libraries, width)
            same &= alike
            what = f"weighted sum of {ROWS} rows, d = {width:,}"
            lines.append(_rate(what, "GB/s", 4 * ROWS * width, calls, options))
        lines += sizes(folder, source, compiler, options.compiles)
    return lines, same


def _rate(
    what: str, unit: str, work: int, calls: list[Callable[[], object]], options: argparse.Namespace
) -> Line:
    first, second, ratio = in_turn(calls, options.repeats)
    return Line(what, unit, work / first / 1e9, work / second / 1e9, 1.0 / ratio)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=300, help="measurements; default: 300")
    parser.add_argument("--compiles", type=int, default=5, help="of each; default: 5")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="a checkout of Highway")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write highway.md")


def run(options: argparse.Namespace, console: Console) -> None:
    """Compare, and print the table."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise SystemExit("highway: needs a C++ compiler, found none; install one or set CXX")
    source = find(options.source, compiler)
    with console.status("compiling and measuring"):
        found, same = measure(options, source, compiler)
    lines = []
    for line in found:
        cells = [f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in (line.ours, line.highway)]
        what = f"{line.what}, {line.unit}" if line.unit else line.what
        lines.append([what, *cells, f"{line.ratio:.2f}"])
    lines.append(["bits of the results", "", "", "the same" if same else "different"])
    text = report.markdown(["", "fastagg", "Highway", "Highway to fastagg"], lines)
    console.print(text, markup=False)
    if options.out:
        title = f"Kernels with Highway {source.version}"
        said = "AVX2, medians of the CPU time of one thread, both in turn."
        path = report.write_page(options.out, "highway", title, said, text)
        console.print(f"written: {path}")
