# SPDX-License-Identifier: Apache-2.0
"""The state of a rule with few clients as that of a rule with more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg.growth import widened_state

K, MORE, D = 6, 11, 23
exact_rule = pytest.mark.exact_rule
SUMS = {"total", "mean_control"}  # over clients


def wider(options: dict[str, Any]) -> dict[str, Any]:
    weights = options.get("client_weights")
    return options if weights is None else {**options, "client_weights": [*weights, 1, 2, 3, 4, 5]}


@exact_rule
def test_old_clients_keep_their_state_and_new_ones_have_none(
    name: str,
    options: dict[str, Any],
    random_rounds: Callable[..., Iterator[tuple[Tensor, Tensor]]],
    same_bits: Callable[..., None],
) -> None:
    few = fastagg.make(name, num_clients=K, num_params=D, **options)
    params = torch.randn(D, generator=torch.Generator().manual_seed(1))
    for updates, clients in random_rounds(K, D, 12, 7):
        few.step(params, updates, clients)
    many = fastagg.make(name, num_clients=MORE, num_params=D, **wider(options))
    before, first = few.state_dict(), many.state_dict()
    state = widened_state(many, before, K)
    many.load_state_dict(state)  # which checks that steps lead to it
    after = many.state_dict()
    for key, value in before.items():
        old, new, none = value, after[key], first[key]
        if key == "candidates":
            old, new, none = (
                fastagg.bits.unpack(v, n) for v, n in ((old, K), (new, MORE), (none, MORE))
            )
        if key in SUMS:
            continue
        place = tuple(slice(n) for n in old.shape)
        same_bits(new[place], old, key)
        if new.shape != old.shape:
            same_bits(new[K:], none[K:], key)
            if new.dim() == 2 and new.shape[-1] == MORE:
                same_bits(new[:, K:], none[:, K:], key)
    if name == "mifa-client":
        same_bits(after["total"], before["total"])
    elif "total" in before:
        rest = many._shares @ after["memory"].double()
        assert torch.allclose(after["total"], rest, rtol=1e-12, atol=1e-14)
    if "mean_control" in before:
        mean = after["controls"].double().mean(dim=0)
        assert torch.allclose(after["mean_control"].double(), mean, rtol=1e-6, atol=1e-7)
    many.step(params, torch.ones(4, D), [0, 2, K, MORE - 1])
    assert torch.isfinite(params).all()


def test_a_wider_mimic_goes_on_as_before(same_bits: Callable[..., None]) -> None:
    few, many = (fastagg.make("mimic", num_clients=k, num_params=3) for k in (2, 4))
    one, other = torch.zeros(3), torch.zeros(3)
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, -1.0]])
    few.step(one, rows, [0, 1])
    other.copy_(one)
    many.load_state_dict(widened_state(many, few.state_dict(), 2))
    for rule, params in ((few, one), (many, other)):
        rule.step(params, rows[:1], [1])
    same_bits(one, other)


def test_other_states_are_refused() -> None:
    few, many = (fastagg.make("fdms", num_clients=k, num_params=3) for k in (2, 4))
    with pytest.raises(ValueError, match=r"state\['scores'\]: expected at most shape \[2, 2\]"):
        widened_state(few, many.state_dict(), 4)
    with pytest.raises(ValueError, match="expected the tensors"):
        widened_state(many, {}, 2)
