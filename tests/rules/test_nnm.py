# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour mixing: compare mixed Gram matrices with the rule on explicitly mixed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import NNM

W6 = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]


def mixed(x: np.ndarray, w: np.ndarray, f: int) -> np.ndarray:
    """Return each row's mean with its n - f - 1 nearest others, by explicit distances."""
    rows = []
    for i in range(len(x)):
        distances = ((x - x[i]) ** 2).sum(1)
        distances[i] = -1.0
        near = np.argsort(distances, kind="stable")[: len(x) - f]
        rows.append(w[near] @ x[near] / w[near].sum())
    return np.stack(rows)


def aggregate(rows: Tensor, **options: Any) -> Tensor:
    agg = NNM(num_clients=len(rows), num_params=rows.shape[1], **options)
    params = torch.zeros(rows.shape[1])
    agg.step(params, rows, range(len(rows)))
    return params


def test_hand_worked() -> None:
    rows = torch.tensor([[0.0], [1.0], [3.0]])
    # neighbours: 0 -> {0, 1}, 1 -> {1, 0}, 3 -> {3, 1}; means .5, .5, 2; Krum takes the first
    assert aggregate(rows, num_byzantine=1, rule="krum").item() == 0.5
    rows = torch.tensor([[0.0], [1.0], [3.0], [100.0]])
    # {0, 1, 3} three times, {100, 3, 1}: means 4/3, 4/3, 4/3, 104/3
    assert aggregate(rows, num_byzantine=1, rule="krum").item() == pytest.approx(4 / 3, rel=1e-6)


@pytest.mark.parametrize("weights", [None, W6])
@pytest.mark.parametrize("f", [1, 2])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("geometric-median", {}),
        ("centered-clip", {"tau": 1.5}),
        ("multi-krum", {"num_byzantine": 1, "keep": 3}),
    ],
)
def test_is_the_rule_on_the_mixed_rows(
    f: int, rule: str, options: dict[str, Any], weights: list[float] | None
) -> None:
    generator = torch.Generator().manual_seed(f)
    for _ in range(10):
        rows = torch.randn(6, 40, generator=generator) + torch.randn(40, generator=generator)
        got = aggregate(
            rows, num_byzantine=f, rule=rule, rule_options=options, client_weights=weights
        )
        explicit = mixed(rows.double().numpy(), np.array(weights or [1.0] * 6), f)
        inner = fastagg.make(rule, num_clients=6, num_params=40, client_weights=weights, **options)
        expected = torch.zeros(40)
        inner.step(expected, torch.from_numpy(explicit).float(), range(6))
        # Mixed rows lie close together compared with their length, and copies differ by rounding.
        # The median then weights them by noise, which moves it by no more than their distances.
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


def test_with_f_zero_it_is_the_weighted_mean() -> None:
    rows, params = torch.randn(6, 20), torch.zeros(20)
    fastagg.FedAvg(num_clients=6, num_params=20, client_weights=W6).step(params, rows, range(6))
    torch.testing.assert_close(aggregate(rows, client_weights=W6), params, rtol=1e-6, atol=1e-6)


def test_a_minority_cannot_move_the_result_far() -> None:
    honest = torch.randn(7, 20)
    rules: list[tuple[str, dict[str, Any]]] = [
        ("geometric-median", {"iterations": 100}),  # each takes 3/7 off: 1e30 needs 82
        ("krum", {"num_byzantine": 3}),
    ]
    for size in (1e3, 1e30):
        rows = torch.cat([honest, torch.full((3, 20), size)])
        for rule, options in rules:
            result = aggregate(rows, num_byzantine=3, rule=rule, rule_options=options)
            assert (result - honest.mean(0)).norm() <= 3.5 * honest.norm(dim=1).max()


def test_documented_example_of_byzfl() -> None:
    """ByzFL 0.0.11 mixes the same neighbours with equal weights. On ties, as for the middle one of
    three rows in a line, it takes what a partial sort leaves, which is unspecified; fastagg takes
    the lowest id. Its documented example, n = 3 and f = 1: means 2.5, 2.5 and 5.5, ..."""
    rows = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    assert mixed(rows, np.ones(3), 1)[:, 0].tolist() == [2.5, 2.5, 5.5]
    result = aggregate(torch.tensor(rows).float(), num_byzantine=1, rule="krum")
    assert result.tolist() == [2.5, 3.5, 4.5]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rule": "mifa"}, ValueError, r"rule: expected one of \['bucketing', .*, got 'mifa'"),
        ({"rule": "krumm"}, ValueError, "Did you mean 'krum'"),
        ({"rule": "krum", "rule_options": {"nu": 1.0}}, TypeError, "no option"),
        ({"rule": "kum"}, ValueError, "^rule: expected one of .*Did you mean 'krum'"),
        ({"rule_options": {"reuse": True}}, ValueError, "rule_options: .*'reuse'"),
        ({"rule_options": {"num_params": 3}}, ValueError, "rule_options: .*'num_params'"),
        ({"rule_options": [1]}, TypeError, "rule_options: expected a mapping"),
        ({"num_byzantine": -1}, ValueError, "num_byzantine"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        NNM(num_clients=2, num_params=1, **options)


def test_without_a_majority_it_refuses(same_bits: Callable[..., None]) -> None:
    agg = NNM(num_clients=6, num_params=3, num_byzantine=2)
    params = torch.randn(3)
    old = params.clone()
    with pytest.raises(ValueError, match="more than 4 rows"):
        agg.step(params, torch.randn(4, 3), range(4))
    same_bits(params, old)
