# SPDX-License-Identifier: Apache-2.0
"""Statements about the results, judged by the rule of ``fastagg_sim.verdicts``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.attacks.setting import SHARE, TASKS, K, Result
from fastagg_sim.verdicts import Estimate, Statement, over_seeds


class Results:
    """Values over seeds, by table, task, attack, fraction, rule and quantity."""

    def __init__(self, rows: Iterable[Result]) -> None:
        self.values: dict[tuple[object, ...], dict[int, float]] = {}
        for row in rows:
            key = (row.table, row.task, row.attack, row.fraction, row.rule, row.quantity)
            self.values.setdefault(key, {})[row.seed] = row.value

    def over(self, *key: object) -> dict[int, float]:
        return self.values.get(key, {})

    def estimate(self, *key: object) -> Estimate:
        return _estimate(list(self.over(*key).values()))

    def difference(self, first: tuple[object, ...], second: tuple[object, ...]) -> Estimate:
        """Return first - second, in pairs of runs with the same seed."""
        a, b = self.over(*first), self.over(*second)
        return _estimate([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def _estimate(values: list[float]) -> Estimate:
    if len(values) >= 2:
        return over_seeds(values)
    return Estimate(values[0] if values else math.nan, None, 0, len(values))


@dataclass(frozen=True)
class Claim:
    """A statement about the tables and what the numbers say about it."""

    text: str
    statements: list[Statement]

    @property
    def known(self) -> bool:
        return not any(math.isnan(s.estimate.value) for s in self.statements)


def claims(results: Results) -> list[Claim]:
    one, mnist = 1 / K, TASKS[0]

    def weight(attack: str, rule: str, quantity: str) -> Estimate:
        return results.estimate("hijack", mnist, attack, one, rule, quantity)

    def error(rule: str) -> Estimate:
        return results.estimate("poison once", "random rows", "poison once", one, rule, "error")

    def run(task: str, attack: str, fraction: float, rule: str) -> tuple[object, ...]:
        return "accuracy", task, attack, fraction, rule, "accuracy"

    def gain(
        attack: str, fraction: float, better: str, worse: str, margin: float
    ) -> list[Statement]:
        return [
            Statement(
                task,
                results.difference(
                    run(task, attack, fraction, better), run(task, attack, fraction, worse)
                ),
                low=margin,
            )
            for task in TASKS
        ]

    def cost(rule: str, plain: str, margin: float) -> list[Statement]:
        return gain("none", 0.0, rule, plain, -margin)

    def survives(rule: str, attack: str, fraction: float, margin: float) -> list[Statement]:
        return [
            Statement(
                task,
                results.difference(run(task, attack, fraction, rule), run(task, "none", 0.0, rule)),
                low=-margin,
            )
            for task in TASKS
        ]

    found = [
        Claim(
            "hijack: without a cap, the liar's mean weight in fdms is above 0.4 (fair: 0.2)",
            [Statement("fdms", weight("hijack", "fdms", "mean weight"), low=0.4)],
        ),
        Claim(
            f"hijack: with max_share = {SHARE} the largest weight is at most {SHARE}",
            [
                Statement(rule, weight("hijack", rule, "largest weight"), high=SHARE + 1e-6)
                for rule in ("fdms, max_share", "fdms-soft, max_share", "fdms-means, max_share")
            ],
        ),
        Claim(
            "max_share costs less than 0.01 of accuracy without attackers",
            cost("fdms, max_share", "fdms", 0.01) + cost("fdms-soft, max_share", "fdms-soft", 0.01),
        ),
        Claim(
            "hijack by 10 %: max_share gains more than 0.02 of accuracy",
            gain("hijack", 0.1, "fdms, max_share", "fdms", 0.02),
        ),
    ]
    bounds = {
        "mifa": (45.0, math.inf), "mimic": (30.0, math.inf), "mimic-aged": (-math.inf, 2.0),
        "mifa, max_age": (-math.inf, 1.0), "stale, max_age": (-math.inf, 1.0),
        "fedvarp, max_age": (-math.inf, 1.0), "mimic, max_age": (30.0, math.inf),
    }  # fmt: skip
    for rule, (low, high) in bounds.items():
        side = f"more than {low:g}" if high == math.inf else f"less than {high:g}"
        found.append(
            Claim(
                f"poison once: after 1000 rounds {rule} is off by {side} row norms",
                [Statement(rule, error(rule), low, high)],
            )
        )
    return [
        *found,
        Claim(
            "max_age costs mifa less than 0.02 of accuracy without attackers",
            cost("mifa, max_age", "mifa", 0.02),
        ),
        Claim(
            "poison once by 20 %: max_age gains mifa more than 0.1 of accuracy",
            gain("poison once", 0.2, "mifa, max_age", "mifa", 0.1),
        ),
        Claim(
            "scaled rows by 20 %: fedavg loses more than 0.1 against max_norm = adaptive",
            gain("scaled", 0.2, "fedavg, max_norm", "fedavg", 0.1),
        ),
        Claim(
            "max_norm = adaptive costs fedavg less than 0.01 of accuracy without attackers",
            cost("fedavg, max_norm", "fedavg", 0.01),
        ),
        Claim(
            "scaled rows by 20 %: geometric-median loses less than 0.05",
            survives("geometric-median", "scaled", 0.2, 0.05),
        ),
        Claim(
            "ALIE by 20 %: geometric-median loses less than 0.05",
            survives("geometric-median", "ALIE", 0.2, 0.05),
        ),
    ]
