#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile every CUDA kernel and print its resources: ``ptxas_summary.py sm_80 sm_90``.

Registers per thread, static shared memory, stack and spills, as ptxas counts them. Needs nvcc and
c++filt, no GPU and no torch. Fails on any warning and on any spill.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADINGS = ("kernel", "arch", "registers", "shared bytes", "stack bytes", "spilled bytes")


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel on one architecture."""

    kernel: str
    arch: str
    registers: int
    shared: int
    stack: int
    spilled: int  # stored and loaded again

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = (self.registers, self.shared, self.stack, self.spilled)
        return (self.kernel, self.arch, *map(str, numbers))


def compile_kernels(source: Path, archs: list[str]) -> str:
    """Return the report of ``ptxas -v`` on one file."""
    targets = [f"-gencode=arch=compute_{a[3:]},code={a}" for a in archs]
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", *targets, "-O3", "-std=c++17", f"-I{ROOT / 'csrc'}"]
        command += ["--Werror", "all-warnings", "-Xptxas", "-v"]
        command += ["-c", str(source), "-o", f"{folder}/kernels.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"nvcc failed on {source}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def read_report(report: str) -> list[Usage]:
    """Return the kernels in a report of ``ptxas -v``."""
    found = []
    entries = re.split(r"Compiling entry function ", report)[1:]
    for entry in entries:
        head = re.match(r"'([^']+)' for '([^']+)'", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        stack = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry
        )
        if not (head and registers and stack):
            raise SystemExit(f"ptxas: cannot read this report:\n{entry}")
        shared = re.search(r"(\d+) bytes smem", entry)
        found.append(
            Usage(
                kernel=head[1],
                arch=head[2],
                registers=int(registers[1]),
                shared=int(shared[1]) if shared else 0,
                stack=int(stack[1]),
                spilled=int(stack[2]) + int(stack[3]),
            )
        )
    return found


def readable(names: list[str]) -> list[str]:
    """``_ZN7fastagg...`` as ``gram_few_kernel<4, 16>``."""
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    pattern = re.compile(r"(?:\w+::|\(anonymous namespace\)::)*(\w+(?:<[^()]*>)?)\(")
    short = []
    for line in done.stdout.splitlines():
        # Values of enumerations come as (fastagg::Precision)1.
        match = pattern.search(re.sub(r"^void |\([\w:]+\)(?=\d)", "", line))
        short.append(match[1] if match else line)
    return short


def main(archs: list[str]) -> int:
    if not archs or not all(re.fullmatch(r"sm_\d+a?", arch) for arch in archs):
        raise SystemExit("usage: ptxas_summary.py sm_80 [sm_90 ...]")
    sources = sorted(ROOT.glob("csrc/kernels/cuda/*.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = pool.map(lambda source: compile_kernels(source, archs), sources)
        found = [usage for report in reports for usage in read_report(report)]
    names = readable([usage.kernel for usage in found])
    found = [replace(usage, kernel=name) for usage, name in zip(found, names, strict=True)]
    found.sort(key=lambda usage: (usage.kernel, usage.arch))
    lines = [HEADINGS, *(usage.cells for usage in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *numbers in lines:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *cells]))
    spilling = [f"{usage.kernel} ({usage.arch})" for usage in found if usage.spilled]
    if spilling or not found:
        print(f"FAILED: {len(found)} kernels, registers spilled by: {', '.join(spilling)}")
        return 1
    print(f"{len(found)} kernels, no spills")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
