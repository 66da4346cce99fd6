# SPDX-License-Identifier: Apache-2.0
"""attacks.csv, attacks.md, and the tables of docs/security.md."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

from benchmarks.attacks.claims import Results, claims
from benchmarks.attacks.runs import HIJACKED, POISONED
from benchmarks.attacks.setting import (
    AGE,
    ATTACKS,
    FRACTIONS,
    SHARE,
    STEPS,
    TASKS,
    D,
    K,
    Result,
    S,
    configurations,
)
from fastagg_sim.verdicts import judge


def markdown(rows: Sequence[Result], rounds: int) -> str:
    """Return the tables and claims."""
    results, lines = Results(rows), list[str]()
    lines += ["## Claims", "", "| claim | numbers, with 95 % intervals over seeds | verdict |",
              "| --- | --- | --- |"]  # fmt: skip
    for claim in claims(results):
        numbers = "; ".join(f"{s.name}: {s.estimate}" for s in claim.statements)
        lines.append(
            f"| {claim.text} | {numbers} | {judge(claim.statements)} |"
            if claim.known
            else f"| {claim.text} | not run | not run |"
        )
    lines += ["", "## Hijack", "", *hijack_table(results)]
    lines += ["", "## Poison once", "", *poison_table(results)]
    labels = [label for label, *_ in configurations(1)]
    for task in TASKS:
        for fraction in FRACTIONS:
            lines += ["", f"## Accuracy: {task}, {fraction:.0%} attackers", ""]
            runs = {row.run for row in rows if (row.task, row.fraction) == (task, fraction)}
            if not any(run[0] == "accuracy" for run in runs):
                lines.append("Not run.")
                continue
            seeds: dict[str, set[object]] = {}
            for _, _, attack, _, _, seed in (run for run in runs if run[0] == "accuracy"):
                seeds.setdefault(str(attack), set()).add(seed)
            counts = sorted({len(found) for found in seeds.values()})
            number = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
            lines += [f"Means of {number} seeds, after {rounds} rounds.", ""]
            lines.append(f"| rule | {' | '.join(ATTACKS)} |")
            lines.append(f"| --- |{' --- |' * len(ATTACKS)}")
            for label in labels:
                cells = []
                for attack in ATTACKS:
                    part = 0.0 if attack == "none" else fraction
                    key = ("accuracy", task, attack, part, label)
                    values = results.over(*key, "accuracy").values()
                    refused = sum(results.over(*key, "refused").values())
                    cell = f"{statistics.fmean(values):.3f}" if values else ""
                    cells.append(cell + (f" ({refused:.0f} refused)" if refused else ""))
                if any(cells):
                    lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def hijack_table(results: Results) -> list[str]:
    lines = ["| rule | sender | mean weight | largest weight |", "| --- | --- | --- | --- |"]
    for label, *_ in HIJACKED:
        for attack, who in (("none", "honest"), ("hijack", "the last change")):
            key = ("hijack", TASKS[0], attack, 1 / K, label)
            means = list(results.over(*key, "mean weight").values())
            largest = results.over(*key, "largest weight").values()
            if means:
                lines.append(
                    f"| `{label}` | {who} | {min(means):.2f} to {max(means):.2f} "
                    f"| {max(largest):.2f} |"
                )
    return lines


def poison_table(results: Results) -> list[str]:
    lines = ["| rule | error after 1000 rounds, row norms |", "| --- | --- |"]
    for label, *_ in POISONED:
        found = results.over("poison once", "random rows", "poison once", 1 / K, label, "error")
        if found:
            lines.append(f"| `{label}` | {statistics.fmean(found.values()):.3g} |")
    return lines


SHOWN = (
    *(
        "fedavg",
        "fedavg, max_norm",
        "fdms",
        "fdms, max_share",
        "fdms, max_norm",
        "fdms-means",
        "mifa",
    ),
    *("mifa, max_age", "mifa, max_norm", "mimic", "mimic, max_norm", "mimic-aged", "scaffold"),
    *("scaffold, max_norm", "geometric-median", "geometric-median, reuse", "centered-clip"),
    *("krum", "multi-krum", "nnm", "bucketing", "median", "trimmed-mean", "meamed", "bulyan"),
)
"""Rules in the table of docs/security.md."""


def accuracy_table(results: Results, fraction: float) -> list[str]:
    """Return the table of docs/security.md: accuracy in percent on both tasks."""
    lines = [f"| rule | {' | '.join(ATTACKS)} |", f"| --- |{' --- |' * len(ATTACKS)}"]
    for label in SHOWN:
        cells = [
            _percent(results, attack, 0.0 if attack == "none" else fraction, label)
            for attack in ATTACKS
        ]
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    return lines


SHOWN_FOR_FRACTIONS = ("fedavg", "fedavg, max_norm", "mifa, max_norm", "centered-clip", "nnm")
"""Rules in the table of docs/security.md that has all fractions of attackers."""


def fraction_table(results: Results) -> list[str]:
    """Return the table of docs/security.md over the fraction of attackers."""
    fractions = " | ".join(f"{100 * fraction:.0f} %" for fraction in FRACTIONS)
    lines = [f"| rule | attack | {fractions} |", f"| --- | --- |{' --- |' * len(FRACTIONS)}"]
    for label in SHOWN_FOR_FRACTIONS:
        for attack in ("poison once", "sybils", "scaled", "sign-flipped"):
            cells = [_percent(results, attack, part, label) for part in FRACTIONS]
            lines.append(f"| `{label}` | {attack} | {' | '.join(cells)} |")
    return lines


def _percent(results: Results, attack: str, part: float, label: str) -> str:
    """Return the accuracy in percent on both tasks."""
    found = [results.over("accuracy", t, attack, part, label, "accuracy").values() for t in TASKS]
    return " / ".join(
        f"{100 * statistics.fmean(values):.0f}" if values else "?" for values in found
    )


def page(rows: Sequence[Result]) -> str:
    """Return the tables that docs/security.md shows."""
    results = Results(rows)
    tables = (
        *(hijack_table(results), poison_table(results)),
        *(accuracy_table(results, 0.2), fraction_table(results)),
    )
    return "\n\n".join("\n".join(table) for table in tables)


def write(folder: Path, rows: Sequence[Result], rounds: int) -> None:
    """Write attacks.csv and attacks.md."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "attacks.csv.part"
    with temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([field.name for field in fields(Result)])
        table.writerows(astuple(row) for row in rows)
    temporary.replace(folder / "attacks.csv")
    attacks = "\n".join(f"- **{name}**: {text}." for name, text in ATTACKS.items())
    text = (
        "# Clients that lie\n\n`python -m benchmarks attacks`. "
        f"K = {K}, S = {S}, softmax regression with {D} parameters, {STEPS} local steps; "
        f"max_share = {SHARE}, max_age = {AGE}. Robust rules know the expected number of "
        "attackers, in the runs without attackers that of 20 %; bulyan expects 1, the most that "
        "S rows allow. Attacks:\n\n"
        f"{attacks}\n\n{markdown(rows, rounds)}\n"
    )
    (folder / "attacks.md").write_text(text, encoding="utf-8")


def read(path: Path) -> list[Result]:
    """Return the results in a CSV file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Result(
                row["table"], row["task"], row["attack"], float(row["fraction"]), row["rule"],
                int(row["seed"]), row["quantity"], float(row["value"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip
