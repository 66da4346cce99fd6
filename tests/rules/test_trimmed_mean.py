# SPDX-License-Identifier: Apache-2.0
"""Trimmed mean: hand-worked numbers, an oracle, and identities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import FedAvg, Median, TrimmedMean


def test_hand_worked() -> None:
    rows = torch.tensor([[1.0, 9.0], [2.0, -3.0], [6.0, 0.0], [-50.0, 1.0], [4.0, 2.0]])
    agg = TrimmedMean(num_clients=5, num_params=2, num_byzantine=1)
    params = torch.zeros(2)
    agg.step(params, rows, range(5))
    assert params.tolist() == [np.float32(7 / 3), 1.0]  # of 1, 2, 4 and of 0, 1, 2
    agg.step(params.zero_(), rows[[4, 0, 1]], [4, 0, 1])
    assert params.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("f", [0, 1, 3])
def test_follows_the_oracle(follow: Callable[..., None], f: int) -> None:
    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        ascending = np.sort(np.stack(list(updates.values())), axis=0)
        return params + 0.5 * ascending[f : len(ascending) - f].mean(axis=0)

    agg = TrimmedMean(num_clients=20, num_params=33, server_lr=0.5, num_byzantine=f)
    step = agg.step

    def enough(params: torch.Tensor, updates: torch.Tensor, clients: torch.Tensor) -> object:
        if len(clients) > 2 * f or len(clients) == 0:
            return step(params, updates, clients)
        with pytest.raises(ValueError, match=f"expected more than {2 * f} rows"):
            step(params, updates, clients)
        params += 0.5 * updates.median(dim=0).values  # any step, for the comparison
        return None

    def same(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        if len(updates) > 2 * f:
            return oracle(params, updates)
        rows = torch.tensor(np.stack(list(updates.values()))).float()
        return params + 0.5 * rows.median(dim=0).values.double().numpy()

    agg.step = enough  # type: ignore[assignment, method-assign]
    follow(agg, same, tolerance=2 * 2.0**-24)  # the mean and the parameters, to float32


def test_without_trimming_it_is_the_mean_and_with_all_the_median() -> None:
    rows, params, twin = torch.randn(7, 50), torch.zeros(50), torch.zeros(50)
    TrimmedMean(num_clients=7, num_params=50).step(params, rows, range(7))
    FedAvg(num_clients=7, num_params=50).step(twin, rows, range(7))
    # FedAvg adds in float32: three roundings in a tree of eight, and that of the factors.
    torch.testing.assert_close(params, twin, rtol=0, atol=1e-6)
    TrimmedMean(num_clients=7, num_params=50, num_byzantine=3).step(params.zero_(), rows, range(7))
    Median(num_clients=7, num_params=50).step(twin.zero_(), rows, range(7))
    assert torch.equal(params, twin)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_bad_options(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_byzantine"):
        TrimmedMean(num_clients=2, num_params=1, num_byzantine=value)  # type: ignore[arg-type]
