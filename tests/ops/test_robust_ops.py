# SPDX-License-Identifier: Apache-2.0
"""The ops of the robust rules: rows of a Gram matrix, groups of rows, and the two iterations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference


def gram_of(rows: Tensor) -> Tensor:
    return ops.gram(rows, dtype=torch.float64)


# --- rows of a Gram matrix --------------------------------------------------------------------


@pytest.mark.parametrize(("S", "d"), [(1, 1), (2, 3), (9, 769), (37, 4_100), (101, 610)])
@pytest.mark.parametrize("listed", [False, True])
def test_rows_have_the_bits_of_the_whole_matrix(isa: str, S: int, d: int, listed: bool) -> None:
    rows = torch.randn(S, d)
    whole = ops.gram(rows, dtype=torch.float64)
    # Up to 6, 9 or 12 by instruction set: in one pass over the rows. More: in tiles of them.
    for count in {*range(1, min(S, 15)), (S + 3) // 4, S}:
        changed = torch.randperm(S)[:count]  # in any order
        got = ops.gram_rows(list(rows) if listed else rows, changed)
        assert got.dtype == torch.float64 and got.shape == (count, S)
        assert torch.equal(got, whole[changed])


@pytest.mark.parametrize("d", [4_100, 300_000])  # of 33 chunks, and of spans shorter than a chunk
def test_rows_do_not_depend_on_threads(isa: str, d: int) -> None:
    rows = torch.randn(23, d)
    whole = ops.gram(rows, dtype=torch.float64)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for count in (1, 3, 11):
                changed = torch.randperm(23)[:count]
                assert torch.equal(ops.gram_rows(rows, changed), whole[changed])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 4, 20])
def test_rows_that_need_scaling(isa: str, count: int) -> None:
    rows = torch.randn(40, 1_000)
    rows[3] *= 1e-25
    rows[7] *= 1e30
    rows[11] = 0.0
    rows[12, 5] = math.nan
    rows[13, 6] = math.inf
    whole = ops.gram(rows, dtype=torch.float64)
    small = whole.diagonal()[[3, 7]] / torch.tensor([1e-50, 1e60], dtype=torch.float64)
    assert bool(((small > 800) & (small < 1200)).all())  # finite, and not zero
    for first in (0, 3, 7, 11, 12, 13):  # is any of them changed, or none
        changed = torch.tensor([first, *range(20, 19 + count)])
        assert torch.equal(
            ops.gram_rows(rows, changed).nan_to_num(nan=7.0), whole[changed].nan_to_num(nan=7.0)
        )


def test_rows_by_gram_itself() -> None:
    """The path for devices without a dedicated kernel, such as GPUs."""
    rows = torch.randn(37, 1_000)
    whole = ops.gram(rows, dtype=torch.float64)
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    for count in (0, 1, 5, 37):
        changed = torch.randperm(37)[:count]
        for given in ([rows], list(rows), [rows[:30], *rows[30:]]):
            got = torch.ops.fastagg.gram_rows.default._op_dk(key, given, changed, "highest")
            assert torch.equal(got, whole[changed])


def test_no_changed_row() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert ops.gram_rows(torch.randn(3, 5), none).shape == (0, 3)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ([0, 3], IndexError, r"changed: expected positions in \[0, 3\), got 3"),
        ([1, 1], ValueError, "changed: expected distinct positions, got 1 twice"),
    ],
)
def test_positions_are_checked(changed: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.gram_rows(torch.randn(3, 5), torch.tensor(changed))


@pytest.mark.parametrize(
    ("m", "n", "count"), [(5, 5, 0), (5, 5, 2), (4, 6, 3), (0, 3, 3), (9, 10, 1)]
)
def test_a_matrix_of_which_some_rows_changed(m: int, n: int, count: int) -> None:
    rows = torch.randn(n, 40)
    whole = gram_of(rows)
    positions = [*torch.randperm(m)[: count - (n - m)].tolist(), *range(m, n)]
    changed = torch.tensor(positions[::-1], dtype=torch.int64)
    before = rows.clone()
    before[changed] = 1.0
    known = gram_of(before)[:m, :m]
    got = ops.replace_rows(known, changed, ops.gram_rows(rows, changed))
    assert torch.equal(got, whole)
    assert torch.equal(reference.replace_rows(known, changed, whole[changed]), whole)


@pytest.mark.parametrize(
    ("changed", "columns", "error", "message"),
    [
        ([0, 4], 4, IndexError, r"changed: expected positions in \[0, 4\), got 4"),
        ([1, 1], 4, ValueError, "changed: expected distinct positions, got 1 twice"),
        ([0, 1], 4, ValueError, "changed: expected all positions from 3 on, 3 is missing"),
        ([0, 1], 2, ValueError, "rows: expected at least 3 columns, got 2"),
        ([0, 1, 2], 3, ValueError, r"rows: expected shape \[3, -1\]"),
    ],
)
def test_bad_changes(
    changed: list[int], columns: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ops.replace_rows(
            torch.eye(3).double(), torch.tensor(changed), torch.ones(2, columns).double()
        )


# --- buckets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "members"), [(1, 1), (7, 7), (12, 9), (41, 40), (4, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_buckets_against_the_oracle(n: int, members: int, size: int) -> None:
    gram = gram_of(torch.randn(n, 40))
    order, weights = torch.randperm(members), shares(members)
    got = ops.bucketed_gram(gram, order, weights, size)
    expected = reference.bucketed_gram(gram, order, weights, size)
    count = -(-members // size)
    assert len(got[0]) == count + n - members and len(got[3]) == count
    assert torch.equal(got[0], got[0].T)
    assert torch.equal(got[1], expected[1])
    # Sums of at most n x n float64 products with factors of sum 1.
    assert torch.allclose(got[0], expected[0], rtol=0, atol=1e-14 * gram.abs().max().item() * n)
    for a, b in zip(got[2:], expected[2:], strict=True):
        assert torch.allclose(a, b, rtol=1e-14, atol=0)


def test_buckets_worked_by_hand() -> None:
    gram = torch.tensor([[4.0, 2.0, 0.0], [2.0, 2.0, 1.0], [0.0, 1.0, 9.0]], dtype=torch.float64)
    weights = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    # {1} is cut off last, but row 0 is in the other one: means are 3/4 x_0 + 1/4 x_2, and x_1
    means, buckets, factors, sums = ops.bucketed_gram(gram, torch.tensor([2, 0, 1]), weights, 2)
    assert buckets.tolist() == [0, 1, 0]
    assert factors.tolist() == [0.75, 1.0, 0.25] and sums.tolist() == [4.0, 2.0]
    assert means.tolist() == [[2.8125, 1.75], [1.75, 2.0]]


@pytest.mark.parametrize(
    ("order", "size", "message"),
    [
        ([0, 1, 3], 2, r"order: expected a permutation of \[0, 3\), got 3 at position 2"),
        ([0, 1, 1], 2, r"order: expected a permutation of \[0, 3\), got 1 at position 2"),
        ([0, -1, 1], 2, r"order: expected a permutation of \[0, 3\), got -1 at position 1"),
        ([0, 1, 2, 3], 2, "order: expected at most 3 rows, got 4"),
        ([0, 1, 2], 0, "bucket_size: expected at least 1, got 0"),
    ],
)
def test_bad_buckets(order: list[int], size: int, message: str) -> None:
    weights = torch.ones(len(order), dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        ops.bucketed_gram(torch.eye(3).double(), torch.tensor(order), weights, size)


# --- distances to nearest rows ----------------------------------------------------------------


def with_copies(n: int, copies: bool) -> Tensor:
    rows = torch.randn(n, 40)
    if copies:
        rows[n // 2 :] = rows[: n - n // 2].clone()
    return gram_of(rows)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 31, 64, 101])
@pytest.mark.parametrize("copies", [False, True])
def test_krum_against_the_oracle(isa: str, n: int, copies: bool) -> None:
    gram = with_copies(n, copies)
    for f in {0, 1, (n - 1) // 2, n, 2**63 - 1}:
        scores = ops.krum_scores(gram, f)
        # Sums of at most n numbers >= 0 in another order.
        assert torch.allclose(scores, reference.krum_scores(gram, f), rtol=1e-15 * n, atol=0)
        for count in {0, 1, n // 2, n}:
            chosen = ops.krum_selection(gram, f, count)
            assert chosen.dtype == torch.int64
            # Of copies, the oracle takes the first as well: both compute equal scores for them.
            assert torch.equal(chosen, reference.krum_selection(gram, f, count))


def test_krum_worked_by_hand() -> None:
    rows = torch.tensor([[0.0], [1.0], [3.0], [7.0], [8.0]])
    gram = gram_of(rows)
    # two neighbours each: 1 + 9, 1 + 4, 4 + 9, 1 + 16, 1 + 25
    assert ops.krum_scores(gram, 1).tolist() == [10.0, 5.0, 13.0, 17.0, 26.0]
    # after row 1, with one neighbour: 9, 9, 1, 1; after row 3: 9, 9, 25; after row 0: 25, 25
    assert ops.krum_selection(gram, 1, 5).tolist() == [1, 3, 0, 2, 4]
    # without faulty rows: three neighbours, then two: 9 + 49, 9 + 16, 1 + 16, 1 + 25, ...
    assert ops.krum_scores(gram, 0).tolist() == [59.0, 41.0, 29.0, 53.0, 75.0]


def test_krum_of_far_groups_keeps_small_distances() -> None:
    x = torch.cat([torch.arange(9.0), 1e15 + torch.arange(4.0)]).double()[:, None]
    gram = -((x - x.T) ** 2) / 2.0  # a matrix with these distances, up to 1e30
    assert ops.krum_scores(gram, 6)[:9].max() < 100.0
    assert torch.equal(ops.krum_selection(gram, 2, 9), reference.krum_selection(gram, 2, 9))


@pytest.mark.parametrize(("n", "further"), [(1, 0), (2, 1), (9, 0), (40, 1), (101, 3)])
@pytest.mark.parametrize("copies", [False, True])
def test_nearest_means_against_the_oracle(isa: str, n: int, further: int, copies: bool) -> None:
    gram, weights = with_copies(n + further, copies), shares(n)
    for count in {1, (n + 1) // 2, n}:
        mixed, mixing = ops.nearest_means(gram, weights, count)
        expected, expected_mixing = reference.nearest_means(gram, weights, count)
        assert torch.equal(mixing != 0, expected_mixing != 0)  # the same rows, also with ties
        assert torch.allclose(mixing, expected_mixing, rtol=1e-15 * n, atol=0)
        assert torch.equal(mixed, mixed.T)
        # Sums of n x n products with shares of sum 1.
        bound = 1e-14 * gram.abs().max().item() * n
        assert torch.allclose(mixed, expected, rtol=0, atol=bound)


def test_nearest_means_worked_by_hand() -> None:
    gram = gram_of(torch.tensor([[0.0], [1.0], [4.0], [10.0]]))
    weights = torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64)
    mixed, mixing = ops.nearest_means(gram, weights, 2)
    # {0, 1}, {0, 1}, {1, 2}, and the last row itself: 0.25, 0.25, 2.5 and 10
    first, second = [0.75, 0.25, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]
    assert mixing.tolist() == [first, first, second, [0.0, 0.0, 0.0, 1.0]]
    means = torch.tensor([0.25, 0.25, 2.5, 10.0], dtype=torch.float64)
    assert torch.equal(mixed, means[:, None] * means)


def test_numbers_that_are_not_finite_end() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        gram = gram_of(torch.randn(19, 9))
        gram[3, 5] = gram[5, 3] = gram[7, 7] = bad
        assert ops.krum_scores(gram, 2).shape == (19,)
        assert sorted(ops.krum_selection(gram, 2, 19).tolist()) == list(range(19))
        assert ops.nearest_means(gram, shares(19), 7)[1].shape == (19, 19)


def test_bad_arguments_of_nearest_rows() -> None:
    gram = torch.eye(3, dtype=torch.float64)
    for call in (ops.krum_scores, lambda gram, f: ops.krum_selection(gram, f, 1)):
        with pytest.raises(ValueError, match="num_byzantine: expected at least 0, got -1"):
            call(gram, -1)
        with pytest.raises(TypeError, match="gram: expected dtype Double, got Float"):
            call(gram.float(), 1)
    for count in (-1, 4):
        with pytest.raises(ValueError, match=f"count: expected 0 to 3, got {count}"):
            ops.krum_selection(gram, 1, count)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count: expected 1 to 3, got {count}"):
            ops.nearest_means(gram, shares(3), count)
    with pytest.raises(ValueError, match="weights: expected at most 3 numbers, got 4"):
        ops.nearest_means(gram, shares(4), 2)


# --- iterations -------------------------------------------------------------------------------


def shares(n: int) -> Tensor:
    weights = torch.rand(n, dtype=torch.float64) + 0.1
    return weights / weights.sum()


def median(gram: Tensor, weights: Tensor) -> Tensor:
    return ops.weiszfeld(gram, weights, torch.zeros_like(weights), 0.1, 8)


def clip(gram: Tensor, weights: Tensor) -> Tensor:
    return ops.clip_towards(gram, weights[:-1] / weights[:-1].sum(), 5.0, 3)


@pytest.mark.parametrize("n", [2, 3, 17, 64, 101, 300])
def test_iterations_against_the_oracle(isa: str, n: int) -> None:
    gram, weights = gram_of(torch.randn(n, 500) + torch.randn(500)), shares(n)
    got = ops.weiszfeld(gram, weights, weights, 1e-6, 8)
    expected = reference.weiszfeld(gram, weights, weights, 1e-6, 8)
    # Distances, of rows far apart from each other, are differences of numbers with 16 digits.
    assert torch.allclose(got, expected, rtol=1e-12, atol=0)
    for tau in (5.0, 30.0, math.inf):
        got = ops.clip_towards(gram, weights[1:] / weights[1:].sum(), tau, 4)
        expected = reference.clip_towards(gram, weights[1:] / weights[1:].sum(), tau, 4)
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("iterate", [median, clip])
@pytest.mark.parametrize("n", [33, 300])  # 300 x 300 numbers are what torch splits over threads
def test_any_number_of_threads_gives_the_same_bits(
    iterate: Callable[[Tensor, Tensor], Tensor], n: int
) -> None:
    gram, weights = gram_of(torch.randn(n, 500)), shares(n)
    expected = iterate(gram, weights)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert torch.equal(iterate(gram, weights), expected)
    finally:
        torch.set_num_threads(before)


def test_no_iteration_returns_the_start() -> None:
    gram, weights = gram_of(torch.randn(4, 9)), shares(4)
    start = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    got = ops.weiszfeld(gram, weights, start, 0.1, 0)
    assert torch.equal(got, start)
    assert got.data_ptr() != start.data_ptr()
    assert ops.clip_towards(gram, weights[:3], 1.0, 0).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_rows_within_the_radius_leave_nothing_of_the_last() -> None:
    gram, weights = gram_of(torch.randn(5, 9)), shares(4)
    factors = ops.clip_towards(gram, weights, math.inf, 1)
    assert factors[-1] == 0.0
    assert torch.equal(factors[:-1], weights)


def test_a_nan_is_propagated() -> None:
    gram, weights = gram_of(torch.randn(3, 9)), shares(3)
    gram[1, 0] = gram[0, 1] = math.nan
    assert median(gram, weights).isnan().all()


@pytest.mark.parametrize("op", ["weiszfeld", "clip_towards"])
def test_bad_arguments(op: str) -> None:
    def call(gram: Tensor, weights: Tensor, iterations: int) -> Tensor:
        if op == "weiszfeld":
            return ops.weiszfeld(gram, weights, torch.zeros(3).double(), 0.1, iterations)
        return ops.clip_towards(gram, weights, 0.1, iterations)

    with pytest.raises(ValueError, match="gram: expected at least two rows, got 1"):
        ops.clip_towards(torch.eye(1, dtype=torch.float64), torch.zeros(0).double(), 1.0, 1)
    gram = torch.eye(3, dtype=torch.float64)
    weights = shares(3 if op == "weiszfeld" else 2)
    call(gram, weights, 1)
    with pytest.raises(TypeError, match="gram: expected dtype Double, got Float"):
        call(gram.float(), weights, 1)
    with pytest.raises(ValueError, match="gram: expected a square matrix, got shape"):
        call(gram[:2], weights, 1)
    with pytest.raises(ValueError, match="weights: expected shape"):
        call(gram, shares(7), 1)
    with pytest.raises(ValueError, match="iterations: expected 0 to 100000, got -1"):
        call(gram, weights, -1)
