# SPDX-License-Identifier: Apache-2.0
"""The demo: five rules under client dropout on the digits of scikit-learn, in about a minute.

There are 20 clients in 5 groups; each group has two of the ten digits. All clients are active in
the first round. In every later round 50 % or 70 % of the clients drop out, but never a whole group,
as FL-FDMS assumes. `--process exact` draws them uniformly. If a whole group is absent, FDMS finds
no friend in the same group, and rules that remember past updates are better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastagg_sim.config import Config, Dropout, LocalTraining, Method, Task
from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options
from fastagg_sim.experiments._panel import Panel, above
from fastagg_sim.records import read_curves

RULES = ("fedavg", "stale", "mifa", "mimic", "fdms")


@dataclass(frozen=True)
class DemoOptions(Options):
    """Five rules under client dropout on the digits of scikit-learn."""

    out: Path | None = Path("build/demo")
    """Results folder."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; the demo is repeated once per seed."""
    alphas: tuple[float, ...] = (0.5, 0.7)
    """Dropout ratios."""
    process: Literal["cluster-floor", "exact"] = "cluster-floor"
    """Dropout process."""

    def dropouts(self) -> tuple[Dropout, ...]:
        return tuple(Dropout(self.process, {"alpha": alpha}) for alpha in self.alphas)


def configs(options: DemoOptions) -> Mapping[str, Config]:
    config = Config(
        name="demo",
        task=Task(
            dataset="digits",
            partition="clustered",
            model="digits-mlp",
            training=LocalTraining(batch_size=10, local_epochs=2, lr=0.1),
            rounds=options.chosen_rounds(60, quick=10),
            partition_options={"num_groups": 5, "samples_per_client": 60},
            eval_every=options.eval_every,
        ),
        methods=(
            Method("no dropout", "fedavg", full_participation=True),
            *(Method(rule, rule, full_first_round=True) for rule in RULES),
        ),
        dropouts=options.dropouts(),
        seeds=options.chosen_seeds(),
    )
    return {"": config}


def claims(folders: Mapping[str, Path], options: DemoOptions) -> Sequence[Claim]:
    curves = read_curves(folders[""] / "metrics.csv")
    found = []
    for alpha, dropout in zip(options.alphas, options.dropouts(), strict=True):
        found.append(above(f"alpha={alpha:g}", Panel(curves, dropout.label), "fdms", "fedavg"))
    return found


EXPERIMENT = Experiment(
    name="demo",
    title="five rules under client dropout on digits, in about a minute",
    options=DemoOptions,
    configs=configs,
    claims=claims,
    expected=Expected(cpu=1, quick=0.5),
)
