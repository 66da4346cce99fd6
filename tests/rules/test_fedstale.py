# SPDX-License-Identifier: Apache-2.0
"""FedStale: hand-worked numbers, an oracle, and the rules between which it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import FedAU, FedStale, FedVARP, UpdateBuffer
from fastagg.updates.streams import TensorRows

K = 6
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 0.0]


class Oracle:
    """The equation of docs/rules.md over dictionaries of rows and lists of whole intervals."""

    def __init__(
        self, beta: float, cutoff: int, weights: list[float], max_age: int | None = None
    ) -> None:
        self.beta, self.cutoff, self.max_age = beta, cutoff, max_age
        self.shares = np.array(weights) / sum(weights)
        self.rows: dict[int, np.ndarray] = {}
        self.last: dict[int, int] = {}
        self.intervals: dict[int, list[int]] = {k: [] for k in range(len(weights))}
        self.waiting = dict.fromkeys(range(len(weights)), 0)
        self.round = self.expired = 0

    def count(self, active: dict[int, Any]) -> None:
        self.round += 1
        for k in self.waiting:
            self.waiting[k] += 1
            if k in active or self.waiting[k] == self.cutoff:
                self.intervals[k].append(self.waiting[k])
                self.waiting[k] = 0

    def __call__(self, params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        if self.max_age is not None:
            old = [k for k, last in self.last.items() if self.round - last > self.max_age]
            for k in old:
                del self.rows[k], self.last[k]
            self.expired += len(old)
        v = sum((self.beta * self.shares[k] * m for k, m in self.rows.items()), np.zeros(33))
        for k, u in updates.items():
            omega = np.mean(self.intervals[k]) if self.intervals[k] else 1.0
            v = v + self.shares[k] * omega * (u - self.beta * self.rows.get(k, 0.0))
        for k, u in updates.items():
            self.rows[k], self.last[k] = u, self.round
        self.count(updates)
        return params + 0.3 * v


def test_hand_worked() -> None:
    agg = FedStale(num_clients=2, num_params=1, beta=0.5)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[8.0]]), [0])  # omega 1: 8 / 2
    assert params.tolist() == [4.0]
    # omega of client 1 is still 1: (6 - 0) / 2 + 0.5 * 8 / 2
    assert agg.step(params, torch.tensor([[6.0]]), [1]).weights.tolist() == [0.5]
    assert params.tolist() == [9.0]
    # Intervals: client 0 has had 1; client 1 has had 2, so omega 2.
    # client 1: 2 (1 - 0.5 * 6) / 2 = -2; remembered: 0.5 (8 + 6) / 2 = 3.5
    agg.step(params, torch.tensor([[1.0]]), [1])
    assert params.tolist() == [10.5]
    assert agg.memory.clone().flatten().tolist() == [8.0, 1.0]
    assert agg.total.tolist() == [4.5]
    assert agg.factors.tolist() == [1.0, 1.5]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("cutoff", "max_age"), [(50, None), (3, None), (50, 1), (2, 2)])
def test_follows_the_oracle(beta: float, cutoff: int, max_age: int | None) -> None:
    options: dict[str, Any] = {"beta": beta, "cutoff": cutoff, "max_age": max_age}
    agg = FedStale(num_clients=K, num_params=33, server_lr=0.3, client_weights=WEIGHTS, **options)
    oracle = Oracle(beta, cutoff, WEIGHTS, max_age)
    params = torch.randn(33)
    for t in range(40):
        clients = torch.randperm(K)[: t % (K + 1)]
        updates = torch.randn(len(clients), 33)
        rows = {int(k): u.double().numpy() for k, u in zip(clients, updates, strict=True)}
        expected = params.double().numpy()
        if rows:
            expected = oracle(expected, rows)
        else:
            oracle.count({})
        agg.step(params, updates, clients)
        error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
        # The parameters are rounded to float32; all before is float64.
        assert error <= 1.001 * 2.0**-24
    assert max_age is None or oracle.expired >= 3


def rounds(num_params: int, count: int) -> Iterator[tuple[Tensor, list[int]]]:
    for t in range(count):
        clients = torch.randperm(K)[: t % (K + 1)].tolist()
        yield torch.randn(len(clients), num_params), clients


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_with_beta_zero_models_are_those_of_fedau(
    same_bits: Callable[..., None], weights: list[float] | None
) -> None:
    options: dict[str, Any] = {"num_clients": K, "num_params": 30, "client_weights": weights}
    stale, other = FedStale(beta=0.0, cutoff=4, **options), FedAU(cutoff=4, **options)
    params = torch.zeros(30)
    for updates, clients in rounds(30, 20):
        twin = params.clone()
        stale.step(params, updates, clients)
        other.step(twin, updates, clients)
        # FedAU adds up to six rows in float32, with weights of which the sum is at most the cutoff;
        # FedStale in float64. Both round the parameters.
        rows = 4.0 * float(updates.abs().max()) if clients else 0.0
        bound = 2.0**-24 * (8 * rows + 2 * float(params.abs().max()))
        torch.testing.assert_close(params, twin, rtol=0.0, atol=bound)
    for name in ("factors", "intervals", "waiting"):
        same_bits(stale.state_dict()[name], other.state_dict()[name])


def test_with_beta_one_and_even_participation_it_is_fedvarp() -> None:
    stale, other = (rule(num_clients=K, num_params=30) for rule in (FedStale, FedVARP))
    stale.beta = 1.0
    params, twin = torch.zeros(30), torch.zeros(30)
    for _ in range(10):
        # Two of six clients in every round: omega = K / S = 3, if it is estimated without error.
        stale.factors.fill_(3.0)
        clients = torch.randperm(K)[:2].tolist()
        updates = torch.randn(2, 30)
        stale.step(params, updates, clients)
        other.step(twin, updates, clients)
        # Ten rounds, in each of which each rule rounds numbers below 10 a few times.
        torch.testing.assert_close(params, twin, rtol=0.0, atol=10 * 4 * 10 * 2.0**-24)


def test_uneven_participation_leaves_no_bias() -> None:
    """The mean of v is that of all clients; frequent clients do not draw it to their updates."""
    g = torch.Generator().manual_seed(0)
    rates = torch.tensor([1.0, 0.5, 0.2])
    means = torch.tensor([0.0, 6.0, 12.0])
    found = {}
    for rule, options in (("fedstale", {"beta": 0.7}), ("fedavg", {})):
        agg = fastagg.make(rule, num_clients=3, num_params=1, **options)
        total = torch.zeros(1)
        for t in range(6000):
            active = (torch.rand(3, generator=g) < rates).nonzero().flatten()
            noise = torch.randn(len(active), 1, generator=g)
            # omega is estimated in the first 1000 rounds
            agg.step(total if t >= 1000 else torch.zeros(1), means[active, None] + noise, active)
        found[rule] = total.item() / 5000
    # v has a standard deviation below 15, so its mean one of 0.2, of which this is five. The cutoff
    # at 50 rounds changes omega of the rarest client by less than 10^-4 of itself.
    assert abs(found["fedstale"] - 6.0) <= 1.1
    assert abs(found["fedavg"] - 6.0) > 1.1


@given(
    seed=st.integers(0, 2**31),
    d=st.integers(1, 300),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    threads=st.integers(1, 3),
)
def test_arrival_order_and_threads_do_not_matter(
    seed: int, d: int, dtype: str, threads: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    before = torch.get_num_threads()
    one, other = (FedStale(num_clients=K, num_params=d, memory_dtype=dtype) for _ in range(2))
    params = torch.randn(d, generator=g)
    twin = params.clone()
    for _ in range(3):
        clients = torch.randperm(K, generator=g)[:4]
        updates, order = torch.randn(4, d, generator=g), torch.randperm(4, generator=g)
        one.step(params, updates, clients)
        torch.set_num_threads(threads)
        other.step(twin, updates[order], clients[order])
        torch.set_num_threads(before)
        assert torch.equal(params, twin)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_taking_ownership_gives_the_same_bits(
    same_bits: Callable[..., None], same_state: Callable[..., None]
) -> None:
    copying, taking = (FedStale(num_clients=5, num_params=30) for _ in range(2))
    buffer, params, twin = UpdateBuffer(5, 30), torch.zeros(30), torch.zeros(30)
    for clients in ([0, 1, 2, 3, 4], [4, 1], [3], [0, 4]):
        for row in buffer.rows(clients):
            row.normal_()
        copying.step(params, [row.clone() for row in buffer.rows(clients)], clients)
        taking.step(twin, buffer, clients)
        same_bits(params, twin)
        same_state(copying, taking)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("d", [3, 1025])
def test_a_cohort_may_have_any_size(dtype: str, d: int) -> None:
    """64 MiB hold 1024 columns of 16,384 converted rows; streamed and old rows are 16,386."""
    size, ones = 8193, torch.ones(1)
    agg = FedStale(num_clients=size, num_params=d, memory_dtype=dtype)
    params, few = torch.zeros(d), torch.zeros(1)
    for value in (1.0, 2.0):
        rows = TensorRows(torch.full((1, d), value).expand(size, d))
        agg.step(params, rows, torch.arange(size))
    small = FedStale(num_clients=1, num_params=1, memory_dtype=dtype)
    for value in (1.0, 2.0):
        small.step(few, value * ones[None], [0])
    # Two steps are rounded to float32. Their sums, of weights 1 / 8193, are float64.
    torch.testing.assert_close(params, few.expand(d), rtol=4 * 2.0**-24, atol=0.0)


def test_a_row_near_the_end_of_the_range_is_left_out() -> None:
    agg = FedStale(num_clients=2, num_params=1, nonfinite="drop", max_norm=None, cutoff=10)
    params = torch.zeros(1)
    gain = 0.5 + 10 * 1.5
    report = agg.step(params, torch.tensor([[1.001e30 / gain], [0.999e30 / gain]]), [0, 1])
    assert report.rejected.tolist() == [0]
    assert "largest magnitude" in report.reasons[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beta": 1.5}, ValueError, r"beta: expected a number in \[0, 1\], got 1.5"),
        ({"beta": -0.1}, ValueError, "beta"),
        ({"beta": float("nan")}, ValueError, "beta"),
        ({"beta": "1"}, TypeError, "beta"),
        ({"cutoff": 0}, ValueError, "cutoff"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FedStale(num_clients=2, num_params=1, **options)
