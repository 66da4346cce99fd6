# SPDX-License-Identifier: Apache-2.0
"""Multi-Krum: hand-worked numbers, an oracle on the vectors, and identities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import FedAvg, Krum, MultiKrum


def expected_mean(x: np.ndarray, w: np.ndarray, f: int, keep: int) -> np.ndarray:
    """Return the weighted mean of the ``keep`` rows with the lowest Krum scores."""
    n = len(x)
    squares = ((x[:, None] - x[None]) ** 2).sum(-1)
    scores = [sum(sorted(np.delete(squares[i], i))[: max(1, n - f - 2)]) for i in range(n)]
    best = sorted(range(n), key=lambda i: (scores[i], i))[:keep]
    return w[best] @ x[best] / w[best].sum()


def test_hand_worked() -> None:
    # scores with two neighbours: 10, 5, 5, 10, far: the four without the last, mean 2
    rows = torch.tensor([[0.0], [1.0], [3.0], [4.0], [50.0]])
    agg = MultiKrum(num_clients=5, num_params=1, num_byzantine=1)
    params = torch.zeros(1)
    report = agg.step(params, rows, range(5))
    assert params.tolist() == [2.0]
    assert report.weights.tolist() == [0.25, 0.25, 0.25, 0.25, 0.0]
    assert report.pairs == 20
    # the best three; the lower id wins a tie: 1, 3, 0
    agg = MultiKrum(num_clients=5, num_params=1, num_byzantine=1, keep=3)
    agg.step(params.zero_(), rows, range(5))
    assert params.item() == pytest.approx(4 / 3, rel=1e-7)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]])
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_follows_the_oracle(
    follow: Callable[..., None], weights: list[float] | None, keep: int
) -> None:
    w = weights or [1.0] * 7

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        ids = sorted(updates)
        rows = np.stack([updates[k] for k in ids])
        return params + 0.5 * expected_mean(rows, np.array([w[k] for k in ids]), 0, keep)

    agg = MultiKrum(num_clients=7, num_params=33, server_lr=0.5, keep=keep, client_weights=weights)
    follow(agg, oracle, tolerance=4 * 2.0**-24)  # the sum, the mean and the factors in float32


def test_with_all_kept_it_is_fedavg(same_bits: Callable[..., None]) -> None:
    rows, params, twin = torch.randn(6, 20), torch.zeros(20), torch.zeros(20)
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    agg = MultiKrum(num_clients=6, num_params=20, keep=9, client_weights=weights)
    agg.step(params, rows, range(6))
    FedAvg(num_clients=6, num_params=20, client_weights=weights).step(twin, rows, range(6))
    torch.testing.assert_close(params, twin, rtol=0, atol=2e-7)  # two roundings of the factors


def test_with_one_kept_it_is_krum(same_bits: Callable[..., None]) -> None:
    rows, params, twin = torch.randn(7, 20), torch.zeros(20), torch.zeros(20)
    MultiKrum(num_clients=7, num_params=20, num_byzantine=2, keep=1).step(params, rows, range(7))
    Krum(num_clients=7, num_params=20, num_byzantine=2).step(twin, rows, range(7))
    same_bits(params, twin)


def test_a_minority_is_left_out() -> None:
    agg = MultiKrum(num_clients=10, num_params=20, num_byzantine=3)
    rows = torch.cat([torch.randn(7, 20), 1e20 * torch.randn(3, 20)])
    report = agg.step(torch.zeros(20), rows, range(10))
    assert report.weights[7:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("keep", "error"), [(0, ValueError), (1.5, TypeError)])
def test_bad_options(keep: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="keep"):
        MultiKrum(num_clients=2, num_params=1, keep=keep)  # type: ignore[arg-type]
