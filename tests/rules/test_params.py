# SPDX-License-Identifier: Apache-2.0
"""Checks of the parameters in a step, for any cohort and any place in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastagg
from fastagg import Aggregator

every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder


def make(name: str, options: dict[str, Any]) -> Aggregator:
    return fastagg.make(name, num_clients=6, num_params=23, **options)


@every_rule
@pytest.mark.parametrize("there", [0, 3])
def test_non_finite_params_are_refused_even_without_valid_updates(
    name: str, options: dict[str, Any], there: int
) -> None:
    agg = make(name, options | {"nonfinite": "drop"})
    params = torch.full((agg.num_params,), math.nan)
    with pytest.raises(ValueError, match="params: expected finite"):
        agg.step(params, torch.full((there, agg.num_params), math.inf), range(there))


@every_rule
def test_params_may_lie_between_rows(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    agg, twin = make(name, options), make(name, options)
    d = agg.num_params
    together = torch.randn(3, 3 * d)
    params, updates = together[1, d : 2 * d], together[:, :d]
    apart = params.clone()
    twin.step(apart, updates.clone(), [0, 2, 5])
    agg.step(params, updates, [0, 2, 5])
    same_bits(params, apart)


def test_a_copy_of_a_model_is_warned_about() -> None:
    """The step would change the copy, and the model not: a silent mistake."""
    model = torch.nn.Linear(3, 2)
    update, expected = torch.ones(1, 8), "CatBackward.*parameters_to_vector.*FlatLayout"
    copy = torch.nn.utils.parameters_to_vector(model.parameters())
    agg = fastagg.make("fedavg", num_clients=2, num_params=8)
    before = copy.detach().clone()
    with pytest.warns(UserWarning, match=expected) as warned:
        agg.step(copy, update, [0])
    assert warned[0].filename == __file__
    assert torch.equal(copy.detach(), before + 1)
    agg.step(copy.detach(), update, [0])  # pytest makes warnings errors
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    agg.step(parameter.view(8), update, [0])  # a view: the parameter changes with it
    assert torch.equal(parameter.detach(), torch.ones(2, 4))
