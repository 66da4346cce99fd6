# SPDX-License-Identifier: Apache-2.0
"""Sizes, attacks and rules of the benchmark, and what a result is."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

K, S, SIDE = 20, 10, 14
INPUTS = SIDE * SIDE + 1
D = INPUTS * 10
STEPS, BATCH, RATE = 5, 20, 0.1
WORK = STEPS * RATE
ROUNDS, SEEDS = 50, (0, 1, 2)
EVALUATED = 5  # the last rounds of which the accuracy is the mean
TASKS = ("clustered MNIST", "Dirichlet Fashion-MNIST")
FRACTIONS = (0.05, 0.1, 0.2, 0.4)
SHARE, AGE = 0.2, 10  # max_share and max_age in the tables

ATTACKS = {
    "none": "all clients are honest",
    "hijack": "send the model's last change; in the second half, minus the own update",
    "poison once": "send minus 100 times the own update once, then stay away",
    "sybils": "all attackers send minus the mean of the honest rows, the same bits",
    "scaled": "send minus 10 times the own update",
    "sign-flipped": "send minus the own update",
    "ALIE": "send the mean minus 1.5 standard deviations of the honest rows, in every column",
    "inner product": "send minus twice the mean of the honest rows",
    "mimic": "send a copy of the row of the honest client with the lowest id",
    "late": "send the update for the model of ten rounds ago",
    "silent": "be active in every tenth round only, then send minus the own update",
}
ANSWERING = ("poison once", "silent")  # attackers decide when they are active

Made = tuple[str, str, dict[str, Any]]


def configurations(byzantine: int) -> list[Made]:
    """Return (label, rule, options); robust rules expect ``byzantine`` attackers among S."""
    f = {"num_byzantine": byzantine}
    averaging: list[Made] = [
        ("fedavg", "fedavg", {}),
        ("amplified", "amplified", {"beta": K / S}),
        ("fedau", "fedau", {}),
        ("fdms", "fdms", {}),
        ("fdms, max_share", "fdms", {"max_share": SHARE}),
        ("fdms-soft", "fdms-soft", {}),
        ("fdms-soft, max_share", "fdms-soft", {"max_share": SHARE}),
        ("fdms-means", "fdms-means", {}),
        ("fdms-means, max_share", "fdms-means", {"max_share": SHARE}),
        ("scaffold", "scaffold", {"local_work": WORK}),
    ]
    for name in ("mifa", "stale", "stale-models", "fedvarp", "mimic", "mimic-aged"):
        averaging.append((name, name, {}))
        averaging.append((f"{name}, max_age", name, {"max_age": AGE}))
    bounded: list[Made] = [
        (f"{label}, max_norm", rule, {**options, "max_norm": "adaptive"})
        for label, rule, options in averaging
        if label in ("fedavg", "fdms", "mifa", "mimic", "scaffold")
    ]
    robust: list[Made] = [
        ("geometric-median", "geometric-median", {}),
        ("geometric-median, reuse", "geometric-median", {"reuse": True}),
        ("geometric-median, reuse, max_age", "geometric-median", {"reuse": True, "max_age": AGE}),
        ("centered-clip", "centered-clip", {"tau": 0.2}),
        ("krum", "krum", f),
        ("multi-krum", "multi-krum", f),
        ("nnm", "nnm", f),
        ("bucketing", "bucketing", {}),
        ("median", "median", {}),
        ("trimmed-mean", "trimmed-mean", f),
        ("meamed", "meamed", f),
        # Bulyan needs 4f + 3 of the S rows.
        ("bulyan", "bulyan", {"num_byzantine": min(byzantine, (S - 3) // 4)}),
    ]
    return [*averaging, *bounded, *robust]


@dataclass(frozen=True)
class Result:
    """One number of a run.

    Attributes:
        table: "hijack", "poison once" or "accuracy".
        task, attack, fraction, rule, seed: of the run.
        quantity: "accuracy", the mean of the last rounds; "mean weight" and "largest weight" of
            attackers' rows; "refused", rounds in which the step raised an error; "error", in row
            norms.
        value: the number.
    """

    table: str
    task: str
    attack: str
    fraction: float
    rule: str
    seed: int
    quantity: str
    value: float

    @property
    def run(self) -> tuple[object, ...]:
        return astuple(self)[:6]
