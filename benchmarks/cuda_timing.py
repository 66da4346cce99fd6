# SPDX-License-Identifier: Apache-2.0
"""The measurements of ``benchmarks.cuda``: what its worker process does."""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cuda_cases import Setup, Way, cases

_PASSES = 15
_SECONDS = 0.2  # approximate time spent on measuring one contender, launched or from a graph
_SLOW = 0.02  # seconds of a pass from which on the launches do not matter: no graph


@dataclass(frozen=True)
class Ceilings:
    """The bytes/s and flops/s that this GPU achieves; NaN if not measured."""

    copy: float = math.nan
    read: float = math.nan
    bfloat16: float = math.nan


@dataclass(frozen=True)
class Timing:
    """The measurements of one contender: seconds of a call, and the error of its result."""

    name: str
    role: str
    launched: float = math.nan
    graph: float = math.nan
    error: float = math.nan
    problem: str = ""

    @property
    def seconds(self) -> float:
        """The smaller of both times."""
        return self.launched if math.isnan(self.graph) else min(self.launched, self.graph)


class Timer:
    """Measures median times of passes: with events on a GPU, with a clock on a CPU (dry runs)."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def seconds(self, one_pass: Callable[[], object]) -> float:
        """Return the median time of a pass.

        Makes a pass to warm up, one to see how many passes fit the time, and at least one more.
        """
        one_pass()
        self._wait()
        begin = time.perf_counter()
        one_pass()
        self._wait()
        once = max(time.perf_counter() - begin, 1e-6)
        passes = max(1, min(_PASSES, int(_SECONDS / once)))
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


def _driver() -> str:
    """Return the version of the GPU's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.splitlines()[0].strip() if found.stdout else "unknown"


def measure_ceilings(dry: bool) -> tuple[str, Ceilings]:
    """Return the device with its software, and what the device achieves."""
    device = "cpu" if dry else "cuda"
    timer = Timer(device)
    name = "a CPU, dry run" if dry else torch.cuda.get_device_name()
    n, m = (1 << 16, 64) if dry else (1 << 30, 8192)
    if not dry:
        n = min(n, torch.cuda.mem_get_info()[0] // 16)
    x, y = torch.randn(n, device=device), torch.empty(n, device=device)
    copy = timer.seconds(lambda: y.copy_(x))
    read = min(timer.seconds(x.sum), timer.seconds(x.amax))
    a, b = (torch.randn(m, m, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = timer.seconds(lambda: a @ b)
    about = f"{name}, driver {'none' if dry else _driver()}, torch {torch.__version__}"
    return about, Ceilings(8 * n / copy, 4 * n / read, 2 * m**3 / product)


_ready: dict[int, Setup] = {}  # the last case, kept from one contender to the next


def _setup(index: int, dry: bool) -> Setup:
    """Return the operands of a case; those of another one are freed first."""
    if index not in _ready:
        _ready.clear()
        gc.collect()
        if not dry:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        _ready[index] = cases("cpu" if dry else "cuda", dry)[index].make()
    return _ready[index]


def names_and_roles(index: int, dry: bool) -> list[tuple[str, str]]:
    """Return the name and the role of each contender of case `index`."""
    return [(way.name, way.role) for way in _setup(index, dry).ways]


def measure(index: int, number: int, dry: bool) -> Timing:
    """Measure contender `number` of case `index`."""
    setup = _setup(index, dry)
    way, timer = setup.ways[number], Timer("cpu" if dry else "cuda")
    launched, graph, problem = _time(way, setup.sets, timer)
    error = setup.error(way) if setup.error else math.nan
    return Timing(way.name, way.role, launched, graph, error, problem)


def _time(way: Way, sets: int, timer: Timer) -> tuple[float, float, str]:
    """Return the seconds of one call, launched and from a graph, and why there is no graph.

    There is none, and its time is NaN, if the call cannot be captured or a pass is slow.
    """

    def one_pass() -> None:
        for index in range(sets):
            way.call(index)

    launched, graph, problem = timer.seconds(one_pass), math.nan, ""
    if way.capturable and launched < _SLOW:
        try:
            graph = timer.graph_seconds(one_pass)
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises if the GPU cannot be used any more
            problem = f"no graph: {error}"
    return launched / sets, graph / sets, problem


_COMMANDS: dict[str, Callable[..., Any]] = {
    "ceilings": measure_ceilings,
    "contenders": names_and_roles,
    "measure": measure,
}


def run(command: str, *arguments: Any) -> Any:
    """Run one of the measurements by name; the function of the worker process."""
    return _COMMANDS[command](*arguments)
