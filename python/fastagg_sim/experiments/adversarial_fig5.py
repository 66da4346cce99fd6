# SPDX-License-Identifier: Apache-2.0
"""Su et al., figures 5, 6 and 7: as figures 1, 3 and 4, with a budget of 0.2.

Eight of ten sampled clients are active. With `--eval-every 1` the results correspond to figure 7.
At least two of the 35 candidates are sampled in 93 % of the rounds, so here `--candidates shadow`
also comes close to the published epsilon_t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastagg_sim.config import Config
from fastagg_sim.experiments import _adversarial
from fastagg_sim.experiments._adversarial import (
    BUCKETING_CCLIP,
    BUCKETING_GM,
    CCLIP,
    FEDAVG,
    FEDAVG_VARIANT,
    FEDPROX,
    FEDPROX_VARIANT,
    GM,
    MIFA,
    AdversarialOptions,
)
from fastagg_sim.experiments._adversarial_experiment import adversarial_experiment
from fastagg_sim.experiments._adversarial_results import (
    above,
    alike,
    budget_claims,
    constant_epsilon_claim,
    naive_pairs,
    read_lines,
    smoother,
)
from fastagg_sim.experiments._base import Claim, Expected

CLIPPING_OR_BUCKETS = (CCLIP, BUCKETING_GM, BUCKETING_CCLIP)


@dataclass(frozen=True)
class Fig5Options(AdversarialOptions):
    """Figures 5, 6 and 7 of Su et al.: CIFAR-10 with 2 of 10 sampled clients silenced."""

    epsilon: float = 0.2
    """The adversary's budget: the largest fraction of an average sample of clients, weighted by
    their numbers of samples, that it may silence per round."""
    eval_every: int = 15
    """Evaluate the global model every this many rounds: 15 for figures 5 and 6, 1 for figure 7."""


def configs(options: Fig5Options) -> Mapping[str, Config]:
    return _adversarial.cifar("adversarial-fig5", options, quick_rounds=60)


def claims(folders: Mapping[str, Path], options: Fig5Options) -> Sequence[Claim]:
    lines = read_lines(folders)
    found = budget_claims(folders["baselines"], options.epsilon, options.as_released)
    found.append(constant_epsilon_claim(folders["baselines"], options.epsilon))
    found += [smoother(lines, variant, naive) for variant, naive in naive_pairs()]
    others = [FEDAVG, FEDPROX, MIFA, FEDAVG_VARIANT]
    return [
        *found,
        alike(lines, "FedAvg-type methods comparable", [FEDAVG, MIFA, FEDAVG_VARIANT]),
        above(lines, "FedProx variant above all others", [FEDPROX_VARIANT], others),
        alike(lines, "Byzantine-robust rules but GM alike", CLIPPING_OR_BUCKETS),
        above(lines, "GM below the other Byzantine-robust rules", CLIPPING_OR_BUCKETS, [GM]),
    ]


EXPERIMENT = adversarial_experiment(
    name="adversarial-fig5",
    title="CIFAR-10 under adversarial dropout, budget 0.2",
    options=Fig5Options,
    configs=configs,
    claims=claims,
    expected=Expected(cpu=270, quick=4),
    figure="5, 6, 7",
)
