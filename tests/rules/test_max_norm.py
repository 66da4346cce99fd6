# SPDX-License-Identifier: Apache-2.0
"""``max_norm``, for every rule: a client whose row is too long is absent in that round."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer
from fastagg.updates.columns import Columns
from fastagg.updates.streams import ColumnBlocks

K, D, SEGMENT = 6, 2_603, 1_024  # d is two segments and a half
Check = Callable[..., None]

every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder
exact_rule = pytest.mark.exact_rule
HONEST = 90.0  # norms of standard normal rows are 51 with a deviation of 0.7
LARGEST = 3e38


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    agg = fastagg.make(name, num_clients=K, num_params=D, **options, **more)
    agg.columns = Columns(SEGMENT)
    return agg


def warm(agg: Aggregator, params: Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        clients = torch.randperm(K, generator=generator)[:4]
        agg.step(params, torch.randn(4, D, generator=generator), clients)


def given(form: str, rows: list[Tensor], clients: list[int]) -> Any:
    if form == "list":
        return rows
    if form == "stream":
        return ColumnBlocks(
            lambda: torch.stack(rows).split(700, dim=1), num_rows=len(rows), num_params=D
        )
    buffer = UpdateBuffer(K, D)
    for client, row in zip(clients, rows, strict=True):
        buffer.row(client).copy_(row)
    return buffer


@pytest.mark.parametrize("form", ["list", "stream", "buffer"])
@every_rule
def test_the_client_of_a_long_row_is_treated_as_absent(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any], form: str
) -> None:
    bounded, twin_agg = make(name, options, max_norm=HONEST), make(name, options)
    params = torch.randn(D)
    twin = params.clone()
    warm(bounded, params)
    warm(twin_agg, twin)
    good = torch.randn(2, D)
    # One row that would spoil any rule; one that is too long only as a whole, in no single segment.
    long = [torch.full((D,), LARGEST), 2.0 * torch.randn(D)]
    rows, clients = [long[0], good[0], long[1], good[1]], [4, 3, 1, 0]
    updates = given(form, rows, clients)
    report = bounded.step(params, updates, clients)
    expected = twin_agg.step(twin, good, [3, 0])
    assert report.rejected.tolist() == [1, 4]
    assert report.active.tolist() == [0, 3]
    assert report.reasons.keys() == {1, 4}
    assert report.reasons[4] == f"norm {LARGEST * D**0.5:.6g}, but max_norm is 90"
    same_bits(report.weights, expected.weights)
    same_bits(params, twin)
    same_state(bounded, twin_agg)
    if form == "buffer":
        same_bits(updates.row(1), long[1])


@exact_rule
def test_the_bound_itself_is_allowed_and_the_same_for_every_rule(
    name: str, options: dict[str, Any]
) -> None:
    rows = torch.randn(3, D)
    norms = Columns(SEGMENT).square_norms(rows).sqrt()
    middle = norms.sort().values[1].item()
    shorter = torch.nextafter(torch.tensor(middle, dtype=torch.float64), torch.tensor(0.0).double())
    agg = make(name, options, max_norm=middle)
    assert len(agg.step(torch.zeros(D), rows, [0, 2, 5]).rejected) == 1
    agg.max_norm = shorter.item()
    assert len(agg.step(torch.zeros(D), rows, [0, 2, 5]).rejected) == 2
    agg.max_norm = None
    assert len(agg.step(torch.zeros(D), rows, [0, 2, 5]).rejected) == 0


@every_rule
def test_all_rows_exceed_max_norm(same_bits: Check, name: str, options: dict[str, Any]) -> None:
    agg = make(name, options, max_norm=1e-3)
    params = torch.randn(D)
    old = params.clone()
    report = agg.step(params, torch.randn(2, D), [3, 1])
    assert report.skipped is not agg.moves_without_clients
    assert report.rejected.tolist() == [1, 3]
    same_bits(params, old)  # no rule remembers anything yet


@every_rule
def test_non_finite_rows_follow_the_nonfinite_option(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options, max_norm=HONEST)
    params = torch.randn(D)
    old = params.clone()
    rows = torch.randn(3, D)
    rows[0, -1] = math.nan
    rows[1] *= 1e30
    with pytest.raises(ValueError, match=r"expected finite values, .*client\(s\) \[2\]"):
        agg.step(params, rows, [2, 0, 4])
    same_bits(params, old)
    agg.nonfinite = "drop"
    report = agg.step(params, rows, [2, 0, 4])
    assert report.active.tolist() == [4]
    assert report.reasons[2] == "NaN or Inf" and report.reasons[0].startswith("norm ")


@every_rule
def test_a_checkpoint_keeps_the_bound(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    make(name, options, max_norm=2.5).save(tmp_path / "a")
    assert fastagg.load(tmp_path / "a").max_norm == 2.5
    assert fastagg.load(tmp_path / "a", max_norm=None).max_norm is None


LIMITS: dict[str, Any] = {
    "fixed": 60.0,
    "adaptive": fastagg.AdaptiveNorm(multiple=1.5, window=8, warmup=4),
}


@every_rule
@pytest.mark.parametrize("which", LIMITS)
def test_rows_above_the_limit_that_is_known_before_a_step_are_rejected(
    name: str, options: dict[str, Any], which: str
) -> None:
    """Memories of fewer bits round rows before their norms are computed."""
    if name == "fedbuff":
        options = {**options, "buffer_size": K}
    agg = make(name, options, max_norm=LIMITS[which], nonfinite="drop")
    params = torch.zeros(D)
    assert math.isinf(agg.norm_limit(adaptive=True)) == (which == "adaptive")
    warm(agg, params)
    limit = agg.norm_limit(adaptive=True)
    assert 60.0 < limit < 100.0
    assert agg.norm_limit(adaptive=False) == (math.inf if which == "adaptive" else limit)
    rows = torch.randn(K, D, generator=torch.Generator().manual_seed(6))
    rows[3] *= 1.001 * limit / rows[3].double().norm().item()
    assert agg.step(params, rows, range(K)).rejected.tolist() == [3]


@pytest.mark.parametrize(
    ("value", "error"),
    [(0.0, ValueError), (-1, ValueError), (math.inf, ValueError), ("1", TypeError)],
)
def test_bad_bounds(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"max_norm: expected (a|None, .* or a) (finite )?number"):
        fastagg.make("fedavg", num_clients=2, num_params=1, max_norm=value)
    agg = fastagg.make("fedavg", num_clients=2, num_params=1, max_norm=3)
    with pytest.raises(error, match="max_norm"):
        agg.max_norm = value
    assert agg.max_norm == 3.0
