#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare a stage of gram_few with the time that memory needs for it: ``stage_budget.py``.

Compiles the kernels for sm_90 and prints a table in Markdown. A row is a kernel for 16-byte
accesses and a number of rows: the instructions of a warp for a stage, its stall cycles (what the
compiler has put into the instructions: the least time of one warp), the warps of a scheduler, and
the budget: the cycles in which the memory of an H200 delivers a stage of each of them. The ratio is
that of the stall cycles of a warp, or of the instructions of all warps if they are more, to the
budget. The sums of a block of columns count in part, as each stage is one of several. Waits for
copies and for the other warp are not counted. This is an estimate; nothing is measured.

The rows are the least and the most of a kernel, and those with the highest ratio. The exit status
is 1 if a ratio is above ``--at-most``. Needs what sass_counts.py needs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ptxas_summary import ROOT
from sass_counts import disassembled

# An H200: bytes read in a second, multiprocessors, their schedulers, cycles in a second, and what
# thread blocks of a multiprocessor share: bytes of shared memory (1 KB of each is reserved), and
# registers.
BANDWIDTH, PROCESSORS, SCHEDULERS, CLOCK = 4.4e12, 132, 4, 1.98e9
SHARED, RESERVED, REGISTERS = 228 << 10, 1 << 10, 1 << 16
THREADS = 128
PRECISIONS = {0: "highest", 1: "high", 2: "tf32"}
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+\s+)?([A-Z0-9_.]+)([^;]*);")
_HIGH_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/$")
_TARGET = re.compile(r"\.L_x_\d+")
_LAYOUT = """
#include <cstdio>
#include "kernels/cuda/gram_layout.h"
using namespace fastagg::cuda;
template <int G> void print() {
  using T = Few<G, false>;
  std::printf("%d %d %d %d", G, T::kStageColumns, T::kBlockStages, T::kSharedBytes);
  for (int rows = 1; rows <= 64; ++rows)
    if (few_groups(rows) == G) std::printf(" %d %d", rows, rows * shared_chunks(rows));
  std::printf("\\n");
}
int main() { print<1>(); print<2>(); print<4>(); print<6>(); print<8>(); }
"""


@dataclass
class Block:
    """A basic block: its instructions, their stall cycles, and the blocks that may follow."""

    counts: Counter[str] = field(default_factory=Counter)
    stalls: int = 0
    follows: list[int] = field(default_factory=list)


def graph_of(text: str) -> list[Block]:
    """Return the basic blocks of the SASS of one kernel."""
    blocks, labels, jumps = [Block()], {}, {}
    jumped = False  # whether the last instruction was a jump
    ends = False  # whether it ends its block
    falls = True  # whether the next block may follow it
    for line in text.splitlines():
        label = re.match(r"(\.L_x_\d+):", line)
        if label or ends:
            if blocks[-1].counts:
                if falls:
                    blocks[-1].follows.append(len(blocks))
                blocks.append(Block())
            ends, falls = False, True
        if label:
            labels[label[1]] = len(blocks) - 1
        elif instruction := _LINE.search(line):
            condition, name, rest = instruction.groups()
            blocks[-1].counts[name.split(".")[0]] += 1
            jumped = name.split(".")[0] in ("BRA", "EXIT")
            if jumped:
                falls = condition is not None
                if target := _TARGET.search(rest):
                    jumps.setdefault(len(blocks) - 1, []).append(target[0])
        elif high := _HIGH_WORD.match(line):
            blocks[-1].stalls += int(high[1], 16) >> (105 - 64) & 15
            ends = jumped  # this was the second word of the last instruction
    for number, targets in jumps.items():
        blocks[number].follows += [labels[target] for target in targets]
    return blocks


def paths(blocks: list[Block], start: int, end: int, most: int = 2000) -> list[list[int]]:
    """Return the paths from ``start`` to ``end`` that visit no block twice, without ``end``."""
    found: list[list[int]] = []
    open_paths = [[start]]
    while open_paths and len(found) < most:
        path = open_paths.pop()
        for follows in blocks[path[-1]].follows:
            if follows == end:
                found.append(path)
            elif follows < len(blocks) and follows not in path:
                open_paths.append([*path, follows])
    return found


def costs(blocks: list[Block], path: list[int]) -> tuple[int, int]:
    """Return the instructions and the stall cycles of a path."""
    return sum(sum(blocks[n].counts.values()) for n in path), sum(blocks[n].stalls for n in path)


def stage_of(text: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the costs of a stage, and those of the sums of a block of columns."""
    blocks = graph_of(text)
    products = max(range(len(blocks)), key=lambda n: blocks[n].counts["HMMA"])
    # A stage: from the products to themselves, by copies that are not in a loop.
    rounds = [path for path in paths(blocks, products, products) if path[1:]]

    def copies(path: list[int]) -> int:
        return sum(blocks[n].counts["LDGSTS"] for n in path)

    def sums(path: list[int]) -> int:
        return sum(blocks[n].counts["DADD"] for n in path)

    most = max(map(copies, rounds))
    rounds = [path for path in rounds if copies(path) == most]
    stage = min((path for path in rounds if sums(path) == 0), key=lambda path: costs(blocks, path))
    flushed = min((path for path in rounds if sums(path) > 0), key=lambda path: costs(blocks, path))
    (n, cycles), (more, longer) = costs(blocks, stage), costs(blocks, flushed)
    return (n, cycles), (more - n, longer - cycles)


@dataclass(frozen=True)
class Layout:
    """The layout of a kernel: the columns of a stage, the stages of a block, shared bytes.

    ``together``, by number of rows: rows of a stage, which are those of several chunks up to 4.
    """

    columns: int
    stages: int
    shared: int
    together: dict[int, int]


def layouts(root: Path) -> dict[int, Layout]:
    """Return the layouts by the number of row groups."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "layout.cpp"), f"{folder}/layout"
        source.write_text(_LAYOUT, encoding="utf-8")
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        flags = ["-std=c++17", f"-I{root / 'csrc'}"]
        subprocess.run([*compiler, *flags, str(source), "-o", program], check=True)
        lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in lines.splitlines():
        groups, columns, stages, shared, *rows = map(int, line.split())
        together = dict(zip(rows[::2], rows[1::2], strict=True))
        found[groups] = Layout(columns, stages, shared, together)
    return found


def ratio_of(rows: int, columns: int, warps: int, instructions: float, cycles: float) -> float:
    """Return the part of the budget that a stage of each warp of a scheduler takes."""
    return max(cycles, warps * instructions) / budget_of(rows, columns, warps)


def budget_of(rows: int, columns: int, warps: int) -> float:
    """Return the cycles for reading a stage of each warp of a scheduler."""
    return warps * rows * columns * 4 / (BANDWIDTH / PROCESSORS / SCHEDULERS / CLOCK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-most", type=float, default=1.2, help="the ratio (default: 1.2)")
    options = parser.parse_args()
    text = disassembled(ROOT / "csrc/kernels/cuda/gram_few.cu", "sm_90")
    layout, failed = layouts(ROOT), False
    headings = ("rows", "precision", "instructions", "stall cycles", "warps", "budget", "ratio")
    print("| " + " | ".join(headings) + " |")
    print("|---|---|" + "---:|" * (len(headings) - 2))
    found = []
    for section in re.split(r"^\.section\s+\.text\.|^//-+ \.text\.", text, flags=re.MULTILINE)[1:]:
        name = re.match(r"\S*gram_few_kernelILi(\d)ELb0ELi16ELNS_9PrecisionE(\d)E", section)
        if name:
            found.append((int(name[1]), int(name[2]), section))
    for groups, precision, section in sorted(found):
        at = layout[groups]
        (instructions, stalls), (more, longer) = stage_of(section)
        costs_of_stage = instructions + more / at.stages, stalls + longer / at.stages
        warps = min(SHARED // (at.shared + RESERVED), REGISTERS // (256 * THREADS))
        ratios = {
            rows: ratio_of(together, at.columns, warps, *costs_of_stage)
            for rows, together in at.together.items()
        }
        worst = max(ratios, key=lambda rows: ratios[rows])
        failed = failed or ratios[worst] > options.at_most
        for rows in sorted({min(ratios), max(ratios), worst}):
            cells = [
                rows,
                PRECISIONS[precision],
                *(f"{cost:.0f}" for cost in costs_of_stage),
                warps,
            ]
            budget = budget_of(at.together[rows], at.columns, warps)
            cells += [f"{budget:.0f}", f"{ratios[rows]:.2f}"]
            print("| " + " | ".join(map(str, cells)) + " |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
