# SPDX-License-Identifier: Apache-2.0
"""Operations over all columns: segments change only roundings, and lose no column."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg import ops
from fastagg.updates.any_rows import piece_columns
from fastagg.updates.columns import Columns, segment_columns
from fastagg.updates.streams import TensorRows


@pytest.mark.parametrize("segment", [1 << 10, 1 << 14, 1 << 17])
def test_segments_change_less_than_stated(segment: int) -> None:
    rows = torch.randn(5, 200_003) + 3.0  # a common drift: sums that grow
    exact = rows.double() @ rows.double().T
    gram = Columns(segment).gram(rows)
    norms = exact.diagonal().sqrt()
    assert ((gram - exact).abs() / torch.outer(norms, norms)).max() < 1e-8
    whole = ops.gram(rows, dtype=torch.float64)
    assert ((gram - whole).abs() / torch.outer(norms, norms)).max() < 1e-8


@pytest.mark.slow
@given(
    d=st.integers(1, 300),
    segment=st.integers(1, 64),
    form=st.sampled_from(["matrix", "list", "mixed"]),
    seed=st.integers(0, 2**32),
)
def test_the_sum_is_that_of_the_segments_in_order(
    d: int, segment: int, form: str, seed: int
) -> None:
    rows = torch.randn(5, d, generator=torch.Generator().manual_seed(seed))
    pairs = torch.eye(5, dtype=torch.bool)
    pairs[0, 2] = pairs[2, 0] = True
    given = {
        "matrix": rows,
        "list": list(rows),
        "mixed": [rows[0], TensorRows([rows[1].double()]).rows[0], *rows[2:]],
    }[form]
    for wanted in (None, pairs):
        expected = torch.zeros(5, 5, dtype=torch.float64)
        for begin in range(0, d, segment):
            part = rows[:, begin : begin + segment]
            expected += ops.gram(part, pairs=wanted, dtype=torch.float64)
        assert torch.equal(Columns(segment).gram(given, pairs=wanted), expected)
        at_once = ops.gram(rows, pairs=wanted, dtype=torch.float64, segment=segment)
        assert torch.equal(at_once, expected)
        if wanted is None:
            weights, out = torch.rand(5), torch.empty(d)
            assert torch.equal(Columns(segment).gram_and_sum_(out, given, weights), expected)
            assert torch.equal(out, ops.weighted_sum_(torch.zeros(d), rows, weights))
    gram = Columns(segment).gram(given)
    assert torch.equal(Columns(segment).square_norms(given), gram.diagonal())
    assert torch.equal(Columns(segment).abs_max(given), rows.abs().amax(dim=1))


def test_one_sum_of_all_segments_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads rows twice anyway, and adds up the segments' rows in one launch."""
    rows, weights = torch.randn(5, 200), torch.rand(5)
    out, expected = torch.empty(200), torch.empty(200)
    gram = Columns(64).gram_and_sum_(expected, rows, weights)
    monkeypatch.setattr("fastagg.updates.columns._one_pass", lambda out: False)
    monkeypatch.setattr(ops, "gram_and_sum_", None)
    assert torch.equal(Columns(64).gram_and_sum_(out, rows, weights), gram)
    assert torch.equal(out, expected)


def test_one_call_for_all_segments_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, each segment of a call of its own would be five launches."""
    rows, calls = torch.randn(70, 200), []
    expected = Columns(64).gram(rows), Columns(64).square_norms(rows)
    gram = ops.gram
    monkeypatch.setattr("fastagg.updates.columns._on_gpu", lambda rows: True)
    monkeypatch.setattr(ops, "gram", lambda *a, **options: calls.append(a) or gram(*a, **options))
    assert torch.equal(Columns(64).gram(rows), expected[0]) and len(calls) == 1
    assert torch.equal(Columns(64).square_norms(rows), expected[1]) and len(calls) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 70, 99])
def test_no_segment_hides_what_is_not_finite(bad: float, position: int) -> None:
    rows = torch.randn(3, 100)
    rows[1, position] = bad
    columns = Columns(32)
    assert torch.isfinite(columns.gram(rows).diagonal()).tolist() == [True, False, True]
    streamed = TensorRows(rows.double()).rows
    assert torch.isfinite(columns.abs_max(streamed)).tolist() == [True, False, True]


def test_segments_are_few() -> None:
    assert segment_columns(1) == segment_columns(1 << 28) == 1 << 20
    assert segment_columns((1 << 28) + 1) == 1 << 21
    assert segment_columns(10**10) == 1 << 26


def test_a_budget_of_a_segment_gives_the_bits_of_memory() -> None:
    """The segment is no power of two, and the budget holds it and not more."""
    rows, columns, weights = torch.randn(3, 30_000), Columns(12_288), torch.rand(3)
    streamed = TensorRows(rows, budget=4 * 3 * 12_288).rows
    assert torch.equal(columns.gram(streamed), columns.gram(rows))
    assert torch.equal(columns.square_norms(streamed), columns.square_norms(rows))
    out, expected = torch.empty(30_000), torch.empty(30_000)
    gram = columns.gram_and_sum_(expected, rows, weights)
    assert torch.equal(columns.gram_and_sum_(out, streamed, weights), gram)
    assert torch.equal(out, expected)
    for one, other in zip(
        columns.sketch(streamed, 64, 1), columns.sketch(rows, 64, 1), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("widest", [1, 256, 1000, 1024, 5003, 1 << 20])
def test_pieces_are_powers_of_two_unless_all_columns_fit(widest: int) -> None:
    for budget in (4, 4 * 3 * 1024, 4 * 3 * 1025, 4 * 3 * 5002, 4 * 3 * 5003, 1 << 30):
        found = piece_columns(budget, 3, widest)
        if budget >= 4 * 3 * widest:
            assert found == widest
        else:
            assert found & (found - 1) == 0 or found == widest < 1024
            assert min(1024, widest) <= found
            assert found <= 1024 or 4 * 3 * found <= budget < 4 * 3 * 2 * found


def test_rows_are_converted_where_they_are() -> None:
    rows = [torch.zeros(3000, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    for begin, end, (parts,) in Columns(1024)._pieces([rows]):
        assert {(part.device.type, part.dtype, len(part)) for part in parts} == {
            ("meta", torch.float32, end - begin)
        }
