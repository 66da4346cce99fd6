#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count instructions of the CUDA kernels: ``sass_counts.py sm_90 [FOLDER]``.

Compiles csrc of this tree, or of the checkout FOLDER, and prints three tables in Markdown. A row of
the first is the basic block of a Gram kernel with the most matrix products, and the stall cycles
that the compiler has put into its instructions: the least time that one warp needs for it. A row of
the second is all of a row operation for float32 and accesses of 16 bytes; of the third, all of a
kernel of the reduction, the rescue path, select_friends or eliminate_. Needs nvcc, c++filt, and
nvdisasm of at least version 12 on the PATH (pip install nvidia-cuda-nvdisasm), no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ptxas_summary import ROOT, readable

SOURCES = ("gram_few", "gram_many")
SHOWN = ("HMMA", "FADD", "LDS", "PRMT", "MOV")
ROW_SOURCES = ("weighted_sum", "mimic", "memory", "scaffold")
ROW_SHOWN = ("LDG", "LDS", "STS", "BAR", "SHFL", "DADD")
ROW_KERNELS = re.compile(r"<(false, )?float, 4>$|scaffold_mean_kernel<4>$")
OTHER_SOURCES = ("gram", "friends")
OTHER_SHOWN = ("LDG", "LDS", "BAR", "BRA", "CALL", "MUFU", "DADD")
OTHER_KERNELS = re.compile("reduce_|rescue_|sum_kernel|select_|eliminate_")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?((?:IMAD\.)?[A-Z0-9]+)")
_HIGH_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/$")
_STALL_BIT = 105 - 64
"""Where an instruction of 128 bits has its stall count of four bits, in the upper word."""
_ENDS = {"BRA", "EXIT", "RET", "BRX"}


@dataclass(frozen=True)
class Block:
    """A basic block: how often it has each instruction, and its stall cycles."""

    counts: Counter[str]
    stalls: int


def disassembled(source: Path, arch: str) -> str:
    """Return the SASS of a source, with the encoding of every instruction."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernels.cubin"
        flags = ["-cubin", f"-arch={arch}", "-O3", "-std=c++17", f"-I{source.parents[2]}"]
        subprocess.run(["nvcc", *flags, str(source), "-o", cubin], check=True)
        done = subprocess.run(
            ["nvdisasm", "-hex", cubin], capture_output=True, text=True, check=True
        )
    return done.stdout


def blocks_of(text: str) -> list[Block]:
    """Return the basic blocks of the SASS of one kernel."""
    found: list[Block] = []
    counts: Counter[str] = Counter()
    stalls, ended, last = 0, False, ""
    for line in text.splitlines():
        if ended or line.startswith(".L_"):
            found.append(Block(counts, stalls))
            counts, stalls, ended = Counter(), 0, False
        if instruction := _INSTRUCTION.search(line):
            last = (
                instruction[1].removeprefix("IMAD.") if "MOV" in instruction[1] else instruction[1]
            )
            counts[last] += 1
        elif high := _HIGH_WORD.match(line):
            stalls += int(high[1], 16) >> _STALL_BIT & 15
            ended = last in _ENDS
    return [*found, Block(counts, stalls)]


def print_whole(
    root: Path, arch: str, sources: tuple[str, ...], shown: tuple[str, ...], wanted: re.Pattern[str]
) -> None:
    """Print a table of all instructions of the kernels whose names contain ``wanted``."""
    print("\n| kernel | instructions | " + " | ".join(shown) + " |")
    print("|---|" + "---|" * (1 + len(shown)))
    for name in sources:
        text = disassembled(root / f"csrc/kernels/cuda/{name}.cu", arch)
        sections = re.split(r"^\.section\s+\.text\.|^//-+ \.text\.", text, flags=re.MULTILINE)[1:]
        whole = {
            re.match(r"\w+", section)[0]: sum((b.counts for b in blocks_of(section)), Counter())
            for section in sections
        }
        for kernel, counts in sorted(zip(readable(list(whole)), whole.values(), strict=True)):
            if wanted.search(kernel):
                cells = [sum(counts.values()), *(counts[i] for i in shown)]
                print(f"| `{kernel}` | " + " | ".join(map(str, cells)) + " |")


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or not re.fullmatch(r"sm_\d+a?", arguments[0]):
        raise SystemExit("usage: sass_counts.py sm_90 [FOLDER]")
    root = Path(arguments[1]) if len(arguments) == 2 else ROOT
    print("| kernel | instructions | stall cycles | " + " | ".join(SHOWN) + " |")
    print("|---|" + "---|" * (2 + len(SHOWN)))
    for name in SOURCES:
        text = disassembled(root / f"csrc/kernels/cuda/{name}.cu", arguments[0])
        sections = re.split(r"^\.section\s+\.text\.|^//-+ \.text\.", text, flags=re.MULTILINE)[1:]
        kernels = {}
        for section in sections:
            block = max(blocks_of(section), key=lambda block: block.counts["HMMA"])
            if block.counts["HMMA"]:
                kernels[re.match(r"\w+", section)[0]] = block
        for kernel, block in sorted(zip(readable(list(kernels)), kernels.values(), strict=True)):
            cells = [sum(block.counts.values()), block.stalls, *(block.counts[i] for i in SHOWN)]
            print(f"| `{kernel}` | " + " | ".join(map(str, cells)) + " |")
    print_whole(root, arguments[0], ROW_SOURCES, ROW_SHOWN, ROW_KERNELS)
    print_whole(root, arguments[0], OTHER_SOURCES, OTHER_SHOWN, OTHER_KERNELS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
