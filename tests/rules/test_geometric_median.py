# SPDX-License-Identifier: Apache-2.0
"""Geometric median: hand-worked numbers, Weiszfeld computed on the vectors, symmetries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastagg import FedAvg, GeometricMedian


def weiszfeld(
    x: np.ndarray, w: np.ndarray, nu: float = 1e-6, iterations: int = 8, start: str = "mean"
) -> np.ndarray:
    """Run smoothed Weiszfeld on vectors [S, d] with weights [S], from their mean or zero."""
    z = w @ x / w.sum() if start == "mean" else np.zeros(x.shape[1])
    for _ in range(iterations):
        beta = w / np.maximum(nu, np.linalg.norm(x - z, axis=1))
        z = beta @ x / beta.sum()
    return z


ZERO = {"iterations": 8, "nu": 0.1, "start": "zero"}  # as in Su et al.


def median_of(rows: Tensor, **options: object) -> Tensor:
    agg = GeometricMedian(num_clients=len(rows), num_params=rows.shape[1], **options)
    params = torch.zeros(rows.shape[1])
    agg.step(params, rows, range(len(rows)))
    return params


def test_hand_worked() -> None:
    # On a line from the mean 4 of 0, 0, 12: distances 4, 4, 8, so weights 1/4, 1/4, 1/8 and
    # z = 12/8 / (5/8) = 12/5; then distances 12/5, 12/5, 48/5, weights 4, 4, 1, z = 12/9.
    rows = torch.tensor([[0.0], [0.0], [12.0]])
    # From zero: distances nu, nu, 12, so weights 1/6, 1/6, 1/12 at nu = 6 and z = 1 / (5/12).
    assert median_of(rows, iterations=1, nu=6.0, start="zero").item() == pytest.approx(2.4)
    # a few float32 roundings of distances from a Gram matrix of small integers
    assert median_of(rows, iterations=0).item() == pytest.approx(4.0, rel=1e-6)
    assert median_of(rows, iterations=1).item() == pytest.approx(12 / 5, rel=1e-6)
    assert median_of(rows, iterations=2).item() == pytest.approx(12 / 9, rel=1e-6)


def test_nu_bounds_the_pull_of_a_near_row() -> None:
    # z starts at 3 = row 1; with nu = 1 the weights are 1/3, 1/1, 1/3.
    rows = torch.tensor([[0.0], [3.0], [6.0]])
    shifted = rows + torch.tensor([[0.0], [0.0], [3.0]])  # mean 4, distances 4, max(1, nu), 5
    assert median_of(rows, iterations=1, nu=1.0).item() == pytest.approx(3.0, rel=1e-6)
    expected = (3.0 / 2.0 + 9.0 / 5.0) / (1 / 4 + 1 / 2 + 1 / 5)
    assert median_of(shifted, iterations=1, nu=2.0).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]])
@pytest.mark.parametrize("options", [{}, {"iterations": 2, "nu": 0.5}, {"iterations": 40}, ZERO])
def test_follows_the_oracle(
    follow: Callable[..., None], weights: list[float] | None, options: dict[str, Any]
) -> None:
    w = weights or [1.0] * 6

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        rows = np.stack(list(updates.values()))
        return params + 0.3 * weiszfeld(rows, np.array([w[k] for k in updates]), **options)

    agg = GeometricMedian(
        num_clients=6, num_params=33, server_lr=0.3, client_weights=weights, **options
    )
    # The mean of two rows lies half-way between them; with more rows, z comes close to none here.
    # The remaining error is the rounding of inner products (3e-8 of the squared norms at this d).
    follow(agg, oracle, tolerance=1e-6)


def test_moves_with_translation_and_rotation() -> None:
    rows = torch.randn(9, 24)
    shift = 3.0 * torch.randn(24)
    rotation, _ = torch.linalg.qr(torch.randn(24, 24))
    # The shift makes rows longer than their distances; the noise in distances grows by its square.
    torch.testing.assert_close(
        median_of(rows + shift), median_of(rows) + shift, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        median_of(rows @ rotation), median_of(rows) @ rotation, rtol=1e-5, atol=1e-5
    )


def test_a_minority_cannot_move_the_result_far() -> None:
    rows = torch.randn(10, 50)
    honest = rows[:7].double().mean(dim=0)
    for size in (1e2, 1e6, 1e12, 3e37):
        rows[7:] = size * torch.randn(3, 50).sign()
        z = median_of(rows, iterations=100)
        # Lopuhaa and Rousseeuw: within 2(n - f)/(n - 2f) = 3.5 radii of any centre of the honest
        radius = (rows[:7].double() - honest).norm(dim=1).max()
        assert (z - honest).norm() <= 3.5 * radius
        assert median_of(rows, iterations=0).norm() > 1e-3 * size  # the mean is unusable


def test_on_a_line_it_is_the_weighted_median() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [100.0]])
    # Weiszfeld approaches a data point as 1/iterations; 400 iterations give 1 %.
    assert median_of(rows, iterations=400).item() == pytest.approx(4.0, rel=1e-2)
    weights = [1.0, 1.0, 1.0, 1.0, 9.0]
    z = median_of(rows, iterations=400, client_weights=weights)
    assert z.item() == pytest.approx(100.0, rel=1e-2)


def test_without_iterations_it_is_fedavg(same_bits: Callable[..., None]) -> None:
    rows, weights = torch.randn(6, 40), [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    params = torch.zeros(40)
    FedAvg(num_clients=6, num_params=40, client_weights=weights).step(params, rows, range(6))
    same_bits(median_of(rows, iterations=0, client_weights=weights), params)


def test_documented_example_of_byzfl() -> None:
    """ByzFL 0.0.11 starts at zero instead of the mean and stops after three iterations; from its
    second iterate on the recursion is the same. Its documented example, worked by hand:
    z_1 = sum_i x_i/|x_i| / sum_i 1/|x_i|, and so on, converges to the middle row, as ours does."""
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    z = np.zeros(3)
    for _ in range(3):
        beta = 1.0 / np.maximum(0.1, np.linalg.norm(rows.numpy() - z, axis=1))
        z = beta @ rows.numpy() / beta.sum()
    assert z == pytest.approx([3.78788764, 4.78788764, 5.78788764], rel=1e-8)  # as ByzFL prints it
    # the mean is the middle row, to within the noise of distances, 1e-4 of the norms
    assert median_of(rows).numpy() == pytest.approx([4.0, 5.0, 6.0], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"nu": 0.0}, ValueError, "nu"),
        ({"nu": float("nan")}, ValueError, "nu"),
        ({"nu": float("inf")}, ValueError, "nu"),
        ({"nu": "small"}, TypeError, "nu"),
        ({"iterations": -1}, ValueError, "iterations"),
        ({"iterations": 2.0}, TypeError, "iterations"),
        ({"iterations": 0, "start": "zero"}, ValueError, "iterations"),
        ({"start": "median"}, ValueError, "start"),
        ({"reuse": 1}, TypeError, "reuse"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GeometricMedian(num_clients=2, num_params=1, **options)
