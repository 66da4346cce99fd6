# SPDX-License-Identifier: Apache-2.0
"""Median: hand-worked numbers, an oracle, and what holds of all columnwise rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Median
from fastagg.updates.streams import ColumnBlocks

COLUMNWISE: list[tuple[str, dict[str, Any]]] = [
    ("median", {}),
    ("trimmed-mean", {"num_byzantine": 1}),
    ("meamed", {"num_byzantine": 1}),
]
columnwise = pytest.mark.parametrize(("name", "options"), COLUMNWISE)


def aggregate(name: str, options: dict[str, Any], rows: Tensor, **more: Any) -> Tensor:
    params = torch.zeros(rows.shape[1])
    size, d = rows.shape
    agg = fastagg.make(name, num_clients=size, num_params=d, **options, **more)
    agg.step(params, rows, range(size))
    return params


def test_hand_worked() -> None:
    rows = torch.tensor([[1.0, -1e30], [2.0, 0.5], [30.0, 1.0]])
    agg = Median(num_clients=4, num_params=2, server_lr=0.5)
    params = torch.zeros(2)
    report = agg.step(params, rows, [3, 0, 1])
    assert params.tolist() == [1.0, 0.25]
    assert report.weights.tolist() == [np.float32(1 / 3)] * 3
    agg.step(params.zero_(), torch.cat([rows, torch.tensor([[4.0, 0.0]])]), range(4))
    assert params.tolist() == [1.5, 0.125]  # of an even number: half of 3 and of 0.25


def test_follows_the_oracle(follow: Callable[..., None]) -> None:
    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        return params + 0.7 * np.median(np.stack(list(updates.values())), axis=0)

    agg = Median(num_clients=9, num_params=33, server_lr=0.7)
    follow(agg, oracle, tolerance=2 * 2.0**-24)  # the median and the parameters, to float32


@columnwise
@given(seed=st.integers(0, 2**32), f=st.integers(0, 3), scale=st.sampled_from([1.0, 1e20]))
def test_a_minority_cannot_leave_the_range_of_the_others(
    name: str, options: dict[str, Any], seed: int, f: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(7 - f, 20, generator=generator)
    rows = torch.cat([honest, scale * torch.randn(f, 20, generator=generator)])
    given_f = {"num_byzantine": f} if options else {}
    result = aggregate(name, given_f, rows)
    # Meamed: each value that is kept is as near to the median as some honest value (its authors'
    # lemma), so within the honest range extended by its length.
    reach = (honest.amax(0) - honest.amin(0)) * (1.0 if name == "meamed" else 0.0)
    slack = 1e-6 * honest.abs().amax(0)  # one rounding
    assert (result >= honest.amin(0) - reach - slack).all()
    assert (result <= honest.amax(0) + reach + slack).all()


@columnwise
def test_columns_are_independent(name: str, options: dict[str, Any]) -> None:
    rows = torch.randn(8, 30)
    whole = aggregate(name, options, rows)
    for k in range(30):
        shuffled = rows[torch.randperm(8), k : k + 1]
        assert torch.equal(aggregate(name, options, shuffled), whole[k : k + 1])


@columnwise
def test_moving_and_scaling_all_rows_moves_and_scales_the_result(
    name: str, options: dict[str, Any]
) -> None:
    rows = torch.randn(8, 30).round(decimals=2)
    result = aggregate(name, options, rows)
    assert torch.equal(aggregate(name, options, 4.0 * rows), 4.0 * result)
    if name != "meamed":  # where the smaller value wins a tie
        assert torch.equal(aggregate(name, options, -rows), -result)
    moved = aggregate(name, options, rows + 64.0)
    # The moved values and the result are rounded to multiples of 2^-18.
    torch.testing.assert_close(moved, result + 64.0, rtol=0, atol=2.0**-16)


@columnwise
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_value_that_is_trimmed_away_is_still_found(
    name: str, options: dict[str, Any], value: float, streamed: bool
) -> None:
    rows = torch.randn(5, 3000)
    rows[2, 2000] = value
    for nonfinite in ("raise", "drop"):
        agg = fastagg.make(name, num_clients=5, num_params=3000, nonfinite=nonfinite, **options)
        updates: Any = rows
        if streamed:
            updates = ColumnBlocks(
                lambda: (rows[:, k : k + 1000] for k in (0, 1000, 2000)),
                num_rows=5,
                num_params=3000,
                budget=4 * 1024 * 5,
            )
        params = torch.zeros(3000)
        if nonfinite == "raise":
            with pytest.raises(ValueError, match=r"NaN or Inf from client\(s\) \[2\]"):
                agg.step(params, updates, range(5))
            assert not params.any()
        else:
            report = agg.step(params, updates, range(5))
            assert report.rejected.tolist() == [2]
            expected = aggregate(name, options, rows[[0, 1, 3, 4]])
            assert torch.equal(params, expected)


@columnwise
@pytest.mark.parametrize("streamed", [False, True])
def test_a_row_that_is_too_long_is_left_out(
    name: str, options: dict[str, Any], streamed: bool
) -> None:
    rows = torch.randn(6, 3000)
    rows[4] *= 3.0
    updates: Any = rows
    if streamed:
        updates = ColumnBlocks(
            lambda: iter([rows]), num_rows=6, num_params=3000, budget=4 * 1024 * 6
        )
    agg = fastagg.make(name, num_clients=6, num_params=3000, max_norm=80.0, **options)
    params = torch.zeros(3000)
    assert agg.step(params, updates, range(6)).rejected.tolist() == [4]
    assert torch.equal(params, aggregate(name, options, rows[[0, 1, 2, 3, 5]]))


@columnwise
@pytest.mark.parametrize("option", ["client_weights", "sketch", "reuse"])
def test_options_of_other_rules_are_refused_with_the_reason(
    name: str, options: dict[str, Any], option: str
) -> None:
    with pytest.raises(TypeError, match=f"{option}: .*"):
        fastagg.make(name, num_clients=3, num_params=2, **options, **{option: None})


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "meamed", "bulyan"])
def test_wrappers_refuse_rules_that_are_no_weighted_sums(rule: str) -> None:
    for wrapper in ("bucketing", "nnm"):
        with pytest.raises(ValueError, match=r"rule: expected one of .*weighted sum of rows"):
            fastagg.make(wrapper, num_clients=3, num_params=2, rule=rule)


@columnwise
def test_a_step_that_fails_changes_nothing(name: str, options: dict[str, Any]) -> None:
    agg = fastagg.make(name, num_clients=5, num_params=4, **options)
    params = torch.full((4,), 3e38)
    with pytest.raises(ValueError, match="range of float32"):
        agg.step(params, torch.full((5, 4), 1e38), range(5))
    assert params.tolist() == [np.float32(3e38)] * 4
    params = torch.tensor([1.0, math.nan, 0.0, 0.0])
    with pytest.raises(ValueError, match="params"):
        agg.step(params, torch.ones(5, 4), range(5))
    assert params[0] == 1.0 and agg.committed == 0
