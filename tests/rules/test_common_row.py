# SPDX-License-Identifier: Apache-2.0
"""Distances of nearly equal rows: the choice of the common row, bounds, and bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import ops
from fastagg.rules.common_row import CLOSE, find_common_row, with_common_row
from fastagg.rules.gram_policy import square_distances
from fastagg.updates.any_rows import AnyRows
from fastagg.updates.columns import AROUND_BLOCK, Columns
from fastagg.updates.streams import TensorRows

E = 1e-7  # bound of the error of ops.gram in its self-check
U = 2.0**-24  # of a subtraction in float32


def near(n: int, d: int, spread: float, seed: int = 0) -> Tensor:
    """n rows [d] around a common vector, with relative distances of about 1.4 times ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(d, generator=generator) + spread * torch.randn(n, d, generator=generator)


def exact_distances(rows: Tensor) -> Tensor:
    """Distances [n, n] float64, from differences."""
    return (rows.double()[:, None] - rows.double()).norm(dim=-1)


def gram_of(rows: Tensor) -> Tensor:
    return ops.gram(rows, dtype=torch.float64)


def distances_with(rows: Tensor) -> tuple[int, Tensor]:
    """Return the common row, which must exist, and the distances that policies see."""
    gram = gram_of(rows)
    common = find_common_row(gram, len(rows))
    assert common is not None
    return common, square_distances(
        with_common_row(gram, Columns(1 << 20).gram_around(rows, common))
    ).sqrt()


@pytest.mark.parametrize("d", [3, 16, 64, 300, 1000, 3000, 30_000])
def test_the_error_of_a_gram_matrix(d: int) -> None:
    """The e of the module's docstring, for positive rows and for nearly equal ones."""
    for seed in range(20):
        for rows in (near(6, d, 1e-3, seed).abs(), near(6, d, 1e-3, seed)):
            exact = rows.double() @ rows.double().T
            norms = exact.diagonal().sqrt()
            error = ((gram_of(rows) - exact).abs() / torch.outer(norms, norms)).max()
            assert error <= (E if d < 1000 else 1.5e-8)  # 6.8e-8 and 9e-9 measured


# --- which row --------------------------------------------------------------------------------


def test_hand_worked() -> None:
    # Distances to the third nearest, the row itself included: 9, 4, 9 and 97^2.
    rows = torch.tensor([[100.0], [101.0], [103.0], [200.0]])
    assert find_common_row(gram_of(rows), 4) == 1
    assert find_common_row(gram_of(rows.flip(0)), 4) == 2
    around = Columns(64).gram_around(rows, 1)
    x = torch.tensor([-1.0, 0.0, 2.0, 99.0], dtype=torch.float64)
    assert torch.equal(around, torch.outer(x, x))
    merged = with_common_row(gram_of(rows), around)
    assert torch.equal(square_distances(merged), (x[:, None] - x).square())
    # Four rows, of which the last is no candidate: of three rows, the median is the second.
    assert find_common_row(gram_of(rows), 3) == 0  # distances 1, 1, 4: a tie


@pytest.mark.parametrize(
    "rows",
    [
        torch.randn(9, 200),  # no row is close to another
        torch.zeros(5, 20),
        torch.cat([torch.zeros(6, 20), torch.ones(1, 20), torch.full((2, 20), 1.01)]),
        torch.cat([torch.randn(7, 200), torch.full((2, 200), 40.0)]),  # two copies, far from most
        torch.randn(1, 20),
        torch.tensor([[1.0, 0.0], [math.sqrt(2 * CLOSE), 1.0]]),
    ],
)
def test_no_second_matrix_where_it_does_not_pay(rows: Tensor) -> None:
    assert find_common_row(gram_of(rows), len(rows)) is None


def test_without_a_common_row_the_error_is_bounded() -> None:
    """Squared distances are then exact to 2e / limit, relatively."""
    rows = near(9, 5000, 0.14)  # just not close
    gram = gram_of(rows)
    assert find_common_row(gram, 9) is None
    exact = exact_distances(rows).square()
    error = (square_distances(gram) - exact).abs().fill_diagonal_(0.0)
    assert (error <= 2 * E / CLOSE * exact).all()


HOSTILE: dict[str, Callable[[int], Tensor]] = {
    "1e30": lambda d: torch.full((4, d), 1e30),
    "largest": lambda d: torch.tensor([[3.4e38], [-3.4e38], [3.4e38], [1.0]]).expand(4, d),
    "one": lambda d: torch.cat([near(3, d, 1e-4), torch.full((1, d), -1e30)]),
    "near each other": lambda d: 50.0 * near(4, d, 1e-6, seed=1),
    "near zero": lambda d: 1e-3 * near(4, d, 1e-1, seed=2),
    "zero": lambda d: torch.zeros(4, d),
    "opposite": lambda d: -near(4, d, 1e-4),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("spread", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("d", [40, 3000])
def test_a_minority_cannot_spoil_the_distances_of_the_majority(
    kind: str, spread: float, first: bool, d: int
) -> None:
    good, bad = near(5, d, spread), HOSTILE[kind](d)
    rows = torch.cat([bad, good] if first else [good, bad])
    common, distances = distances_with(rows)
    own = slice(4, 9) if first else slice(0, 5)
    exact = exact_distances(good)
    furthest, largest = float(exact.max()), float(good.double().norm(dim=1).max())
    # The bounds of the module's docstring, with the factor 1 + sqrt(e) that it leaves out.
    assert exact_distances(torch.cat([rows[common][None], good]))[0].max() <= (1 + 1e-3) * (
        2 * furthest + 4 * math.sqrt(E) * largest
    )
    bound = 4 * (math.sqrt(E) + U) * (furthest + 2 * math.sqrt(E) * largest) * (1 + 1e-3)
    assert (distances[own, own] - exact).abs().max() <= bound
    if spread >= 1e-4:  # far better than the bound, unless the row is chosen among noise
        assert (distances[own, own] - exact).abs().max() <= 1e-6 * furthest  # 2e-8 measured


def test_no_distance_gets_worse() -> None:
    """A minority near zero keeps the distances of the plain matrix, which are more exact there."""
    rows = torch.cat([1e4 * near(5, 300, 1e-4), near(4, 300, 1.0, seed=1)])
    _, distances = distances_with(rows)
    exact = exact_distances(rows)
    assert (distances - exact).abs()[5:, 5:].max() <= 1e-6 * exact[5:, 5:].max()
    around = Columns(1 << 20).gram_around(rows, 0)
    alone = square_distances(around).sqrt()
    assert (alone - exact).abs()[5:, 5:].max() > 1e-4 * exact[5:, 5:].max()  # 4e-3 measured


def test_copies_stay_copies() -> None:
    rows = near(9, 500, 1e-4)
    rows[6:] = rows[1]
    _, distances = distances_with(rows)
    same = [1, 6, 7, 8]
    assert not distances[same][:, same].any()
    for k in same[1:]:
        assert torch.equal(distances[k], distances[1])


def test_differences_beyond_float32_keep_the_plain_matrix() -> None:
    rows = torch.tensor([[3e38, 1.0], [2.9e38, 1.0], [3e38, 0.0], [-3e38, 1.0]])
    gram = gram_of(rows)
    around = Columns(64).gram_around(rows, 0)
    assert not torch.isfinite(around[3, 3])
    assert with_common_row(gram, around) is gram


# --- rules --------------------------------------------------------------------------------------

RULES: list[tuple[str, dict[str, Any]]] = [
    ("krum", {"num_byzantine": 2}),
    ("multi-krum", {"num_byzantine": 2}),
    ("nnm", {"num_byzantine": 2, "rule": "krum"}),
    ("geometric-median", {}),
    ("centered-clip", {"tau": 5.0}),
    ("bucketing", {"rule": "geometric-median"}),
]
every_rule = pytest.mark.parametrize(("name", "options"), RULES, ids=[name for name, _ in RULES])


def aggregate(name: str, options: dict[str, Any], rows: Any, **more: Any) -> tuple[Tensor, Tensor]:
    d = 700
    agg = fastagg.make(name, num_clients=9, num_params=d, **options, **more)
    agg.columns = Columns(256)
    params = torch.zeros(d)
    report = agg.step(params, rows, range(9))
    return params, report.weights


def krum_of(rows: Tensor, f: int) -> int:
    """Return Krum's row by distances in float64."""
    squares = exact_distances(rows).square().numpy()
    return int(np.sort(squares, axis=1)[:, 1 : len(rows) - f - 1].sum(axis=1).argmin())


@pytest.mark.parametrize("spread", [1e-3, 1e-4, 1e-5])
def test_krum_picks_the_row_of_the_oracle(spread: float) -> None:
    picked = 0
    for seed in range(100):
        rows = near(9, 700, spread, seed)
        _, weights = aggregate("krum", {"num_byzantine": 2}, rows)
        picked += int(weights.argmax()) == krum_of(rows, 2)
    assert picked == 100  # 92, 25 and 11 by the plain Gram matrix


def test_krum_is_not_distracted_by_a_huge_row() -> None:
    for seed in range(20):
        rows = near(9, 700, 1e-4, seed)
        rows[seed % 9] = 1e30
        _, weights = aggregate("krum", {"num_byzantine": 2}, rows)
        assert int(weights.argmax()) == krum_of(rows, 2)


@every_rule
@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_rows_are_read_again_only_if_some_are_close(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], spread: float
) -> None:
    passes = []
    real = Columns.gram_around

    def spy(self: Columns, rows: AnyRows, common: int, scales: Tensor | None = None) -> Tensor:
        passes.append(common)
        return real(self, rows, common, scales)

    monkeypatch.setattr(Columns, "gram_around", spy)
    aggregate(name, options, near(9, 700, spread))
    assert len(passes) == (spread < 1.0)


def test_a_policy_that_needs_norms_keeps_the_plain_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Columns, "gram_around", None)
    aggregate("geometric-median", {"start": "zero"}, near(9, 700, 1e-4))
    inside = {"rule": "geometric-median", "rule_options": {"start": "zero"}}
    aggregate("bucketing", inside, near(9, 700, 1e-4))


@every_rule
def test_the_same_bits_for_all_forms_orders_and_thread_counts(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    rows = near(9, 700, 1e-4)
    expected, weights = aggregate(name, options, rows)
    order = torch.randperm(9)
    agg = fastagg.make(name, num_clients=9, num_params=700, **options)
    agg.columns = Columns(256)
    params = torch.zeros(700)
    agg.step(params, rows[order], order)
    same_bits(params, expected)
    strided = torch.zeros(9, 1400)[:, 300:1000]
    strided.copy_(rows)
    for form in (list(rows), strided, TensorRows(rows.double())):
        for found, wanted in zip(aggregate(name, options, form), (expected, weights), strict=True):
            same_bits(found, wanted)
    torch.set_num_threads(3)
    same_bits(aggregate(name, options, rows)[0], expected)


@every_rule
def test_clients_of_weight_zero_are_as_if_absent(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    weights = [1.0, 2.0, 0.0, 1.0, 1.0, 3.0, 1.0, 0.0, 1.0]
    rows = near(9, 700, 1e-4)
    rows[2], rows[7] = 1e6, 0.0
    results = []
    for clients in (list(range(9)), [k for k in range(9) if weights[k]]):
        agg = fastagg.make(name, num_clients=9, num_params=700, client_weights=weights, **options)
        params = torch.zeros(700)
        agg.step(params, rows[clients], clients)
        results.append(params)
    same_bits(*results)


@pytest.mark.parametrize("d", [1, AROUND_BLOCK - 1, AROUND_BLOCK, 2 * AROUND_BLOCK + 3])
def test_blocks_lose_no_column(d: int) -> None:
    rows = near(4, d, 1e-2)
    moved = rows - rows[2]
    exact = moved.double() @ moved.double().T
    scale = exact.diagonal().max()
    for given in (rows, list(rows), TensorRows(rows.double()).rows):
        assert ((Columns(1 << 20).gram_around(given, 2) - exact).abs() <= E * scale).all()
