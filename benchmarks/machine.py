# SPDX-License-Identifier: Apache-2.0
"""The machine: what it is, what else it is doing, and how much memory a call takes (Linux)."""

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

ROOT = Path(__file__).resolve().parents[1]
BUSY = 0.05
"""Share of all cores that anybody else may use during a comparison; beyond it no ratio is given."""


def describe() -> dict[str, str]:
    """What a figure cannot be read without."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.processor() or "unknown",
        "cores": str(os.cpu_count()),
        "l3_mb": f"{cache_bytes(3) / 1e6:.0f}",
        "best_isa": str(fastagg.build_info()["isa"]),
        "torch": torch.__version__,
        "commit": _commit(),
    }


@functools.cache
def blas() -> str:
    """numpy's, with the processor whose kernels it has chosen: that decides how fast it is."""
    import numpy  # noqa: F401  (loads it)

    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "unknown"
    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    # numpy brings its own, or uses the system's.
    for library in sorted(found, key=lambda library: "numpy" not in library["filepath"]):
        name, version = library["internal_api"], library["version"]
        return f"{name} {version} {library.get('architecture', '')}".strip()
    return "unknown"


@functools.cache
def _commit() -> str:
    """The commit, with "-dirty" if tracked files other than results differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    results = ":!benchmarks/results"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", results)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def cache_bytes(level: int) -> int:
    """Size of one cache of that level; 0 if the system does not tell."""
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if _read(folder / "level").strip() == str(level):
            number, unit = re.match(r"(\d+)([KM]?)", _read(folder / "size")).groups()  # type: ignore[union-attr]
            return int(number) << {"": 0, "K": 10, "M": 20}[unit]
    return 0


def home_of(num_bytes: int) -> str:
    """Where operands of that size stay between calls: "cache" (half of L3 or less) or "DRAM"."""
    return "cache" if num_bytes <= cache_bytes(3) / 2 else "DRAM"


@contextmanager
def threads_apart() -> Iterator[None]:
    """Keeps the calling thread on one core, and all other threads of this process off it (Linux).

    Left alone, the threads of a pool often share a core for the first milliseconds after a pause,
    with the others idle: all that a short call takes. Threads that start meanwhile stay on the
    core of the one that starts them, so pools must have started before.
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
    """How many cores the rest of the machine used meanwhile: ``with Watch() as watch: ...``.

    That is the CPU time of the whole machine (time stolen by other virtual machines included)
    less that of this process, over wall time. The kernel counts in hundredths of a second, so a
    watch of less than about a second is coarse.

    Attributes:
        others: in cores; NaN if the system does not tell.
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
        """Whether the others used more than ``BUSY`` of the machine."""
        return self.others > BUSY * (os.cpu_count() or 1)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), _machine_seconds(), time.process_time()


def _machine_seconds() -> float:
    """CPU seconds that the machine has spent on anything since it started."""
    first = _read("/proc/stat").split("\n", 1)[0].split()
    if len(first) < 9:
        return float("nan")
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[1:9])
    ticks: int = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / ticks


def peak_bytes(call: Callable[[], object]) -> float:
    """The most resident memory that ``call`` adds while it runs; NaN if the system does not tell.

    Call it once before: what a first call allocates for good (threads, library workspaces) does
    not count. Accurate to a few hundred KB, since the kernel counts pages in batches.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed must not be there to be used
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is there
    except (OSError, AttributeError):
        return float("nan")
    before = _resident("VmRSS")
    call()
    return max(0.0, _resident("VmHWM") - before)


def _resident(field: str) -> float:
    match = re.search(rf"^{field}:\s+(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    return int(match.group(1)) * 1024.0 if match else float("nan")


def _read(path: str | Path) -> str:
    """The content of a file of /proc or /sys, empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
