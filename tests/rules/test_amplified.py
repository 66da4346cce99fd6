# SPDX-License-Identifier: Apache-2.0
"""Amplified averaging: hand-worked numbers, an oracle, and the case that equals FedAvg."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import Amplified, FedAvg


def test_hand_worked() -> None:
    agg = Amplified(num_clients=4, num_params=2, server_lr=0.5, beta=2.0)
    params = torch.zeros(2)
    # .5 * 2 * 1/4 * ((2, 0) + (4, -2)) = .25 * (6, -2)
    report = agg.step(params, torch.tensor([[2.0, 0.0], [4.0, -2.0]]), [0, 2])
    assert params.tolist() == [1.5, -0.5]
    assert report.weights.tolist() == [0.5, 0.5]


def test_weights_are_not_normalised() -> None:
    agg = Amplified(num_clients=2, num_params=1, beta=3.0, client_weights=[2.0, 10.0])
    params = torch.zeros(1)
    agg.step(params, torch.ones(2, 1), [0, 1])
    assert params.tolist() == [36.0]


def test_with_beta_w_one_over_s_it_is_fedavg(same_bits: Callable[..., None]) -> None:
    agg = Amplified(num_clients=6, num_params=50, beta=0.25, client_weights=[1.0] * 6)
    plain = FedAvg(num_clients=6, num_params=50)
    updates, params = torch.randn(4, 50), torch.randn(50)
    twin = params.clone()
    agg.step(params, updates, [0, 2, 3, 5])
    plain.step(twin, updates, [0, 2, 3, 5])
    same_bits(params, twin)


def test_follows_the_oracle(follow: Callable[..., None]) -> None:
    w = [0.1, 0.2, 0.0, 0.3, 0.05]

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        return params + 0.5 * 4.0 * sum(w[k] * u for k, u in updates.items())

    agg = Amplified(num_clients=5, num_params=33, server_lr=0.5, beta=4.0, client_weights=w)
    follow(agg, oracle, tolerance=2 * 2.0**-24 * 2)  # two roundings to float32


def test_sequential_moves_the_model_client_by_client() -> None:
    w, beta = [0.1, 0.4, 0.0, 0.3, 0.2], 0.9
    options = {"num_clients": 5, "num_params": 20, "beta": beta, "client_weights": w}
    agg = Amplified(sequential=True, **options)
    start, updates, clients = torch.randn(20), torch.randn(4, 20), [4, 0, 3, 2]
    expected = start.double()
    for k in sorted(clients):
        local = start.double() + updates[clients.index(k)].double()
        expected = (1 - beta * w[k]) * expected + beta * w[k] * local
    params = start.clone()
    agg.step(params, updates, clients)
    torch.testing.assert_close(params.double(), expected, rtol=1e-6, atol=1e-6)  # float32 result
    single = start.clone()
    Amplified(**options).step(single, updates[:1], [4])
    agg.step(params.copy_(start), updates[:1], [4])
    assert torch.equal(params, single)  # with one client both modes agree


def test_sequential_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="sequential"):
        Amplified(num_clients=2, num_params=1, sequential=1)


@pytest.mark.parametrize("beta", [-1.0, float("nan"), float("inf")])
def test_bad_beta(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        Amplified(num_clients=2, num_params=1, beta=beta)
