# SPDX-License-Identifier: Apache-2.0
"""Claims that the experiments of Su et al. share, from their CSV files."""

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
    """The curves of one experiment by method, all seeds, from both of its folders."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.curves: dict[str, list[Curve]] = {}
        for curve in curves:
            self.curves.setdefault(curve.method, []).append(curve)

    @staticmethod
    def read(folders: Mapping[str, Path]) -> Lines:
        parts = [folders[part] / "metrics.csv" for part in ("baselines", "byzantine")]
        return Lines([curve for part in parts for curve in read_curves(part)])

    def accuracy(self, method: str) -> float:
        """Test accuracy, mean over seeds and the last evaluations."""
        return fmean(curve.last(LAST) for curve in self.curves[method])

    def loss(self, method: str) -> float:
        """Training loss, mean over seeds and the last evaluations."""
        return fmean(fmean(curve.train_loss[-LAST:]) for curve in self.curves[method])

    def noise(self, method: str, of: str = "accuracy") -> float:
        """Deviation of the change from one evaluation to the next in the second half of the run,
        mean over seeds; `of`: accuracy or train_loss."""
        return fmean(fluctuation(getattr(curve, of)) for curve in self.curves[method])

    def rise(self, method: str) -> float:
        """`largest_rise` of the training loss in the second half of the run, mean over seeds."""
        return fmean(largest_rise(c.train_loss[len(c.rounds) // 2 :]) for c in self.curves[method])


def largest_rise(values: Sequence[float]) -> float:
    """By how much `values` are above an earlier one, at most; 0 if they only fall."""
    lowest, rise = values[0], 0.0
    for value in values:
        lowest = min(lowest, value)
        rise = max(rise, value - lowest)
    return rise


def read_epsilon(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """(epsilon_t, active clients) of every round, by seed."""
    found: dict[int, list[tuple[float, int]]] = {}
    with open(folder / EPSILON_FILE, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["seed"]), []).append(
                (float(row["epsilon"]), int(row["active"]))
            )
    return found


# --- claims ---------------------------------------------------------------------------------


def budget_claims(folder: Path, epsilon: float, strict: bool) -> list[Claim]:
    """Assumption 2: the adversary keeps to its budget; `strict`: that of the released code."""
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
    fractions = [f for values in read_epsilon(folder).values() for f, _ in values]
    share = fmean(abs(fraction - epsilon) < 1e-6 for fraction in fractions)
    return Claim(
        f"epsilon_t = {epsilon:g} in every round",
        share == 1.0,
        {"rounds with it": f"{100 * share:.1f} %", "mean": round(fmean(fractions), 4)},
    )


def above(lines: Lines, text: str, upper: Sequence[str], lower: Sequence[str]) -> Claim:
    """Each of `upper` has a higher accuracy at the end than each of `lower`."""
    values = {method: round(lines.accuracy(method), 4) for method in (*upper, *lower)}
    passed = min(values[m] for m in upper) > max(values[m] for m in lower)
    return Claim(f"{text} (accuracy, last {LAST} evaluations)", passed, values)


def alike(lines: Lines, text: str, methods: Sequence[str], tolerance: float = 0.03) -> Claim:
    """The accuracies of `methods` at the end are within `tolerance` of each other."""
    values = {method: round(lines.accuracy(method), 4) for method in methods}
    passed = max(values.values()) - min(values.values()) <= tolerance
    return Claim(f"{text} (within {tolerance:g}, last {LAST} evaluations)", passed, values)


def smoother(lines: Lines, calm: str, noisy: str, of: str = "accuracy") -> Claim:
    """`calm` changes less from one evaluation to the next than `noisy`."""
    values = {method: round(lines.noise(method, of), 5) for method in (calm, noisy)}
    name = of.replace("_", " ")
    text = f"{calm} progresses more smoothly than {noisy} ({name}, deviation of changes)"
    return Claim(text, values[calm] < values[noisy], values)


def steadier(lines: Lines, calm: str, wild: str) -> Claim:
    """The training loss of `calm` rises less again than that of `wild`. This sees the long swings
    of a roller coaster, between which a curve can be smooth from one evaluation to the next."""
    values = {method: round(lines.rise(method), 4) for method in (calm, wild)}
    text = f"{calm} is steadier than {wild} (train loss, largest rise in the second half)"
    return Claim(text, values[calm] < values[wild], values)


def naive_pairs() -> list[tuple[str, str]]:
    """(variant, the naive method it is of)."""
    return [(variant, variant.removesuffix(" variant")) for variant in VARIANTS]


def synthetic_claims(
    folders: Mapping[str, Path], epsilon: float, as_released: bool
) -> Sequence[Claim]:
    """Appendix E.2, figures 9 to 12."""
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
