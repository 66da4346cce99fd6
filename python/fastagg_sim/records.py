# SPDX-License-Identifier: Apache-2.0
"""Read the CSV files of finished runs: accuracy curves and score matrices."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from fastagg_sim.config import ConfigError

_CURVE_COLUMNS = (
    *("method", "rule", "dropout", "seed", "round", "uploads"),
    *("accuracy", "wrong_friend_rate", "substitutions"),
)


@dataclass(frozen=True)
class Curve:
    """The rows of one job in metrics.csv.

    rounds: the rounds (0, 1, ...) in which the model was evaluated.
    uploads, accuracy: the values after those rounds, one entry per entry of `rounds`.
    train_loss: the same, or empty if the run did not evaluate the training loss.
    time: simulated seconds at the end of those rounds; empty if the run has no latencies.
    wrong_friends: (wrong-friend rate, number of substitutions) of every round that has
        substitutions, where the groups of the clients are known.
    """

    method: str
    rule: str
    dropout: str
    seed: int
    rounds: list[int] = field(default_factory=list)
    uploads: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    wrong_friends: list[tuple[float, int]] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    time: list[float] = field(default_factory=list)

    def after(self, rounds: int) -> float | None:
        """Return the accuracy after `rounds` rounds, or None if it was not evaluated then."""
        index = rounds - 1
        return self.accuracy[self.rounds.index(index)] if index in self.rounds else None

    def last(self, count: int = 10) -> float:
        """Return the mean accuracy of the last `count` evaluations."""
        return fmean(self.accuracy[-count:])

    def time_to(self, target: float) -> float | None:
        """Return the simulated seconds after which an evaluation first had an accuracy of at least
        `target`; None if none had, or without latencies."""
        reached = (t for t, a in zip(self.time, self.accuracy, strict=False) if a >= target)
        return next(reached, None)


class Rows:
    """The rows of a CSV file of results, as cells by the names of their columns.

    columns: those that the file must have; others are read, too.

    Reading raises ConfigError, naming the file and the line, if it is not a CSV file with these
    columns and the same number of cells in every row.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = columns
        self._line = 1

    def __iter__(self) -> Iterator[dict[str, str]]:
        try:
            with open(self._path, newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                self._check_header(rows.fieldnames or ())
                for row in rows:
                    self._line = rows.line_num
                    if None in row or None in row.values():
                        raise self._wrong(f"expected {len(rows.fieldnames or ())} cells")
                    yield row
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{self._path}: expected a CSV file: {error}") from error

    def _check_header(self, header: Sequence[str]) -> None:
        missing = [name for name in self._columns if name not in header]
        if missing:
            raise self._wrong(f"expected a header with {', '.join(missing)}")

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {self._line}: {problem}")

    @contextmanager
    def numbers(self) -> Iterator[None]:
        """Let a cell that is no number be a ConfigError that names the line."""
        try:
            yield
        except ValueError as error:
            raise self._wrong(f"expected numbers: {error}") from error


def read_curves(path: Path) -> list[Curve]:
    """Return the curves in a metrics.csv, in the order of their first rows.

    Raises ConfigError if `path` is not a file, is damaged, or has no row or no accuracy of a job.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: expected the metrics of a run, found none")
    curves: dict[tuple[str, ...], Curve] = {}
    rows = Rows(path, _CURVE_COLUMNS)
    for row in rows:
        with rows.numbers():
            key = (row["method"], row["rule"], row["dropout"], row["seed"])
            if key not in curves:
                curves[key] = Curve(*key[:3], seed=int(row["seed"]))
            _add(curves[key], row)
    if not curves:
        raise ConfigError(f"{path}: expected the rows of finished jobs, found none")
    for curve in curves.values():
        where = f"{path}: {curve.method} with dropout {curve.dropout} and seed {curve.seed}"
        if not curve.rounds:
            raise ConfigError(f"{where}: expected an accuracy in one round or more, found none")
        for name, values in (("train_loss", curve.train_loss), ("time", curve.time)):
            if len(values) not in (0, len(curve.rounds)):
                raise ConfigError(f"{where}: expected a {name} beside every accuracy or none")
    return list(curves.values())


def _add(curve: Curve, row: dict[str, str]) -> None:
    """Add a row of metrics.csv to the curve of its job."""
    if row["wrong_friend_rate"]:
        curve.wrong_friends.append((float(row["wrong_friend_rate"]), int(row["substitutions"])))
    if row["accuracy"]:
        curve.rounds.append(int(row["round"]))
        curve.uploads.append(int(row["uploads"]))
        curve.accuracy.append(float(row["accuracy"]))
        if row.get("train_loss"):
            curve.train_loss.append(float(row["train_loss"]))
        if row.get("time"):
            curve.time.append(float(row["time"]))


def read_columns(path: Path, names: Sequence[str]) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Read the columns `names` of a CSV file with one row per job and round.

    Returns {(method, seed): {name: values}}. A round in which one of the columns is empty is left
    out of all of them. Raises ConfigError if the file is damaged.
    """
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    rows = Rows(path, ("method", "seed", *names))
    for row in rows:
        with rows.numbers():
            job = found.setdefault((row["method"], int(row["seed"])), {name: [] for name in names})
            if all(row[name] for name in names):
                for name in names:
                    job[name].append(float(row[name]))
    return found


@dataclass(frozen=True)
class Scores:
    """The contents of a scores.csv.

    matrix: the similarity scores R, float64 [K, K]; NaN on the diagonal and for pairs that no
        round scored.
    groups: the group of each client, or None if the groups are not known.
    """

    matrix: np.ndarray
    groups: list[int] | None

    def intra(self) -> np.ndarray:
        """Return the scores of all ordered pairs of clients of the same group."""
        return self._where(same_group=True)

    def inter(self) -> np.ndarray:
        """Return the scores of all ordered pairs of clients of different groups."""
        return self._where(same_group=False)

    def _where(self, same_group: bool) -> np.ndarray:
        if self.groups is None:
            raise ValueError("groups: expected the group of every client, got None")
        groups = np.array(self.groups)
        chosen = self.matrix[(groups[:, None] == groups[None, :]) == same_group]
        return chosen[~np.isnan(chosen)]


def read_scores(path: Path) -> Scores:
    """Read the score matrix in a scores.csv. Raises ConfigError if it is damaged."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        size = len(rows)
        if not rows or any(len(row) != 2 + size for row in rows):
            raise ValueError(f"expected a group and K scores of each of K clients, got {size} rows")
        matrix = np.array([[float(cell) if cell else np.nan for cell in row[2:]] for row in rows])
        groups = [int(row[1]) for row in rows] if rows[0][1] else None
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from error
    np.fill_diagonal(matrix, np.nan)
    return Scores(matrix, groups)
