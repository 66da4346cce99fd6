# SPDX-License-Identifier: Apache-2.0
"""Su et al., figures 11 and 12: Synthetic(1, 1) with heavy-tailed client sizes, a budget of 0.7.

Logistic regression with full batches: 200 local steps for FedAvg-type methods, 100 for FedProx, one
for the Byzantine-robust rules. Clients are weighted by their numbers of samples, also in the
adversary's budget. The largest clients exceed the budget, so they are never silenced.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastagg_sim.experiments._adversarial import SyntheticOptions
from fastagg_sim.experiments._adversarial_experiment import synthetic_experiment
from fastagg_sim.experiments._base import Expected


@dataclass(frozen=True)
class Fig11Options(SyntheticOptions):
    """Figures 11 and 12 of Su et al.: Synthetic(1, 1), budget 0.7."""

    epsilon: float = 0.7
    """The adversary's budget: the largest fraction of an average sample of clients, weighted by
    their numbers of samples, that it may silence per round."""


EXPERIMENT = synthetic_experiment(
    name="adversarial-fig11",
    title="Synthetic(1, 1) under adversarial dropout, budget 0.7",
    figure="11, 12",
    options=Fig11Options,
    expected=Expected(cpu=30, quick=2),
)
