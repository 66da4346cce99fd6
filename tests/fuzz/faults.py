# SPDX-License-Identifier: Apache-2.0
"""Processes in which the n-th allocation, or the n-th call that changes files, fails."""

from __future__ import annotations

import ctypes
import enum
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path(__file__).with_suffix(".c")


class Fault(enum.IntEnum):
    """What fails after :func:`armed`; the numbers are those in faults.c."""

    ONE_ALLOCATION = 1
    """The n-th allocation, and no other."""
    MEMORY_FULL = 2
    """From the n-th allocation on, all that need more memory than was in use before."""
    ONE_CALL = 3
    """The n-th call that changes files, with EIO."""
    DISK_FULL = 4
    """From the n-th call that needs room on a disk on, all of these, with ENOSPC."""
    READ_ONLY = 5
    """From the n-th call that changes files on, all of these, with EROFS."""


def why_not() -> str | None:
    """Return why faults cannot be injected on this machine, or None."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return "needs Linux with glibc"
    return None if _compiler() else "needs a C compiler"


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """Compile faults.c and return the library."""
    compiler, target = _compiler(), folder / "faults.so"
    assert compiler is not None
    command = [compiler, "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(target), "-ldl"]
    subprocess.run(command, check=True)
    return target


def start(library: Path, module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start ``python -m module`` with the library; its output and errors are pipes."""
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Faults:
    """The functions of the preloaded library in this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._arm, self._disarm = library.fault_arm, library.fault_disarm
        self._arm.argtypes = [ctypes.c_int, ctypes.c_long]
        self._calls, self._failed = library.fault_calls, library.fault_failed
        self._calls.restype = self._failed.restype = ctypes.c_long

    @contextmanager
    def armed(self, fault: Fault, n: int) -> Iterator[None]:
        """Let the ``n``-th call within this context fail, 1 for the first; 0: count the calls."""
        self._arm(int(fault), n or 1 << 62)
        try:
            yield
        finally:
            self._disarm()

    @property
    def calls(self) -> int:
        """Number of calls within the last context."""
        return int(self._calls())

    @property
    def failed(self) -> int:
        """Number of calls that failed within the last context."""
        return int(self._failed())
