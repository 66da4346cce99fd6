# SPDX-License-Identifier: Apache-2.0
"""Su et al., theorem 4: the error of every rule compared to the minimax bound.

The hard instances are those of appendix D, with f(x) = L/2 |x|^2 and g(x) = L/2 |x + u/L|^2. In
instance 1 all clients have the objective f. Instance 2 differs between the parts:

- "heterogeneity": epsilon M of the M clients always have g, with
  |u|^2 = G^2 / (epsilon (1 - epsilon)), and the adversary always silences these clients.
- "noise": in every round epsilon M clients, drawn uniformly, have g, with sigma instead of G, and
  the adversary silences these clients.

The server receives the same gradients in both instances, so it ends at the same model x, and the
larger of |grad F_1(x)|^2 and |grad F_2(x)|^2 is at least

    epsilon / (4 (1 - epsilon)) G^2    (eq. 40; sigma^2 for noise).

(Eq. 13 is half of that: the larger of two bounds is at least half of their sum.) A rule that
converges to the minimum of the objective that it sees ends at x = 0, where the error is four times
the bound. The midpoint between the two minimisers, -epsilon u / (2 L), attains the bound.

The third part, "noise, uniform", silences the same number of clients, independently of which
clients have g. This is the setting of theories with a static set of faulty clients. There averaging
with a falling learning rate converges to the minimum of F_2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastagg_sim.config import Config
from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options

CSV = "theorem4.csv"


@dataclass(frozen=True)
class Theorem4Options(Options):
    """Theorem 4 of Su et al.: every rule's error on the hard instances."""

    epsilons: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    """Fractions of clients that the adversary may silence; multiples of 1/20."""


def configs(options: Theorem4Options) -> Mapping[str, Config]:
    """Return none, but check `options` before a folder is created."""
    from fastagg_sim.experiments._theorem4 import check_epsilons

    check_epsilons(options.epsilons)
    return {}


def prepare(folders: Mapping[str, Path], options: Theorem4Options) -> Sequence[Path]:
    """Measure the errors of all rules and write theorem4.csv."""
    from fastagg_sim.experiments import _theorem4

    rounds = options.chosen_rounds(300, quick=100)
    rows = _theorem4.measure(options.epsilons, options.chosen_seeds(), rounds)
    _theorem4.write_rows(rows, folders[""] / CSV)
    return [folders[""] / CSV]


def draw(folders: Mapping[str, Path], options: Theorem4Options, target: Path) -> None:
    from fastagg_sim.experiments import _theorem4

    _theorem4.draw(_theorem4.read_rows(folders[""] / CSV), target)


def claims(folders: Mapping[str, Path], options: Theorem4Options) -> Sequence[Claim]:
    from fastagg_sim.experiments._theorem4 import MIDPOINT, PARTS, read_rows

    rows = read_rows(folders[""] / CSV)
    hard = [row for row in rows if row.part != "noise, uniform"]
    rules = [row for row in hard if row.rule != MIDPOINT]
    found = [
        Claim.counted(
            "no rule can tell the two instances apart (same bits)",
            all(row.same for row in rules),
            {"rules": len({row.rule for row in rules}), "runs": len(rules)},
        )
    ]
    for part in PARTS[:2]:
        of_part = [row for row in rules if row.part == part]
        lowest = min(of_part, key=lambda row: row.ratio)
        # 1e-5: the models are float32, with relative rounding errors of about 1e-7 per parameter.
        found.append(
            Claim.counted(
                f"{part}: no rule is below the minimax bound",
                lowest.ratio >= 1.0 - 1e-5,
                {"smallest error / bound": round(lowest.ratio, 6), "of": lowest.rule},
            )
        )
        mid = [row.ratio for row in hard if row.part == part and row.rule == MIDPOINT]
        found.append(
            Claim.counted(
                f"{part}: the midpoint attains the bound",
                all(abs(ratio - 1.0) < 1e-6 for ratio in mid),  # the CSV has nine digits
                {"error / bound": f"{min(mid):.7f} to {max(mid):.7f}"},
            )
        )
        for who, some in (
            (
                "FedAvg and its variant are",
                [r for r in of_part if r.rule in ("fedavg", "amplified")],
            ),
            ("every rule is", of_part),
        ):
            far = max(some, key=lambda row: abs(row.ratio - 4.0))
            found.append(
                Claim.counted(
                    f"{part}: {who} at 4 times the bound (within 1 %)",
                    abs(far.ratio - 4.0) <= 0.04,
                    {"furthest from 4": round(far.ratio, 4), "rule": far.rule},
                )
            )
    uniform = [row for row in rows if row.part == "noise, uniform"]
    found.append(
        Claim.counted(
            "noise: where as many are silenced uniformly, FedAvg is below the bound",
            all(row.ratio < 1.0 for row in uniform),
            {f"epsilon={row.epsilon:g}": round(row.ratio, 4) for row in uniform},
        )
    )
    return found


EXPERIMENT = Experiment(
    name="theorem4",
    title="every rule's error against the minimax bound",
    options=Theorem4Options,
    configs=configs,
    claims=claims,
    prepare=prepare,
    draw=draw,
    expected=Expected(cpu=1, quick=0.5),
    paper="Su et al.",
    figure="theorem 4",
    unused=("eval_every", "workers", "device"),
)
