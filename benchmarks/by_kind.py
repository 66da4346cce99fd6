# SPDX-License-Identifier: Apache-2.0
"""``targets``: every target of the CPU kernels, on every kind of processor that has results.

It measures nothing. It writes the pages of `ops`, `steps` and `columns` again from their CSV files,
so that all of them have the same targets, and one page with the verdicts of all kinds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import report, targets
from benchmarks.targets import Judged

_PAGES = ("ops", "steps", "columns")
_LEGEND = """The targets are those of [targets.py](../targets.py), for two threads. A ratio is the
time of the other way over that of fastagg. A percentage is the share of what bandwidth and
multiply-adds of the machine allow. The limit is the ratio that fastagg would have at 100 %.

**Bold**: missed. *Italic*: out of reach in that run, because the limit is below the target as
well. Other figures meet it. The limit changes with the speed of the memory, so another run can have
another one. Without a limit, it is not known: a percentage has none, and a run can be too noisy for
it. Where the run was too noisy or busy, there is no verdict. "Absent": the contender was not
installed. Empty: not measured.

Tables were measured at the commits that the pages of the kinds name, and not always with the same
contenders."""
_MISSED, _OUT_OF_REACH = "missed", "out of reach"


def add_options(parser: argparse.ArgumentParser) -> None:
    default = Path(__file__).parent / "results"
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FOLDER", help="results; default: %(default)s"
    )


def run(options: argparse.Namespace, console: Console) -> None:
    """Write all pages again, and targets.md."""
    kinds: dict[str, list[Judged]] = {}
    for folder in sorted(options.out.glob("*/")):
        for name in _PAGES:
            table = folder / f"{name}.csv"
            if table.exists():
                found = targets.judge(report.write_table_page(table))
                kinds.setdefault(folder.name, []).extend(found)
    if not kinds:
        raise SystemExit(f"--out: expected a folder with results, got {options.out}")
    page = options.out / "targets.md"
    page.write_text(as_text(kinds), encoding="utf-8")
    for kind, judged in kinds.items():
        console.print(f"{kind}: {_summary(judged)}")
    console.print(f"written: {page}")


def as_text(kinds: Mapping[str, Sequence[Judged]]) -> str:
    """Return the page, in Markdown."""
    counts = [f"- `{kind}`: {_summary(judged)}" for kind, judged in kinds.items()]
    parts = ["# Targets on every kind of processor", "`python -m benchmarks targets`", _LEGEND]
    headings = ("op", "S", "d", "by", "against", "asked", *kinds)
    return "\n\n".join([*parts, "\n".join(counts), report.markdown(headings, _lines(kinds))])


def _lines(kinds: Mapping[str, Sequence[Judged]]) -> list[tuple[str, ...]]:
    cells = {
        (judged.target, judged.own.S, judged.own.d, kind): _cell(judged)
        for kind, found in kinds.items()
        for judged in found
    }
    lines = []
    for target in targets.TARGETS:
        for S, d in target.shapes:
            own = [cells.get((target, S, d, kind), "") for kind in kinds]
            against = "fastest careful" if target.against == "careful" else target.against
            asked = target.figure(target.asked)
            lines.append((target.op, str(S), f"{d:,}", target.by, against, asked, *own))
    return lines


def _cell(judged: Judged) -> str:
    target, verdict = judged.target, _verdict(judged)
    measured = target.figure(judged.measured)
    if verdict == "met":
        return measured
    if verdict not in (_MISSED, _OUT_OF_REACH):
        return verdict
    known = judged.at_most is not None and not math.isnan(judged.at_most)
    limit = f", limit {target.figure(judged.at_most)}" if known else ""
    return f"**{measured}{limit}**" if verdict == _MISSED else f"*{measured}{limit}*"


def _verdict(judged: Judged) -> str:
    return _OUT_OF_REACH if judged.out_of_reach else judged.verdict


def _summary(found: Sequence[Judged]) -> str:
    return targets.summary([(_verdict(judged),) for judged in found])
