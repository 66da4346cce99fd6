# SPDX-License-Identifier: Apache-2.0
"""Common parts of the experiments of Su et al.: options, methods and the adversary.

Local training follows the paper's table 1. The paper tunes learning rates on a grid and does not
report the chosen ones. The defaults here are values of the same grid; options can change them.
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
SAMPLE = 10  # K, clients that the server samples per round; the default of "adversarial"
BETA = NUM_CLIENTS / SAMPLE
MOMENTUM = 0.9
CLIPPING = {"tau": 10 / (1 - MOMENTUM), "iterations": 3}
MEDIAN: dict[str, Any] = {"nu": 0.1, "iterations": 8, "start": "zero"}
FULL_BATCH = 1_000_000  # more than any client has samples

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
    """Seeds; the experiment is repeated once per seed. The paper has at least two repetitions."""
    epsilon: float = 0.8
    """The adversary's budget: the largest fraction of an average sample of clients, weighted by
    their numbers of samples, that it may silence per round."""
    candidates: Literal["all", "shadow"] = "all"
    """The clients that the adversary may silence. all: all clients; this gives the published
    fraction of silenced clients, but amounts to a uniform choice. shadow: the 35 clients of section
    6.1, chosen by shadow runs, which are stored in the data cache."""
    as_released: bool = False
    """Follow the released code instead of the text: the budget is 0.1 larger, but must not be
    reached; the variants update the model within the loop over the clients; clients have other
    label distributions in the shadow runs than in the real run."""
    fedavg_lr: float = 0.1
    """Learning rate of FedAvg and its variant (the initial value, if it decays)."""
    mifa_lr: float = 0.1
    """Learning rate of MIFA (the initial value, if it decays)."""
    fedprox_lr: float = 0.01
    """Learning rate of FedProx's local solver, and of its variant's."""
    prox: float = 0.1
    """Weight mu of FedProx's proximal term."""
    gm_lr: float = 0.01
    """Learning rate of the geometric median, with and without buckets."""
    cclip_lr: float = 0.01
    """Learning rate of centred clipping, with and without buckets."""

    def dropout(self, shadow: Shadow) -> Dropout:
        """Return the dropout setting of the adversary.

        With candidates="shadow" this computes the shadow runs that are not in the cache yet.
        """
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
    """The clients that the adversary may silence. shadow: the 35 clients of section 6.1, chosen by
    shadow runs, which are stored in the data cache; in some rounds no client is silenced, as the
    paper says of this data set. all: all clients, which leaves 1.2 clients active per round on
    average."""
    # Of 0.1, 0.01, 0.001 and 0.0001, each method has the learning rate with the lowest training
    # loss at the end of a run with --quick and seed 100, which is used in no figure.
    # results/README.md lists the losses.
    fedavg_lr: float = 0.01
    """Learning rate of FedAvg and its variant."""
    mifa_lr: float = 0.001
    """Learning rate of MIFA."""
    fedprox_lr: float = 0.001
    """Learning rate of FedProx's local solver, and of its variant's."""
    gm_lr: float = 0.001
    """Learning rate of the geometric median, with and without buckets."""


@dataclass(frozen=True)
class Local:
    """The three kinds of local training in table 1, at the learning rate of each method.

    fedavg: of FedAvg and its variant.
    fedprox: of FedProx and its variant.
    mifa: as fedavg.
    gm, cclip: one step with momentum, for the robust rules.
    """

    fedavg: LocalTraining
    fedprox: LocalTraining
    mifa: LocalTraining
    gm: LocalTraining
    cclip: LocalTraining

    @classmethod
    def at_rates(
        cls,
        options: AdversarialOptions,
        fedavg: LocalTraining,
        fedprox: LocalTraining,
        step: LocalTraining,
    ) -> Local:
        """Build it from the three kinds of training, with the learning rates and FedProx's weight
        of the options.

        fedavg, fedprox: of FedAvg and FedProx; any learning rate and weight.
        step: one step with momentum; any learning rate.
        """
        return cls(
            fedavg=replace(fedavg, lr=options.fedavg_lr),
            fedprox=replace(fedprox, lr=options.fedprox_lr, prox=options.prox),
            mifa=replace(fedavg, lr=options.mifa_lr),
            gm=replace(step, lr=options.gm_lr),
            cclip=replace(step, lr=options.cclip_lr),
        )


def baselines(local: Local, as_released: bool) -> tuple[Method, ...]:
    """Return FedAvg, FedProx, MIFA and the two variants (eq. 2), in the order of the legend.

    MIFA uses zeros for clients that were never active. The released code starts from random models
    on CIFAR-10, and their sum remains in the aggregate for the whole run.
    """
    variant: dict[str, Any] = {"beta": BETA}
    if as_released:
        variant["sequential"] = True
    return (
        Method(FEDAVG, "fedavg", sample_weights=True),
        Method(FEDPROX, "fedavg", sample_weights=True, training=local.fedprox),
        # Eq. 44 applies remembered updates at the current learning rate.
        Method(MIFA, "mifa", sample_weights=True, gradient_units=True, training=local.mifa),
        Method(FEDAVG_VARIANT, "amplified", variant, sample_weights=True),
        Method(FEDPROX_VARIANT, "amplified", variant, sample_weights=True, training=local.fedprox),
    )


def byzantine(local: Local) -> tuple[Method, ...]:
    """Return the robust rules, applied to the last momentum of all clients.

    The momentum of a client that was never active is zero. In gradient units a client sends minus
    its momentum. We interpret "2 buckets" as buckets of two clients, as in the bucketing paper.
    """

    def method(
        label: str, rule: str, options: Mapping[str, Any], training: LocalTraining
    ) -> Method:
        return Method(
            label,
            rule,
            {**options, "reuse": True},
            gradient_units=True,
            training=training,
            sample_weights=True,
        )

    median = {"rule": "geometric-median", "rule_options": MEDIAN}
    clipping = {"rule": "centered-clip", "rule_options": CLIPPING}
    return (
        method(GM, "geometric-median", MEDIAN, local.gm),
        method(CCLIP, "centered-clip", CLIPPING, local.cclip),
        method(BUCKETING_GM, "bucketing", median, local.gm),
        method(BUCKETING_CCLIP, "bucketing", clipping, local.cclip),
    )


def configs(
    name: str, task: Task, local: Local, shadow: Shadow, options: AdversarialOptions
) -> Mapping[str, Config]:
    """Return the runs of a figure: "baselines", and the comparison with "byzantine" rules."""
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
    """Return the local training of table 1 on CIFAR-10.

    With --quick, FedAvg and FedProx use batches of 20 instead of 100. The rules with one step per
    round always use batches of 100.
    """
    size = 20 if options.quick else 100
    return Local.at_rates(
        options,
        fedavg=LocalTraining(size, local_steps=25, lr_power=0.5),
        fedprox=LocalTraining(size, local_steps=10, momentum=MOMENTUM),
        step=_one_step(100),
    )


def _one_step(batch_size: int) -> LocalTraining:
    return LocalTraining(batch_size, local_steps=1, momentum=MOMENTUM, keep_momentum=True)


def cifar(name: str, options: AdversarialOptions, quick_rounds: int) -> Mapping[str, Config]:
    """Section 6.2: CIFAR-10, Dir(0.1) label proportions per client, 500 samples each, LeNet-5.

    With `--quick` the model is evaluated at least twelve times, because some claims are about the
    changes between evaluations.
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
    """Return the shadow runs of a task. With --quick they use rounds 1 and 6 instead of 5 and
    150."""
    from fastagg_sim.shadow_runs import Shadow

    return Shadow(
        replace(task, device=options.device),
        local.cclip,
        CLIPPING,
        sample_weights=True,
        seed_shift=1000 if options.as_released else 0,
        first_round=1 if options.quick else 5,
        last_round=6 if options.quick else 150,
    )


# --- Synthetic(1, 1) ------------------------------------------------------------------------


def synthetic(name: str, options: AdversarialOptions) -> Mapping[str, Config]:
    """Appendix E.2: 100 clients with heavy-tailed sizes, logistic regression, full batches.

    The paper does not state the number of rounds.
    """
    quick = options.quick
    local = Local.at_rates(
        options,
        fedavg=LocalTraining(FULL_BATCH, local_steps=50 if quick else 200),
        fedprox=LocalTraining(FULL_BATCH, local_steps=25 if quick else 100, momentum=MOMENTUM),
        step=_one_step(FULL_BATCH),
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
            train_loss=NUM_CLIENTS * FULL_BATCH,  # all samples
        )

    fresh = {} if options.as_released else {"redraw": 1}
    return configs(name, task(), local, _shadow(task(**fresh), local, options), options)
