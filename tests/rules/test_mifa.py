# SPDX-License-Identifier: Apache-2.0
"""MIFA: hand-worked numbers and an independent oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import MIFA, ColumnBlocks, TensorRows, UpdateBuffer


def test_hand_worked() -> None:
    agg = MIFA(num_clients=4, num_params=1)
    params = torch.zeros(1)
    # memory 4, 8, 0, 0: mean 3
    assert agg.step(params, torch.tensor([[8.0], [4.0]]), [1, 0]).weights.tolist() == [0.25, 0.25]
    assert params.tolist() == [3.0]
    # memory 4, 0, 0, 0 after client 1 sends 0: mean 1
    agg.step(params, torch.tensor([[0.0]]), [1])
    assert params.tolist() == [4.0]
    assert agg.memory.clone().flatten().tolist() == [4.0, 0.0, 0.0, 0.0]
    assert agg.total.tolist() == [1.0]


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0, 1.0, 5.0, 0.0]])
def test_follows_the_oracle(follow: Callable[..., None], weights: list[float] | None) -> None:
    last: dict[int, np.ndarray] = {}
    w = weights or [1.0] * 6

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        last.update(updates)
        return params + 0.3 * sum(w[k] * u for k, u in last.items()) / sum(w)

    agg = MIFA(num_clients=6, num_params=33, server_lr=0.3, client_weights=weights)
    follow(agg, oracle, tolerance=2 * 2.0**-24)  # one rounding to float32


def test_the_total_does_not_drift() -> None:
    agg = MIFA(num_clients=5, num_params=20)
    params = torch.zeros(20)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        updates = torch.randn(2, 20, generator=generator)
        agg.step(params.zero_(), updates, torch.randperm(5, generator=generator)[:2])
    exact = agg.memory.clone().double().mean(dim=0)
    # 600 float64 roundings of numbers below 1, against 1e-7 and more for a float32 total
    assert (agg.total - exact).abs().max() <= 600 * 2.0**-53


FORMS = {
    "tensor": lambda d: (torch.zeros(0, d), []),
    "list": lambda d: ([], []),
    "array": lambda d: (torch.from_numpy(np.empty((0, d), np.float32)), []),  # strides of 0
    "stream": lambda d: (TensorRows(torch.zeros(0, d)), []),
    "stream of nothing": lambda d: (TensorRows([]), []),
    "blocks": lambda d: (ColumnBlocks(lambda: [], num_rows=0, num_params=d), []),
    "buffer": lambda d: (UpdateBuffer(3, d), []),
    "all rejected": lambda d: (torch.full((1, d), torch.nan), [2]),
    "all too long": lambda d: (torch.full((1, d), 1e9), [2]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_round_without_clients_applies_what_is_remembered(form: str) -> None:
    agg = MIFA(num_clients=3, num_params=2, server_lr=0.5, nonfinite="drop", max_norm=100.0)
    params = torch.zeros(2)
    agg.step(params, torch.tensor([[6.0, 0.0], [0.0, 12.0]]), [0, 1])
    assert params.tolist() == [1.0, 2.0]  # half of the mean (2, 4)
    state = agg.state_dict()
    updates, clients = FORMS[form](2)
    report = agg.step(params, updates, clients)
    assert params.tolist() == [2.0, 4.0]
    assert not report.skipped
    assert report.active.tolist() == report.weights.tolist() == []
    assert report.rejected.tolist() == clients
    for name, value in agg.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_round_without_clients_can_be_skipped() -> None:
    agg = MIFA(num_clients=3, num_params=2, empty_rounds="skip")
    params = torch.zeros(2)
    agg.step(params, torch.tensor([[6.0, 0.0]]), [0])
    assert agg.step(params, [], []).skipped
    assert params.tolist() == [2.0, 0.0]
    assert agg.options()["empty_rounds"] == "skip"
    with pytest.raises(ValueError, match="empty_rounds"):
        MIFA(num_clients=3, num_params=2, empty_rounds="repeat")


def test_a_round_without_clients_that_would_overflow_changes_nothing() -> None:
    agg = MIFA(num_clients=1, num_params=1)
    params = torch.zeros(1)
    agg.step(params, torch.full((1, 1), 2e38), [0])
    with pytest.raises(ValueError, match="range of float32"):
        agg.step(params, [], [])
    assert params.item() == torch.tensor(2e38).item()
