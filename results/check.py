# SPDX-License-Identifier: Apache-2.0
"""Recompute every number that README.md states, from the CSV files alone.

Run: python results/check.py. It prints a line per number, stated and recomputed, and exits with 1
if one of them differs by more than the rounding of its last digit, or if README.md has a number
that nothing here knows. It imports numpy and the standard library, nothing of this project.
With --coverage it prints how often the interval of one seed has the mean of ten instead.

To change README.md, change stated.txt with it. A line there is a line of README.md, or a cell of
the overview, or a part of one. It has an expression in braces, of the functions below, in place of
each number that is recomputed. Other numbers in it are settings, or values of the papers.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
STATED = HERE / "stated.txt"

CIFAR, MNIST, FASHION = "fdms-fig1-cifar", "fdms-fig1-mnist", "fdms-fig9"
CIFAR3 = "fdms-fig1-cifar-seeds"
MEANT = {CIFAR: "0.5", "fdms-fig2": "0.5"}
FIG2, SAMPLES = "fdms-fig2", "fdms-fig2-samples"
LOW, MEDIUM, HIGH = (f"fdms-fig5/{level}" for level in ("low", "medium", "high"))
MANY, MANY_CIFAR = "fdms-fig7/mnist-40", "fdms-fig7/cifar10-40"
CIFAR_1, CIFAR_5 = "fdms-fig6/cifar10-1", "fdms-fig6/cifar10-5"
PROX = "fdms-fig8/fedprox"
TABLE4R, TABLE3R = "mimic-table4-fmnist-rounds", "mimic-table3-rounds"
PER_CLIENT = "mimic-table4-fmnist-clients"
TABLE3, TABLE4, TABLE4C = "mimic-table3", "mimic-table4-fmnist", "quick/mimic-table4-cifar"
FIG4, FIG4R, CLIP = "mimic-fig4", "mimic-fig4-rounds", "adversarial-clipping"
SCALE, DTYPES = "scale-friends", "memory-dtypes"
MEANS, MEANS_CIFAR = "friends-from-means/mnist", "friends-from-means-cifar/cifar10"
SKETCHED = "friends-sketched-seeds/mnist"
LATE = "late-fig1"
SERVER, TRAINING = "aggregation", "training"
TWO, TEN = "quick/mimic-table5/classes-2", "quick/mimic-table5/classes-10"
SU1, SU5, SU9, SU11 = (f"adversarial-fig{n}/baselines" for n in (1, 5, 9, 11))
SU1R, SU5R, SU9R, SU11R = (f"adversarial-fig{n}/byzantine" for n in (1, 5, 9, 11))
SHADOW, SHADOWR = (f"adversarial-fig1-shadow/{part}" for part in ("baselines", "byzantine"))

# --- the CSV files ------------------------------------------------------------------------------


@functools.cache
def table(path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, with its path relative to this folder."""
    with open(HERE / path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@functools.cache
def jobs(folder: str, method: str, dropout: str | None) -> dict[int, list[dict[str, str]]]:
    """Return the evaluated rounds of one method by seed.

    dropout: how the name of the dropout setting ends, if the method ran with several; None: the one
        that the page compares with published values.
    """
    dropout = dropout or MEANT.get(folder)
    rows = [r for r in table(f"{folder}/metrics.csv") if r["method"] == method and r["accuracy"]]
    names = {row["dropout"] for row in rows}
    if dropout is not None and len(names) > 1:
        names = {name for name in names if name.endswith(dropout)}
    found: dict[int, list[dict[str, str]]] = {}
    for row in rows:
        if row["dropout"] in names:
            found.setdefault(int(row["seed"]), []).append(row)
    if len(names) != 1:
        raise ValueError(f"{folder}: {method}: expected one dropout setting, found {names}")
    return found


def column(
    folder: str, method: str, dropout: str | None = None, of: str = "accuracy"
) -> dict[int, np.ndarray]:
    return {
        seed: np.array([float(row[of]) for row in rows])
        for seed, rows in jobs(folder, method, dropout).items()
    }


def mean(values: object) -> float:
    return float(np.mean(values))  # type: ignore[arg-type]


# --- what is computed from them -----------------------------------------------------------------


def after(
    folder: str, method: str, rounds: int, dropout: str | None = None, of: str = "accuracy"
) -> float:
    """Accuracy, or another column, after a number of rounds, mean over seeds."""
    index = column(folder, method, dropout, "round")
    values = column(folder, method, dropout, of)
    return mean([values[s][list(index[s]).index(rounds - 1)] for s in values])


def last(folder: str, method: str, dropout: str | None = None, of: str = "accuracy") -> float:
    """Mean over seeds and the last ten evaluations."""
    return mean([end(values) for values in column(folder, method, dropout, of).values()])


def whole(folder: str, method: str, dropout: str | None = None) -> float:
    """Mean over seeds and all evaluations."""
    return mean([area(values) for values in column(folder, method, dropout).values()])


def gain(folder: str, of: Callable[[str, str, str], float], dropout: str) -> float:
    """What FDMS gains over Dropout, in `last` or `whole`."""
    return of(folder, "FDMS", dropout) - of(folder, "Dropout", dropout)


def in_time(folder: str, method: str) -> dict[int, np.ndarray]:
    """Accuracy of the newest evaluated model at 100 equal distances of simulated time, by seed.

    Before the first evaluation it is that of guessing one of ten labels.
    """
    config = json.loads((HERE / folder / "config.json").read_text(encoding="utf-8"))
    grid = [config["task"]["max_seconds"] * i / 100 for i in range(1, 101)]
    found = {}
    for seed, times in column(folder, method, of="time").items():
        known = [0.1, *column(folder, method)[seed]]
        found[seed] = np.array([known[int(np.sum(times <= t))] for t in grid])
    return found


def late(folder: str, method: str) -> float:
    """Mean over seeds and the last fifth of the simulated time, both ends included."""
    return mean([values[79:] for values in in_time(folder, method).values()])


def whole_time(folder: str, method: str) -> float:
    """Mean over seeds and the simulated time."""
    return mean([area(values) for values in in_time(folder, method).values()])


def seconds_to(folder: str, method: str, target: float) -> float:
    """Mean over seeds of the simulated time of the first evaluation with this accuracy."""
    times, values = column(folder, method, of="time"), column(folder, method)
    return mean([times[s][values[s] >= target][0] for s in values])


def answers(folder: str, *methods: str) -> float:
    """Answers that a run takes, mean over seeds and `methods`."""
    return mean([v[-1] for m in methods for v in column(folder, m, of="uploads").values()])


def end(values: np.ndarray, rounds: np.ndarray | None = None) -> float:
    return mean(values[-10:])


def area(values: np.ndarray, rounds: np.ndarray | None = None) -> float:
    return mean(values)


def wobble(values: np.ndarray, rounds: np.ndarray) -> float:
    """Mean absolute change to an evaluation in the second half from the evaluation before.

    The second half are the evaluations after n / 2 or more of n rounds; `rounds` count from 0.
    """
    done = rounds + 1.0
    return mean(np.abs(np.diff(values))[done[1:] >= 0.5 * done[-1]])


def change(folder: str, method: str, dropout: str | None = None) -> float:
    rounds = column(folder, method, dropout, "round")
    runs = column(folder, method, dropout).items()
    return mean([wobble(values, rounds[seed]) for seed, values in runs])


def final(folder: str, method: str, dropout: str | None = None) -> float:
    """Accuracy in % at the end."""
    return 100 * mean([values[-1] for values in column(folder, method, dropout).values()])


PUBLISHED_TABLE3 = {
    "FedAvg": (69.39, 68.42, 68.21),
    "FedProx": (72.67, 67.44, 64.74),
    "SCAFFOLD": (73.46, 72.30, 68.70),
    "MIFA": (72.92, 72.82, 72.20),
    "MimiC": (75.89, 74.86, 74.71),
}
"""Accuracy in % with absences of up to 20, 50 and 100 rounds."""

PUBLISHED_TABLE4 = {
    "FedAvg": (64.71, 69.22, 71.31),
    "FedProx": (66.91, 69.43, 72.91),
    "SCAFFOLD": (63.77, 73.18, 71.88),
    "MIFA": (68.58, 73.43, 73.24),
    "MimiC": (72.22, 74.86, 74.24),
}
"""Accuracy in % of Fashion-MNIST with 10, 30 and 50 % of the clients active."""


def apart(folder: str, seed: int = 0) -> float:
    """Mean distance of MimiC's table 3 from the published values, in points, with one seed."""
    return mean(
        [
            abs(100 * column(folder, method, f"={tau}")[seed][-1] - published)
            for method, row in PUBLISHED_TABLE3.items()
            for tau, published in zip((20, 50, 100), row, strict=True)
        ]
    )


def apart4(folder: str, percent: int) -> float:
    """Mean distance of a row of MimiC's table 4 from the published values, in points."""
    place, rate = (10, 30, 50).index(percent), f"0.{percent // 10}"
    return mean([abs(final(folder, m, rate) - row[place]) for m, row in PUBLISHED_TABLE4.items()])


def hours(*folders: str) -> float:
    """CPU-hours of training and evaluation of runs."""
    rows = [row for folder in folders for row in table(f"{folder}/timings.csv")]
    return sum(float(r["seconds_training"]) + float(r["seconds_evaluation"]) for r in rows) / 3600


def updates(*folders: str) -> float:
    """Client updates of runs."""
    return sum(float(row["active"]) for f in folders for row in table(f"{f}/metrics.csv"))


def per_client() -> float:
    """The largest distance of 200 uploads per client from 200 rounds with 50 % active, in points."""
    return max(abs(final(PER_CLIENT, m, "0.5") - final(TABLE4R, m, "0.5")) for m in PUBLISHED_TABLE4)


def moved(method: str, rate: str = "0.1") -> float:
    """How far the accuracy of a run moves in the last 20 of 200 rounds: its range, in points."""
    (values,) = column(TABLE4R, method, rate).values()
    return 100 * float(np.ptp(values[-20:]))


def between(method: str, first: int, end: int, rate: str = "0.1") -> float:
    """Mean accuracy in % in rounds [first, end) of a run, counted from 0."""
    (values,) = column(TABLE4R, method, rate).values()
    return 100 * mean(values[first:end])


def later(first: int, end: int | None = None) -> float:
    """The part in % of the rates of MimiC's rounds [first, end), which fall by 5 % per round."""
    return 100 * (0.95**first - (0.0 if end is None else 0.95**end))


def tail(folder: str, method: str, dropout: str | None = None) -> float:
    """Mean accuracy in % of the evaluations in the last fifth of the uploads."""
    uploads = column(folder, method, dropout, "uploads")
    values = column(folder, method, dropout)
    return 100 * mean([mean(v[uploads[s] >= 0.8 * uploads[s][-1]]) for s, v in values.items()])


def uploads(folder: str, method: str) -> float:
    """Uploads of a whole run."""
    return mean([values[-1] for values in column(folder, method, None, "uploads").values()])


def rounds(folder: str, method: str, dropout: str | None = None) -> float:
    index = column(folder, method, dropout, "round")
    return mean([values[-1] + 1 for values in index.values()])


def lowest(folder: str, method: str, seed: int = 0) -> float:
    """The lowest training loss."""
    return float(column(folder, method, None, "train_loss")[seed].min())


def highest(folder: str, method: str, seed: int = 0) -> float:
    """The highest training loss."""
    return float(column(folder, method, None, "train_loss")[seed].max())


def final_loss(folder: str, method: str, seed: int = 0) -> float:
    return float(column(folder, method, None, "train_loss")[seed][-1])


def same_evaluations(folder: str) -> float:
    """The number of evaluations with equal results with and without buckets, if all are."""
    plain, buckets = (column(folder, m) for m in ("cclip", "bucketing cclip"))
    equal = all(np.array_equal(values, buckets[seed]) for seed, values in plain.items())
    return float(sum(map(len, plain.values()))) if equal else math.nan


def mean_active(folder: str) -> float:
    """Active clients of a round under an adversary, mean over rounds and seeds."""
    return mean([float(row["active"]) for row in table(f"{folder}/epsilon.csv")])


def parted(folder: str) -> float:
    """The first round after which clipping with and without buckets have different losses."""
    one, two = (column(folder, m, None, "train_loss")[0] for m in ("cclip", "bucketing cclip"))
    return column(folder, "cclip", None, "round")[0][np.flatnonzero(one != two)[0]] + 1.0


def pairs(method: str) -> float:
    """Pairs per round of elimination, mean over the last tenth of 500 rounds."""
    counts = [
        float(row["pairs"])
        for row in table("fdms-fig4/metrics.csv")
        if row["method"] == method and int(row["round"]) >= 450
    ]
    return mean(counts)


@functools.cache
def scores(dataset: str) -> tuple[float, float]:
    """Mean score of pairs within groups, and of pairs across groups."""
    folder = f"fdms-fig3/{dataset}/jobs/FDMS_cluster-floor-0.5_seed0"
    with open(HERE / folder / "scores.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    groups = [row[1] for row in rows]
    within, across = [], []
    for i, row in enumerate(rows):
        for j, cell in enumerate(row[2:]):
            if i != j and cell:
                (within if groups[i] == groups[j] else across).append(float(cell))
    return mean(within), mean(across)


def ratios() -> tuple[float, float]:
    """Mean and largest ratio of the distances of friends and of all clients."""
    rows = table("friends-fig1/distances.csv")
    found = [float(row["distance2_friends"]) / float(row["distance2_all"]) for row in rows]
    return mean(found), max(found)


def largest_tenth(seed: int) -> float:
    """The part of the samples that the ten largest of 100 clients have."""
    rows = table("adversarial-fig8/sizes.csv")
    sizes = sorted(int(row["samples"]) for row in rows if int(row["seed"]) == seed)
    return sum(sizes[-10:]) / sum(sizes)


def loss(rate: float, method: str) -> float:
    """Training loss on Synthetic(1, 1) at a rate, mean of the last ten evaluations."""
    rows = [r for r in table("rates/synthetic.csv") if float(r["rate"]) == rate]
    return mean([float(r["train_loss"]) for r in rows if r["method"] == method][-10:])


def at_rate(rate: float, method: str, file: str = "cifar", count: int = 3) -> float:
    """Accuracy on CIFAR-10 at a rate, mean of the last evaluations."""
    rows = [r for r in table(f"rates/{file}.csv") if float(r["rate"]) == rate]
    return mean([float(r["accuracy"]) for r in rows if r["method"] == method][-count:])


def whole_at(rate: float, method: str) -> float:
    """at_rate after 2000 rounds, mean of the last ten evaluations."""
    return at_rate(rate, method, "cifar-whole", 10)


def stale(variant: str, rounds_: int) -> float:
    """Accuracy of a variant of Stale on Fashion-MNIST."""
    for row in table("rates/stale.csv"):
        if row["variant"] == variant and int(row["rounds"]) == rounds_:
            return float(row["accuracy"])
    raise ValueError(f"no accuracy of {variant} after {rounds_} rounds")


def reference(round_: int, name: str = "accuracy") -> float:
    """A column of the reference without dropout, after a round."""
    (row,) = (r for r in table("rates/reference.csv") if r["round"] == str(round_))
    return float(row[name])


def norms(tau: str) -> list[float]:
    """The recorded lengths of momenta at a threshold."""
    rows = table("adversarial-clipping/norms.csv")
    return [float(row["norm"]) for row in rows if row["method"].endswith(f" {tau}")]


def _theorem(uniform: bool) -> list[dict[str, str]]:
    rows = table("theorem4/theorem4.csv")
    return [r for r in rows if (r["part"] == "noise, uniform") == uniform]


def theorem_ratio() -> float:
    """The ratio of error and bound that is farthest from 4, of all rules."""
    found = [float(r["ratio"]) for r in _theorem(False) if "midpoint" not in r["rule"]]
    return max(found, key=lambda ratio: abs(ratio - 4))


def theorem_rules() -> float:
    return float(len({r["rule"] for r in _theorem(False) if "midpoint" not in r["rule"]}))


def theorem_uniform() -> tuple[float, float]:
    found = [float(row["ratio"]) for row in _theorem(True)]
    return min(found), max(found)


def seed_after(rounds_: int, count: int = 1) -> list[float]:
    """Accuracy of Dropout on clustered CIFAR-10 for seeds 0 to 4: the mean of the last `count`
    rounds up to `rounds_`."""
    more = column("fdms-fig1-cifar-dropout-seeds", "fedavg", "0.5")
    values = {**column(CIFAR, "Dropout", "0.5"), **more}
    return [mean(values[seed][rounds_ - count : rounds_]) for seed in range(5)]


def of_seed(seed: int) -> tuple[float, float]:
    """Full on Fashion-MNIST: accuracy after 300 rounds, mean absolute change in the second half."""
    values, rounds = column(FASHION, "Full")[seed], column(FASHION, "Full", of="round")[seed]
    return float(values[299]), wobble(values, rounds)


def points(folder: str, verdict: str) -> int:
    """How many points of the published curves of a panel have this verdict.

    folder: the experiment, and how the panel's name ends, in lower case.
    """
    experiment, part = folder.split("/")
    content = json.loads((HERE / experiment / "claims.json").read_text(encoding="utf-8"))
    points_of = [c for c in content["claims"] if "of published" in c["text"]]
    panel = [c for c in points_of if c["text"].lower().split(": ")[0].endswith(part)]
    return sum(c["verdict"] == verdict for c in panel)


def wrong(part: str, dropout: str) -> list[float]:
    """Wrong friends with exact and with sketched similarities: % of a run's, mean over seeds."""
    return [
        wrong_share(f"friends-sketched/{part}", method, dropout)
        for method in ("FDMS", "FDMS k=1024")
    ]


def wrong_share(folder: str, method: str, dropout: str | None = None) -> float:
    """Wrong friends in % of a run's, mean over seeds."""
    of_runs = []
    for run in jobs(folder, method, dropout).values():
        counted = [r for r in run if r["wrong_friend_rate"]]
        sizes = np.array([float(r["substitutions"]) for r in counted])
        rates = np.array([float(r["wrong_friend_rate"]) for r in counted])
        of_runs.append(float((rates * sizes).sum() / sizes.sum()))
    return 100 * mean(of_runs)


def of_means(dropout: str, method: str = "Means") -> float:
    """Wrong friends of friends-from-means in % of a run's, mean over seeds."""
    return wrong_share(MEANS, method, dropout)


def peak(method: str) -> float:
    """Largest resident memory of a process of scale-friends in MB."""
    rows = table(f"{SCALE}/memory.csv")
    return max(float(row["peak_mb"]) for row in rows if row["method"] == method)


def seconds(method: str, *parts: str) -> float:
    """Seconds of a round of scale-friends: the sum of some parts, mean over rounds and seeds."""
    rows = [row for row in table(f"{SCALE}/timings.csv") if row["method"] == method]
    return sum(mean([float(row[f"seconds_{part}"]) for row in rows]) for part in parts)


# --- Student's intervals ------------------------------------------------------------------------


@functools.cache
def t_quantile(df: int) -> float:
    """The 97.5 % quantile, by bisection of the integral of the density."""
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))

    def above(t: float) -> bool:
        x = np.linspace(0.0, t, 20001)
        y = constant * (1 + x * x / df) ** (-(df + 1) / 2)
        return 0.5 + float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum()) > 0.975

    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return (low + high) / 2


def deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1))


def over_seeds(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean."""
    half = t_quantile(len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


@functools.cache
def versus(
    folder: str,
    statistic: Callable[[np.ndarray, np.ndarray], float],
    method: str,
    other: str,
    dropout: str,
) -> tuple[float, float, float]:
    """The difference of two methods, paired over seeds, and the ends of its 95 % interval."""
    one, two = column(folder, method, dropout), column(folder, other, dropout)
    rounds = column(folder, method, dropout, "round")
    differences = [
        statistic(one[seed], rounds[seed]) - statistic(two[seed], rounds[seed])
        for seed in sorted(one)
    ]
    return mean(differences), *over_seeds(differences)


def _interval(statistic: str, other: str) -> str:
    """The expressions of FDMS minus another method, with three seeds of figure 1 e."""
    call = f"versus(CIFAR3, {statistic}, 'FDMS', '{other}', '0.5')"
    return f"{{{call}[0]}} [{{{call}[1]}}, {{{call}[2]}}]"


# --- what one seed can say ----------------------------------------------------------------------


def over_blocks(values: np.ndarray, inside: int) -> tuple[float, float]:
    """The 95 % interval of the mean of the last 10 `inside` of 100 values of one run.

    It follows from the deviation of ten means of ten values from the line that fits them, or from
    the differences of neighbours, if these say that it is wider.
    """
    if len(values) != 100:
        raise ValueError(f"values: expected 100, got {len(values)}")
    means = values.reshape(10, 10).mean(axis=1)
    x = np.arange(10)
    residuals = means - np.polyval(np.polyfit(x, means, 1), x)
    steps = np.diff(values)
    blocks = float(residuals @ residuals) / 8 / inside
    neighbours = float(steps @ steps) / 2 / len(steps) / (10 * inside)
    half = t_quantile(8) * math.sqrt(max(blocks, neighbours))
    middle = mean(values[-10 * inside :])
    return middle - half, middle + half


class OneSeed(NamedTuple):
    """Intervals from one seed beside those from all ten, for the difference of each two methods."""

    cases: int
    covers: float  # the interval from one seed has the mean of the others, in % of the cases
    opposite: int  # both exclude zero, on different sides
    decided: int  # the one from one seed excludes zero
    alone: float  # and the one from ten seeds does not, in % of these


@functools.cache
def one_seed(folder: str, inside: int) -> OneSeed:
    """Compare single seeds with all ten, for runs of 100 evaluations.

    inside: 10 for the mean over the run, 1 for that of the last ten evaluations.
    """
    rows = table(f"{folder}/metrics.csv")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    settings = dict.fromkeys(row["dropout"] for row in rows)
    cases = covered = opposite = decided = alone = 0
    for setting in settings:
        for one, other in itertools.combinations(methods if setting != "full" else (), 2):
            a, b = column(folder, one, setting), column(folder, other, setting)
            differences = [a[seed] - b[seed] for seed in sorted(a)]
            values = [mean(d[-10 * inside :]) for d in differences]
            sign = _sign(over_seeds(values))
            for seed, interval in enumerate(over_blocks(d, inside) for d in differences):
                truth = mean(values[:seed] + values[seed + 1 :])
                cases += 1
                covered += interval[0] <= truth <= interval[1]
                opposite += _sign(interval) * sign < 0
                decided += _sign(interval) != 0
                alone += _sign(interval) != 0 and sign == 0
    return OneSeed(cases, 100 * covered / cases, opposite, decided, 100 * alone / decided)


def _sign(interval: tuple[float, float]) -> int:
    """The sign of all numbers of an interval, 0 if there is none."""
    return (interval[0] > 0) - (interval[1] < 0)


def coverage() -> str:
    """Return a table of `one_seed`."""
    lines = [
        "folder, mean over, cases, mean of the others covered, opposite, decided, of them alone"
    ]
    for folder in (MEANS_CIFAR, MNIST):
        for name, inside in (("the run", 10), ("last ten", 1)):
            seen = one_seed(folder, inside)
            lines.append(
                f"{folder}, {name}, {seen.cases}, {seen.covers:.1f} %, {seen.opposite}, "
                f"{seen.decided}, {seen.alone:.1f} %"
            )
    return "\n".join(lines)


# --- the comparison -----------------------------------------------------------------------------

VERDICTS = ("holds", "fails", "undecided")
NUMBER = r"(-?\d*\.?\d+)"


def without_code(text: str) -> str:
    """Blank out what has numbers that are no statements: code, links of one word, names."""
    links = (r"\[[^\] ]*\]\([^)]*\)", r"\]\([^)]*\)")
    patterns = (r"```.*?```", r"`[^`]*`", *links, r"<!--.*?-->", r"CIFAR-10|VGG-11")
    for pattern in patterns:
        text = re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    return text


def counts(text: str) -> tuple[list[str], str]:
    """Compare the counts of verdicts with claims.json; return the report and the other text."""
    report = []
    total: dict[str, list[int]] = {}
    for path in sorted(HERE.rglob("claims.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        verdicts = [claim["verdict"] for claim in content["claims"]]
        seen = [verdicts.count(v) for v in VERDICTS]
        quick = bool(content["options"].get("quick"))
        _add(total, "scaled down (`--quick`)" if quick else "full", verdicts)
        for basis in {claim["basis"] for claim in content["claims"]} if not quick else ():
            _add(
                total,
                f"full, {basis}",
                [c["verdict"] for c in content["claims"] if c["basis"] == basis],
            )
        name = path.parent.relative_to(HERE).as_posix()
        row = re.search(rf"\]\({re.escape(name)}/[^|]* \| (\d+) \| (\d+) \| (\d+) \|", text)
        stated = [int(n) for n in row.groups()] if row else None
        report.append(line(f"verdicts of {name}", stated, seen, stated == seen))
        if row:
            start, stop = row.span(1)[0], row.span(3)[1]
            text = text[:start] + re.sub(r"\d", " ", text[start:stop]) + text[stop:]
    claims = (HERE / "claims.md").read_text(encoding="utf-8")
    for title, seen in sorted(total.items()):
        pattern = rf"^\| {re.escape(title)} \| (\d+) \| (\d+) \| (\d+) \|$"
        for page, name in ((claims, " in claims.md"), (text, "")):
            row = re.search(pattern, page, re.MULTILINE)
            stated = [int(n) for n in row.groups()] if row else None
            report.append(line(f"verdicts, {title}{name}", stated, seen, stated == seen))
        if row:
            text = text[: row.start()] + re.sub(r"\d", " ", row[0]) + text[row.end() :]
    return report, text


def _add(total: dict[str, list[int]], title: str, verdicts: list[str]) -> None:
    before = total.get(title, [0, 0, 0])
    total[title] = [n + verdicts.count(v) for n, v in zip(before, VERDICTS, strict=True)]


def line(what: str, stated: object, found: object, right: bool) -> str:
    return f"{'ok   ' if right else 'WRONG'}  {what}: stated {stated}, recomputed {found}"


def check(text: str) -> list[str]:
    """Return the report, one line per number."""
    report, rest = counts(text)
    for entry in STATED.read_text(encoding="utf-8").splitlines():
        words = re.split(r"\{(.*?)\}", entry)
        fixed, expressions = words[::2], words[1::2]
        template, pattern = "{}".join(fixed), NUMBER.join(map(re.escape, fixed))
        found = list(re.finditer(pattern, rest))
        what = repr(template if len(template) < 40 else template[:37] + "...")
        if len(found) != 1:
            where = "not in README.md" if not found else f"{len(found)} times in README.md"
            report.append(f"WRONG  {what}: {where}")
            # Its numbers shall not be reported a second time, as unknown ones.
            shape = r"-?\d*\.?\d+".join(map(re.escape, re.split(r"\{\}|-?\d*\.?\d+", template)))
            rest = re.sub(shape, lambda m: re.sub(r"\d", " ", m[0]), rest)
            continue
        (match,) = found
        for stated, expression in zip(match.groups(), expressions, strict=True):
            digits = len(stated.partition(".")[2])
            number = float(eval(expression))  # written in stated.txt
            right = abs(float(stated) - number) <= 0.5 * 10.0**-digits + 1e-9
            report.append(
                line(f"{expression} in {what}", stated, f"{number:.{digits + 2}f}", right)
            )
        rest = rest[: match.start()] + re.sub(r"\d", " ", match[0]) + rest[match.end() :]
    for number, text in enumerate(without_code(rest).splitlines(), start=1):
        for left in re.findall(r"[-.\w]*\d[\w.]*", text):
            report.append(f"WRONG  line {number}: nothing here recomputes {left}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the numbers of results/README.md.")
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="print how often intervals of one seed cover the mean of ten, and check nothing",
    )
    arguments = parser.parse_args()
    if arguments.coverage:
        print(coverage())
        return 0
    report = check(PAGE.read_text(encoding="utf-8"))
    print("\n".join(report))
    wrong = sum(entry.startswith("WRONG") for entry in report)
    print(f"{len(report)} checks, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
