# SPDX-License-Identifier: Apache-2.0
"""FedBuff: hand-worked numbers, an oracle, clients with several rows, and FedAsync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastagg
from fastagg import FedBuff, Staleness

Check = Callable[..., None]


def test_hand_worked() -> None:
    agg = FedBuff(num_clients=4, num_params=2, server_lr=0.5)
    params = torch.zeros(2)
    # ages 3, 0 and 8: s = 1/2, 1 and 1/3; .5 / 3 * (.5 (8, 0) + (2, -6) + (3, 6) / 3)
    rows = torch.tensor([[8.0, 0.0], [2.0, -6.0], [3.0, 6.0]])
    report = agg.step(params, rows, [2, 1, 2], ages=[3, 0, 8])
    torch.testing.assert_close(params, torch.tensor([7.0 / 6.0, -4.0 / 6.0]))
    assert report.active.tolist() == [1, 2, 2]
    assert report.ages is not None and report.ages.tolist() == [0, 3, 8]
    torch.testing.assert_close(report.weights, torch.tensor([1.0, 0.5, 1.0 / 3.0]) / 3.0)


def test_without_late_rows_it_is_the_mean(same_bits: Check) -> None:
    agg, mean = (fastagg.make(n, num_clients=6, num_params=40) for n in ("fedbuff", "fedavg"))
    params, twin, rows = torch.zeros(40), torch.zeros(40), torch.randn(4, 40)
    agg.step(params, rows, [5, 1, 0, 3])
    mean.step(twin, rows, [5, 1, 0, 3])
    same_bits(params, twin)


def test_buffer_size_divides_also_if_fewer_rows_come() -> None:
    agg = FedBuff(num_clients=4, num_params=1, buffer_size=4)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[2.0], [6.0]]), [0, 1])
    assert params.tolist() == [2.0]
    with pytest.raises(ValueError, match=r"at most buffer_size = 4 rows, got 5"):
        agg.step(params, torch.ones(5, 1), [0, 1, 2, 3, 3], ages=[0, 0, 0, 0, 1])
    assert params.tolist() == [2.0]


def test_client_weights_are_relative_to_their_mean() -> None:
    agg = FedBuff(num_clients=3, num_params=1, client_weights=[1.0, 2.0, 3.0])
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[4.0], [8.0]]), [0, 2])  # (4 / 2 + 8 * 3 / 2) / 2
    assert params.tolist() == [7.0]


def test_one_row_per_step_is_fedasync() -> None:
    """Xie et al. 2019: x = (1 - a_t) x + a_t x_new, a_t = a s(t - tau)."""
    alpha, d = 0.6, 12
    agg = FedBuff(num_clients=5, num_params=d, server_lr=alpha, staleness="hinge", buffer_size=1)
    generator = torch.Generator().manual_seed(3)
    params = torch.randn(d, generator=generator)
    x, models = params.double(), [params.double()]
    for t in range(30):
        age = int(torch.randint(0, min(t, 9) + 1, (), generator=generator))
        local = models[t - age] + torch.randn(d, generator=generator).double()
        s = 1.0 if age <= 4 else 1.0 / (10.0 * (age - 4) + 1.0)
        agg.step(params, (local - params.double()).float()[None], [t % 5], ages=[age])
        x = (1.0 - alpha * s) * x + alpha * s * local
        models.append(x)
        # Each of 30 steps rounds the update and the parameters to float32.
        assert (params.double() - x).abs().max() <= 60 * 2.0**-24 * x.abs().max()


@given(data=st.data())
def test_follows_the_oracle_in_any_order(same_bits: Check, data: st.DataObject) -> None:
    K, d = 4, 9
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, K - 1), st.integers(0, 6)), unique=True, max_size=12)
    )
    a = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    weights = data.draw(st.sampled_from([None, [1.0, 2.0, 0.0, 5.0]]))
    seed = data.draw(st.integers(0, 2**32))
    rows = torch.randn(len(pairs), d, generator=torch.Generator().manual_seed(seed))
    order = data.draw(st.permutations(range(len(pairs))))
    results = []
    for listed in (range(len(pairs)), order):
        agg = FedBuff(
            num_clients=K,
            num_params=d,
            staleness=Staleness("polynomial", a=a),
            client_weights=weights,
        )
        params = torch.ones(d)
        ids, ages = [pairs[i][0] for i in listed], [pairs[i][1] for i in listed]
        report = agg.step(params, rows[list(listed)], ids, ages=ages)
        results.append((params, report.weights))
    same_bits(results[0][0], results[1][0])
    same_bits(results[0][1], results[1][1])
    expected = np.ones(d)
    for (client, age), row in zip(pairs, rows.double().numpy(), strict=True):
        w = 1.0 if weights is None else weights[client] * K / sum(weights)
        expected += w * (1.0 + age) ** -a * row / len(pairs)
    # Two roundings to float32 of sums of at most 12 rows.
    error = np.abs(results[0][0].double().numpy() - expected).max()
    assert error <= 14 * 2.0**-24 * (1.0 + float(rows.abs().sum()))


def test_any_form_of_rows_gives_the_same_bits(same_bits: Check) -> None:
    rows, ids, ages = torch.randn(5, 70), [1, 0, 1, 3, 1], [4, 0, 2, 1, 0]
    stream = fastagg.ColumnBlocks(lambda: rows.split(9, dim=1), num_rows=5, num_params=70)
    results = []
    for given_rows in (rows, list(rows), stream):
        params = torch.zeros(70)
        FedBuff(num_clients=4, num_params=70).step(params, given_rows, ids, ages=ages)
        results.append(params)
    same_bits(results[0], results[1])
    same_bits(results[0], results[2])


def test_a_row_too_old_is_left_out_and_the_client_stays() -> None:
    agg = FedBuff(num_clients=3, num_params=1, staleness="constant", max_staleness=2)
    params = torch.zeros(1)
    report = agg.step(params, torch.tensor([[1.0], [2.0], [4.0]]), [1, 1, 0], ages=[3, 2, 9])
    assert report.active.tolist() == [1] and report.rejected.tolist() == [0, 1]
    assert report.reasons[1] == "age 3, but at most max_staleness = 2 is accepted"
    assert params.tolist() == [2.0]


def test_all_rows_of_a_client_with_nan_are_left_out() -> None:
    agg = FedBuff(num_clients=3, num_params=1, nonfinite="drop", max_norm=5.0)
    params = torch.zeros(1)
    rows = torch.tensor([[1.0], [float("nan")], [2.0], [1.0], [9.0]])
    report = agg.step(params, rows, [1, 1, 0, 2, 2], ages=[0, 1, 0, 0, 1])
    assert report.active.tolist() == [0] and report.rejected.tolist() == [1, 2]
    assert report.reasons[2] == "norm 9, but max_norm is 5"
    assert params.tolist() == [2.0]


def test_the_norm_of_a_client_is_that_of_its_longest_row() -> None:
    """Whatever the order of its rows: a later, shorter one does not hide it."""
    agg = FedBuff(num_clients=2, num_params=1, max_norm=5.0)
    params = torch.zeros(1)
    rows = torch.tensor([[9.0], [1.0], [3.0]])
    report = agg.step(params, rows, [1, 1, 0], ages=[0, 1, 0])
    assert report.rejected.tolist() == [1] and params.tolist() == [3.0]


def test_min_active_counts_clients() -> None:
    agg = FedBuff(num_clients=3, num_params=1, min_active=2)
    params = torch.zeros(1)
    report = agg.step(params, torch.ones(3, 1), [1, 1, 1], ages=[0, 1, 2])
    assert report.skipped and report.reason == "too few active clients: 1 of min_active = 2"
    assert not agg.step(params, torch.ones(2, 1), [1, 0], ages=[0, 1]).skipped


@pytest.mark.parametrize(
    ("ids", "ages", "match"),
    [
        ([1, 1], None, r"clients: expected distinct ids, got \[1\] more than once"),
        ([1, 1], [2, 2], r"clients, ages: expected distinct pairs .* got \[\(1, 2\)\]"),
        ([1, 0], [2], r"ages: expected one age per client \(2\), got 1"),
        ([1, 0], [2, -1], r"ages: expected ints in \[0, .*got -1"),
    ],
)
def test_wrong_pairs(ids: list[int], ages: Any, match: str) -> None:
    agg, params = FedBuff(num_clients=3, num_params=1), torch.zeros(1)
    with pytest.raises(ValueError, match=match):
        agg.step(params, torch.ones(2, 1), ids, ages=ages)
    assert params.tolist() == [0.0] and agg.committed == 0


def test_a_buffer_has_one_row_per_client() -> None:
    agg, buffer = FedBuff(num_clients=3, num_params=1), fastagg.UpdateBuffer(3, 1)
    with pytest.raises(ValueError, match="updates: expected rows of their own"):
        agg.step(torch.zeros(1), buffer, [1, 1], ages=[0, 1])


@pytest.mark.parametrize("size", [0, 1.5, True, "2"])
def test_bad_buffer_size(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="buffer_size"):
        FedBuff(num_clients=3, num_params=1, buffer_size=size)
