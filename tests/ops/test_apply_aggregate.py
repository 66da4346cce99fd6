# SPDX-License-Identifier: Apache-2.0
"""apply_aggregate_: the bits of the plain steps, and parameters that keep theirs out of range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

LIMIT = 1e38
F32, F64 = torch.float32, torch.float64


def call(
    params: Tensor,
    aggregate: Tensor,
    lr: float = 0.3,
    norm: float = 1.0,
    peak: float = 1e30,
    limit: float = LIMIT,
) -> bool:
    """Apply the op to ``params``; return whether they have changed."""
    applied = torch.zeros((), dtype=torch.bool)
    assert ops.apply_aggregate_(params, applied, aggregate, lr, norm, peak, limit) is params
    return bool(applied)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("d", [1, 7, 63, 1_000, 62_006, 1_200_000])
def test_bits_are_those_of_the_plain_steps(isa: str, d: int) -> None:
    params, row, total = torch.randn(d), torch.randn(d), torch.randn(d, dtype=F64)
    rate = torch.tensor([0.3], dtype=F64)
    expected = ops.weighted_sum_(params.clone(), [row], rate)
    moved = params.clone()
    assert call(moved, row) and torch.equal(bits(moved), bits(expected))

    expected = ops.add_total_(params.clone(), total, 0.3, 0.7)
    moved = params.clone()
    assert call(moved, total, norm=0.7) and torch.equal(bits(moved), bits(expected))

    oracle, flag = params.clone(), torch.zeros((), dtype=torch.bool)
    reference.apply_aggregate_(oracle, flag, total, 0.3, 0.7, 1e30, LIMIT)
    assert bool(flag) and torch.equal(moved, oracle)  # both round a float64 number once


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_bits_do_not_depend_on_threads(threads: int, dtype: torch.dtype) -> None:
    params, aggregate = torch.randn(2_000_001), torch.randn(2_000_001, dtype=dtype)
    before, results = torch.get_num_threads(), []
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            results.append(params.clone())
            assert call(results[-1], aggregate)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(results[0]), bits(results[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 500, 1_006])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_parameters_that_are_not_finite_keep_their_bits(
    isa: str, bad: float, place: int, dtype: torch.dtype
) -> None:
    params = torch.randn(1_007)
    params[place] = bad
    moved = params.clone()
    assert not call(moved, torch.randn(1_007, dtype=dtype))
    assert torch.equal(bits(moved), bits(params))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_aggregate_is_not_applied(isa: str, bad: float) -> None:
    params, row = torch.randn(1_007), torch.randn(1_007)
    row[640] = bad
    moved = params.clone()
    assert not call(moved, row) and torch.equal(moved, params)
    for peak in (math.nan, math.inf):  # of a total that may not be finite
        assert not call(moved, row.double(), peak=peak) and torch.equal(moved, params)


def test_limits_by_hand() -> None:
    params, row = torch.tensor([1.0, -4.0]), torch.tensor([-2.0, 1.0])
    # 4 + 0.5 * 2 = 5 is the limit; the largest magnitudes are in different columns.
    assert not call(params, row, lr=0.5, limit=4.99) and params.tolist() == [1.0, -4.0]
    assert not call(params, row, lr=0.5, peak=1.99, limit=9.0) and params.tolist() == [1.0, -4.0]
    assert call(params, row, lr=0.5, peak=2.0, limit=5.0) and params.tolist() == [0.0, -3.5]
    # A float64 total is not read for its largest magnitude: the bound counts. 3.5 + 0.5 * 3 = 5.
    total = torch.tensor([4.0, 2.0], dtype=F64)
    assert not call(params, total, lr=0.5, norm=0.5, peak=3.0, limit=4.99)
    assert params.tolist() == [0.0, -3.5]
    assert call(params, total, lr=0.5, norm=0.5, peak=3.0, limit=5.0)
    assert params.tolist() == [1.0, -3.0]


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
    st.floats(-100, 100, width=32),
    st.floats(0, 10),
    st.floats(0, 300),
    st.booleans(),
)
def test_the_oracle_decides_alike(
    values: list[float], row: float, lr: float, limit: float, wide: bool
) -> None:
    params = torch.tensor(values)
    aggregate = torch.full_like(params, row, dtype=F64 if wide else F32)
    mine, oracle = params.clone(), params.clone()
    flag = torch.zeros((), dtype=torch.bool)
    reference.apply_aggregate_(oracle, flag, aggregate, lr, 1.0, 100.0, limit)
    assert call(mine, aggregate, lr, 1.0, 100.0, limit) == bool(flag)
    # The rate is rounded to float32, and so is its product with the row.
    assert torch.allclose(mine, oracle, rtol=0.0, atol=2.0**-22 * (100.0 + 10.0 * 100.0))


def test_empty_vectors() -> None:
    for dtype in (F32, F64):
        assert call(torch.empty(0), torch.empty(0, dtype=dtype))


def test_bad_arguments() -> None:
    params, flag = torch.zeros(4), torch.zeros((), dtype=torch.bool)
    rest = (1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="aggregate: expected shape"):
        ops.apply_aggregate_(params, flag, torch.zeros(3), *rest)
    with pytest.raises(TypeError, match="aggregate: expected dtype"):
        ops.apply_aggregate_(params, flag, torch.zeros(4, dtype=torch.bfloat16), *rest)
    with pytest.raises(TypeError, match="applied: expected dtype Bool"):
        ops.apply_aggregate_(params, torch.zeros(()), torch.zeros(4), *rest)
    with pytest.raises(ValueError, match=r"norm: expected 1 with a float32 aggregate, got 0\.5"):
        ops.apply_aggregate_(params, flag, torch.zeros(4), 1.0, 0.5, 1.0, 1.0)
    with pytest.raises(ValueError, match="memory"):
        ops.apply_aggregate_(params, flag, params, *rest)
    assert params.tolist() == [0.0] * 4 and not flag
