# SPDX-License-Identifier: Apache-2.0
"""difference_sum_: the weighted sum and the norms of models minus a base, in one pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

# Blocks are 8,192 columns, steps 64, groups 8, 4, 2 and 1 rows.
SHAPES = [(1, 1), (2, 63), (3, 64), (4, 129), (7, 8_193), (15, 4_099), (70, 2_049), (2, 600_001)]
# As for weighted_sum_, plus the rounding of the difference.
ROUNDED = 12 * 2.0**-24
SQUARES = 1e-6  # of sums of 64 squares in float32: at most 12 roundings, 7e-7


def made(S: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(d, generator=g)
    rows = base + 0.1 * torch.randn(S, d, generator=g)
    return rows, base, torch.rand(S, generator=g, dtype=torch.float64)


def run(rows: Tensor | list[Tensor], base: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    out, squares = torch.full_like(base, torch.nan), torch.full((len(weights),), torch.nan).double()
    assert ops.difference_sum_(out, squares, rows, base, weights) is out
    return out, squares


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_against_the_oracle(isa: str, S: int, d: int) -> None:
    rows, base, weights = made(S, d)
    out, squares = run(rows, base, weights)
    expected, wanted = torch.zeros(d, dtype=torch.float64), torch.zeros(S, dtype=torch.float64)
    reference.difference_sum_(expected, wanted, rows, base, weights)
    # A difference is rounded relative to itself: it is exact, or nearly, for models near the base.
    scale = (weights @ (rows.double() - base.double()).abs()).max()
    assert ((out.double() - expected).abs() <= ROUNDED * scale).all()
    assert ((squares - wanted).abs() <= SQUARES * wanted).all()


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_the_sum_has_the_bits_of_weighted_sum(isa: str, S: int, d: int) -> None:
    rows, base, weights = made(S, d)
    out, _ = run(rows, base, weights)
    expected = ops.weighted_sum_(torch.zeros(d), rows - base, weights, beta=0.0)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    rows, base, weights = made(9, 300_001)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(rows, base, weights)
        torch.set_num_threads(threads)
        assert all(map(torch.equal, run(rows, base, weights), one))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_rows_are_converted(isa: str, dtype: torch.dtype) -> None:
    rows, base, weights = made(11, 8_200)
    short = rows.to(dtype)
    for given_rows in (short, list(short)):
        got = run(given_rows, base, weights)
        assert all(map(torch.equal, got, run(short.float(), base, weights)))


def test_rows_at_any_address(isa: str) -> None:
    rows, base, weights = made(5, 1_000)
    shifted = []
    for row in rows:
        room = torch.empty(1_001)
        room[1:] = row
        shifted.append(room[1:])
    assert all(map(torch.equal, run(shifted, base, weights), run(rows, base, weights)))


@given(st.integers(0, 12), st.integers(0, 200), st.integers(0, 100))
def test_any_shape(S: int, d: int, seed: int) -> None:
    rows, base, weights = made(S, d, seed)
    if S == 0:
        weights = torch.zeros(0, dtype=torch.float64)
    out, squares = run(list(rows), base, weights)
    assert torch.equal(out, ops.weighted_sum_(torch.zeros(d), list(rows - base), weights, beta=0.0))
    wanted = (rows.double() - base.double()).square().sum(dim=1)
    assert ((squares - wanted).abs() <= SQUARES * wanted).all()


def test_numbers_beyond_the_range(isa: str) -> None:
    rows, base, weights = made(4, 300)
    rows[0, 7], rows[1, 0], rows[2, 299] = torch.nan, torch.inf, 3e38
    _, squares = run(rows, base, weights)
    assert squares[0].isnan()
    assert squares[1].isinf()
    assert squares[2].isinf() or squares[2] > 8e76  # a GPU computes in float64
    assert 0.0 < squares[3] < 100.0


def test_a_case_by_hand(isa: str) -> None:
    rows = torch.tensor([[2.0, 3.0, 5.0], [1.0, 1.0, 1.0]])
    base = torch.tensor([1.0, 1.0, 1.0])
    out, squares = run(rows, base, torch.tensor([0.5, 0.25]))
    assert out.tolist() == [0.5, 1.0, 2.0]
    assert squares.tolist() == [21.0, 0.0]


def test_what_is_refused(isa: str) -> None:
    rows, base, weights = made(3, 8)
    out, squares = torch.zeros(8), torch.zeros(3, dtype=torch.float64)
    wrong = [
        ((torch.zeros(7), squares, rows, base, weights), ValueError, "base"),
        ((out, torch.zeros(3), rows, base, weights), TypeError, "squares"),
        ((out, squares[:2], rows, base, weights), ValueError, "squares"),
        ((out, squares, rows.double(), base, weights), TypeError, "rows"),
        ((out, squares, rows, base[:5], weights), ValueError, "base"),
        ((out, squares, rows, out, weights), ValueError, "base: shares memory with out"),
        ((rows[0], squares, rows, base, weights), ValueError, "shares memory with out"),
        ((out, squares, rows, base, weights[:2]), ValueError, "weights"),
    ]
    for arguments, error, match in wrong:
        with pytest.raises(error, match=match):
            ops.difference_sum_(*arguments)
    assert out.count_nonzero() == 0 and squares.count_nonzero() == 0
