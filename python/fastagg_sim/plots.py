# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of a results folder from its CSV files, each as a PNG and as an SVG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastagg_sim.config import NO_DROPOUT, job_key
from fastagg_sim.dropout import available as processes
from fastagg_sim.files import write_atomically
from fastagg_sim.looks import Look, looks, set_title, wrapped
from fastagg_sim.records import Curve, Scores, read_curves, read_scores
from fastagg_sim.verdicts import LEVEL, t_quantile

DPI = 150
HEIGHT = 3.8  # of a figure of accuracies in inches, unless its legend is longer
Line = tuple[Sequence[float], Sequence[float]]
"""The (x, y) values of one seed; x is ascending."""
POINTS = 600  # of a line in a figure, at most; longer lines are thinned
LONG = 100
"""Evaluations above which lines are drawn as a `running_mean`, because single values hide those of
other lines."""
RADIUS = 5  # of the running mean, in evaluations
# Characters of a line in titles, notes and legends; longer names would leave panels no room.
TITLE, NOTE, NAME = 44, 54, 32
# The same figure is the same bytes: no date, and ids that do not depend on the process.
_SVG: dict[Any, Any] = {
    "svg.hashsalt": "fastagg",
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.3,
}


def save(figure: Figure, target: Path) -> Path:
    """Write `figure` to `target`, a PNG, and beside it as an SVG; close it and return `target`."""
    picture, buffer = BytesIO(), StringIO()
    figure.savefig(picture, format="png", dpi=DPI)
    with matplotlib.rc_context(_SVG):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    # Hundredths of a point are enough, and make the file a third smaller.
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    short = [re.sub(r"(\.\d\d)\d+", r"\1", s) if s[:2] in ("L ", "C ") else s for s in lines]
    plt.close(figure)
    write_atomically(target, picture.getvalue())
    write_atomically(target.with_suffix(".svg"), "\n".join(short) + "\n")
    return target


def thin(values: np.ndarray) -> np.ndarray:
    """Return at most about `POINTS` of `values`, at equal distances, with the first and last."""
    if len(values) <= POINTS:
        return values
    return values[np.unique(np.linspace(0, len(values) - 1, POINTS).round().astype(int))]


def running_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return, for each value, the mean of it and of `RADIUS` neighbours on each side.

    Near the start, where lines are steep, there are fewer on both sides; near the end, fewer after
    it, so that a line does not end with a single value.
    """
    y = np.asarray(values, dtype=float)
    place = np.arange(len(y))
    before = np.minimum(RADIUS, place)
    after = np.minimum(before, len(y) - 1 - place)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    return (sums[place + after + 1] - sums[place - before]) / (before + after + 1)


def are_long(lines: Iterable[Sequence[Line]]) -> bool:
    """Return whether all lines of a panel are so long that it shows running means."""
    return all(len(x) > LONG for seeds in lines for x, _ in seeds)


def seeds_note(count: int, *, smooth: Iterable[bool] = (), interval: bool = False) -> str:
    """Return what the lines of a figure with `count` seeds show, for its legend.

    smooth, interval: as for `draw_line`; the former for each panel.
    """
    panels = list(smooth)
    mean = f"means of {2 * RADIUS + 1} evaluations"
    if not all(panels):
        mean += f",\nin panels of more than {LONG}"
    if count < 2:
        note, lines = "n = 1 seed", f";\nfaint: all evaluations,\nothers: {mean}"
    else:
        band = "its 95 % interval" if interval else "band from the\nlowest to the highest"
        note, lines = f"n = {count} seeds: mean,\nand {band}", f";\nlines: {mean}"
    return note + lines if any(panels) else note


def note_equal_lines(panel: Axes, lines: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Say below `panel`, after its label, which of its lines are constant or identical.

    lines: the values of each line, one array per seed.
    """
    notes = []
    constant = {
        label: float(seeds[0][0])
        for label, seeds in lines.items()
        if all(np.all(values == seeds[0][0]) for values in seeds)
    }
    if lines and len(constant) == len(lines) and len(set(constant.values())) == 1:
        notes.append(f"constant: {next(iter(constant.values())):g}")
    else:
        notes += [f"{label}: constant, {value:g}" for label, value in constant.items()]
        groups: dict[tuple[bytes, ...], list[str]] = {}
        for label, seeds in lines.items():
            groups.setdefault(tuple(values.tobytes() for values in seeds), []).append(label)
        notes += [
            f"identical: {', '.join(labels)}" for labels in groups.values() if len(labels) > 1
        ]
    if notes:
        label = panel.get_xlabel()
        lines_below = [wrapped(note, NOTE) for note in notes]
        panel.set_xlabel("\n".join([*([label] if label else []), *lines_below]))


def accuracy_figure(curves: Sequence[Curve], target: Path, *, over_time: bool = False) -> Path:
    """Draw the test accuracy over rounds, `save` it to `target` and return `target`.

    There is one panel per dropout setting and one line per method: the mean over seeds, with a band
    from the lowest to the highest seed. Methods that ran without dropout only appear in every
    panel.

    over_time: draw it over the simulated seconds, which all curves must have. Values are
        interpolated linearly, because the steps of seeds are at different times. A method whose
        seeds have no time in common is not drawn; a note below the panel says so.
    """
    methods = {curve.method: curve.rule for curve in curves}
    every = looks(methods)
    dropped = {curve.method for curve in curves if curve.dropout != NO_DROPOUT}
    own = [c.dropout for c in curves if c.method in dropped]  # not those of references
    dropouts = list(dict.fromkeys(own)) or [NO_DROPOUT]
    most = max(len({c.seed for c in curves if c.method == method}) for method in methods)
    figure, panels = plt.subplots(
        1,
        len(dropouts),
        figsize=(2.0 + 4.2 * len(dropouts), HEIGHT),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    smooth = []
    for panel, dropout in zip(panels[0], dropouts, strict=True):
        drawn: dict[str, list[Line]] = {}
        for method in every:
            seeds = [c for c in curves if c.method == method]
            if method in dropped:
                seeds = [c for c in seeds if c.dropout == dropout]
            if seeds:
                drawn[method] = [
                    (c.time if over_time else [t + 1 for t in c.rounds], c.accuracy) for c in seeds
                ]
        apart = [method for method, lines in drawn.items() if not _overlap(lines)]
        for method in apart:
            del drawn[method]
        smooth.append(bool(drawn) and are_long(drawn.values()))
        for method, lines in drawn.items():
            draw_line(panel, method, lines, every[method], smooth=smooth[-1])
        set_title(panel, dropout_title(dropout), width=TITLE)
        panel.set_xlabel("simulated seconds" if over_time else "round")
        if apart:
            note = f"not drawn, seeds without a common time: {', '.join(apart)}"
            panel.set_xlabel(f"{panel.get_xlabel()}\n{wrapped(note, NOTE)}")
        note_equal_lines(panel, {m: [np.array(y) for _, y in seeds] for m, seeds in drawn.items()})
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_xlim(left=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("test accuracy")
    named: dict[str, Artist] = {}  # the first panel may lack a method
    for panel in panels[0]:
        handles, labels = panel.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    names = [wrapped(name, NAME) for name in named]
    lines_beside = sum(1 + name.count("\n") for name in names)
    figure.set_figheight(max(HEIGHT, 1.0 + 0.21 * lines_beside))
    figure.legend(
        list(named.values()),
        names,
        loc="outside right center",
        title=seeds_note(most, smooth=smooth),
        title_fontsize=8,
        handlelength=3.2,
    )
    return save(figure, target)


def _overlap(lines: Sequence[Line]) -> bool:
    """Return whether there is a part of the x axis, or a point, that all lines have."""
    return max(x[0] for x, _ in lines) <= min(x[-1] for x, _ in lines)


def dropout_title(label: str) -> str:
    """Return the title of a dropout setting from its label, such as "exact-0.5"."""
    names = [n for n in processes() if label == n or label.startswith(f"{n}-")]
    process = max(names, key=len, default=label)
    # KEY=VALUE, or a value without a key: the dropout ratio or the active probability
    pattern = r"(?:^|-)(?:([a-z][a-z-]*)=)?((?:(?!-[a-z][a-z-]*=).)+)"
    plain = "p" if process == "bernoulli" else "alpha"
    options = re.findall(pattern, label[len(process) + 1 :])
    parts = (f"{(key or plain).replace('-', '_')} = {value}" for key, value in options)
    return ", ".join([process, *parts])


def draw_line(
    panel: Axes,
    label: str,
    lines: Sequence[Line],
    look: Look,
    marker: str | None = None,
    *,
    smooth: bool = False,
    interval: bool = False,
) -> None:
    """Draw the mean over seeds, and a band from the lowest to the highest seed.

    Values are interpolated linearly, and drawn in the range of x that all seeds have. A single
    value is drawn as a marker.

    smooth: draw the `running_mean`; that of one seed has all values behind it, in a faint line.
    interval: the band is the 95 % interval of the mean instead, by Student's t.
    """
    start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([np.asarray(x, dtype=float) for x, _ in lines]))
    grid = thin(grid[(grid >= start) & (grid <= end)])
    values = np.array([np.interp(grid, x, y) for x, y in lines])  # [seeds, points]
    mean = values.mean(0)
    low, high = values.min(0), values.max(0)
    if interval and len(lines) > 1:
        error = values.std(0, ddof=1) / len(lines) ** 0.5
        half = t_quantile(0.5 + LEVEL / 2, len(lines) - 1) * error
        low, high = mean - half, mean + half
    if smooth:
        if len(lines) == 1:
            panel.plot(grid, mean, color=look.color, linewidth=0.8, alpha=0.25)
        mean = np.mean([np.interp(grid, x, running_mean(y)) for x, y in lines], axis=0)
    if marker is None and len(grid) == 1:
        marker = "o"
    panel.plot(
        grid,
        mean,
        linestyle=look.style,
        color=look.color,
        linewidth=1.5,
        label=label,
        marker=marker,
    )
    if len(lines) > 1:
        panel.fill_between(grid, low, high, color=look.color, alpha=0.15, linewidth=0)


def similarity_figure(named: Sequence[tuple[str, Scores]], target: Path) -> Path:
    """Draw heat maps of similarity scores, `save` them to `target` and return `target`.

    There is one panel per (title, scores), which are those of one seed. Clients are ordered by
    group, with lines between the groups.
    """
    figure, panels = plt.subplots(
        1, len(named), figsize=(1.2 + 3.8 * len(named), 4.2), squeeze=False, layout="constrained"
    )
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="#e8e8e8")
    values = np.concatenate([scores.matrix.ravel() for _, scores in named])
    scored = values[np.isfinite(values)]  # none, if no two clients were ever active together
    low, high = scored.min(initial=0.0), scored.max(initial=1.0)
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(low, high), colors)
    for panel, (title, scores) in zip(panels[0], named, strict=True):
        size = len(scores.matrix)
        groups = scores.groups or [0] * size
        order = sorted(range(size), key=lambda k: (groups[k], k))
        panel.imshow(scores.matrix[np.ix_(order, order)], vmin=low, vmax=high, cmap=colors)
        for position in range(1, size):
            if groups[order[position]] != groups[order[position - 1]]:
                panel.axhline(position - 0.5, color="black", linewidth=0.8)
                panel.axvline(position - 0.5, color="black", linewidth=0.8)
        step = max(1, size // 5)
        panel.set_xticks(range(0, size, step), [str(order[i]) for i in range(0, size, step)])
        panel.set_yticks(range(0, size, step), [str(order[i]) for i in range(0, size, step)])
        panel.set_xlabel(f"client ({seeds_note(1)})")
        set_title(panel, title, width=TITLE)
    panels[0][0].set_ylabel("client")
    figure.colorbar(
        scale, ax=panels[0].tolist(), label="mean similarity R (grey: never scored)", shrink=0.85
    )
    return save(figure, target)


def plot_folder(path: Path) -> list[Path]:
    """Draw the figures of the results folder `path` and return the files written.

    These are accuracy.png; if the run has latencies, time.png, the accuracy over simulated time;
    and, if it has score matrices, similarity.png, which shows the first seed of each method and
    dropout setting.
    """
    curves = read_curves(path / "metrics.csv")
    written = [accuracy_figure(curves, path / "accuracy.png")]
    if all(curve.time for curve in curves):
        written.append(accuracy_figure(curves, path / "time.png", over_time=True))
    named: dict[str, Scores] = {}
    for curve in curves:
        file = path / "jobs" / job_key(curve.method, curve.dropout, curve.seed) / "scores.csv"
        name = f"{curve.method}, {dropout_title(curve.dropout)}"
        if file.exists() and name not in named:
            named[name] = read_scores(file)
    if named:
        written.append(similarity_figure(list(named.items()), path / "similarity.png"))
    return written
