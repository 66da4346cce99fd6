# SPDX-License-Identifier: Apache-2.0
"""Compare FedAvg with hand-worked numbers and an independent oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import FedAvg

WEIGHTS = [1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 0.25]


def test_hand_worked() -> None:
    agg = FedAvg(num_clients=3, num_params=2, server_lr=0.5)
    params = torch.tensor([1.0, 1.0])
    # mean of (2, 0) and (4, -2) is (3, -1); half of it is added to (1, 1)
    report = agg.step(params, torch.tensor([[2.0, 0.0], [4.0, -2.0]]), [0, 2])
    assert params.tolist() == [2.5, 0.5]
    assert report.active.tolist() == [0, 2]
    assert report.weights.tolist() == [0.5, 0.5]
    assert report.friends is None
    assert report.pairs == 0
    assert not report.skipped


def test_sample_counts_weight_the_active_clients_only() -> None:
    agg = FedAvg(num_clients=3, num_params=1, client_weights=[100, 7, 300])
    params = torch.zeros(1)
    # (100 * 4 + 300 * 8) / 400 = 7; client 1 is absent
    report = agg.step(params, torch.tensor([[8.0], [4.0]]), [2, 0])
    assert params.tolist() == [7.0]
    assert report.weights.tolist() == [0.25, 0.75]  # by ascending id


def test_active_clients_without_weight_are_refused() -> None:
    agg = FedAvg(num_clients=3, num_params=1, client_weights=[1, 0, 0])
    params = torch.ones(1)
    with pytest.raises(ValueError, match=r"client_weights.*active"):
        agg.step(params, torch.ones(2, 1), [1, 2])
    assert params.tolist() == [1.0]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_follows_the_oracle(follow: Callable[..., None], weights: list[float] | None) -> None:
    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        w = {k: 1.0 if weights is None else weights[k] for k in updates}
        return params + 0.7 * sum(w[k] * u for k, u in updates.items()) / sum(w.values())

    agg = FedAvg(num_clients=7, num_params=33, server_lr=0.7, client_weights=weights)
    # two roundings to float32, of the aggregate and of the parameters
    follow(agg, oracle, tolerance=2 * 2.0**-24 * 2)
