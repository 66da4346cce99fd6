# SPDX-License-Identifier: Apache-2.0
"""The machine: its description, its load by other processes, the memory of a call (Linux)."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import fastagg
from fastagg import _C

ROOT = Path(__file__).resolve().parents[1]
BUSY = 0.05
"""Fraction of all cores that other processes may use; above it the ratios are refused."""


def describe() -> dict[str, str]:
    """Return the properties of the machine and the build that measurements depend on."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.processor() or "unknown",
        "cores": str(os.cpu_count()),
        "l3_mb": f"{cache_bytes(3) / 1e6:.0f}",
        "best_isa": str(fastagg.build_info()["isa"]),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def is_intel() -> bool:
    """Return whether the processor is one of Intel's."""
    return re.search(r"^vendor_id\s*:\s*GenuineIntel$", _read("/proc/cpuinfo"), re.M) is not None


@functools.cache
def blas() -> str:
    """Return numpy's BLAS library and the processor type whose kernels it uses.

    The processor type decides the speed.
    """
    import numpy  # noqa: F401  (loads the library)

    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "unknown"
    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    # numpy contains its own BLAS library, or uses that of the system.
    for library in sorted(found, key=lambda library: "numpy" not in library["filepath"]):
        name, version = library["internal_api"], library["version"]
        return f"{name} {version} {library.get('architecture', '')}".strip()
    return "unknown"


@functools.cache
def _commit() -> str:
    """Return the commit, with "-dirty" if tracked files other than results differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    results = ":!benchmarks/results"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", results)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def cache_bytes(level: int) -> int:
    """Return the size of one cache of `level`; 0 if the system does not report it."""
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if _read(folder / "level").strip() == str(level):
            number, unit = re.match(r"(\d+)([KM]?)", _read(folder / "size")).groups()  # type: ignore[union-attr]
            return int(number) << {"": 0, "K": 10, "M": 20}[unit]
    return 0


def home_of(num_bytes: int) -> str:
    """Return where operands of this size are between calls.

    "cache" if they need at most half of the L3 cache that kernels count on, else "DRAM".
    """
    return "cache" if num_bytes <= _C.own_l3_bytes() / 2 else "DRAM"


@contextmanager
def threads_apart() -> Iterator[None]:
    """Keep the calling thread on one core, and all other threads of this process off it (Linux).

    Otherwise the threads of a pool often share a core for the first milliseconds after a pause,
    while other cores are idle. A short call takes no longer than that. Threads that start within
    this context inherit the core of the thread that starts them, so thread pools must have been
    started before.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    everywhere, own = os.sched_getaffinity(0), threading.get_native_id()
    first = min(everywhere)
    try:
        for thread in _threads():
            _keep_on(thread, {first} if thread == own else everywhere - {first} or everywhere)
        yield
    finally:
        for thread in _threads():
            _keep_on(thread, everywhere)


def _threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def _keep_on(thread: int, cores: set[int]) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, cores)


class Watch:
    """Measures how many cores other processes use: ``with Watch() as watch: ...``.

    This is the CPU time of the whole machine (including time stolen by other virtual machines)
    minus that of this process, divided by wall time. The kernel counts hundredths of a second, so
    the result is inaccurate for less than about a second.

    Attributes:
        others: the number of cores; NaN if the system does not report it.
    """

    others = float("nan")

    def __enter__(self) -> Watch:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall, machine, own = (b - a for a, b in zip(self._start, self._now(), strict=True))
        self.others = max(0.0, machine - own) / max(wall, 1e-9)

    @property
    def busy(self) -> bool:
        """Whether other processes used more than ``BUSY`` of the cores."""
        return self.others > BUSY * (os.cpu_count() or 1)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), _machine_seconds(), time.process_time()


def _machine_seconds() -> float:
    """Return the CPU seconds of all processes since the machine was started."""
    first = _read("/proc/stat").split("\n", 1)[0].split()
    if len(first) < 9:
        return float("nan")
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[1:9])
    ticks: int = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / ticks


def peak_bytes(call: Callable[[], object]) -> float:
    """Return the additional resident memory that ``call`` uses at its peak.

    Run ``call`` once before, so that its permanent allocations (threads, library workspaces) do not
    count. The result is accurate to a few hundred KB, because the kernel counts pages in batches.
    It is NaN if the system does not report it.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # return memory that earlier calls freed to the system
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current value
    except (OSError, AttributeError):
        return float("nan")
    before = _resident("VmRSS")
    call()
    return max(0.0, _resident("VmHWM") - before)


def _resident(field: str) -> float:
    match = re.search(rf"^{field}:\s+(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    return int(match.group(1)) * 1024.0 if match else float("nan")


def _read(path: str | Path) -> str:
    """Return the contents of a file in /proc or /sys; empty if it does not exist."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
