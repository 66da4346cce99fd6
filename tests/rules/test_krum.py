# SPDX-License-Identifier: Apache-2.0
"""Krum: hand-worked numbers, an oracle on the vectors, and differences from other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fastagg import Krum


def scores(x: np.ndarray, f: int) -> np.ndarray:
    """Blanchard et al.: sums of squared distances to the n - f - 2 nearest others, at least 1."""
    n = len(x)
    result = np.zeros(n)
    for i in range(n):
        others = sorted(((x[i] - x[j]) ** 2).sum() for j in range(n) if j != i)
        result[i] = sum(others[: max(1, n - f - 2)])
    return result


def chosen(rows: Tensor, f: int = 0, **options: object) -> int:
    agg = Krum(num_clients=len(rows), num_params=rows.shape[1], num_byzantine=f, **options)
    report = agg.step(torch.zeros(rows.shape[1]), rows, range(len(rows)))
    assert sorted(report.weights.tolist())[-1] == report.weights.sum() == 1.0
    return int(report.weights.argmax())


def test_hand_worked() -> None:
    # f = 1, n = 5: two neighbours. 0: 1 + 9 = 10;  1: 1 + 4 = 5;  3: 4 + 1 = 5;  4: 1 + 9 = 10
    rows = torch.tensor([[0.0], [1.0], [3.0], [4.0], [50.0]])
    assert chosen(rows, f=1) == 1  # a tie, the lower id
    # f = 0: three neighbours. 0: 26;  1: 1 + 4 + 9 = 14;  3: 1 + 4 + 9 = 14;  4: 26
    assert chosen(rows.flip(0)) == 2  # rows 50, 4, 3, 1, 0


@pytest.mark.parametrize("f", [0, 1, 2])
def test_follows_the_oracle(follow: Callable[..., None], f: int) -> None:
    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        ids = sorted(updates)
        rows = np.stack([updates[k] for k in ids])
        return params + 0.5 * rows[scores(rows, f).argmin()]

    agg = Krum(num_clients=12, num_params=33, server_lr=0.5, num_byzantine=f)
    follow_rounds_of_at_least(2 * f + 1, agg, oracle)


def follow_rounds_of_at_least(
    size: int, agg: Krum, oracle: Callable[[np.ndarray, dict[int, np.ndarray]], np.ndarray]
) -> None:
    generator = torch.Generator().manual_seed(3)
    params = torch.randn(agg.num_params, generator=generator)
    for _ in range(20):
        count = int(torch.randint(size, agg.num_clients + 1, (), generator=generator))
        clients = torch.randperm(agg.num_clients, generator=generator)[:count]
        rows = torch.randn(count, agg.num_params, generator=generator)
        given = {int(k): u.double().numpy() for k, u in zip(clients, rows, strict=True)}
        expected = oracle(params.double().numpy(), given)
        agg.step(params, rows, clients)
        error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
        assert error <= 2 * 2.0**-24  # the row unchanged, then one rounding of the sum


def test_a_minority_is_not_chosen() -> None:
    rows = torch.randn(9, 20)
    for bad in (torch.full((3, 20), 1e30), 50.0 * torch.randn(3, 20), torch.full((3, 20), -3e38)):
        assert chosen(torch.cat([bad, rows]), f=3) >= 3
        assert chosen(torch.cat([rows, bad]), f=3) < 9


def test_copies() -> None:
    rows = torch.randn(1, 20).expand(5, 20)
    assert chosen(rows) == 0
    # each of two copies of a bad row has only one other row at distance 0
    mixed = torch.cat([torch.randn(7, 20), torch.full((2, 20), 40.0)])
    assert chosen(mixed, f=2) < 7


@pytest.mark.parametrize(("size", "f"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_small_rounds_use_at_least_one_neighbour(size: int, f: int) -> None:
    rows = torch.randn(size, 6)
    assert chosen(rows, f) == scores(rows.double().numpy(), f).argmin()


@pytest.mark.parametrize(("size", "f"), [(2, 1), (1, 1), (4, 2)])
def test_without_a_majority_it_refuses(same_bits: Callable[..., None], size: int, f: int) -> None:
    agg = Krum(num_clients=6, num_params=3, num_byzantine=f)
    params = torch.randn(3)
    old = params.clone()
    with pytest.raises(
        ValueError, match=f"more than {2 * f} rows, twice num_byzantine, got {size}"
    ):
        agg.step(params, torch.randn(size, 3), range(size))
    same_bits(params, old)


def test_a_nan_row_is_never_chosen() -> None:
    """ByzFL 0.0.11 returns it: NaN distances make its scores NaN, and argmin takes the first."""
    rows = torch.randn(5, 4)
    rows[0] = math.nan
    agg = Krum(num_clients=5, num_params=4, nonfinite="drop", num_byzantine=1)
    params = torch.zeros(4)
    report = agg.step(params, rows, range(5))
    assert report.rejected.tolist() == [0]
    assert torch.isfinite(params).all()


def test_neighbours_are_those_of_the_paper() -> None:
    """The paper takes n - f - 2 others. ByzFL 0.0.11 takes the n - f nearest, the row itself
    included: n - f - 1 others. It may therefore choose another row. Here n = 5
    and f = 1: two neighbours, or three."""
    rows = torch.tensor([[0.0], [2.0], [4.0], [5.0], [9.0]])
    x = rows.double().numpy()
    assert scores(x, 1).tolist() == [20.0, 8.0, 5.0, 10.0, 41.0]
    assert chosen(rows, f=1) == 2
    three = [np.sort(((x - row) ** 2).sum(1))[1:4].sum() for row in x]
    assert three == [45.0, 17.0, 21.0, 26.0, 90.0]  # row 1 would win


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="num_byzantine"):
        Krum(num_clients=2, num_params=1, num_byzantine=-1)
    with pytest.raises(TypeError, match="num_byzantine"):
        Krum(num_clients=2, num_params=1, num_byzantine=0.5)  # type: ignore[arg-type]
