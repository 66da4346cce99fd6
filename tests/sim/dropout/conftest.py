# SPDX-License-Identifier: Apache-2.0
"""Processes for 20 clients, and rates. Rates are checked to 5 standard errors: with the fixed seeds
here the tests are deterministic; a correct process would exceed such a bound for one seed in a
million."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, make_dropout

K = 20
GROUPS = [client // 4 for client in range(K)]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "exact": {"alpha": 0.5},
    "cluster-floor": {"alpha": 0.5},
    "bernoulli": {"p": 0.3},
    "round-robin": {"phase": "random"},
    "time-varying": {"fraction": 0.3},
    "markov": {"rate": 0.3, "memory": 0.5},
    "label-correlated": {"low": 0.2, "high": 0.6},
    "sampled": {"sample": 8, "process": "bernoulli", "options": {"p": 0.5}},
    "churn": {"initial": 12, "lifetime": 30.0, "process": "bernoulli", "options": {"p": 0.5}},
    "adversarial": {"candidates": [0, 1, 2, 3, 4, 5], "epsilon": 0.3},
}
# Client k holds 30 samples of label k % 10 and 10 of the next.
COUNTS = [[30 * (k % 10 == c) + 10 * ((k + 1) % 10 == c) for c in range(10)] for k in range(K)]


def make(name: str, seed: int = 0, **options: Any) -> DropoutProcess:
    chosen = {**OPTIONS[name], **options}
    return make_dropout(
        name, num_clients=K, seed=seed, groups=GROUPS, label_counts=COUNTS, **chosen
    )


def indicator(process: DropoutProcess, rounds: int) -> torch.Tensor:
    """Return which clients are active in each round: float64 [rounds, K]."""
    active = torch.zeros(rounds, process.num_clients, dtype=torch.float64)
    for t in range(rounds):
        active[t, process.active(t)] = 1.0
    return active


def pair_counts(active: torch.Tensor) -> torch.Tensor:
    """Count the rounds in which both clients of a pair are active: [n (n - 1) / 2]."""
    together = active.T @ active
    return together[torch.ones_like(together).triu(diagonal=1).bool()]


def assert_rate(hits: torch.Tensor, trials: int, rate: float) -> None:
    """Assert that each entry of `hits` fits Binomial(trials, rate), to 5 standard errors."""
    bound = 5.0 * math.sqrt(trials * rate * (1.0 - rate))
    assert (hits - trials * rate).abs().max() <= bound


@pytest.fixture(name="make")
def _make() -> Callable[..., DropoutProcess]:
    return make


@pytest.fixture(name="options")
def _options() -> dict[str, dict[str, Any]]:
    return OPTIONS


@pytest.fixture(name="indicator")
def _indicator() -> Callable[..., torch.Tensor]:
    return indicator


@pytest.fixture(name="pair_counts")
def _pair_counts() -> Callable[..., torch.Tensor]:
    return pair_counts


@pytest.fixture(name="assert_rate")
def _assert_rate() -> Callable[..., None]:
    return assert_rate
