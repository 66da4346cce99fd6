# SPDX-License-Identifier: Apache-2.0
"""Aggregators can be pickled and copied, with any options; a copy goes on by itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator

K, D, ROUNDS = 6, 23, 4
# Options that change what an object consists of. Each is tried with every rule that takes it.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "client"},
    {"reuse": True},
    {"reuse": True, "max_age": 2, "memory_dtype": "int8"},
    {"reuse": True, "staleness": "constant"},
    {"staleness": "constant", "max_staleness": 3},
    {"staleness": "polynomial"},
    {"memory_dtype": "bfloat16"},
    {"memory_dtype": "int8", "max_age": 2},
    {"sketch": 64},
    {"max_share": 0.4},
    {"clip_norm": "adaptive"},
    {"clip_norm": 2.0, "noise_multiplier": 0.0},
    {"nonfinite": "drop"},
    {"server_optimizer": "adam"},
]
NEEDED: dict[str, dict[str, Any]] = {"scaffold": {"local_work": 0.5}}
COPIES: dict[str, Callable[[Aggregator], Aggregator]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda agg: pickle.loads(pickle.dumps(agg)),
}


def made(name: str) -> Iterator[tuple[dict[str, Any], Aggregator]]:
    """Yield all options that a rule takes, and an aggregator with them."""
    for options in OPTIONS:
        given = NEEDED.get(name, {}) | options
        try:
            agg = fastagg.make(name, num_clients=K, num_params=D, **given)
        except (TypeError, ValueError):  # the rule does not have these options
            continue
        yield options, agg


@pytest.mark.slow
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", fastagg.available())
def test_a_copy_goes_on_by_itself(
    random_rounds: Any,
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    how: str,
) -> None:
    def run(agg: Aggregator, params: Tensor, seed: int) -> None:
        for updates, clients in random_rounds(K, D, ROUNDS, seed):
            agg.step(params, updates, clients)

    for options, agg in made(name):
        params = torch.zeros(D)
        run(agg, params, 1)
        other, moved, before = COPIES[how](agg), params.clone(), agg.state_dict()
        run(other, moved, 2)
        for key, value in agg.state_dict().items():
            same_bits(value, before[key], f"{options} {key}")
        run(agg, params, 2)
        same_bits(params, moved, f"{options}")
        same_state(agg, other)


def test_the_options_fit_rules() -> None:
    taken = {(name, *options) for name in fastagg.available() for options, _ in made(name)}
    assert {("mimic", "mode"), ("krum", "reuse"), ("nnm", "reuse", "staleness")} <= taken
    assert all(
        any((name, *options) in taken for name in fastagg.available()) for options in OPTIONS
    )
