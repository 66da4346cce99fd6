# SPDX-License-Identifier: Apache-2.0
"""MimiC with fading corrections: hand-worked numbers, an oracle, and MimiC as its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastagg import FedAvg, MimiC, MimiCAged


def test_hand_worked() -> None:
    agg = MimiCAged(num_clients=3, num_params=1, fading=0.5)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[4.0], [2.0]]), [0, 1])  # v = 3, c = -1, 1
    assert params.tolist() == [3.0]
    assert agg.corrections.clone().flatten().tolist() == [-1.0, 1.0, 0.0]
    agg.step(params, torch.tensor([[6.0]]), [0])  # age 1: v = 5, c = -1
    agg.step(params, [], [])
    # client 0 has age 2, client 1 age 3: v = ((6 - .5) + (2 + .25)) / 2 = 3.875
    agg.step(params, torch.tensor([[6.0], [2.0]]), [0, 1])
    assert params.tolist() == [3.0 + 5.0 + 3.875]
    assert agg.corrections.clone().flatten().tolist() == [-2.125, 1.875, 0.0]
    assert agg.last.tolist() == [3, 3, -1]


@pytest.mark.parametrize("fading", [0.0, 0.7, 1.0])
def test_follows_the_oracle(follow: Callable[..., None], fading: float) -> None:
    c = {k: np.zeros(33) for k in range(6)}
    last: dict[int, int] = {}
    agg = MimiCAged(num_clients=6, num_params=33, server_lr=0.3, fading=fading)

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        t = int(agg.rounds)
        corrected = [
            u + (fading ** (t - last[k] - 1) * c[k] if k in last else 0.0)
            for k, u in updates.items()
        ]
        v = sum(corrected) / len(corrected)
        for k, u in updates.items():
            c[k], last[k] = v - u, t
        return params + 0.3 * v

    follow(agg, oracle, tolerance=20 * 4 * 2.0**-24)  # corrections are rounded in each round


@pytest.mark.slow
def test_without_fading_it_is_mimic(random_rounds: Callable[..., Any]) -> None:
    aged = MimiCAged(num_clients=6, num_params=20, fading=1.0)
    plain = MimiC(num_clients=6, num_params=20)
    params, twin = torch.zeros(20), torch.zeros(20)
    for updates, clients in random_rounds(6, 20, 10, seed=2):
        aged.step(params, updates, clients)
        plain.step(twin, updates, clients)
    assert torch.equal(params, twin)
    assert torch.equal(aged.corrections.clone(), plain.corrections.clone())


def test_fading_zero_drops_the_correction_of_an_absent_client() -> None:
    aged, mean = (
        MimiCAged(num_clients=2, num_params=5, fading=0.0),
        FedAvg(num_clients=2, num_params=5),
    )
    params, twin = torch.zeros(5), torch.zeros(5)
    for clients in ([0, 1], [], [0], [1]):
        updates = torch.randn(len(clients), 5)
        aged.step(params, updates, clients)
        mean.step(twin, updates, clients)
    torch.testing.assert_close(params, twin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("fading", "error"),
    [(-0.1, ValueError), (1.1, ValueError), (float("nan"), ValueError), ("slow", TypeError)],
)
def test_bad_fading(fading: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="fading"):
        MimiCAged(num_clients=2, num_params=1, fading=fading)
