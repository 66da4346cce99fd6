# SPDX-License-Identifier: Apache-2.0
"""``min_active``: a round with fewer active clients is one without any, and the report says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastagg
from fastagg import Aggregator

K, D = 6, 23
Check = Callable[..., None]
every_rule = pytest.mark.every_rule


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, **(options | more))


@every_rule
def test_too_few_clients_are_as_good_as_none(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any]
) -> None:
    agg, twin_agg = make(name, options, min_active=3), make(name, options)
    params = torch.randn(D)
    twin, rows = params.clone(), torch.randn(K, D)
    for clients in ([0, 2, 5], [1, 4], [], [5], range(K)):
        active = list(clients)
        report = agg.step(params, rows[active], active)
        used = active if len(active) >= 3 else []
        expected = twin_agg.step(twin, rows[used], used)
        same_bits(params, twin)
        same_state(agg, twin_agg)
        assert report.active.tolist() == used and report.skipped is expected.skipped
        assert report.rejected.tolist() == (active if not used else [])
        reason = f"too few active clients: {len(active)} of min_active = 3"
        assert report.reasons == dict.fromkeys(report.rejected.tolist(), reason)
        if report.skipped:
            assert report.reason == (reason if active else "no client was active")
        else:
            assert report.reason == ""


def test_rejections_count() -> None:
    agg = make("fedavg", {"nonfinite": "drop", "max_norm": None}, min_active=3)
    params, rows = torch.zeros(D), torch.ones(3, D)
    rows[1, 7] = math.nan
    report = agg.step(params, rows, [4, 1, 2])
    assert report.skipped and not params.any() and report.active.tolist() == []
    reason = "too few active clients: 2 of min_active = 3"
    assert report.reasons == {1: "NaN or Inf", 2: reason, 4: reason} and report.reason == reason
    agg.min_active = 2
    assert agg.step(params, rows, [4, 1, 2]).active.tolist() == [2, 4]


def test_rows_of_a_buffer_stay_with_the_caller() -> None:
    agg, buffer = make("mifa", {}, min_active=2), fastagg.UpdateBuffer(K, D)
    buffer.row(3).fill_(7.0)
    agg.step(torch.zeros(D), buffer, [3])
    assert (buffer.row(3) == 7.0).all() and not agg.memory[3].any()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("empty_rounds", "moved"), [("apply", 16.0), ("skip", 8.0)])
def test_mifa_treats_such_a_round_as_empty_rounds_says(empty_rounds: str, moved: float) -> None:
    agg = make("mifa", {"empty_rounds": empty_rounds}, min_active=2)
    params = torch.zeros(D)
    agg.step(params, torch.full((K, D), 8.0), range(K))
    report = agg.step(params, torch.full((1, D), -100.0), [3])
    assert (params == moved).all() and report.rejected.tolist() == [3]
    assert report.skipped is (empty_rounds == "skip")
    assert bool(report.reason) is report.skipped


@given(st.permutations([0, 1, 2, 3]), st.integers(1, K))
def test_arrival_order_does_not_matter(order: list[int], least: int) -> None:
    rows, results = torch.randn(4, D, generator=torch.Generator().manual_seed(1)), []
    for clients in ([0, 1, 2, 3], order):
        agg, params = make("fdms", {}, min_active=least), torch.zeros(D)
        report = agg.step(params, rows[clients], clients)
        results.append((params.tolist(), report.rejected.tolist(), report.reason))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (K + 1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_bad_values_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^min_active: expected "):
        make("fedavg", {}, min_active=value)
    agg = make("fedavg", {}, min_active=2)
    with pytest.raises(error, match=r"^min_active: expected "):
        agg.min_active = value
    assert agg.min_active == 2


def test_checkpoints_have_it(tmp_path: Path) -> None:
    make("geometric-median", {"reuse": True}, min_active=4).save(tmp_path / "a")
    assert fastagg.load(tmp_path / "a").min_active == 4
    assert fastagg.load(tmp_path / "a", min_active=2).min_active == 2
