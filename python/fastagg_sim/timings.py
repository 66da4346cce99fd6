# SPDX-License-Identifier: Apache-2.0
"""Where the time of finished runs went, by their timings.csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastagg_sim.config import ConfigError
from fastagg_sim.tables import Grid


@dataclass
class Spent:
    """Seconds of all rounds of a method in one results folder."""

    folder: str
    method: str
    rounds: int = 0
    training: float = 0.0
    server: float = 0.0
    evaluation: float = 0.0

    @property
    def total(self) -> float:
        return self.training + self.server + self.evaluation

    @property
    def share(self) -> float:
        """The part of the server's step in all rounds, in [0, 1]; 0 if no time was spent."""
        return self.server / self.total if self.total else 0.0


def read_spent(folders: Sequence[Path]) -> list[Spent]:
    """Every method of every results folder at or below one of `folders`.

    Raises ConfigError where there is none.
    """
    found: list[Spent] = []
    for top in folders:
        files = sorted(
            f for f in top.rglob("timings.csv") if "jobs" not in f.relative_to(top).parts
        )
        if not files:
            raise ConfigError(f"{top}: expected a results folder, or one of such, found none")
        for file in files:
            methods: dict[str, Spent] = {}
            with open(file, newline="", encoding="utf-8") as content:
                for row in csv.DictReader(content):
                    name = row["method"]
                    spent = methods.setdefault(name, Spent(_name(file.parent, top), name))
                    spent.rounds += 1
                    spent.training += float(row["seconds_training"])
                    spent.server += float(row["seconds_aggregation"])
                    spent.evaluation += float(row["seconds_evaluation"])
            found += methods.values()
    return found


def _name(folder: Path, top: Path) -> str:
    return folder.name if folder == top else folder.relative_to(top).as_posix()


def shares(spent: Sequence[Spent], limit: float) -> Grid:
    """One row per results folder and method. limit: in [0, 1], which shares above it are marked."""
    rows = []
    for one in spent:
        seconds = (one.training, one.server, one.evaluation)
        cells = [f"{1e3 * value / one.rounds:.2f}" for value in seconds]
        mark = " !" if one.share > limit else ""
        rows.append((one.folder, one.method, str(one.rounds), *cells, f"{one.share:.2%}{mark}"))
    return Grid(
        "milliseconds of a round, and the server's share of it",
        ("results", "method", "rounds", "training", "server", "evaluation", "share"),
        rows,
        f"means over all rounds, dropout settings and seeds; !: above {limit:.0%}",
    )
