# SPDX-License-Identifier: Apache-2.0
"""Stale models: hand-worked numbers and an independent oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import StaleModels


def test_hand_worked() -> None:
    agg = StaleModels(num_clients=3, num_params=1)
    params = torch.tensor([10.0])
    # models 14 and 18: the new model is their mean, 16
    agg.step(params, torch.tensor([[8.0], [4.0]]), [1, 0])
    assert params.tolist() == [16.0]
    # client 1's model is now 16 - 4 = 12, client 0's still 14: mean 13; plain Stale: 16 + 0
    agg.step(params, torch.tensor([[-4.0]]), [1])
    assert params.tolist() == [13.0]
    assert agg.memory.clone().flatten().tolist() == [14.0, 12.0, 0.0]


def test_server_lr_moves_part_of_the_way() -> None:
    agg = StaleModels(num_clients=2, num_params=1, server_lr=0.25)
    params = torch.tensor([10.0])
    agg.step(params, torch.tensor([[8.0]]), [0])  # a quarter of the way from 10 to 18
    assert params.tolist() == [12.0]


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0, 1.0, 5.0, 0.5]])
def test_follows_the_oracle(follow: Callable[..., None], weights: list[float] | None) -> None:
    last: dict[int, np.ndarray] = {}
    w = weights or [1.0] * 6

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        last.update({k: params + u for k, u in updates.items()})
        mean = sum(w[k] * m for k, m in last.items()) / sum(w[k] for k in last)
        return params + 0.9 * (mean - params)

    agg = StaleModels(num_clients=6, num_params=33, server_lr=0.9, client_weights=weights)
    # Models are rounded to float32 when stored (a model may be larger than the result); then the
    # parameters are rounded.
    follow(agg, oracle, tolerance=6 * 2.0**-24)
