# SPDX-License-Identifier: Apache-2.0
"""Su et al., figures 11 and 12: Synthetic(1, 1) with heavy-tailed client sizes, a budget of 0.7.

Logistic regression with full batches; 200 local steps for FedAvg-type methods, 100 for FedProx, one
for the Byzantine-robust rules. A client counts as much as it has samples, for the budget, too: the
largest clients do not fit into it and can never be silenced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastagg_sim.config import Config
from fastagg_sim.experiments import _adversarial, _adversarial_results
from fastagg_sim.experiments._adversarial import BASELINES, MIFA, AdversarialOptions
from fastagg_sim.experiments._base import Claim, Expected, Experiment


@dataclass(frozen=True)
class Fig11Options(AdversarialOptions):
    """Figures 11 and 12 of Su et al.: Synthetic(1, 1), budget 0.7."""

    epsilon: float = 0.7
    """The adversary's budget: the part of an average sample that it may silence per round."""
    fedavg_lr: float = 0.01
    """Learning rate of FedAvg-type methods."""
    fedprox_lr: float = 0.01
    """Learning rate of FedProx's local solver."""
    byzantine_lr: float = 0.01
    """Learning rate of the Byzantine-robust rules."""


def configs(options: Fig11Options) -> Mapping[str, Config]:
    return _adversarial.synthetic("adversarial-fig11", options)


def prepare(folders: Mapping[str, Path], options: Fig11Options) -> Sequence[Path]:
    from fastagg_sim.experiments._adversarial_plots import write_epsilon

    return [write_epsilon(folders["baselines"])]


def draw(folders: Mapping[str, Path], options: Fig11Options, target: Path) -> None:
    from fastagg_sim.experiments import _adversarial_plots

    without = [method for method in BASELINES if method != MIFA]
    _adversarial_plots.draw(folders, [without, BASELINES], target)


def claims(folders: Mapping[str, Path], options: Fig11Options) -> Sequence[Claim]:
    return _adversarial_results.synthetic_claims(folders, options.epsilon, options.as_released)


EXPERIMENT = Experiment(
    name="adversarial-fig11",
    title="Synthetic(1, 1) under adversarial dropout, budget 0.7",
    options=Fig11Options,
    configs=configs,
    claims=claims,
    prepare=prepare,
    draw=draw,
    expected=Expected(cpu=12, quick=2),
    paper="Su et al.",
    figure="11, 12",
)
