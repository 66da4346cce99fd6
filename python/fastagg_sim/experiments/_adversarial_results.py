# SPDX-License-Identifier: Apache-2.0
"""Common claims of the experiments of Su et al., checked on their CSV files."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import fmean

from fastagg_sim.experiments._adversarial import BASELINES, BYZANTINE, MIFA, VARIANTS
from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._curves import Curves, compare
from fastagg_sim.experiments._statistics import (
    CHANGE,
    END,
    LOSS_CHANGE,
    LOSS_END,
    LOSS_RISE,
    Statistic,
)
from fastagg_sim.records import read_curves

EPSILON_FILE = "epsilon.csv"


@dataclass(frozen=True)
class PublishedEnd:
    """Where a published curve ends: the lowest and highest value around its last round."""

    rounds: int
    train_loss: tuple[float, float]
    accuracy: tuple[float, float]


def read_lines(folders: Mapping[str, Path]) -> Curves:
    """Read the curves of one experiment from both of its folders."""
    parts = [folders[part] / "metrics.csv" for part in ("baselines", "byzantine")]
    return Curves(curve for part in parts for curve in read_curves(part))


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


def above(lines: Curves, text: str, upper: Sequence[str], lower: Sequence[str]) -> Claim:
    """Claim: each method of `upper` has a higher accuracy at the end than each of `lower`."""
    statements = lines.differences(product(upper, lower), END, low=0)
    levels = lines.levels((*upper, *lower), END)
    return Claim.about(f"{text} (accuracy, {END.text})", statements, levels)


def alike(lines: Curves, text: str, methods: Sequence[str], tolerance: float = 0.03) -> Claim:
    """Claim: the accuracies of `methods` at the end differ by less than `tolerance`."""
    statements = lines.differences(combinations(methods, 2), END, -tolerance, tolerance)
    levels = lines.levels(methods, END)
    return Claim.about(f"{text} (within {tolerance:g}, {END.text})", statements, levels)


def lower(lines: Curves, text: str, method: str, other: str, statistic: Statistic) -> Claim:
    """Claim: a statistic of `method` is below that of `other`."""
    return compare(text, lines, method, other, statistic, high=0)


def smoother(lines: Curves, calm: str, noisy: str, statistic: Statistic = CHANGE) -> Claim:
    """Claim: `calm` changes less between consecutive evaluations than `noisy`."""
    return lower(lines, f"{calm} progresses more smoothly than {noisy}", calm, noisy, statistic)


def steadier(lines: Curves, calm: str, wild: str) -> Claim:
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
    lines = read_lines(folders)
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
