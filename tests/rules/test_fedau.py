# SPDX-License-Identifier: Apache-2.0
"""FedAU: hand-worked intervals, an oracle that keeps every interval, and the estimated rates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import FedAU


def test_hand_worked() -> None:
    agg = FedAU(num_clients=2, num_params=1, cutoff=3)
    factors = []
    for clients in ([0], [], [0, 1], [0], [], [], [0], [0]):
        weights = agg.step(torch.zeros(1), torch.ones(len(clients), 1), clients).weights
        factors.append((2 * weights).tolist())
    # client 0: intervals 1, 2, 1, 3, 1;  client 1: 3, then cut off at 3 (rounds 4 to 6), 2 so far
    expected = [[1.0], [], [1.0, 1.0], [1.5], [], [], [4 / 3], [7 / 4]]
    for got, wanted in zip(factors, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)  # float32 weights
    assert agg.factors.tolist() == pytest.approx([8 / 5, 3.0])
    assert agg.intervals.tolist() == [5, 2]
    assert agg.waiting.tolist() == [0, 2]


@pytest.mark.parametrize("cutoff", [1, 2, 4, 50])
def test_follows_the_oracle(follow: Callable[..., None], cutoff: int) -> None:
    w = [3.0, 1.0, 4.0, 1.0, 5.0, 0.0]
    intervals: dict[int, list[int]] = {k: [] for k in range(6)}
    waiting = dict.fromkeys(range(6), 0)

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        result = params.copy()
        for k, u in updates.items():
            result += 0.3 * w[k] / sum(w) * (np.mean(intervals[k]) if intervals[k] else 1.0) * u
        for k in range(6):
            waiting[k] += 1
            if k in updates or waiting[k] == cutoff:
                intervals[k].append(waiting[k])
                waiting[k] = 0
        return result

    agg = FedAU(num_clients=6, num_params=33, server_lr=0.3, cutoff=cutoff, client_weights=w)
    params = torch.randn(33)
    for t in range(40):
        clients = torch.randperm(6)[: t % 7]
        updates = torch.randn(len(clients), 33)
        given = {int(k): u.double().numpy() for k, u in zip(clients, updates, strict=True)}
        expected = oracle(params.double().numpy(), given)
        agg.step(params, updates, clients)
        error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
        assert error <= 4 * 2.0**-24  # factors, aggregate and parameters are rounded once each


@pytest.mark.slow
def test_factors_converge_to_the_inverse_rates() -> None:
    agg = FedAU(num_clients=4, num_params=1)
    rates = torch.tensor([1.0, 0.5, 0.25, 0.1])
    for _ in range(20_000):
        clients = (torch.rand(4) < rates).nonzero().flatten()
        agg.step(torch.zeros(1), torch.zeros(len(clients), 1), clients)
    # 2,000 intervals or more; the standard deviation of each is its mean. Five standard errors.
    # The cutoff at 50 lowers the last one by 0.5 %.
    assert agg.factors.tolist() == pytest.approx((1 / rates).tolist(), rel=5 / 2000**0.5)


def test_cutoff_one_is_amplified_without_amplification() -> None:
    agg = FedAU(num_clients=3, num_params=1, cutoff=1)
    for clients in ([0], [2], [], [0, 1]):
        report = agg.step(torch.zeros(1), torch.ones(len(clients), 1), clients)
        assert report.weights.tolist() == pytest.approx([1 / 3] * len(clients))


@pytest.mark.parametrize(("cutoff", "error"), [(0, ValueError), (2.5, TypeError)])
def test_bad_cutoff(cutoff: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="cutoff"):
        FedAU(num_clients=2, num_params=1, cutoff=cutoff)  # type: ignore[arg-type]
