# SPDX-License-Identifier: Apache-2.0
"""Common claims of the experiments of Su et al., checked on their CSV files."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fastagg_sim.experiments._adversarial import BASELINES, BYZANTINE, MIFA, VARIANTS
from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._panel import fluctuation
from fastagg_sim.records import Curve, read_curves

LAST = 10
EPSILON_FILE = "epsilon.csv"


class Lines:
    """The curves of one experiment from both of its folders: for each method, one per seed."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.curves: dict[str, list[Curve]] = {}
        for curve in curves:
            self.curves.setdefault(curve.method, []).append(curve)

    @staticmethod
    def read(folders: Mapping[str, Path]) -> Lines:
        parts = [folders[part] / "metrics.csv" for part in ("baselines", "byzantine")]
        return Lines([curve for part in parts for curve in read_curves(part)])

    def accuracy(self, method: str) -> float:
        """Return the mean test accuracy over seeds and the last evaluations."""
        return fmean(curve.last(LAST) for curve in self.curves[method])

    def loss(self, method: str) -> float:
        """Return the mean training loss over seeds and the last evaluations."""
        return fmean(fmean(curve.train_loss[-LAST:]) for curve in self.curves[method])

    def noise(self, method: str, of: str = "accuracy") -> float:
        """Return the `fluctuation` of "accuracy" or "train_loss" (`of`), averaged over seeds."""
        return fmean(fluctuation(getattr(curve, of)) for curve in self.curves[method])

    def rise(self, method: str) -> float:
        """Return the `largest_rise` of the training loss in the second half of the run, averaged
        over seeds."""
        return fmean(largest_rise(c.train_loss[len(c.rounds) // 2 :]) for c in self.curves[method])


def largest_rise(values: Sequence[float]) -> float:
    """Return the largest difference between a value and an earlier one; 0 if values only fall."""
    lowest, rise = values[0], 0.0
    for value in values:
        lowest = min(lowest, value)
        rise = max(rise, value - lowest)
    return rise


def read_epsilon(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """Return (epsilon_t, number of active clients) of every round, by seed."""
    found: dict[int, list[tuple[float, int]]] = {}
    with open(folder / EPSILON_FILE, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["seed"]), []).append(
                (float(row["epsilon"]), int(row["active"]))
            )
    return found


# --- claims ---------------------------------------------------------------------------------


def budget_claims(folder: Path, epsilon: float, strict: bool) -> list[Claim]:
    """Claim: the adversary never exceeds its budget (Assumption 2).

    strict: use the budget of the released code, which is 0.1 larger.
    """
    seen = [values for seed in read_epsilon(folder).values() for values in seed]
    fractions = [fraction for fraction, _ in seen]
    numbers = {
        "mean": round(fmean(fractions), 4),
        "largest": round(max(fractions), 4),
        "active clients": f"{fmean(active for _, active in seen):.2f} on average",
    }
    limit = epsilon + (0.1 if strict else 0.0)
    return [
        Claim(f"epsilon_t <= {limit:g} in every round", max(fractions) <= limit + 1e-6, numbers)
    ]


def constant_epsilon_claim(folder: Path, epsilon: float) -> Claim:
    """Claim: the adversary uses its complete budget in every round."""
    fractions = [f for values in read_epsilon(folder).values() for f, _ in values]
    share = fmean(abs(fraction - epsilon) < 1e-6 for fraction in fractions)
    return Claim(
        f"epsilon_t = {epsilon:g} in every round",
        share == 1.0,
        {"rounds with it": f"{100 * share:.1f} %", "mean": round(fmean(fractions), 4)},
    )


def above(lines: Lines, text: str, upper: Sequence[str], lower: Sequence[str]) -> Claim:
    """Claim: each method of `upper` has a higher accuracy at the end than each of `lower`."""
    values = {method: round(lines.accuracy(method), 4) for method in (*upper, *lower)}
    passed = min(values[m] for m in upper) > max(values[m] for m in lower)
    return Claim(f"{text} (accuracy, last {LAST} evaluations)", passed, values)


def alike(lines: Lines, text: str, methods: Sequence[str], tolerance: float = 0.03) -> Claim:
    """Claim: the accuracies of `methods` at the end differ by at most `tolerance`."""
    values = {method: round(lines.accuracy(method), 4) for method in methods}
    passed = max(values.values()) - min(values.values()) <= tolerance
    return Claim(f"{text} (within {tolerance:g}, last {LAST} evaluations)", passed, values)


def smoother(lines: Lines, calm: str, noisy: str, of: str = "accuracy") -> Claim:
    """Claim: `calm` changes less between consecutive evaluations than `noisy`."""
    values = {method: round(lines.noise(method, of), 5) for method in (calm, noisy)}
    name = of.replace("_", " ")
    text = f"{calm} progresses more smoothly than {noisy} ({name}, deviation of changes)"
    return Claim(text, values[calm] < values[noisy], values)


def steadier(lines: Lines, calm: str, wild: str) -> Claim:
    """Claim: the `largest_rise` of the training loss of `calm` is smaller than that of `wild`.

    This also detects slow oscillations, in which consecutive evaluations differ little.
    """
    values = {method: round(lines.rise(method), 4) for method in (calm, wild)}
    text = f"{calm} is steadier than {wild} (train loss, largest rise in the second half)"
    return Claim(text, values[calm] < values[wild], values)


def naive_pairs() -> list[tuple[str, str]]:
    """Return the pairs (variant, the naive method that it modifies)."""
    return [(variant, variant.removesuffix(" variant")) for variant in VARIANTS]


def synthetic_claims(
    folders: Mapping[str, Path], epsilon: float, as_released: bool
) -> Sequence[Claim]:
    """The claims of appendix E.2 about figures 9 to 12."""
    lines = Lines.read(folders)
    found = budget_claims(folders["baselines"], epsilon, as_released)
    for variant, naive in naive_pairs():
        losses = {method: round(lines.loss(method), 4) for method in (variant, naive)}
        text = f"{variant} has a lower train loss than {naive} (last {LAST} evaluations)"
        found.append(Claim(text, losses[variant] < losses[naive], losses))
        found.append(smoother(lines, variant, naive, "train_loss"))
    found.append(
        alike(lines, "test accuracies of all but MIFA alike", [m for m in BASELINES if m != MIFA])
    )
    for method in (MIFA, *BYZANTINE):
        found += [steadier(lines, variant, method) for variant in VARIANTS]
    return found
