# SPDX-License-Identifier: Apache-2.0
"""A rule that needs more rows, or refuses so many, leaves bad rows out first, in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import TensorRows

D = 4
ROWS = torch.eye(D)
LONG = torch.full((1, D), 100.0)


def given(form: str, rows: Tensor) -> Any:
    forms = {"matrix": Tensor.clone, "rows": list, "streamed": TensorRows}
    return forms[form](rows)


@pytest.mark.parametrize("form", ["matrix", "rows", "streamed"])
@pytest.mark.parametrize(
    ("rule", "options", "bad"),
    [
        ("fedbuff", {"buffer_size": 3}, LONG),
        ("fedbuff", {"buffer_size": 3}, LONG * float("nan")),
        ("fedbuff", {"buffer_size": 3, "clip_norm": 0.5}, LONG),
    ],
)
def test_a_row_that_is_rejected_does_not_count_for_the_plan(
    form: str, rule: str, options: dict[str, Any], bad: Tensor
) -> None:
    options = {"nonfinite": "drop", "max_norm": 5.0} | options
    agg = fastagg.make(rule, num_clients=D + 1, num_params=D, **options)
    twin = fastagg.make(rule, num_clients=D + 1, num_params=D, **options)
    params, expected = torch.zeros(D), torch.zeros(D)
    report = agg.step(params, given(form, torch.cat([ROWS[:3], bad])), [0, 1, 2, 3])
    twin.step(expected, ROWS[:3], [0, 1, 2])
    assert report.active.tolist() == [0, 1, 2] and report.reasons.keys() == {3}
    assert torch.equal(params, expected) and params.any()


@pytest.mark.parametrize("form", ["matrix", "rows", "streamed"])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("trimmed-mean", {"num_byzantine": 1}),
        ("meamed", {"num_byzantine": 1}),
        ("krum", {"num_byzantine": 1}),
        ("krum", {"num_byzantine": 1, "clip_norm": 0.5}),
    ],
)
def test_a_refused_step_says_which_rows_were_rejected_before(
    form: str, rule: str, options: dict[str, Any]
) -> None:
    agg = fastagg.make(rule, num_clients=D, num_params=D, max_norm=5.0, **options)
    params = torch.zeros(D)
    rows = given(form, torch.cat([ROWS[:1], LONG]))
    with pytest.raises(
        ValueError, match=r"got 1 \(rejected: client 3: norm 200, but max_norm is 5"
    ):
        agg.step(params, rows, [0, 3])
    assert not params.any()


def test_zero_weights_are_left_because_of_a_row() -> None:
    agg = fastagg.FedAvg(num_clients=8, num_params=D, nonfinite="drop")
    rows, weights = torch.zeros(8, D), [0.0, *[1.0] * 6, 0.0]
    rows[1:7] = float("nan")
    with pytest.raises(ValueError, match=r"all zeros \(rejected: client 1: NaN .*; and 1 more\)$"):
        agg.step(torch.zeros(D), rows, range(8), weights=weights)
