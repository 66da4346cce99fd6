# SPDX-License-Identifier: Apache-2.0
"""What the policies of the robust rules are made of, against plain definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastagg import ops
from fastagg.rules._policy import DenseAverages, PairAverages, nearest, square_distances
from fastagg.rules.bucketing import BucketMixing
from fastagg.rules.geometric_median import WeiszfeldPolicy
from fastagg.rules.krum import krum_scores


def gram_of(n: int, copies: bool = False) -> Tensor:
    rows = torch.randn(n, 60)
    if copies:
        rows[n // 2 :] = rows[: n - n // 2].clone()
    return ops.gram(rows, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 5, 40, 101])
@pytest.mark.parametrize("copies", [False, True])
def test_nearest_is_the_head_of_a_stable_sort(n: int, copies: bool) -> None:
    distances = square_distances(gram_of(n, copies), own=-1.0)
    order = distances.sort(dim=1, stable=True).indices
    for count in {1, (n + 1) // 2, n}:
        expected = torch.zeros(n, n, dtype=torch.bool).scatter_(1, order[:, :count], True)
        assert torch.equal(nearest(distances, count), expected)


@pytest.mark.parametrize("n", [3, 8, 101])
def test_krum_scores_of_copies_are_equal_to_the_bit(n: int) -> None:
    """Ties go to the lowest id, so copies must have one score, in whatever order they come."""
    gram = gram_of(n)
    order = torch.randperm(n)
    assert torch.equal(krum_scores(gram[order][:, order], 1), krum_scores(gram, 1)[order])
    scores = krum_scores(gram_of(2 * n, copies=True), 1)
    assert torch.equal(scores[:n], scores[n:])


def dense(groups: Tensor, weights: Tensor, count: int) -> DenseAverages:
    matrix = torch.zeros(count, len(groups), dtype=torch.float64)
    matrix[groups, torch.arange(len(groups))] = weights
    return DenseAverages(matrix)


@pytest.mark.parametrize("n", [1, 2, 9, 100])
@pytest.mark.parametrize("further", [0, 1])
def test_averages_of_pairs_have_the_bits_of_the_dense_ones(n: int, further: int) -> None:
    count = (n + 1) // 2
    groups = (torch.arange(n) // 2)[torch.randperm(n)]
    weights = torch.rand(n, dtype=torch.float64)
    pairs, plain = PairAverages(groups, weights, count), dense(groups, weights, count)
    gram = gram_of(n + further)
    assert torch.equal(pairs.gram(gram), plain.gram(gram))
    factors = torch.rand(count + further, dtype=torch.float64)
    assert torch.equal(pairs.spread(factors), plain.spread(factors))


def test_dense_averages_against_matrix_products() -> None:
    n, m = 12, 5
    matrix, gram = torch.rand(m, n, dtype=torch.float64), gram_of(n + 1)
    whole = torch.block_diag(matrix, torch.ones(1, 1, dtype=torch.float64))
    averages, factors = DenseAverages(matrix), torch.rand(m + 1, dtype=torch.float64)
    assert torch.allclose(averages.gram(gram), whole @ gram @ whole.T, rtol=0, atol=1e-11)
    assert torch.allclose(averages.spread(factors), factors @ whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bucket_size", [1, 2, 3])
def test_averages_of_buckets_have_rows_of_sum_one(bucket_size: int) -> None:
    n = 7
    weights = torch.rand(n, dtype=torch.float64)
    policy = BucketMixing(WeiszfeldPolicy(1e-6, 1, "mean"), bucket_size, seed=3)
    averages, sums = policy.mixing(gram_of(n), weights / weights.sum(), t=5)
    assert len(sums) == -(-n // bucket_size)
    assert sums.sum().item() == pytest.approx(1.0, abs=1e-15)
    # Each average is of sum 1: all of them together are as many.
    ones = torch.ones(len(sums), dtype=torch.float64)
    assert averages.spread(ones).sum().item() == pytest.approx(len(sums), abs=1e-13)
