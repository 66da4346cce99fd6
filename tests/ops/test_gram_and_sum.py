# SPDX-License-Identifier: Apache-2.0
"""gram_and_sum_: one pass must give the bits of the two ops that it replaces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastagg import ops

# Rows in place and packed, several blocks with a rest, one block, more chunks than threads.
SHAPES = [(1, 1), (2, 3), (5, 769), (20, 4_096), (23, 62_006), (36, 30_011), (101, 2_047)]


def both(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    out, gram = torch.full((rows.shape[1],), torch.nan), torch.full((len(rows),) * 2, torch.nan)
    gram = gram.double()
    assert ops.gram_and_sum_(out, gram, rows, weights) is out
    return gram, out


def check(rows: Tensor, weights: Tensor) -> None:
    gram, out = both(rows, weights)
    expected = ops.weighted_sum_(torch.zeros(rows.shape[1]), rows, weights, beta=0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    expected = ops.gram(rows, dtype=torch.float64)
    torch.testing.assert_close(gram, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_same_bits_as_the_two_ops_in_sequence(isa: str, S: int, d: int) -> None:
    check(torch.randn(S, d), torch.rand(S, dtype=torch.float64))


@pytest.mark.parametrize("threads", [1, 2, 3, 16])  # 16: rows are split over tasks as well
def test_same_bits_for_any_number_of_threads(isa: str, threads: int) -> None:
    rows, weights = torch.randn(61, 20_000), torch.randn(61)
    expected = both(rows, weights)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = both(rows, weights)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("scale", [1e-30, 1e25])  # rows are scaled for gram, not for the sum
def test_magnitudes_out_of_range(isa: str, scale: float) -> None:
    rows = torch.randn(7, 5_000)
    rows[::2] *= scale
    check(rows, torch.rand(7))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(isa: str, value: float) -> None:
    rows = torch.randn(40, 3_000)
    rows[3, 2_999] = value
    gram, out = both(rows, torch.zeros(40))
    assert torch.isfinite(gram.diagonal()).tolist() == [i != 3 for i in range(40)]
    assert not torch.isfinite(out[2_999])


def test_no_rows() -> None:
    out = torch.full((3,), torch.nan)
    ops.gram_and_sum_(out, torch.empty(0, 0, dtype=torch.float64), [], torch.empty(0))
    assert out.tolist() == [0.0, 0.0, 0.0]


def test_wrong_arguments() -> None:
    rows, weights, gram = torch.randn(3, 5), torch.ones(3), torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="gram: expected dtype Double"):
        ops.gram_and_sum_(torch.zeros(5), gram.float(), rows, weights)
    with pytest.raises(ValueError, match=r"gram: expected shape \[3, 3\]"):
        ops.gram_and_sum_(torch.zeros(5), gram[:2, :2].contiguous(), rows, weights)
    with pytest.raises(ValueError, match="weights: expected shape"):
        ops.gram_and_sum_(torch.zeros(5), gram, rows, weights[:2])
    with pytest.raises(ValueError, match="shares memory"):
        ops.gram_and_sum_(rows[0], gram, rows, weights)
