# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures from the CSV files."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.work import WORK
from fastagg_sim.looks import COLORS, LOOKS, set_title

# Colours that colour-blind readers can distinguish, combined with markers. The op of a rule has the
# colour of the rule.
_OPS = {
    "gram": (COLORS["blue"], "o"),
    "weighted_sum_": (COLORS["green"], "s"),
    "mimic_": (LOOKS["mimic"].color, "^"),
    "memory_update_": (LOOKS["mifa"].color, "v"),
}
_BY = {
    "fastagg": (COLORS["blue"], "o", "-"),
    "torch X @ X.T": (COLORS["vermillion"], "s", "--"),
    "numpy X @ X.T": (COLORS["orange"], "^", ":"),
    "F.cosine_similarity": (COLORS["green"], "v", "-."),
}
_DPI = 150

Records = list[dict[str, str]]


def read_csv(path: Path) -> Records:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def roofline(table: Path, target: Path) -> Path:
    """Draw the roofline: the measured ops below the ceilings of the same run.

    The ceilings are medians over the comparisons with operands in DRAM. A comparison with operands
    in a cache may lie above the slope. Writes a PNG to ``target`` and returns ``target``.
    """
    records = [r for r in read_csv(table) if r["op"] in _OPS]
    if not records:
        raise ValueError(f"{table}: expected rows of {', '.join(_OPS)}, found none")
    from_dram = [r for r in records if r["home"] == "DRAM"] or records
    slopes = {
        name: statistics.median(float(r[column]) for r in from_dram if r[column])
        for name, column in (("reading", "read_gbytes_per_s"), ("updating", "update_gbytes_per_s"))
        if any(r[column] for r in from_dram)
    }
    peak = statistics.median(float(r["fma_gflops"]) for r in records if r["role"] == "ours")
    figure, axes = plt.subplots(figsize=(7.6, 4.8), layout="constrained")
    ends = (0.1, 500.0)
    for (name, slope), style in zip(slopes.items(), ("-", "--"), strict=False):
        knee = peak / slope
        axes.plot([ends[0], knee], [ends[0] * slope, peak], style, color="black", linewidth=1.2,
                  label=f"DRAM, {name}: {slope:.0f} GB/s")  # fmt: skip
    axes.plot([peak / max(slopes.values()), ends[1]], [peak, peak], color="black", linewidth=1.2)
    axes.annotate(f"multiply-add, {peak:.0f} GFLOP/s", (ends[1], peak), xytext=(-4, 4),
                  textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    _points(axes, records)
    axes.set(xscale="log", yscale="log", xlim=ends, xlabel="flops per byte", ylabel="GFLOP/s")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="lower right")
    title = "{cpu}, {threads} threads, {best_isa}".format_map(records[0])
    if any(r["verdict"] == "busy" for r in records):
        title += " (busy: these points mean little)"
    set_title(axes, title)
    return _save(figure, target)


def _points(axes: Axes, records: Records) -> None:
    for op, (color, marker) in _OPS.items():
        for wanted, face, what in (("ours", color, "fastagg"), ("careful", "none", "best other")):
            rows = [
                r for r in records
                if r["op"] == op and r["role"] == wanted
                and (wanted == "ours" or r["contender"] == r["baseline"])
            ]  # fmt: skip
            x = [WORK[op](int(r["S"]), int(r["d"])).intensity for r in rows]
            y = [float(r["gflops"]) for r in rows]
            axes.plot(x, y, marker, color=color, markerfacecolor=face, markersize=6, linewidth=0,
                      label=f"{op}, {what}" if rows else None)  # fmt: skip
            cached = [i for i, r in enumerate(rows) if r["home"] == "cache"]
            for i in cached if wanted == "ours" else ():
                axes.annotate("in cache", (x[i], y[i]), xytext=(6, -3),
                              textcoords="offset points", fontsize=7)  # fmt: skip


def accuracy(table: Path, target: Path) -> Path:
    """Draw the error of the cosine over d, with a panel for each kind of rows.

    Writes a PNG to ``target`` and returns ``target``.
    """
    records = [r for r in read_csv(table) if r["quantity"] == "cosine" and r["scale"] == "1"]
    kinds = list(dict.fromkeys(r["rows"] for r in records))
    if not kinds:
        raise ValueError(f"{table}: expected errors of the cosine, found none")
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(1 + 3.4 * len(kinds), 3.8), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, kind in zip(panels[0], kinds, strict=True):
        for by, (color, marker, style) in _BY.items():
            rows = [r for r in records if r["rows"] == kind and r["by"] == by]
            panel.plot(
                [int(r["d"]) for r in rows], [float(r["error"]) for r in rows], style,
                color=color, marker=marker, markersize=5, label=by,
            )  # fmt: skip
        panel.axhline(1e-8, color="black", linewidth=0.8, linestyle=(0, (1, 3)))
        panel.set(xscale="log", yscale="log", xlabel="d, parameters")
        set_title(panel, f"{kind} rows")
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("largest error of the cosine")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return _save(figure, target)


def _save(figure: plt.Figure, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=_DPI)
    plt.close(figure)
    return target
