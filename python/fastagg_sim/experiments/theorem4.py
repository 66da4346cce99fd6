# SPDX-License-Identifier: Apache-2.0
"""Su et al., theorem 4: no rule is below the minimax bound, and by how much they are above it.

The hard instances of appendix D, with f(x) = L/2 |x|^2 and g(x) = L/2 |x + u/L|^2. Instance 1 is
the same for both parts: all clients have f. Instance 2 of part "heterogeneity": epsilon M of the M
clients always have g, |u|^2 = G^2 / (epsilon (1 - epsilon)), and the adversary always silences
them. Of part "noise": in every round other epsilon M clients, drawn uniformly, have g, with sigma
for G, and the adversary silences those. A server sees the same gradients in both instances, so it
ends at the same model x, and the larger of |grad F_1(x)|^2 and |grad F_2(x)|^2 is at least

    epsilon / (4 (1 - epsilon)) G^2    (eq. 40; sigma^2 for noise).

(Eq. 13 has half of that: of two bounds, the larger is at least half of their sum.) What converges
to what it sees ends at x = 0, four times the bound; the point halfway between the two minimisers,
-epsilon u / (2 L), attains it. "noise, uniform" silences as many clients without looking at them:
the adversary that theory for a static set of faulty clients has in mind. There averaging with a
falling learning rate goes to the minimum of F_2.
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
    """Fractions of clients that the adversary may silence; times 20 a whole number."""


def configs(options: Theorem4Options) -> Mapping[str, Config]:
    return {}


def prepare(folders: Mapping[str, Path], options: Theorem4Options) -> Sequence[Path]:
    """Measure, and write theorem4.csv."""
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
        Claim(
            "no rule can tell the two instances apart (same bits)",
            all(row.same for row in rules),
            {"rules": len({row.rule for row in rules}), "runs": len(rules)},
        )
    ]
    for part in PARTS[:2]:
        of_part = [row for row in rules if row.part == part]
        lowest = min(of_part, key=lambda row: row.ratio)
        # float32 models: 50 parameters of about 1e-7 relative rounding
        found.append(
            Claim(
                f"{part}: no rule is below the minimax bound",
                lowest.ratio >= 1.0 - 1e-5,
                {"smallest error / bound": round(lowest.ratio, 6), "of": lowest.rule},
            )
        )
        mid = [row.ratio for row in hard if row.part == part and row.rule == MIDPOINT]
        found.append(
            Claim(
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
                Claim(
                    f"{part}: {who} at 4 times the bound (within 1 %)",
                    abs(far.ratio - 4.0) <= 0.04,
                    {"furthest from 4": round(far.ratio, 4), "rule": far.rule},
                )
            )
    uniform = [row for row in rows if row.part == "noise, uniform"]
    found.append(
        Claim(
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
