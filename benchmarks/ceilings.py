# SPDX-License-Identifier: Apache-2.0
"""The ceilings: the largest bandwidths and multiply-add rates that this machine achieves.

Ceilings are measured in turn with the contenders and on the same operands. The memory of a shared
machine can be twice as fast in one minute as in the next, and operands that fit into a cache have
another bandwidth than operands that do not.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fastagg
from benchmarks.machine import ROOT, is_intel

ISAS = ("portable", "avx2", "avx512", "neon")  # numbered as in simd.h
_LANES = (4, 8, 16, 4)  # floats of a vector
_PREFETCH = (0, 256, 1024, 4096)  # distances in floats; the fastest depends on machine and size
_PASS_BYTES = 32 << 20  # smaller operands are read repeatedly until this many bytes are read
_FMA_FLOPS = 1_000_000_000  # per thread; this takes a few milliseconds
_ROUNDS, _MOST_ROUNDS = 10, 50  # of measuring multiply-adds per cycle
_PAUSE = 0.1  # seconds between them
_NEAR = 0.1  # a power of two times 2^-0.1 to 2^0.1
_SOURCES = (ROOT / "benchmarks" / "ceilings.cpp", ROOT / "csrc/kernels/cpu/simd.cpp")


@dataclass(frozen=True)
class Probe:
    """A ceiling to measure: ``rate()`` measures once and returns bytes or flops per second."""

    name: str
    rate: Callable[[], float]


@functools.cache
def library() -> ctypes.CDLL:
    """Load ceilings.cpp, compiled into build/ if it is missing or out of date."""
    target = ROOT / "build" / "benchmarks" / "ceilings.so"
    if not target.exists() or target.stat().st_mtime < max(s.stat().st_mtime for s in _SOURCES):
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if not compiler:
            raise RuntimeError(
                "measuring the ceilings needs a C++ compiler, found none; install one or set CXX"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        flags = [
            "-O3",
            "-std=c++17",
            "-ffp-contract=fast",
            "-Wall",
            "-Wno-psabi",
            "-shared",
            "-fPIC",
            "-pthread",
        ]
        command = [*compiler.split(), *flags, *map(str, _SOURCES), "-o", str(fresh)]
        subprocess.run(command, check=True)
        fresh.replace(target)
    found = ctypes.CDLL(str(target))
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.ceiling_read.argtypes = [pointer, size, size, number, number, number]
    found.ceiling_update.argtypes = [pointer] * 3 + [size] * 2 + [number] * 4
    found.ceiling_fma.argtypes = [size, number, number, pointer]
    found.ceiling_cycles.argtypes = [size]
    for function in (
        found.ceiling_read,
        found.ceiling_update,
        found.ceiling_fma,
        found.ceiling_cycles,
    ):
        function.restype = ctypes.c_double
    return found


def read_probe(x: Tensor, isa: str) -> Probe:
    """Return the probe of reading ``x`` (contiguous float32), in bytes/s."""
    level, n, passes = ISAS.index(isa), x.numel(), _passes(x.nbytes)

    def seconds(ahead: int) -> float:
        threads = torch.get_num_threads()
        return library().ceiling_read(x.data_ptr(), n, ahead, passes, level, threads) / passes

    (ahead,) = _fastest(seconds)
    return Probe("read", lambda: x.nbytes / seconds(ahead))


def update_probe(c: Tensor, u: Tensor, isa: str) -> Probe:
    """Return the probe of ``c = u - c``, in bytes/s at 12 bytes per element.

    c, u: contiguous float32 of the same shape; measuring changes c.
    """
    if c.shape != u.shape or not (c.is_contiguous() and u.is_contiguous()):
        raise ValueError(
            f"c, u: expected contiguous tensors of the same shape, got {c.shape} and {u.shape}"
        )
    return _update_probe("update", c, c, u, isa, streamed=(0,))


def update_beside_probe(to: Tensor, c: Tensor, u: Tensor, isa: str) -> Probe:
    """Return the probe of ``to = u - c``, in bytes/s at 12 bytes per element.

    What is written is not read before, if the processor has stores past the caches and they are
    faster; else every line of ``to`` is moved twice.

    to, c, u: contiguous float32 of the same shape, aligned to cache lines; measuring changes to.
    """
    if any(t.shape != to.shape or not t.is_contiguous() or t.data_ptr() % 64 for t in (to, c, u)):
        raise ValueError(
            "to, c, u: expected contiguous tensors of the same shape that begin at cache lines, "
            f"got {to.shape}, {c.shape} and {u.shape}"
        )
    return _update_probe("update beside", to, c, u, isa, streamed=(0, 1))


def _update_probe(
    name: str, to: Tensor, c: Tensor, u: Tensor, isa: str, streamed: Sequence[int]
) -> Probe:
    """Return the probe of ``to = u - c``, which is streamed or not, whatever is faster."""
    level, n, passes = ISAS.index(isa), c.numel(), _passes(2 * c.nbytes)

    def seconds(ahead: int, stream: int) -> float:
        threads, pointers = torch.get_num_threads(), [t.data_ptr() for t in (to, c, u)]
        taken = library().ceiling_update(*pointers, n, ahead, stream, passes, level, threads)
        return float(taken / passes)

    fastest = _fastest(seconds, streamed)
    return Probe(name, lambda: 3 * c.nbytes / seconds(*fastest))


def fma_probe(isa: str) -> Probe:
    """Return the probe of multiply-adds without memory access, in flops/s."""
    done, found = ctypes.c_int64(), library()

    def rate() -> float:
        threads = torch.get_num_threads()
        taken = found.ceiling_fma(
            _FMA_FLOPS, ISAS.index(isa), threads, ctypes.cast(ctypes.byref(done), ctypes.c_void_p)
        )
        return done.value / taken

    return Probe(f"fma {isa}", rate)


@functools.cache
def fma_per_cycle(isa: str) -> float:
    """Return the float32 multiply-adds per cycle of one core.

    Both the rate of multiply-adds and that of dependent additions, one per cycle, are the best of
    many short measurements in turn: another process can only make one slower. One on the other
    thread of the core can take half of the multiply-adds, and none of the additions. So there are
    rounds of them, over a second, and up to four seconds more as long as the result is not near a
    power of two and at least one vector. No known core does more than two vectors per cycle.
    """
    vector = _LANES[ISAS.index(isa)]
    products, cycles = [], []
    for done in range(1, _MOST_ROUNDS + 1):
        for _ in range(40):
            products.append(_products_per_second(isa))
            cycles.append(_cycles_per_second())
        found = max(products) / max(cycles)
        off = abs(math.log2(found) - round(math.log2(found)))
        plausible = off < _NEAR and found > 0.9 * vector
        if plausible and (done >= _ROUNDS or found > 1.9 * vector):
            return found
        time.sleep(_PAUSE)
    print(
        f"{found:.1f} multiply-adds per cycle: others use this core, or its kind is unknown; the "
        "kind of processor in the results may be wrong",
        file=sys.stderr,
    )
    return found


def _products_per_second(isa: str) -> float:
    done = ctypes.c_int64()
    seconds = library().ceiling_fma(
        _FMA_FLOPS // 50, ISAS.index(isa), 1, ctypes.cast(ctypes.byref(done), ctypes.c_void_p)
    )
    return done.value / 2 / seconds


def _cycles_per_second() -> float:
    additions = 1 << 20
    return float(additions / library().ceiling_cycles(additions))


@functools.cache
def kind() -> str:
    """Return the kind of processor: instruction set, and multiply-adds per cycle of one core.

    For example "avx2-16", or "avx512-16" for a processor that takes two cycles for 512 bits, and
    "avx512-32" for one that takes one. The number is rounded to a power of two. Intel's processors
    are kinds of their own, as "avx512-32-intel": their caches and prefetchers differ so much from
    AMD's that neither stands for the other.
    """
    isa = str(fastagg.build_info()["isa"])
    maker = "-intel" if is_intel() else ""
    return f"{isa}-{2 ** round(math.log2(fma_per_cycle(isa)))}{maker}"


def _passes(num_bytes: int) -> int:
    """Return the number of passes over operands of this size in one measurement.

    If larger than 1 it is even, so that ``c = u - c`` restores c.
    """
    return 1 if num_bytes >= _PASS_BYTES else 2 * (_PASS_BYTES // (2 * max(num_bytes, 1)) + 1)


def _fastest(seconds: Callable[..., float], *choices: Sequence[int]) -> tuple[int, ...]:
    """Return the arguments with the shortest time, of three runs each.

    The first one is a prefetch distance; ``choices`` has the values of each of the others.
    """
    options = itertools.product(_PREFETCH, *choices)
    return min(options, key=lambda option: min(seconds(*option) for _ in range(3)))
