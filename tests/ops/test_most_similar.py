# SPDX-License-Identifier: Apache-2.0
"""most_similar: against the oracle and by hand, its promises, and the path for GPUs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference


def numbers(size: int, k: int, seed: int, most: int = 127) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, (size, k), generator=g, dtype=torch.int8)


def factors(size: int, seed: int = 0) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def check(*args: Any) -> None:
    """Compare bits with the oracle: inner products are exact, and rounded once by the factor."""
    best, similarity = ops.most_similar(*args)
    expected, values = reference.most_similar(*args)
    assert torch.equal(best, expected)
    assert torch.equal(similarity, values)


def test_by_hand(isa: str) -> None:
    rows = torch.tensor([[3, 4], [-1, 0], [0, 2]], dtype=torch.int8)
    scale = torch.tensor([0.2, 1.0, 0.5])  # 1 / |row|
    queries = torch.tensor([[6, 8], [-5, 1], [0, 0], [0, 127]], dtype=torch.int8)
    best, similarity = ops.most_similar(queries, rows, scale)
    assert best.tolist() == [0, 1, 0, 2]  # the third query: all products are 0, the lowest row
    assert similarity.tolist() == [10.0, 5.0, 0.0, 127.0]


@pytest.mark.parametrize("k", [1, 2, 7, 64, 100, 1024])
@pytest.mark.parametrize(("queries", "rows"), [(1, 1), (5, 32), (13, 33), (250, 70)])
def test_oracle(isa: str, k: int, queries: int, rows: int) -> None:
    check(numbers(queries, k, 1), numbers(rows, k, 2), factors(rows))


def test_extreme_numbers_do_not_overflow(isa: str) -> None:
    extremes = torch.full((3, 1024), -128, dtype=torch.int8)
    extremes[1] = 127
    extremes[2, ::2] = 127
    check(extremes, extremes, torch.tensor([1.0, 2.0, 0.0]))
    check(extremes, extremes, -torch.ones(3))


@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=5),
)
def test_groups_and_ids_with_ties(seed: int, sizes: list[tuple[int, int]]) -> None:
    g = torch.Generator().manual_seed(seed)
    splits = torch.tensor([(0, 0), *sizes]).cumsum(0)
    query_ids = torch.randint(20, (int(splits[-1, 0]),), generator=g)
    row_ids = torch.randint(9, (int(splits[-1, 1]),), generator=g)
    # Numbers from -1 to 1 and equal rows: many ties.
    scale = torch.randint(1, 3, (9,), generator=g).float()
    check(numbers(20, 4, seed, 1), numbers(9, 4, seed + 1, 1), scale, query_ids, row_ids, splits)


def test_tiles_of_groups(isa: str) -> None:
    """On a GPU, groups are cut into tiles of 64 queries and of 64 rows."""
    splits = torch.tensor([[0, 0], [1, 130], [66, 130], [210, 195], [210, 196]])
    query_ids, row_ids = torch.arange(210) * 7 % 150, torch.arange(196) * 5 % 90
    for k in (12, 70, 130):
        queries, rows = numbers(150, k, k), numbers(90, k, 1)
        check(queries, rows, factors(90) - 0.5, query_ids, row_ids, splits)


def test_products_beyond_float32(isa: str) -> None:
    rows = torch.full((3, 4), 127, dtype=torch.int8)
    queries = torch.cat([-rows[:1], rows[:1]])
    best, similarity = ops.most_similar(queries, rows, torch.full((3,), 3e38))
    assert best.tolist() == [0, 0] and similarity.tolist() == [-math.inf, math.inf]


def test_nothing_to_compare_with(isa: str) -> None:
    empty = torch.empty(0, 64, dtype=torch.int8)
    best, similarity = ops.most_similar(numbers(3, 64, 0), empty, torch.empty(0))
    assert best.tolist() == [-1] * 3
    assert similarity.tolist() == [-math.inf] * 3
    best, similarity = ops.most_similar(empty, numbers(3, 64, 0), torch.ones(3))
    assert best.shape == similarity.shape == (0,)


def test_invariant_to_threads() -> None:
    args = numbers(3000, 64, 0), numbers(500, 64, 1), factors(500)
    expected = ops.most_similar(*args)
    torch.set_num_threads(4)
    got = ops.most_similar(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_torch_path() -> None:
    """The path for devices without a dedicated kernel, such as GPUs."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    queries, rows, scale = numbers(50, 128, 0, 2), numbers(30, 128, 1, 2), factors(30)
    splits = torch.tensor([[0, 0], [20, 0], [30, 25], [40, 40]])
    ids = torch.arange(40).flip(0), torch.arange(40) % 30
    for rest in ((None, None, None), (*ids, splits), (ids[0], None, None), (None, ids[1], None)):
        got = torch.ops.fastagg.most_similar.default._op_dk(key, queries, rows, scale, *rest)
        expected = ops.most_similar(queries, rows, scale, *rest)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


GOOD = {
    "queries": numbers(3, 8, 0),
    "rows": numbers(2, 8, 1),
    "factors": torch.ones(2),
    "query_ids": torch.tensor([0, 2]),
    "row_ids": torch.tensor([1, 1, 0]),
    "splits": torch.tensor([[0, 0], [1, 3], [2, 3]]),
}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("queries", torch.zeros(3, 8), TypeError, "queries: expected dtype"),
        ("queries", numbers(3, 9, 0), ValueError, "rows: expected shape"),
        ("queries", numbers(3, 1025, 0), ValueError, "queries: expected 1 to 1024 columns"),
        ("queries", numbers(3, 0, 0), ValueError, "queries: expected 1 to 1024 columns"),
        ("queries", numbers(8, 3, 0).T, ValueError, "queries: expected a contiguous tensor"),
        ("rows", numbers(2, 8, 1).short(), TypeError, "rows: expected dtype"),
        ("factors", torch.ones(3), ValueError, "factors: expected shape"),
        ("factors", torch.ones(2).double(), TypeError, "factors: expected dtype"),
        ("query_ids", torch.tensor([0, 3]), IndexError, r"query_ids: expected ids in \[0, 3\)"),
        ("query_ids", torch.tensor([-1, 0]), IndexError, "got -1 at position 0"),
        ("row_ids", torch.tensor([0, 0, 2]), IndexError, r"row_ids: expected ids in \[0, 2\)"),
        ("row_ids", torch.tensor([0, 0, 1]).int(), TypeError, "row_ids: expected dtype"),
        ("splits", torch.tensor([[0, 0], [2, 2]]), ValueError, "splits: expected columns that"),
        ("splits", torch.tensor([[0, 1], [2, 3]]), ValueError, "splits: expected columns that"),
        ("splits", torch.tensor([[0, 0], [3, 0], [2, 3]]), ValueError, "columns that do not"),
        ("splits", torch.empty(0, 2).long(), ValueError, "splits: expected at least one row"),
        ("splits", torch.tensor([0, 0]), ValueError, "splits: expected shape"),
    ],
)
def test_arguments_are_checked(
    name: str, value: Tensor, error: type[Exception], message: str
) -> None:
    check(*GOOD.values())
    with pytest.raises(error, match=message):
        ops.most_similar(**{**GOOD, name: value})
