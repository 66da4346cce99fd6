# SPDX-License-Identifier: Apache-2.0
"""Show the measurements as tables, and write them as CSV and Markdown."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import targets
from benchmarks.ceilings import kind
from benchmarks.harness import NOISY, SHAKY, Row
from benchmarks.machine import BUSY, blas, describe

HEADINGS = (
    "op", "K", "S", "d", "threads", "by", "µs", "GB/s", "GFLOP/s", "% ceiling",
    "x baseline", "x fastagg", "peak MB",
)  # fmt: skip
LEGEND = (
    f"Medians; ~ quartiles more than {SHAKY:.0%} apart. Ratios are medians of those within each "
    f"turn; 'noisy': their 95 % intervals are wider than {NOISY:.0%}, 'busy': others used more "
    f"than {BUSY:.0%} of the machine, or slowed it down: no ratio then. "
    "x baseline: time of the fastest careful way over this one's; x fastagg: this one's time over "
    "fastagg's. % ceiling: of what bandwidth and multiply-adds, measured in turn, allow at best "
    "(on the operands themselves: c marks those that stay in a cache)."
)


def make_console() -> Console:
    """Return a console that does not truncate tables if the output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=170, highlight=False)


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row of the tables, in the order of HEADINGS."""
    mark = "~" if row.verdict == "shaky" else ""
    refused = row.verdict if row.verdict in ("noisy", "busy") else "-"
    return (
        row.op,
        "" if row.K is None else str(row.K),
        str(row.S),
        f"{row.d:,}",
        str(row.threads),
        row.contender,
        f"{row.us:,.0f}{mark}",
        f"{row.gbytes_per_s:.1f}",
        f"{row.gflops:.0f}",
        _number(row.percent_of_ceiling, "{:.0f}", refused) + (" c" if row.home == "cache" else ""),
        _number(row.times_baseline, "{:.2f}", refused),
        _number(row.times_ours, "{:.2f}", refused),
        _number(row.peak_mb, "{:.1f}", "-"),
    )


def _number(value: float, form: str, otherwise: str) -> str:
    return otherwise if math.isnan(value) else form.format(value)


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    """Print the table."""
    table = _table(title, HEADINGS, left=("op", "by"))
    for _, group in itertools.groupby(rows, key=_comparison):
        for row in group:
            table.add_row(*cells(row))
        table.add_section()
    console.print(table)
    console.print(LEGEND, style="dim")
    refused = left_out(rows)
    console.print(f"{len(refused)} of {len(rows)} measurements have no ratios", style="dim")
    for line in refused:
        console.print(f"  {line}", style="dim", markup=False)


def _table(title: str, headings: Sequence[str], left: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


def _comparison(row: Row) -> tuple[object, ...]:
    return row.op, row.K, row.S, row.d, row.threads


def left_out(rows: Sequence[Row]) -> list[str]:
    """Return, for each measurement without ratios, which rule of harness.py refused them."""
    reasons = {
        "busy": f"others used more than {BUSY:.0%} of the machine, or slowed it down",
        "noisy": f"its share of the ceiling is known to no better than {NOISY:.0%}",
    }
    return [
        f"{row.op} {row.S} x {row.d:,}, {row.contender}: {row.us:,.0f} µs, {row.verdict}: "
        f"{reasons[row.verdict]}"
        for row in rows
        if row.verdict in reasons
    ]


# --- the headline -----------------------------------------------------------------------------

_CEILING = "the ceiling"
HEADLINE = ("op", "by", "against", "shapes", "at least", "geometric mean")


def headline(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Summarise, for each op, the speedup over each contender and the share of the ceiling.

    A line contains the smallest value and the geometric mean over all shapes. Refused values (see
    harness.py) are left out, and their number is shown ("7 of 8" shapes).
    """
    figures: dict[tuple[str, str, str], list[float]] = {}
    for _, group in itertools.groupby(rows, key=_comparison):
        contenders = list(group)
        for own in (row for row in contenders if row.role in ("ours", "variant")):

            def add(against: str, figure: float, own: Row = own) -> None:
                figures.setdefault((own.op, own.contender, against), []).append(figure)

            add(_CEILING, own.percent_of_ceiling)
            add("fastest careful way", own.times_baseline)
            for other in contenders:
                if other.role not in ("ours", "variant"):
                    add(other.contender, other.times_ours / own.times_ours)
    lines: list[tuple[str, ...]] = []
    for (op, by, against), values in figures.items():
        good = [value for value in values if not math.isnan(value)]
        shapes = str(len(values)) if len(good) == len(values) else f"{len(good)} of {len(values)}"
        form = "{:.0f} %" if against == _CEILING else "{:.2f} x"
        worst = form.format(min(good)) if good else "-"
        mean = form.format(statistics.geometric_mean(good)) if good else "-"
        lines.append((op, by, against, shapes, worst, mean))
    return lines


def show_headline(rows: Iterable[Row], console: Console) -> None:
    table = _table("fastagg compared with other implementations", HEADLINE, left=HEADLINE[:3])
    for line in headline(rows):
        table.add_row(*line)
    console.print(table)


def show_targets(rows: Sequence[Row], console: Console) -> None:
    """Print the targets, and whether this run met them."""
    if lines := targets.verdicts(rows):
        table = _table("Targets: " + targets.summary(lines), targets.HEADINGS, left=("op", "by"))
        for line in lines:
            table.add_row(*line)
        console.print(table)


# --- files ------------------------------------------------------------------------------------


def about_machine() -> dict[str, str]:
    """Return the description of the machine and of numpy's BLAS library."""
    return describe() | {"blas": blas()}


@dataclass(frozen=True)
class Measured:
    """A row, and the machine and commit with which it was measured."""

    row: Row
    about: dict[str, str]


def measured_here(rows: Iterable[Row]) -> list[Measured]:
    """Return rows that this process has measured."""
    about = about_machine()
    return [Measured(row, about) for row in rows]


def merge(path: Path, rows: Sequence[Row]) -> list[Measured]:
    """Return the rows of a CSV file, if it exists, with new ones in their places.

    A comparison (op, K, S, d, threads) is replaced as a whole, so that its contenders were always
    measured together. New comparisons come last.
    """
    fresh: dict[tuple[object, ...], list[Measured]] = {}
    for measured in measured_here(rows):
        fresh.setdefault(_comparison(measured.row), []).append(measured)
    merged: list[Measured] = []
    for old in read_csv(path) if path.exists() else []:
        key = _comparison(old.row)
        if key not in fresh:
            merged.append(old)
        elif fresh[key][0] not in merged:
            merged += fresh[key]
    return merged + [one for group in fresh.values() if group[0] not in merged for one in group]


def read_csv(path: Path) -> list[Measured]:
    """Read a file of :func:`write_csv`; an empty cell becomes NaN, or None for K."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Measured(
                Row(**{name: _value(name, record[name]) for name in _FIELDS}),
                {name: text for name, text in record.items() if name not in _FIELDS},
            )
            for record in csv.DictReader(file)
        ]


def _value(name: str, text: str) -> Any:
    if _FIELDS[name] == "str":
        return text
    if _FIELDS[name] == "float":
        return float(text) if text else math.nan
    return int(text) if text else None


_FIELDS = {field.name: str(field.type) for field in fields(Row)}


def write_csv(path: Path, measured: Sequence[Measured]) -> None:
    """Write all fields of all rows, with the machine in every row; NaN becomes an empty cell."""
    records = [asdict(one.row) | one.about for one in measured]
    columns = [*_FIELDS, *(measured[0].about if measured else ())]
    _write_csv(path, columns, records)


def _write_csv(path: Path, columns: Sequence[str], records: Iterable[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for record in records:
            writer.writerow({name: _text(value) for name, value in record.items()})


def _text(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.5g}"
    return "" if value is None else value


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    head = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def write_page(folder: Path, name: str, title: str, said: str, text: str) -> Path:
    """Write the results of one command, with the machine, below the kind of processor.

    Args:
        folder: the folder of all results.
        name: the command, and the name of the file.
        title: heading of the page.
        said: what was measured, in sentences.
        text: the tables, in Markdown.

    Returns:
        The path of the file.
    """
    about = ", ".join(f"{key} {value}" for key, value in about_machine().items())
    head = f"# {title}\n\n`python -m benchmarks {name}` on kind {kind()}: {about}. {said}\n\n"
    path = folder / kind() / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{text.rstrip()}\n", encoding="utf-8")
    return path


def _machines(measured: Sequence[Measured]) -> str:
    """Describe the machine and commit; if rows come from several runs, each with its ops."""
    ops: dict[str, dict[str, None]] = {}
    for one in measured:
        about = ", ".join(f"{name} {value}" for name, value in one.about.items())
        ops.setdefault(about, {})[one.row.op] = None
    if len(ops) == 1:
        return next(iter(ops))
    return "; ".join(f"{', '.join(names)}: {about}" for about, names in ops.items())


TITLES = {
    "ops": "Ops",
    "steps": "Server steps",
    "columns": "Statistics of columns",
    "scaling": "Scaling",
}
"""Titles of the pages, by subcommand."""


def write_table_page(table: Path) -> list[Row]:
    """Write the page of a CSV file beside it; return the rows of the file."""
    measured, name = read_csv(table), table.stem
    write_markdown(table.with_suffix(".md"), measured, TITLES[name], f"python -m benchmarks {name}")
    return [one.row for one in measured]


def write_markdown(path: Path, measured: Sequence[Measured], title: str, command: str) -> None:
    """Write the headline, the targets and the whole table, with the machines and the command.

    The folder of the file is named after the kind of processor.
    """
    rows = [one.row for one in measured]
    threads = "/".join(map(str, sorted({row.threads for row in rows})))
    parts = [
        f"# {title}",
        f"`{command}` on kind {path.parent.name}: {_machines(measured)}; {threads} threads.",
        LEGEND,
        markdown(HEADLINE, headline(rows)),
    ]
    if lines := targets.verdicts(rows):
        about_them = f"What is asked ([targets.py](../../targets.py)): {targets.summary(lines)}."
        parts += ["## Targets", f"{about_them} {targets.LEGEND}", markdown(targets.HEADINGS, lines)]
    parts += ["## All figures", markdown(HEADINGS, map(cells, rows))]
    refused = left_out(rows)
    parts += ["## Left out", f"{len(refused)} of {len(rows)} measurements have no ratios."]
    parts += ["\n".join(f"- {line}" for line in refused)] if refused else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts), encoding="utf-8")
