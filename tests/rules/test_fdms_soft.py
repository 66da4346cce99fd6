# SPDX-License-Identifier: Apache-2.0
"""FDMS with several friends: hand-worked numbers, an oracle, and FDMS as its limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastagg import FDMS, FDMSSoft


def test_hand_worked() -> None:
    agg = FDMSSoft(num_clients=4, num_params=2, friends=2, temperature=0.25)
    directions = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    agg.step(torch.zeros(2), directions, range(4))
    # client 0's scores: 1 with 1, .5 with 2, 0 with 3; the two best get e^0 : e^-2
    report = agg.step(torch.zeros(2), directions[1:], [1, 2, 3])
    low = math.exp(-2.0) / (1.0 + math.exp(-2.0))
    assert report.weights.tolist() == pytest.approx(
        [0.25 * (1 + 1 - low), 0.25 * (1 + low), 0.25], rel=1e-6
    )
    assert report.friends is not None and report.friends.tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]])
@pytest.mark.parametrize(("friends", "temperature"), [(1, 0.1), (2, 0.05), (3, 1.0), (9, 0.2)])
def test_follows_the_oracle(
    follow: Callable[..., None], weights: list[float] | None, friends: int, temperature: float
) -> None:
    K = 7
    shares = np.array(weights or [1.0] * K) / sum(weights or [1.0] * K)
    scores: dict[tuple[int, int], list[float]] = {}

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        ids = sorted(updates)
        factors = dict.fromkeys(ids, 0.0)
        for k in range(K):
            known = [i for i in ids if (k, i) in scores]
            best = sorted(known, key=lambda i: -np.mean(scores[k, i]))[:friends]
            if k in updates:
                factors[k] += shares[k]
            elif not best:
                for i in ids:
                    factors[i] += shares[k] / len(ids)
            else:
                parts = np.exp([np.mean(scores[k, i]) / temperature for i in best])
                for i, part in zip(best, parts / parts.sum(), strict=True):
                    factors[i] += shares[k] * part
        for i in ids:
            for j in ids:
                if i != j:
                    u, v = updates[i], updates[j]
                    cosine = u @ v / np.linalg.norm(u) / np.linalg.norm(v)
                    scores.setdefault((i, j), []).append((cosine + 1) / 2)
        return params + 0.5 * sum(f * updates[k] for k, f in factors.items())

    agg = FDMSSoft(
        num_clients=K,
        num_params=33,
        server_lr=0.5,
        friends=friends,
        temperature=temperature,
        client_weights=weights,
    )
    # differences of float32 scores are divided by temperatures of .05 and more
    follow(agg, oracle, tolerance=1e-5)


@pytest.mark.parametrize("similarity", ["cosine", "distance"])
def test_one_friend_is_fdms(random_rounds: Callable[..., Any], similarity: str) -> None:
    soft = FDMSSoft(num_clients=6, num_params=20, friends=1, similarity=similarity)
    hard = FDMS(num_clients=6, num_params=20, similarity=similarity)
    params, twin = torch.zeros(20), torch.zeros(20)
    for updates, clients in random_rounds(6, 20, 10, seed=2):
        first, second = soft.step(params, updates, clients), hard.step(twin, updates, clients)
        assert (first.friends is None) == (second.friends is None)
        # the same shares, added in another order
        torch.testing.assert_close(first.weights, second.weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(params, twin, rtol=1e-5, atol=1e-5)


def test_many_absent_clients() -> None:
    """More absent clients than one batch holds; the weights still sum to 1."""
    agg = FDMSSoft(num_clients=600, num_params=8)
    agg.step(torch.zeros(8), torch.randn(600, 8), range(600))
    report = agg.step(torch.zeros(8), torch.randn(9, 8), range(0, 45, 5))
    assert report.weights.sum().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"friends": 0}, ValueError, "friends"),
        ({"friends": 1.5}, TypeError, "friends"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"temperature": None}, TypeError, "temperature"),
        ({"elimination": "theorem2"}, TypeError, "elimination"),
        ({"similarity": "dot"}, ValueError, "similarity"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        FDMSSoft(num_clients=2, num_params=1, **options)
