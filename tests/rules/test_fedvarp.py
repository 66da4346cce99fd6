# SPDX-License-Identifier: Apache-2.0
"""FedVARP: hand-worked numbers, an oracle, and taking ownership of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import FedVARP, UpdateBuffer


def test_hand_worked() -> None:
    agg = FedVARP(num_clients=4, num_params=1)
    params = torch.zeros(1)
    # nothing remembered: the mean 6 of the active
    assert agg.step(params, torch.tensor([[8.0], [4.0]]), [1, 0]).weights.tolist() == [0.5, 0.5]
    assert params.tolist() == [6.0]
    # client 1 sends 0: 0 - 8 = -8, and the mean of 4, 8, 0, 0 is 3
    agg.step(params, torch.tensor([[0.0]]), [1])
    assert params.tolist() == [1.0]
    assert agg.memory.clone().flatten().tolist() == [4.0, 0.0, 0.0, 0.0]
    assert agg.total.tolist() == [1.0]


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]])
def test_follows_the_oracle(follow: Callable[..., None], weights: list[float] | None) -> None:
    last = {k: np.zeros(33) for k in range(6)}
    w = np.array(weights or [1.0] * 6)

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        active = sum(w[k] for k in updates)
        change = sum(w[k] / active * (u - last[k]) for k, u in updates.items())
        result = params + 0.3 * (change + sum(w[k] * last[k] for k in range(6)) / w.sum())
        last.update(updates)
        return result

    agg = FedVARP(num_clients=6, num_params=33, server_lr=0.3, client_weights=weights)
    follow(agg, oracle, tolerance=2 * 2.0**-24)  # one rounding to float32


def test_taking_ownership_gives_the_same_bits(
    same_bits: Callable[..., None], same_state: Callable[..., None]
) -> None:
    copying, taking = (FedVARP(num_clients=5, num_params=30) for _ in range(2))
    buffer, params, twin = UpdateBuffer(5, 30), torch.zeros(30), torch.zeros(30)
    for clients in ([0, 1, 2, 3, 4], [4, 1], [3], [0, 4]):
        for row in buffer.rows(clients):
            row.normal_()
        copying.step(params, [row.clone() for row in buffer.rows(clients)], clients)
        taking.step(twin, buffer, clients)
        same_bits(params, twin)
        same_state(copying, taking)


def test_active_clients_without_weight_are_refused() -> None:
    agg = FedVARP(num_clients=2, num_params=1, client_weights=[1.0, 0.0])
    with pytest.raises(ValueError, match="expected a weight > 0 among the active clients"):
        agg.step(torch.zeros(1), torch.ones(1, 1), [1])


def test_the_total_stays_the_mean_of_the_memory_rows() -> None:
    weights = [1e-6, 1.0, 3.0, 1e3, 2.0]  # shares of the active clients from 1e-9 to 1
    agg = FedVARP(num_clients=5, num_params=20, client_weights=weights)
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    generator = torch.Generator().manual_seed(0)
    for t in range(300):
        clients = torch.randperm(5, generator=generator)[: 1 + t % 5]
        updates = torch.randn(len(clients), 20, generator=generator)
        agg.step(torch.zeros(20), updates, clients)
        exact = shares @ agg.memory.clone().double()
        # In each round a few float64 roundings of numbers below 10, against 1e-6 for float32.
        assert (agg.total - exact).abs().max() <= 10 * 4 * (t + 1) * 2.0**-53
