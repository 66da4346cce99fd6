# SPDX-License-Identifier: Apache-2.0
"""difference_gram_and_sum_: gram_and_sum_ of models in parts minus a base, in one pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

# Blocks of gram are at most 768 columns, strips 3 or 5 rows; from 20 rows on, rows are packed.
SHAPES = [(1, 1), (2, 63), (3, 640), (5, 4_129), (22, 8_193), (31, 30_011), (2, 200_001)]


def made(S: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(d, generator=g)
    return (
        base + 0.1 * torch.randn(S, d, generator=g),
        base,
        torch.rand(S, generator=g, dtype=torch.float64),
    )


def in_parts(rows: Tensor, ends: list[int]) -> list[Tensor]:
    """Return parts of each row, each at an odd address of separate memory."""
    cuts = [0, *sorted(min(end, rows.shape[1]) for end in ends), rows.shape[1]]
    parts = []
    for row in rows:
        for begin, end in itertools.pairwise(cuts):
            room = torch.empty(end - begin + 1, dtype=rows.dtype)
            room[1:] = row[begin:end]
            parts.append(room[1:])
    return parts


def run(
    models: list[Tensor], base: Tensor, weights: Tensor, begin: int = 0, d: int | None = None
) -> tuple[Tensor, Tensor]:
    S = len(weights)
    out = torch.full((len(base) if d is None else d,), torch.nan)
    gram = torch.full((S, S), torch.nan, dtype=torch.float64)
    assert ops.difference_gram_and_sum_(out, gram, models, base, weights, begin) is out
    return out, gram


def in_memory(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(rows.shape[1])
    gram = torch.empty(len(rows), len(rows), dtype=torch.float64)
    ops.gram_and_sum_(out, gram, rows, weights)
    return out, gram


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_against_the_oracle(isa: str, S: int, d: int) -> None:
    rows, base, weights = made(S, d)
    models = in_parts(rows, [d // 3, d // 2])
    out, gram = run(models, base, weights)
    expected = torch.zeros(d, dtype=torch.float64)
    wanted = torch.zeros(S, S, dtype=torch.float64)
    reference.difference_gram_and_sum_(expected, wanted, models, base, weights)
    # test_gram.py derives 3e-6 and more for gram. The sum: as in test_differences.py.
    norms = wanted.diagonal().sqrt()
    assert ((gram - wanted).abs() <= 2e-6 * norms.outer(norms)).all()
    scale = (weights @ (rows.double() - base.double()).abs()).max()
    assert ((out.double() - expected).abs() <= 12 * 2.0**-24 * scale).all()


@pytest.mark.parametrize(("S", "d"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_of_rows_in_memory(isa: str, S: int, d: int, dtype: torch.dtype) -> None:
    rows, base, weights = made(S, d)
    rows = rows.to(dtype)
    expected = in_memory(rows.float() - base, weights)
    for ends in ([], [d // 2], [1, 2, d // 3, 768, 1_536]):
        assert all(map(torch.equal, run(in_parts(rows, ends), base, weights), expected))


def test_parts_of_several_dtypes(isa: str) -> None:
    rows, base, weights = made(23, 5_000)
    first, second = rows[:, :2_100].bfloat16(), rows[:, 2_100:]
    models = [part for pair in zip(first, second, strict=True) for part in pair]
    whole = torch.cat([first.float(), second], dim=1)
    assert all(map(torch.equal, run(models, base, weights), in_memory(whole - base, weights)))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    rows, base, weights = made(25, 60_001)
    models = in_parts(rows, [100, 40_000])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(models, base, weights)
        torch.set_num_threads(threads)
        assert all(map(torch.equal, run(models, base, weights), one))
    finally:
        torch.set_num_threads(before)


@given(
    S=st.integers(0, 24),
    d=st.integers(0, 300),
    seed=st.integers(0, 100),
    ends=st.lists(st.integers(0, 300), max_size=4),
    cut=st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_any_columns(S: int, d: int, seed: int, ends: list[int], cut: tuple[int, int]) -> None:
    rows, base, _ = made(S, d, seed)
    weights = torch.rand(S, dtype=torch.float64)
    begin, end = sorted(min(c, d) for c in cut)
    got = run(in_parts(rows, ends), base, weights, begin, end - begin)
    assert all(map(torch.equal, got, in_memory((rows - base)[:, begin:end], weights)))


def test_rows_beyond_the_range_of_squares(isa: str) -> None:
    rows, base, weights = made(24, 3_000)
    rows[1], rows[2] = base, base + 1e-30  # zero; and below what float32 distinguishes
    base[:10] = 0.0
    rows[3, 3], rows[4, 5] = 3e25, 1e-25
    rows[4, :5] = rows[4, 6:10] = 0.0
    rows[4, 10:] = base[10:]
    models = in_parts(rows, [1_000])
    got, expected = run(models, base, weights), in_memory(rows - base, weights)
    assert all(map(torch.equal, got, expected))
    assert got[1][3, 3] == pytest.approx(9e50, rel=1e-5)
    assert got[1][4, 4] == pytest.approx(1e-50, rel=1e-5)


def test_rows_that_are_not_finite(isa: str) -> None:
    rows, base, weights = made(4, 2_000)
    rows[0, 7], rows[1, 0], rows[2, 1_999] = torch.nan, torch.inf, -torch.inf
    _, gram = run(in_parts(rows, [10]), base, weights)
    assert gram.diagonal().isfinite().tolist() == [False, False, False, True]


def test_a_case_by_hand(isa: str) -> None:
    rows = torch.tensor([[2.0, 3.0, 5.0], [1.0, 0.0, 1.0]])
    base = torch.tensor([1.0, 1.0, 1.0])
    out, gram = run(in_parts(rows, [1]), base, torch.tensor([0.5, 0.25]))
    assert out.tolist() == [0.5, 0.75, 2.0]
    assert gram.tolist() == [[21.0, -2.0], [-2.0, 1.0]]


def test_what_is_refused() -> None:
    rows, base, weights = made(3, 8)
    models = in_parts(rows, [3])
    out, gram = torch.zeros(8), torch.zeros(3, 3, dtype=torch.float64)
    double = [*models[:5], models[5].double()]
    shorter = [*models[:5], models[5][1:]]
    wrong = [
        ((out.double(), gram, models, base, weights, 0), TypeError, "out: expected dtype"),
        ((out, gram.float(), models, base, weights, 0), TypeError, "gram: expected dtype"),
        ((out, gram[:2, :2].clone(), models, base, weights, 0), ValueError, "gram: expected"),
        ((out, gram, models[:5], base, weights, 0), ValueError, "models: expected as many parts"),
        ((out, gram, models, base[:7], weights, 0), ValueError, "begin: expected columns"),
        ((out[:2], gram, models, base[:7], weights, 0), ValueError, "models: expected parts of 7"),
        ((out, gram, double, base, weights, 0), TypeError, "models: expected dtype"),
        ((out, gram, shorter, base, weights, 0), ValueError, "models: expected shape"),
        ((out, gram, models, base, weights[:2], 0), ValueError, "gram: expected"),
        ((out, gram, models, base, weights, 1), ValueError, "begin: expected columns"),
        ((out, gram, models, base, weights, -1), ValueError, "begin: expected columns"),
        ((out, gram, models, out, weights, 0), ValueError, "base: shares memory with out"),
        ((models[1], gram, models, base, weights, 0), ValueError, "shares memory with out"),
    ]
    for arguments, error, match in wrong:
        with pytest.raises(error, match=match):
            ops.difference_gram_and_sum_(*arguments)
    assert out.count_nonzero() == 0 and gram.count_nonzero() == 0
