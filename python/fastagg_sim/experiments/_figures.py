# SPDX-License-Identifier: Apache-2.0
"""Draw the papers' figures: panels of lines, with the mean and the range over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fastagg_sim.looks import looks, set_title
from fastagg_sim.plots import Line, are_long, draw_line, note_equal_lines, save, seeds_note
from fastagg_sim.records import Curve

GREY = "#8a8a8a"


@dataclass(frozen=True)
class Plot:
    """One panel of a figure.

    lines: for each name in the legend, in its order, one line per seed.
    ylim: the limits of the axis; the upper one gives way to lines above it.
    published: the published line, where it is known, by the same names.
    """

    title: str
    lines: Mapping[str, Sequence[Line]]
    ylim: tuple[float, float] | None = None
    ylabel: str = "Test Accuracy"
    published: Mapping[str, Line] = field(default_factory=dict)


def over_rounds(curves: Sequence[Curve]) -> list[Line]:
    """Return, for every seed, the accuracy over the number of rounds."""
    return [([r + 1 for r in curve.rounds], curve.accuracy) for curve in curves]


def minus(curves: Sequence[Curve], others: Sequence[Curve]) -> list[Line]:
    """Return, for every seed that both have, the accuracy of `curves` minus that of `others` over
    the number of rounds."""
    known = {curve.seed: dict(zip(curve.rounds, curve.accuracy, strict=True)) for curve in others}
    lines: list[Line] = []
    for curve in curves:
        base = known.get(curve.seed, {})
        pairs = zip(curve.rounds, curve.accuracy, strict=True)
        points = [(t + 1, a - base[t]) for t, a in pairs if t in base]
        if points:
            x, y = zip(*points, strict=True)
            lines.append((x, y))
    return lines


def over_uploads(curves: Sequence[Curve]) -> list[Line]:
    """Return, for every seed, the accuracy in percent over the number of uploads."""
    return [(curve.uploads, [100 * a for a in curve.accuracy]) for curve in curves]


def draw(
    plots: Sequence[Plot],
    target: Path,
    *,
    xlabel: str = "Number of Rounds",
    columns: int = 3,
    marker: str | None = None,
    interval: bool = False,
) -> Path:
    """Draw the panels, at most `columns` in a row, with a legend beside them.

    interval: as for `draw_line`.

    Published lines are thin and grey, with the line style of their method. `save`s the figure to
    `target` and returns `target`.
    """
    columns = min(columns, len(plots))
    rows = -(-len(plots) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.2 * columns + (1.4 if columns > 1 else 2.8), 3.4 * rows),
        squeeze=False,
        layout="constrained",
    )
    legend: dict[str, Artist] = {}
    count = max((len(lines) for plot in plots for lines in plot.lines.values()), default=1)
    smooth = [marker is None and are_long(plot.lines.values()) for plot in plots]
    every = looks(dict.fromkeys(label for plot in plots for label in plot.lines))
    for panel in axes.flat[len(plots) :]:
        panel.set_visible(False)
    for panel, plot, running in zip(axes.flat, plots, smooth, strict=False):
        for label, lines in plot.lines.items():
            look = every[label]
            draw_line(panel, label, lines, look, marker, smooth=running, interval=interval)
            if label in plot.published:
                end = max(x[-1] for x, _ in lines)
                _draw_published(panel, plot.published[label], end, look.style)
        set_title(panel, plot.title)
        panel.set_xlabel(xlabel)
        note_equal_lines(
            panel,
            {label: [np.asarray(y) for _, y in lines] for label, lines in plot.lines.items()},
        )
        panel.set_ylabel(plot.ylabel)
        panel.set_xlim(left=0)
        if plot.ylim is not None:
            low, high = plot.ylim
            # Panels with equal limits keep them equal.
            most = max(_highest(other) for other in plots if other.ylim == plot.ylim)
            high = max(high, most + 0.02 * (high - low)) if most > high else high
            panel.set_ylim(low - 0.03 * (high - low), high)  # curves on the lower limit show
        panel.grid(color="#dddddd", linewidth=0.6)
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    # Beside the panels, because a legend inside them would hide parts of the curves.
    if any(plot.published for plot in plots):
        legend["published, in\nthe same styles"] = Line2D([], [], color=GREY, linewidth=1.0)
    figure.legend(
        list(legend.values()),
        list(legend),
        loc="outside right center",
        fontsize=9,
        title=seeds_note(count, smooth=smooth, interval=interval),
        title_fontsize=8,
        handlelength=3.2,
    )
    return save(figure, target)


def _highest(plot: Plot) -> float:
    """Return the largest value of the lines of a panel."""
    lines = [line for seeds in plot.lines.values() for line in seeds]
    return max(max(y) for _, y in (*lines, *plot.published.values()))


def _draw_published(panel: Axes, line: Line, end: float, style: Any) -> None:
    """Draw a published line up to x = `end`, above the others, with a white rim."""
    x, y = (np.asarray(values, dtype=float) for values in line)
    grid = np.append(x[x < end], end) if x[0] < end < x[-1] else x[x <= end]
    rim = [patheffects.Stroke(linewidth=2.2, foreground="white"), patheffects.Normal()]
    panel.plot(
        grid,
        np.interp(grid, x, y),
        linestyle=style,
        color=GREY,
        linewidth=1.0,
        zorder=3,
        path_effects=rim,
        marker="o" if len(grid) == 1 else None,
        markersize=4,
    )
