# SPDX-License-Identifier: Apache-2.0
"""Tables of results, for the terminal and as Markdown; the summary of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastagg_sim.config import Task
from fastagg_sim.records import Curve, Rows, read_curves
from fastagg_sim.results import ResultsFolder

LAST = 10
_NAMES = 2  # columns of names; the others are numbers
_FOLDED = 12  # characters of a folded name in one line
_WIDEST = 10_000  # characters of a line


@dataclass(frozen=True)
class Grid:
    """A table of text cells: its columns, its rows, and a note that explains the columns."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str

    def to_rich(self) -> Table:
        table = Table(
            title=self.title,
            title_justify="left",
            caption=self.note,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for index, name in enumerate(self.columns):
            if index < _NAMES:
                table.add_column(name, overflow="fold")
            else:
                table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def show(self, console: Console) -> None:
        """Print the table so that every cell can be read.

        In a terminal that is narrower than the table, long names are folded. If that is not
        enough, or the output goes to a file or a pipe, lines are as long as the table.
        """
        table = self.to_rich()
        wide = Console(file=console.file, width=_WIDEST, color_system=None)
        width = wide.measure(table).maximum
        names = list(zip(self.columns, *self.rows, strict=True))[:_NAMES]
        saved = sum(max(0, max(map(cell_len, cells)) - _FOLDED) for cells in names)
        if console.is_terminal and width - saved <= console.width:
            console.print(table)
            return
        wide.width = width
        with wide.capture() as captured:
            wide.print(table)
        for line in captured.get().splitlines():
            console.file.write(line.rstrip() + "\n")
        console.file.flush()

    def to_markdown(self) -> str:
        lines = [f"{self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append(
            "|" + "|".join([" --- ", " --- ", *[" ---: "] * (len(self.columns) - 2)]) + "|"
        )
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note]) + "\n"


def _spread(values: Sequence[float]) -> str:
    text = f"{fmean(values):.3f}"
    return text + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def summary(folder: ResultsFolder) -> Grid:
    """Return the summary of a run, with one row per method and dropout setting.

    The columns are means over seeds: accuracy at the end; accuracy over the last evaluations
    (± standard deviation over seeds); uploads; fraction of the substitutions whose friend belongs
    to another group; milliseconds of aggregation per round. With latencies also: simulated seconds
    at the end; simulated seconds until an evaluation reached a target (`time_target`), over the
    seeds that reached it, and the number of those if not all did.
    """
    curves: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in read_curves(folder.path / "metrics.csv"):
        curves[curve.dropout, curve.method].append(curve)
    seconds = _aggregation_seconds(folder.path / "timings.csv")
    target = time_target([curve for group in curves.values() for curve in group])
    rows: list[tuple[str, ...]] = []
    settings = list(dict.fromkeys(dropout for dropout, _ in curves))
    for dropout, method in sorted(curves, key=lambda key: settings.index(key[0])):
        group = curves[dropout, method]
        wrong, substitutions = _friends(group)
        rows.append(
            (
                dropout,
                method,
                f"{fmean(curve.accuracy[-1] for curve in group):.3f}",
                _spread([curve.last(LAST) for curve in group]),
                str(round(fmean(curve.uploads[-1] for curve in group))),
                f"{100 * wrong / substitutions:.1f} %" if substitutions else "",
                f"{1000 * seconds[method, dropout]:.2f}",
                *(() if target is None else _times(group, target)),
            )
        )
    task = folder.config.task
    length = _length(task, [curve for group in curves.values() for curve in group])
    seeds = len(folder.config.seeds)
    return Grid(
        f"{folder.config.name}: test accuracy on {task.dataset} after {length}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}",
        (
            "dropout",
            "method",
            "final",
            f"last {LAST}",
            "uploads",
            "wrong",
            "agg ms",
            *(() if target is None else ("seconds", f"to {target:.2f}")),
        ),
        rows,
        f"last {LAST}: mean of the last evaluations ± deviation over seeds; wrong: stand-ins of "
        "another group; agg: server time per round"
        + ("" if target is None else f"; seconds: simulated, at the end and to {target:.2f}"),
    )


def _length(task: Task, curves: Sequence[Curve]) -> str:
    """Return how long the runs were, for the title: what ended them, and the time that they
    reached if that is not `max_seconds`."""
    if task.max_seconds is not None:
        limit = f"{task.max_seconds:g} simulated seconds"
        ends = [curve.time[-1] for curve in curves if curve.time]
        if not ends or min(ends) >= task.max_seconds:
            return limit
        reached = " to ".join(dict.fromkeys(f"{end:.4g}" for end in (min(ends), max(ends))))
        return f"{task.rounds} rounds or {limit} (reached: {reached})"
    return f"{task.rounds} rounds" if task.max_uploads is None else f"{task.max_uploads} uploads"


def time_target(curves: Sequence[Curve]) -> float | None:
    """Return the accuracy to which a summary states the time: nine tenths of the best mean over the
    last evaluations, rounded down to hundredths. None without latencies."""
    if not all(curve.time for curve in curves):
        return None
    return math.floor(90 * max(curve.last(LAST) for curve in curves)) / 100


def time_to(curves: Sequence[Curve], target: float) -> str:
    """Return the mean time to `target` over the seeds that reached it, for tables; "" if none did.

    If not all seeds did, the text says how many."""
    times = [time for curve in curves if (time := curve.time_to(target)) is not None]
    if not times:
        return ""
    return f"{fmean(times):.4g}" + (
        "" if len(times) == len(curves) else f" ({len(times)} of {len(curves)})"
    )


def _times(curves: Sequence[Curve], target: float) -> tuple[str, str]:
    return f"{fmean(curve.time[-1] for curve in curves):.4g}", time_to(curves, target)


def _friends(curves: Sequence[Curve]) -> tuple[int, int]:
    """Return the number of substitutions by a friend of another group, and of all substitutions,
    in rounds for which the groups are known."""
    known = [friends for curve in curves for friends in curve.wrong_friends]
    return round(sum(rate * count for rate, count in known)), sum(count for _, count in known)


def _aggregation_seconds(path: Path) -> dict[tuple[str, str], float]:
    """Return the mean seconds of aggregation per round, by (method, dropout)."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    rows = Rows(path, ("method", "dropout", "seconds_aggregation"))
    for row in rows:
        with rows.numbers():
            times[row["method"], row["dropout"]].append(float(row["seconds_aggregation"]))
    return {key: fmean(seconds) for key, seconds in times.items()}
