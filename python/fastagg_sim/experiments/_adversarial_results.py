# SPDX-License-Identifier: Apache-2.0
"""Common claims of the experiments of Su et al., checked on their CSV files."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from fastagg_sim.experiments._adversarial import BASELINES, BYZANTINE, MIFA, VARIANTS
from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._statistics import (
    CHANGE,
    END,
    LOSS_CHANGE,
    LOSS_END,
    LOSS_RISE,
    Statistic,
    contrast,
)
from fastagg_sim.records import Curve, read_curves
from fastagg_sim.verdicts import Estimate, Statement

EPSILON_FILE = "epsilon.csv"


@dataclass(frozen=True)
class PublishedEnd:
    """Where a published curve ends: the lowest and highest value around its last round."""

    rounds: int
    train_loss: tuple[float, float]
    accuracy: tuple[float, float]


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

    def levels(self, methods: Sequence[str], statistic: Statistic) -> dict[str, float]:
        """Return a statistic of some methods, means over seeds, rounded for tables."""
        return {method: round(statistic.of(self.curves[method]), 4) for method in methods}

    def minus(self, method: str, other: str, statistic: Statistic) -> Estimate:
        """Return a statistic of `method` minus that of `other`."""
        return contrast([(1, self.curves[method]), (-1, self.curves[other])], statistic)


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
        Claim.counted(
            f"epsilon_t <= {limit:g} in every round", max(fractions) <= limit + 1e-6, numbers
        )
    ]


def constant_epsilon_claim(folder: Path, epsilon: float) -> Claim:
    """Claim: the adversary uses its complete budget in every round."""
    fractions = [f for values in read_epsilon(folder).values() for f, _ in values]
    share = fmean(abs(fraction - epsilon) < 1e-6 for fraction in fractions)
    return Claim.counted(
        f"epsilon_t = {epsilon:g} in every round",
        share == 1.0,
        {"rounds with it": f"{100 * share:.1f} %", "mean": round(fmean(fractions), 4)},
    )


def above(lines: Lines, text: str, upper: Sequence[str], lower: Sequence[str]) -> Claim:
    """Claim: each method of `upper` has a higher accuracy at the end than each of `lower`."""
    statements = [
        Statement(f"{high} - {low}", lines.minus(high, low, END), low=0)
        for high in upper
        for low in lower
    ]
    levels = lines.levels((*upper, *lower), END)
    return Claim.about(f"{text} (accuracy, {END.text})", statements, levels)


def alike(lines: Lines, text: str, methods: Sequence[str], tolerance: float = 0.03) -> Claim:
    """Claim: the accuracies of `methods` at the end differ by less than `tolerance`."""
    statements = [
        Statement(f"{a} - {b}", lines.minus(a, b, END), -tolerance, tolerance)
        for a, b in combinations(methods, 2)
    ]
    levels = lines.levels(methods, END)
    return Claim.about(f"{text} (within {tolerance:g}, {END.text})", statements, levels)


def lower(lines: Lines, text: str, method: str, other: str, statistic: Statistic) -> Claim:
    """Claim: a statistic of `method` is below that of `other`."""
    return Claim.about(
        f"{text} ({statistic.text})",
        [Statement("difference", lines.minus(method, other, statistic), high=0)],
        lines.levels((method, other), statistic),
    )


def smoother(lines: Lines, calm: str, noisy: str, statistic: Statistic = CHANGE) -> Claim:
    """Claim: `calm` changes less between consecutive evaluations than `noisy`."""
    return lower(lines, f"{calm} progresses more smoothly than {noisy}", calm, noisy, statistic)


def steadier(lines: Lines, calm: str, wild: str) -> Claim:
    """Claim: the training loss of `calm` rises less within blocks of rounds than that of `wild`.

    This also detects slow oscillations, in which consecutive evaluations differ little.
    """
    return lower(lines, f"{calm} is steadier than {wild}", calm, wild, LOSS_RISE)


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
        found.append(lower(lines, f"{variant} below {naive}", variant, naive, LOSS_END))
        found.append(smoother(lines, variant, naive, LOSS_CHANGE))
    found.append(
        alike(lines, "test accuracies of all but MIFA alike", [m for m in BASELINES if m != MIFA])
    )
    for method in (MIFA, *BYZANTINE):
        found += [steadier(lines, variant, method) for variant in VARIANTS]
    return found
