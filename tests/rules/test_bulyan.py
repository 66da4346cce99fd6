# SPDX-License-Identifier: Apache-2.0
"""Bulyan: hand-worked numbers, an oracle that follows the paper step by step, and symmetries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Bulyan, UpdateBuffer
from fastagg.rules.bulyan import bulyan_selection


def chosen_by_krum(x: np.ndarray, f: int) -> list[int]:
    """The n - 2f rows of Bulyan's first phase: Krum on the rows that are left, again and again."""
    left, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * f:
        scores = []
        for i in left:
            others = sorted(((x[i] - x[j]) ** 2).sum() for j in left if j != i)
            scores.append(sum(others[: max(1, len(left) - f - 2)]))
        chosen.append(left.pop(int(np.argmin(scores))))
    return chosen


def expected_mean(x: np.ndarray, f: int) -> np.ndarray:
    rows = np.sort(x[chosen_by_krum(x, f)], axis=0)
    keep = len(rows) - 2 * f
    order = np.abs(rows - np.median(rows, axis=0)).argsort(axis=0, kind="stable")[:keep]
    return np.take_along_axis(rows, order, axis=0).mean(axis=0)


def aggregate(rows: Tensor, f: int, **options: object) -> tuple[Tensor, Tensor]:
    params = torch.zeros(rows.shape[1])
    agg = Bulyan(num_clients=len(rows), num_params=rows.shape[1], num_byzantine=f, **options)  # type: ignore[arg-type]
    return params, agg.step(params, rows, range(len(rows))).weights


def test_hand_worked() -> None:
    # f = 1, so Krum counts 4 of 6 neighbours. 3 and 4 have the best score, 1 + 1 + 4 + 4; 3 first.
    # Of 1, 2, 4, 5, 6, 90, with 3 neighbours: 26, 14, 9, 11, 21, far: 4.
    # Of 1, 2, 5, 6, 90, with 2: 17, 10, 10, 17, far: 2. Of 1, 5, 6, 90, with 1: 16, 1, 1, far: 5.
    # Of 1, 6, 90, with 1, the least: 25, 25, far: 1.
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [90.0]])
    assert chosen_by_krum(rows.double().numpy(), 1) == [2, 3, 1, 4, 0]
    assert bulyan_selection((rows @ rows.T).double(), 1) == [2, 3, 1, 4, 0]
    params, weights = aggregate(rows, 1)
    # of 1, 2, 3, 4, 5 the three that are nearest to 3
    assert params.tolist() == [3.0]
    assert weights.tolist() == [np.float32(0.2)] * 5 + [0.0, 0.0]


@pytest.mark.parametrize(("n", "f"), [(7, 1), (8, 1), (11, 2), (15, 3), (30, 6), (47, 11)])
def test_follows_the_oracle(n: int, f: int) -> None:
    rows = torch.randn(n, 40, generator=torch.Generator().manual_seed(n)) + 1.0
    rows[-f:] += 3.0 * torch.randn(40, generator=torch.Generator().manual_seed(f))
    params, weights = aggregate(rows, f)
    x = rows.double().numpy()
    assert set(weights.nonzero().flatten().tolist()) == set(chosen_by_krum(x, f))
    # One rounding of the mean; float64 sums of numbers up to 10.
    np.testing.assert_allclose(params.double().numpy(), expected_mean(x, f), rtol=6e-8, atol=1e-14)


@given(st.data())
def test_rows_are_chosen_as_in_the_paper(data: st.DataObject) -> None:
    f = data.draw(st.integers(0, 6))
    n = data.draw(st.integers(2 * f + 1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    x = rng.standard_normal((n, 3)) * 10.0 ** data.draw(st.sampled_from([-5, 0, 5]))
    far = data.draw(st.integers(0, n))
    x[:far] *= 1e6  # sums of small distances next to sums of large ones
    # Distances from the Gram matrix: those of different rows are far from rounding errors.
    gram = torch.tensor(x @ x.T)
    if far == 0 or far == n:
        assert bulyan_selection((gram + gram.T) / 2, f) == chosen_by_krum(x, f) or f == 0
    assert len(set(bulyan_selection((gram + gram.T) / 2, f))) == n - 2 * f


def test_equal_rows_are_chosen_in_the_order_of_ids() -> None:
    gram = torch.ones(9, 9, dtype=torch.float64)
    assert bulyan_selection(gram, 2) == [0, 1, 2, 3, 4]


def test_small_distances_are_not_lost_beside_large_ones() -> None:
    # Two far groups of colluders. A score that is a difference of sums of 1e30 would be 0.
    x = np.concatenate([np.arange(9.0)[:, None], 1e15 + np.arange(4.0)[:, None]])
    distances = (x - x.T) ** 2
    gram = torch.tensor(-distances / 2.0)  # of a matrix with these distances
    assert bulyan_selection(gram, 2) == chosen_by_krum(x, 2)


@pytest.mark.parametrize("f", [1, 2])
def test_attackers_far_away_have_no_influence(f: int) -> None:
    honest = torch.randn(4 * f + 3 - f, 25)
    for scale in (1e3, 1e15):
        rows = torch.cat([honest, scale * torch.ones(f, 25)])
        params, weights = aggregate(rows, f)
        assert (params >= honest.amin(0)).all() and (params <= honest.amax(0)).all()
        # The last choices count one neighbour. So colluders are chosen as well if f > 1, and the
        # mean around the median leaves them out.
        assert bool(weights[-f:].any()) == (f > 1)


def test_any_order_of_arrival_gives_the_same_bits(same_bits: Callable[..., None]) -> None:
    rows = torch.randn(11, 400)
    params, _ = aggregate(rows, 2)
    for _ in range(5):
        order, twin = torch.randperm(11), torch.zeros(400)
        agg = Bulyan(num_clients=11, num_params=400, num_byzantine=2)
        agg.step(twin, rows[order], order)
        same_bits(params, twin)


def test_sketches_choose_the_same_rows_where_distances_differ_clearly() -> None:
    # Rows on a line at growing distances: a sketch is off by a few percent (k = 16384).
    rows = torch.cumsum(torch.arange(1.0, 12.0), 0)[:, None] * torch.randn(1, 3000)
    exact = aggregate(rows, 2)
    sketched = aggregate(rows, 2, sketch=16_384)
    assert torch.equal(exact[1], sketched[1]) and torch.equal(exact[0], sketched[0])


def test_reuse_applies_the_rule_to_the_last_rows(same_bits: Callable[..., None]) -> None:
    K, d = 9, 50
    reusing = fastagg.make("bulyan", num_clients=K, num_params=d, num_byzantine=1, reuse=True)
    full = fastagg.make("bulyan", num_clients=K, num_params=d, num_byzantine=1)
    last, params, twin = torch.zeros(K, d), torch.zeros(d), torch.zeros(d)
    buffer = UpdateBuffer(K, d)
    for t in range(5):
        clients = torch.randperm(K)[: 3 + t].sort().values
        for row, client in zip(buffer.rows(clients), clients.tolist(), strict=True):
            last[client] = row.normal_()
        reusing.step(params, buffer, clients)
        full.step(twin, last, range(K))
        same_bits(params, twin)


def test_too_few_rows_change_nothing() -> None:
    agg = Bulyan(num_clients=9, num_params=2, num_byzantine=1)
    params = torch.ones(2)
    with pytest.raises(ValueError, match="expected at least 7 rows, four times num_byzantine"):
        agg.step(params, torch.randn(6, 2), range(6))
    assert params.tolist() == [1.0, 1.0] and agg.committed == 0


def test_a_client_of_weight_0_is_left_out() -> None:
    rows = torch.randn(8, 10)
    params, twin = torch.zeros(10), torch.zeros(10)
    weights = [1.0, 0.0] + [2.0] * 6
    agg = Bulyan(num_clients=8, num_params=10, num_byzantine=1, client_weights=weights)
    assert agg.step(params, rows, range(8)).weights[1] == 0.0
    without = [0, 2, 3, 4, 5, 6, 7]
    Bulyan(num_clients=8, num_params=10, num_byzantine=1).step(twin, rows[without], without)
    assert torch.equal(params, twin)
