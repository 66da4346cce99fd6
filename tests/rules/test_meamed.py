# SPDX-License-Identifier: Apache-2.0
"""Mean around the median: hand-worked numbers, an oracle, and identities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastagg import Meamed, TrimmedMean


def around_median(rows: np.ndarray, keep: int) -> np.ndarray:
    """The mean of the ``keep`` values of each column of [n, d] nearest to its median."""
    ascending = np.sort(rows, axis=0)
    order = np.abs(ascending - np.median(rows, axis=0)).argsort(axis=0, kind="stable")
    return np.take_along_axis(ascending, order[:keep], axis=0).mean(axis=0)


def test_hand_worked() -> None:
    # medians 3 and 0; without 100 (and, of -4 and 4 at the same distance, without 4)
    rows = torch.tensor([[1.0, 4.0], [2.0, 0.0], [3.0, -4.0], [4.0, 1.0], [100.0, -1.0]])
    agg = Meamed(num_clients=5, num_params=2, num_byzantine=1)
    params = torch.zeros(2)
    agg.step(params, rows, range(5))
    assert params.tolist() == [2.5, -1.0]


def test_follows_the_oracle(follow: Callable[..., None]) -> None:
    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        rows = np.stack(list(updates.values()))
        return params + 0.5 * around_median(rows, len(rows))

    agg = Meamed(num_clients=9, num_params=33, server_lr=0.5)
    follow(agg, oracle, tolerance=2 * 2.0**-24)  # the mean and the parameters, to float32


@pytest.mark.parametrize(("size", "f"), [(3, 1), (8, 3), (21, 5), (50, 24)])
def test_one_step_is_that_of_the_oracle(size: int, f: int) -> None:
    rows, params = torch.randn(size, 200), torch.zeros(200)
    Meamed(num_clients=size, num_params=200, num_byzantine=f).step(params, rows, range(size))
    expected = around_median(rows.double().numpy(), size - f)
    # One rounding of the mean; float64 sums of numbers up to 4.
    np.testing.assert_allclose(params.double().numpy(), expected, rtol=2.0**-24, atol=1e-14)


def test_with_f_0_it_is_the_mean() -> None:
    rows, params, twin = torch.randn(7, 50), torch.zeros(50), torch.zeros(50)
    Meamed(num_clients=7, num_params=50).step(params, rows, range(7))
    TrimmedMean(num_clients=7, num_params=50).step(twin, rows, range(7))
    assert torch.equal(params, twin)


def test_too_few_rows() -> None:
    agg = Meamed(num_clients=4, num_params=1, num_byzantine=2)
    with pytest.raises(ValueError, match="expected more than 4 rows"):
        agg.step(torch.zeros(1), torch.ones(4, 1), range(4))
