# SPDX-License-Identifier: Apache-2.0
"""Bucketing: its draws, its identities, and the buckets averaged explicitly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastagg
from fastagg import Bucketing, ops
from fastagg.rules.bucketing import draw_buckets, draw_order

W7 = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
INNER = [
    ("geometric-median", {}),
    ("centered-clip", {"tau": 4.0}),
    ("krum", {}),
    ("multi-krum", {"keep": 2}),
    ("nnm", {"rule": "centered-clip", "rule_options": {"tau": 4.0}}),
]


@given(n=st.integers(1, 40), size=st.integers(1, 45), seed=st.integers(0, 9), t=st.integers(0, 9))
def test_buckets_are_a_partition(n: int, size: int, seed: int, t: int) -> None:
    buckets = draw_buckets(n, size, seed, t)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(n))
    assert sorted(map(len, buckets)) == sorted([size] * (n // size) + [n % size] * (n % size > 0))
    assert buckets == draw_buckets(n, size, seed, t)


@given(n=st.integers(1, 40), size=st.integers(1, 45), seed=st.integers(0, 9), t=st.integers(0, 9))
def test_the_kernel_assigns_the_same_buckets(n: int, size: int, seed: int, t: int) -> None:
    order = draw_order(n, seed, t)
    weights = torch.ones(n, dtype=torch.float64)
    numbers = ops.bucketed_gram(torch.eye(n).double(), order, weights, size)[1].tolist()
    buckets = [[row for row in range(n) if numbers[row] == m] for m in range(max(numbers) + 1)]
    assert buckets == draw_buckets(n, size, seed, t)


def test_draws_are_fixed_and_differ_by_round_and_seed() -> None:
    assert draw_buckets(6, 2, seed=0, t=0) == [[0, 2], [1, 4], [3, 5]]  # must never change
    draws = {str(draw_buckets(12, 2, seed, t)) for seed in range(5) for t in range(5)}
    assert len(draws) == 25


def test_pairs_are_equally_likely() -> None:
    counts = np.zeros((6, 6))
    for t in range(3000):
        for a, b in draw_buckets(6, 2, seed=1, t=t):
            counts[a, b] += 1
    rates = counts[np.triu_indices(6, 1)] / 3000
    # 1/5 each; four standard errors of a rate from 3000 draws
    assert np.abs(rates - 0.2).max() <= 4 * (0.2 * 0.8 / 3000) ** 0.5


@pytest.mark.parametrize(("rule", "options"), INNER)
def test_buckets_of_one_are_the_rule_itself(
    same_bits: Callable[..., None],
    random_rounds: Callable[..., Any],
    rule: str,
    options: dict[str, Any],
) -> None:
    around = Bucketing(num_clients=7, num_params=20, bucket_size=1, rule=rule, rule_options=options)
    plain = fastagg.make(rule, num_clients=7, num_params=20, **options)
    params, twin = torch.zeros(20), torch.zeros(20)
    for updates, clients in random_rounds(7, 20, 8, seed=1):
        around.step(params, updates, clients)
        plain.step(twin, updates, clients)
        same_bits(params, twin)


@pytest.mark.parametrize("rule", ["geometric-median", "krum", "multi-krum", "nnm"])
def test_one_bucket_is_the_weighted_mean(rule: str) -> None:
    agg = Bucketing(num_clients=7, num_params=20, bucket_size=7, rule=rule, client_weights=W7)
    mean = fastagg.FedAvg(num_clients=7, num_params=20, client_weights=W7)
    rows, params, twin = torch.randn(5, 20), torch.zeros(20), torch.zeros(20)
    agg.step(params, rows, [0, 2, 3, 5, 6])
    mean.step(twin, rows, [0, 2, 3, 5, 6])
    torch.testing.assert_close(params, twin, rtol=0, atol=2e-7)  # the factors are rounded once more


def test_unclipped_it_is_the_weighted_mean_for_any_bucket_size() -> None:
    rows, twin = torch.randn(7, 20), torch.zeros(20)
    fastagg.FedAvg(num_clients=7, num_params=20, client_weights=W7).step(twin, rows, range(7))
    for size in range(1, 9):
        agg = Bucketing(
            num_clients=7,
            num_params=20,
            bucket_size=size,
            rule="centered-clip",
            rule_options={"tau": float("inf")},
            client_weights=W7,
        )
        params = torch.zeros(20)
        agg.step(params, rows, range(7))
        torch.testing.assert_close(params, twin, rtol=0, atol=5e-7)


@pytest.mark.parametrize("weights", [None, W7])
@pytest.mark.parametrize(("rule", "options"), INNER)
def test_is_the_rule_on_the_averages(
    rule: str, options: dict[str, Any], weights: list[float] | None
) -> None:
    rows, w = torch.randn(7, 40), np.array(weights or [1.0] * 7)
    agg = Bucketing(
        num_clients=7,
        num_params=40,
        bucket_size=2,
        seed=3,
        rule=rule,
        rule_options=options,
        client_weights=weights,
    )
    params, expected = torch.zeros(40), torch.zeros(40)
    for t in range(4):
        buckets = draw_buckets(7, 2, seed=3, t=t)
        x = rows.double().numpy()
        averages = np.stack([w[b] @ x[b] / w[b].sum() for b in buckets])
        inner = fastagg.make(
            rule,
            num_clients=4,
            num_params=40,
            client_weights=[w[b].sum() for b in buckets],
            **options,
        )
        if agg.previous is not None:
            inner.load_state_dict({"previous": agg.previous})
        agg.step(params.zero_(), rows, range(7))
        inner.step(expected.zero_(), torch.from_numpy(averages).float(), range(4))
        # averages are float32, and distances are accurate to 1e-7 of the squared norms
        torch.testing.assert_close(params, expected, rtol=0, atol=2e-6)


def test_skipped_rounds_count(same_bits: Callable[..., None]) -> None:
    first = Bucketing(num_clients=6, num_params=5, rule="krum")
    second = Bucketing(num_clients=6, num_params=5, rule="krum")
    rows, params, twin = torch.randn(6, 5), torch.zeros(5), torch.zeros(5)
    first.step(params, rows, range(6))
    first.step(params.zero_(), rows, range(6))
    second.step(twin, [], [])
    second.step(twin, rows, range(6))
    same_bits(params, twin)


def test_a_minority_cannot_move_the_result_far() -> None:
    honest = torch.randn(9, 20)
    rows = torch.cat([honest, torch.full((1, 20), 1e20)])
    rules: list[tuple[str, dict[str, Any]]] = [
        ("geometric-median", {"iterations": 40}),
        ("krum", {}),
    ]
    for seed in range(20):  # one bad bucket of five, wherever it falls
        for rule, options in rules:
            agg = Bucketing(
                num_clients=10, num_params=20, seed=seed, rule=rule, rule_options=options
            )
            params = torch.zeros(20)
            agg.step(params, rows, range(10))
            assert params.norm() <= 5 * honest.norm(dim=1).max()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bucket_size": 0}, ValueError),
        ({"bucket_size": 2.0}, TypeError),
        ({"seed": -1}, ValueError),
        ({"seed": None}, TypeError),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        Bucketing(num_clients=2, num_params=1, **options)
