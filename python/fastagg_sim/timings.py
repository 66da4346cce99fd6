# SPDX-License-Identifier: Apache-2.0
"""Summarise how finished runs spent their time, from their timings.csv files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastagg_sim.config import ConfigError
from fastagg_sim.records import Rows
from fastagg_sim.tables import Grid


@dataclass
class Spent:
    """Seconds that one method spent in one results folder, summed over all rounds."""

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
        """The server's fraction of the total time, in [0, 1]; 0 if the total is 0."""
        return self.server / self.total if self.total else 0.0


def read_spent(folders: Sequence[Path]) -> list[Spent]:
    """Return the times of every method in every results folder at or below one of `folders`.

    Raises ConfigError if one of `folders` contains no results folder, or a file is damaged.
    """
    found: list[Spent] = []
    for top in folders:
        files = sorted(
            f for f in top.rglob("timings.csv") if "jobs" not in f.relative_to(top).parts
        )
        if not files:
            raise ConfigError(
                f"{top}: expected a results folder, or a folder that contains some, found none "
                "(no timings.csv)"
            )
        for file in files:
            found += _read(file, _name(file.parent, top))
    return found


def _read(file: Path, folder: str) -> list[Spent]:
    """Return the times of every method in the timings.csv `file` of the results folder `folder`."""
    methods: dict[str, Spent] = {}
    rows = Rows(file, ("method", "seconds_training", "seconds_aggregation", "seconds_evaluation"))
    for row in rows:
        with rows.numbers():
            spent = methods.setdefault(row["method"], Spent(folder, row["method"]))
            spent.rounds += 1
            spent.training += float(row["seconds_training"])
            spent.server += float(row["seconds_aggregation"])
            spent.evaluation += float(row["seconds_evaluation"])
    if not methods:
        raise ConfigError(f"{file}: expected the rows of finished jobs, found none")
    return list(methods.values())


def _name(folder: Path, top: Path) -> str:
    return folder.name if folder == top else folder.relative_to(top).as_posix()


def shares(spent: Sequence[Spent], limit: float) -> Grid:
    """Return a table with one row per results folder and method.

    limit: in [0, 1]; a server's share above it is marked with "!".
    """
    rows = []
    for one in spent:
        seconds = (one.training, one.server, one.evaluation)
        cells = [f"{1e3 * value / one.rounds:.2f}" for value in seconds]
        mark = " !" if one.share > limit else ""
        rows.append((one.folder, one.method, str(one.rounds), *cells, f"{one.share:.2%}{mark}"))
    return Grid(
        "milliseconds per round, and the server's share of them",
        ("results", "method", "rounds", "training", "server", "evaluation", "share"),
        rows,
        f"means over all rounds, dropout settings and seeds; !: above {limit:.0%}",
    )
