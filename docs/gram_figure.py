# SPDX-License-Identifier: Apache-2.0
"""Draw docs/gram.svg: how the Gram kernel divides its work.

Run from the root of the repository: python docs/gram_figure.py
The numbers are those of csrc/kernels/cpu/gram.cpp on AVX-512.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

LANES = 16
ROWS = 5  # of a strip
BLOCK = 768  # columns
STRIPS, CHUNKS, BLOCKS = 5, 4, 4  # drawn
HERE, OTHER, SELF, IDLE, INK = "#0072B2", "#56B4E9", "#E69F00", "#eeeeee", "#333333"


def box(
    axes: Axes, x: float, y: float, w: float, h: float, color: str = "none", **more: object
) -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor=INK, linewidth=0.6, **more))


def text(axes: Axes, x: float, y: float, words: str, size: float = 8.5, **more: object) -> None:
    axes.text(x, y, words, fontsize=size, color=INK, **({"ha": "center", "va": "center"} | more))


def matrix(axes: Axes) -> None:
    """Draw the rows in DRAM: strips, chunks, and the blocks of one chunk."""
    axes.set_title("1  S rows of d columns, in DRAM", fontsize=10, loc="left")
    for strip in range(STRIPS):
        for chunk in range(CHUNKS):
            box(axes, 4 * chunk, STRIPS - 1 - strip, 4, 1, IDLE)
        text(axes, -0.2, STRIPS - 0.5 - strip, f"strip {strip}", ha="right")
    for block in range(BLOCKS):
        for strip in range(STRIPS):
            color = {0: HERE, 1: OTHER}.get(block, "none")
            box(axes, 4 + block, STRIPS - 1 - strip, 1, 1, color, alpha=0.8)
    text(axes, 6, STRIPS + 0.3, "chunk 1: one task")
    text(axes, 14, STRIPS + 0.3, "chunk 3: another thread")
    text(axes, 4.5, -0.45, f"block: {BLOCK}\ncolumns", va="top")
    text(axes, 7.3, -0.45, "prefetched\nmeanwhile", va="top")
    axes.add_patch(FancyArrowPatch((7.2, -0.5), (5.6, 0.1), arrowstyle="->", mutation_scale=8))
    text(axes, 12.6, -0.45, f"a strip: {ROWS} rows, wherever\nthey are (pointers)", va="top")
    axes.set(xlim=(-2.6, 16.2), ylim=(-2, STRIPS + 0.8))


def triangle(axes: Axes) -> None:
    """Draw the tiles of one block."""
    axes.set_title("2  one block: tiles of the lower triangle", fontsize=10, loc="left")
    for i in range(STRIPS):
        for j in range(STRIPS):
            color = SELF if i == j else HERE if j < i else "none"
            hatch = {} if j <= i else {"linestyle": ":"}
            box(axes, j, STRIPS - 1 - i, 1, 1, color, alpha=0.85, **hatch)
        text(axes, -0.15, STRIPS - 0.5 - i, f"I = {i}", ha="right")
        text(axes, i + 0.5, STRIPS + 0.25, f"J = {i}")
    text(axes, STRIPS + 0.3, STRIPS - 0.6, "by symmetry:\nnot computed", ha="left")
    axes.add_patch(
        FancyArrowPatch((STRIPS + 0.2, STRIPS - 0.7), (4.1, 3.6), arrowstyle="->", mutation_scale=8)
    )
    box(axes, STRIPS + 0.3, 2.4, 0.5, 0.5, SELF, alpha=0.85)
    text(
        axes,
        STRIPS + 1,
        2.65,
        "first in strip I: reads its\nrows, packs them into a panel",
        ha="left",
    )
    box(axes, STRIPS + 0.3, 1.2, 0.5, 0.5, HERE, alpha=0.85)
    text(
        axes, STRIPS + 1, 1.45, "then: panel I stays in L1,\npanels J < I stream from L2", ha="left"
    )
    axes.set(xlim=(-1, STRIPS + 5.6), ylim=(-0.6, STRIPS + 0.8))


def panel(axes: Axes) -> None:
    """Draw a packed strip and the places of its panels."""
    size = ROWS * BLOCK * 4 // 1024
    axes.set_title(f"3  a panel: {ROWS} rows interleaved, {size} KB", fontsize=10, loc="left")
    shades = plt.get_cmap("Blues")
    for vector in range(2 * ROWS):
        box(axes, 1.5 * vector, 3, 1.5, 1, shades(0.25 + 0.13 * (vector % ROWS)))
        text(axes, 1.5 * vector + 0.75, 3.5, f"row {vector % ROWS}", size=7)
    text(axes, 0.75, 4.3, f"{LANES} columns", size=7.5)
    text(axes, 15.3, 3.5, "…", ha="left")
    for level, (name, what) in enumerate(
        [
            ("L1", "panel I, and the vectors of J that are in use"),
            ("L2", "panels of all strips, used 32 strips at a time"),
            ("DRAM", "rows: each block read once, by the diagonal tiles"),
        ]
    ):
        y = 1.8 - level
        box(axes, 0, y, 2.2, 0.8, (HERE, OTHER, IDLE)[level], alpha=0.8)
        text(axes, 1.1, y + 0.4, name)
        text(axes, 2.6, y + 0.4, what, ha="left")
    axes.set(xlim=(-0.3, 17), ylim=(-0.6, 4.8))


def tile(axes: Axes) -> None:
    """Draw the registers of an off-diagonal tile."""
    used = ROWS * ROWS + ROWS + 1
    axes.set_title(f"4  a tile: {used} of 32 registers", fontsize=10, loc="left")
    for i in range(ROWS):
        box(axes, -1.5, ROWS - 1 - i, 1, 0.85, SELF, alpha=0.85)
        text(axes, -1, ROWS - 0.58 - i, f"$x_{i}$")
        for j in range(ROWS):
            box(axes, j, ROWS - 1 - i, 0.92, 0.85, HERE if j == 2 else OTHER, alpha=0.8)
            text(axes, j + 0.46, ROWS - 0.58 - i, f"$s_{{{i}{j}}}$", size=8)
    box(axes, 2, ROWS + 0.35, 0.92, 0.85, SELF, alpha=0.85)
    text(axes, 2.46, ROWS + 0.78, "$y_2$")
    text(axes, ROWS + 0.4, 4.3, "$s_{ij}$ += $x_i$ · $y_j$:", ha="left")
    text(axes, ROWS + 0.4, 3.6, f"{LANES} multiply-adds each", ha="left")
    text(axes, ROWS + 0.4, 2.4, "end of the block: a tree adds", ha="left")
    text(axes, ROWS + 0.4, 1.8, f"the {LANES} lanes of each $s_{{ij}}$ to a", ha="left")
    text(axes, ROWS + 0.4, 1.2, "float64 sum of its chunk;", ha="left")
    text(axes, ROWS + 0.4, 0.6, "chunks are added in order", ha="left")
    axes.set(xlim=(-1.8, ROWS + 6), ylim=(-0.4, ROWS + 1.6))


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "fastagg"  # makes the file reproducible byte for byte
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.6), layout="constrained")
    for draw, place in zip((matrix, triangle, panel, tile), axes.flat, strict=True):
        place.set_axis_off()
        draw(place)
    target = Path("docs/gram.svg")
    figure.savefig(target, metadata={"Date": None})
    print(f"drawn: {target}")


if __name__ == "__main__":
    main()
