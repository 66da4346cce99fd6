# SPDX-License-Identifier: Apache-2.0
"""What a call costs through interfaces that would free a wheel from PyTorch's version.

An op with a list of S rows of 610 numbers, behind: PyTorch's C++ interface, which fastagg uses;
PyTorch's stable interface (PyTorch 2.10 or newer); a C function that Python calls with addresses;
and this function registered as an op from Python, as torch.compile needs it.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import report

NUM_PARAMS = 610
COUNTS = (1, 20, 200)  # of rows
STABLE_SINCE = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10

Call = Callable[[Tensor, Sequence[Tensor]], None]


def interfaces(folder: Path) -> dict[str, Call]:
    """Compile the op and return it by the name of the interface."""
    from torch.utils import cpp_extension

    def load(name: str, *flags: str) -> Path:
        path = folder / name
        path.mkdir()
        cpp_extension.load(
            name,
            [str(Path(__file__).with_name("abi.cpp"))],
            extra_cflags=["-O3", *flags],
            build_directory=str(path),
            is_python_module=False,
        )
        return path / f"{name}.so"

    function = ctypes.CDLL(str(load("abi_cxx"))).abi_add_rows
    load("abi_stable", "-DSTABLE", STABLE_SINCE)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = None

    def by_address(out: Tensor, rows: Sequence[Tensor]) -> None:
        addresses = (ctypes.c_void_p * len(rows))(*[row.data_ptr() for row in rows])
        function(out.data_ptr(), addresses, len(rows), out.shape[0])

    library = torch.library.Library("abi_c", "DEF")
    library.define("add_rows_(Tensor(a!) out, Tensor[] rows) -> ()")
    library.impl("add_rows_", by_address, "CPU")
    interfaces.library = library  # type: ignore[attr-defined]  # it unregisters its ops when freed
    return {
        "C++ (used)": torch.ops.abi_cxx.add_rows_.default._op,
        "stable": torch.ops.abi_stable.add_rows_.default._op,
        "C function, called from Python": by_address,
        "C function, registered from Python": torch.ops.abi_c.add_rows_.default._op,
    }


@torch.no_grad()
def measure(calls: dict[str, Call], repeats: int) -> list[tuple[int, dict[str, float]]]:
    """(S, microseconds a call by interface): medians, interfaces in turn."""
    found = []
    for count in COUNTS:
        rows, out = [torch.randn(NUM_PARAMS) for _ in range(count)], torch.zeros(NUM_PARAMS)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(20):
                    call(out, rows)
                times[name].append((time.perf_counter() - start) / 20 * 1e6)
        found.append((count, {name: statistics.median(t) for name, t in times.items()}))
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=300, help="measurements; default: 300")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write abi.md")


def run(options: argparse.Namespace, console: Console) -> None:
    """Time all interfaces and print the table."""
    with tempfile.TemporaryDirectory() as folder, console.status("compiling"):
        rows = measure(interfaces(Path(folder)), options.repeats)
    headings = ["interface", *(f"S = {count}" for count, _ in rows)]
    lines = [[name, *(f"{times[name]:.1f}" for _, times in rows)] for name in rows[0][1]]
    text = report.markdown(headings, lines)
    console.print(text, markup=False)
    if options.out:
        title = "Interfaces of an op with a list of rows"
        said = f"d = {NUM_PARAMS}, medians in microseconds a call."
        path = report.write_page(options.out, "abi", title, said, text)
        console.print(f"written: {path}")
