# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.cuda_verdict FOLDER``: compare FOLDER/cuda.csv with its targets.

Prints a line for each case. The exit status is 0 if all targets are met, 1 if one is missed or not
known. Needs only Python, and works on what a benchmark that was ended has left.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Cells = Mapping[str, str]


def targets(rows: Iterable[Cells]) -> list[Cells]:
    """Return the rows that have a target: a floor under the speed of fastagg."""
    return [row for row in rows if row["floor"]]


def lines(rows: list[Cells]) -> Iterator[str]:
    """Yield a table of all cases with their targets, and a line with the numbers of verdicts."""
    form = "{:<34} {:>9} {:>15} {:>9}  {:<26} {}"
    yield form.format("case", "us", "of ceiling", "x careful", "floor", "met")
    for row in rows:
        if row["role"] == "ours":
            percent = f"{row['percent']} % {row['ceiling']}" if row["percent"] else ""
            title = f"{row['op']} {row['mode']}".strip() + f" ({row['S']}, {row['d']})"
            met = " ".join(filter(None, (row["met"], row["problem"][:60])))
            cells = (title, row["us"], percent, _speedup(row, rows), row["floor"], met)
            yield form.format(*cells).rstrip()
    verdicts = [row["met"] for row in targets(rows)]
    counts = {word: verdicts.count(word) for word in ("yes", "NO", "unknown")}
    yield "{yes} targets met, {NO} missed, {unknown} unknown".format(**counts)


def _speedup(ours: Cells, rows: list[Cells]) -> str:
    """Return the least speedup over a careful contender of the same case."""
    found = [
        float(row["speedup"])
        for row in rows
        if row["role"] == "careful" and row["speedup"]
        if all(row[name] == ours[name] for name in ("op", "mode", "K", "S", "d"))
    ]
    return f"{min(found):.3g}" if found else ""


def passed(rows: list[Cells]) -> bool:
    """Return whether there are targets and all are met."""
    found = targets(rows)
    return bool(found) and all(row["met"] == "yes" for row in found)


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) / "cuda.csv"
    if not path.is_file():
        print("no benchmark has been measured")
        return 1
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[Cells] = list(csv.DictReader(file))
    print(*lines(rows), sep="\n")
    return 0 if passed(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
