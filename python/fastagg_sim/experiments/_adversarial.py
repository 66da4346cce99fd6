# SPDX-License-Identifier: Apache-2.0
"""What the experiments of Su et al. share: settings, methods and the adversary.

Local training follows the paper's table 1. It tunes learning rates on a grid and does not say what
came out; the defaults here are of that grid too, and options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fastagg_sim.config import Config, Dropout, LocalTraining, Method, Task
from fastagg_sim.experiments._base import Options

if TYPE_CHECKING:
    from fastagg_sim.shadow_runs import Shadow

NUM_CLIENTS = 100  # M
SAMPLE = 10  # K, the clients that the server asks in a round; the default of "adversarial"
BETA = NUM_CLIENTS / SAMPLE
MOMENTUM = 0.9
CLIPPING = {"tau": 10 / (1 - MOMENTUM), "iterations": 3}
MEDIAN: dict[str, Any] = {"nu": 0.1, "iterations": 8, "start": "zero"}
FULL_BATCH = 1_000_000  # no client has as many samples

FEDAVG, FEDPROX, MIFA = "FedAvg", "FedProx", "MIFA"
FEDAVG_VARIANT, FEDPROX_VARIANT = "FedAvg variant", "FedProx variant"
VARIANTS = (FEDAVG_VARIANT, FEDPROX_VARIANT)
BASELINES = (FEDAVG, FEDPROX, MIFA, *VARIANTS)
GM, CCLIP, BUCKETING_GM, BUCKETING_CCLIP = "GM", "cclip", "bucketing GM", "bucketing cclip"
BYZANTINE = (GM, CCLIP, BUCKETING_GM, BUCKETING_CCLIP)


@dataclass(frozen=True)
class AdversarialOptions(Options):
    """Options of the experiments of Su et al."""

    seeds: tuple[int, ...] = (0, 1)
    """One repetition per seed; the paper has at least two."""
    epsilon: float = 0.8
    """The adversary's budget: the part of an average sample that it may silence per round."""
    candidates: Literal["all", "shadow"] = "all"
    """Whom the adversary may silence. all: everybody, which is what gives the published fraction of
    silenced clients, and is a uniform choice. shadow: the 35 of section 6.1, found by shadow runs
    that are kept in the data cache."""
    as_released: bool = False
    """The released code instead of the text: the budget, 0.1 larger, must not be reached; the
    variants move the model within the loop over the clients; shadow clients have label
    distributions of their own."""
    fedavg_lr: float = 0.1
    """Learning rate of FedAvg-type methods (in round 0, where it decays)."""
    fedprox_lr: float = 0.01
    """Learning rate of FedProx's local solver."""
    prox: float = 0.1
    """Weight mu of FedProx's proximal term."""
    byzantine_lr: float = 0.01
    """Learning rate of the Byzantine-robust rules."""

    def dropout(self, shadow: Shadow) -> Dropout:
        """The adversary; with candidates="shadow" this runs what `shadow` lacks."""
        epsilon = self.epsilon + (0.1 if self.as_released else 0.0)
        options: dict[str, Any] = {"epsilon": round(epsilon, 9)}
        if self.as_released:
            options["strict"] = True
        if self.candidates == "all":
            return Dropout("adversarial", {**options, "candidates": "all"})
        found = shadow.candidates(self.chosen_seeds(), workers=self.workers)
        return Dropout(
            "adversarial",
            options,
            seed_options={str(seed): {"candidates": c.ids} for seed, c in found.items()},
        )


@dataclass(frozen=True)
class SyntheticOptions(AdversarialOptions):
    """Options of the experiments on Synthetic(1, 1)."""

    candidates: Literal["all", "shadow"] = "shadow"
    """Whom the adversary may silence. shadow: the 35 of section 6.1, found by shadow runs that are
    kept in the data cache; with them there are rounds in which nobody is silenced, as the paper
    says of this data set. all: everybody, which leaves 1.2 clients per round on average."""
    # Of 0.1, 0.01 and 0.001 those with which most methods of the group end at the lowest training
    # loss, with --quick and seed 100, which no figure shows: results/README.md has the losses.
    fedavg_lr: float = 0.01
    """Learning rate of FedAvg-type methods."""
    fedprox_lr: float = 0.001
    """Learning rate of FedProx's local solver."""


@dataclass(frozen=True)
class Local:
    """The three local programs of table 1."""

    fedavg: LocalTraining
    fedprox: LocalTraining
    momentum: LocalTraining


def baselines(local: Local, as_released: bool) -> tuple[Method, ...]:
    """FedAvg, FedProx, MIFA and the two variants (eq. 2), in the order of the legend.

    MIFA starts from zeros for clients never seen; in the released code, from random models on
    CIFAR-10, the sum of which stays in its aggregate for ever.
    """
    variant: dict[str, Any] = {"beta": BETA}
    if as_released:
        variant["sequential"] = True
    return (
        Method(FEDAVG, "fedavg", sample_weights=True),
        Method(FEDPROX, "fedavg", sample_weights=True, training=local.fedprox),
        Method(MIFA, "mifa", sample_weights=True, gradient_units=True),  # eq. 44: current rate
        Method(FEDAVG_VARIANT, "amplified", variant, sample_weights=True),
        Method(FEDPROX_VARIANT, "amplified", variant, sample_weights=True, training=local.fedprox),
    )


def byzantine(local: Local) -> tuple[Method, ...]:
    """The robust rules over everybody's last momentum; zeros for clients never seen.

    In gradient units a client sends minus its momentum. "2 buckets" are buckets of two, as in the
    paper that bucketing is from.
    """

    def method(label: str, rule: str, options: Mapping[str, Any]) -> Method:
        return Method(
            label,
            rule,
            {**options, "reuse": True},
            gradient_units=True,
            training=local.momentum,
            sample_weights=True,
        )

    return (
        method(GM, "geometric-median", MEDIAN),
        method(CCLIP, "centered-clip", CLIPPING),
        method(BUCKETING_GM, "bucketing", {"rule": "geometric-median", "rule_options": MEDIAN}),
        method(BUCKETING_CCLIP, "bucketing", {"rule": "centered-clip", "rule_options": CLIPPING}),
    )


def configs(
    name: str, task: Task, local: Local, shadow: Shadow, options: AdversarialOptions
) -> Mapping[str, Config]:
    """The runs of a figure and of its comparison with Byzantine-robust rules."""
    dropout = options.dropout(shadow)
    seeds = options.chosen_seeds()
    return {
        part: Config(f"{name} {part}", task, methods, (dropout,), seeds)
        for part, methods in (
            ("baselines", baselines(local, options.as_released)),
            ("byzantine", byzantine(local)),
        )
    }


# --- CIFAR-10 -------------------------------------------------------------------------------


def cifar_local(options: AdversarialOptions) -> Local:
    """Table 1. With --quick clients that take many steps a round take them on batches of 20; those
    that take one have the paper's 100."""
    size = 20 if options.quick else 100
    return Local(
        LocalTraining(size, local_steps=25, lr=options.fedavg_lr, lr_power=0.5),
        LocalTraining(
            size, local_steps=10, lr=options.fedprox_lr, momentum=MOMENTUM, prox=options.prox
        ),
        _one_step(100, options),
    )


def _one_step(batch_size: int, options: AdversarialOptions) -> LocalTraining:
    return LocalTraining(
        batch_size,
        local_steps=1,
        lr=options.byzantine_lr,
        momentum=MOMENTUM,
        keep_momentum=True,
    )


def cifar(name: str, options: AdversarialOptions, quick_rounds: int) -> Mapping[str, Config]:
    """Section 6.2: CIFAR-10, Dir(0.1) label proportions per client, 500 samples each, LeNet-5.

    `--quick` evaluates a dozen times, at least, since claims are about changes between evaluations.
    """
    local = cifar_local(options)
    every = options.eval_every

    def task(**partition: Any) -> Task:
        return Task(
            dataset="cifar10",
            partition="dirichlet",
            model="lenet",
            training=local.fedavg,
            rounds=options.chosen_rounds(2000, quick=quick_rounds),
            num_clients=NUM_CLIENTS,
            partition_options={"alpha": 0.1, "samples_per_client": 500, **partition},
            eval_every=min(every, quick_rounds // 12) if options.quick else every,
            train_loss=5_000 if options.quick else 10_000,
        )

    fresh = {} if options.as_released else {"redraw": 1}
    shadow = _shadow(task(**fresh), local, options)
    return configs(name, task(), local, shadow, options)


def _shadow(task: Task, local: Local, options: AdversarialOptions) -> Shadow:
    """--quick looks at rounds 1 and 6 instead of 5 and 150."""
    from fastagg_sim.shadow_runs import Shadow

    return Shadow(
        replace(task, device=options.device),
        local.momentum,
        CLIPPING,
        sample_weights=True,
        seed_shift=1000 if options.as_released else 0,
        first_round=1 if options.quick else 5,
        last_round=6 if options.quick else 150,
    )


# --- Synthetic(1, 1) ------------------------------------------------------------------------


def synthetic(name: str, options: AdversarialOptions) -> Mapping[str, Config]:
    """Appendix E.2: 100 clients with heavy-tailed sizes, logistic regression, full batches.

    The number of rounds is not given.
    """
    quick = options.quick
    local = Local(
        LocalTraining(FULL_BATCH, local_steps=50 if quick else 200, lr=options.fedavg_lr),
        LocalTraining(
            FULL_BATCH,
            local_steps=25 if quick else 100,
            lr=options.fedprox_lr,
            momentum=MOMENTUM,
            prox=options.prox,
        ),
        _one_step(FULL_BATCH, options),
    )

    def task(**data: Any) -> Task:
        return Task(
            dataset="synthetic",
            partition="natural",
            model="logistic",
            training=local.fedavg,
            rounds=options.chosen_rounds(500, quick=150),
            num_clients=NUM_CLIENTS,
            data_options=data,
            eval_every=options.eval_every,
            train_loss=NUM_CLIENTS * FULL_BATCH,  # all
        )

    fresh = {} if options.as_released else {"redraw": 1}
    return configs(name, task(), local, _shadow(task(**fresh), local, options), options)
