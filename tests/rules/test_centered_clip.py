# SPDX-License-Identifier: Apache-2.0
"""Centered clipping: hand-worked numbers, eq. 43 computed on the vectors, and identities."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fastagg
from fastagg import CenteredClip


def clipping(
    v: np.ndarray, x: np.ndarray, w: np.ndarray, tau: float, iterations: int
) -> np.ndarray:
    """Apply eq. 43 from v [d] to vectors [S, d]; weights [S] sum to 1."""
    for _ in range(iterations):
        norms = np.linalg.norm(x - v, axis=1)
        factor = np.minimum(1.0, np.divide(tau, norms, out=np.ones_like(norms), where=norms > 0))
        v = v + (w * factor) @ (x - v)
    return v


def test_hand_worked() -> None:
    agg = CenteredClip(num_clients=2, num_params=2, tau=5.0, iterations=2, server_lr=2.0)
    params = torch.zeros(2)
    rows = torch.tensor([[6.0, 8.0], [0.0, -4.0]])
    # v_0 = 0: (6, 8) is clipped to (3, 4), (0, -4) stays: v_1 = (1.5, 0)
    # from v_1: (4.5, 8) has norm 9.179: clipped by .5447; (-1.5, -4) stays, norm 4.272
    scale = 5.0 / math.hypot(4.5, 8.0)
    v = [1.5 + (4.5 * scale - 1.5) / 2, (8.0 * scale - 4.0) / 2]
    agg.step(params, rows, [0, 1])
    assert params.tolist() == pytest.approx([2 * v[0], 2 * v[1]], rel=1e-6)  # float32 results
    assert agg.previous is not None
    assert agg.previous.tolist() == pytest.approx(v, rel=1e-6)  # before server_lr


def test_one_client_moves_v_by_at_most_tau_per_iteration() -> None:
    agg = CenteredClip(num_clients=3, num_params=1, tau=1.0, iterations=3)
    params = torch.zeros(1)
    for t in range(1, 5):  # v goes 3, 6, 9, and at 10 it stays
        agg.step(params.zero_(), torch.tensor([[10.0]]), [1])
        assert params.item() == pytest.approx(min(3.0 * t, 10.0), rel=1e-6)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]])
@pytest.mark.parametrize(("tau", "iterations"), [(4.0, 3), (0.5, 1), (20.0, 5), (math.inf, 2)])
def test_follows_the_oracle(
    follow: Callable[..., None], weights: list[float] | None, tau: float, iterations: int
) -> None:
    w = weights or [1.0] * 6
    v = np.zeros(33)

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        nonlocal v
        rows, chosen = np.stack(list(updates.values())), np.array([w[k] for k in updates])
        v = clipping(v, rows, chosen / chosen.sum(), tau, iterations)
        return params + 0.3 * v

    agg = CenteredClip(
        num_clients=6,
        num_params=33,
        server_lr=0.3,
        tau=tau,
        iterations=iterations,
        client_weights=weights,
    )
    # Rounding of inner products (3e-8 of squared norms), and of v to float32 in each round.
    follow(agg, oracle, tolerance=1e-6)


@pytest.mark.parametrize("start", [0.0, 1.0, -3e37])
def test_one_unclipped_iteration_is_the_weighted_mean_whatever_v0(
    same_bits: Callable[..., None], start: float
) -> None:
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    rows = torch.randn(4, 40)
    agg = CenteredClip(
        num_clients=6, num_params=40, tau=math.inf, iterations=1, client_weights=weights
    )
    agg.load_state_dict({"previous": torch.full((40,), start)})
    params, expected = torch.zeros(40), torch.zeros(40)
    agg.step(params, rows, [0, 1, 4, 5])
    mean = fastagg.FedAvg(num_clients=6, num_params=40, client_weights=weights)
    mean.step(expected, rows, [0, 1, 4, 5])
    same_bits(params, expected)


def test_a_row_at_v0_is_not_divided_by_its_distance() -> None:
    agg = CenteredClip(num_clients=2, num_params=3, tau=1.0)
    params = torch.zeros(3)
    agg.step(params, torch.zeros(2, 3), [0, 1])
    assert params.tolist() == [0.0, 0.0, 0.0]


def test_each_outlier_moves_the_result_by_at_most_tau() -> None:
    honest = torch.randn(8, 30)
    results = []
    for size in (0.0, 1e3, 1e30, 3e38):
        rows = torch.cat([honest, torch.full((2, 30), size)])
        agg = CenteredClip(num_clients=10, num_params=30, tau=10.0, iterations=3)
        params = torch.zeros(30)
        agg.step(params, rows, range(10))
        results.append(params)
    for params in results[1:]:  # two of ten, three iterations, at most 10 further in each
        assert (params - results[0]).norm() <= 3 * 0.2 * 2 * 10.0
    # Factors below float32's normal numbers lose bits: 1e-38 / 3e38 of a row of 3e38.
    torch.testing.assert_close(results[3], results[2], rtol=1e-3, atol=1e-3)


def test_infinity_survives_a_checkpoint(tmp_path: Path) -> None:
    agg = CenteredClip(num_clients=2, num_params=1, tau=math.inf)
    agg.save(tmp_path / "server.safetensors")
    loaded = fastagg.load(tmp_path / "server.safetensors")
    assert isinstance(loaded, CenteredClip) and loaded.tau == math.inf


def test_documented_example_of_byzfl() -> None:
    """ByzFL 0.0.11 uses the same recursion with weights 1/n and also keeps v for the next call; its
    default is one iteration. Its documented example: from zero, with tau = 100, the mean.
    ByzFL differs in two ways. A NaN row makes this result and all later results NaN. A row at
    distance 0 divides 100 by 0, which is harmless because the minimum with 1 is taken."""
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    agg = CenteredClip(num_clients=4, num_params=3, tau=100.0, iterations=1, nonfinite="drop")
    params = torch.zeros(3)
    agg.step(params, rows, [0, 1, 2])
    assert params.tolist() == pytest.approx([4.0, 5.0, 6.0])
    report = agg.step(params.zero_(), [*rows, torch.full((3,), math.nan)], [0, 1, 2, 3])
    assert report.rejected.tolist() == [3]
    assert params.tolist() == pytest.approx([4.0, 5.0, 6.0])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"tau": 0.0}, ValueError, "tau"),
        ({"tau": -1.0}, ValueError, "tau"),
        ({"tau": math.nan}, ValueError, "tau"),
        ({"tau": "large"}, TypeError, "tau"),
        ({"tau": 1.0, "iterations": 0}, ValueError, "iterations"),
        ({"tau": 1.0, "iterations": True}, TypeError, "iterations"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        CenteredClip(num_clients=2, num_params=1, **options)
