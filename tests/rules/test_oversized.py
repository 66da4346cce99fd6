# SPDX-License-Identifier: Apache-2.0
"""``nonfinite="drop"``: rows near the end of float32 are left out and cannot stop rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator
from fastagg.updates.streams import ColumnBlocks

K, D = 6, 23
Check = Callable[..., None]
every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder
exact_rule = pytest.mark.exact_rule
LARGEST = torch.finfo(torch.float32).max
GRAM = {"fdms", "fdms-means", "fdms-soft", "krum", "multi-krum", "geometric-median", "nnm",
        "centered-clip", "bucketing", "bulyan"}  # fmt: skip


def documented(name: str, options: dict[str, Any]) -> float:
    """Return the limit of a row, which a server optimizer lowers."""
    chosen = options.get("server_optimizer", "sgd")
    optimizer = chosen if isinstance(chosen, str) else chosen["name"]
    limit = {"sgd": 1e30, "momentum": 1e29, "nesterov": 1e29}.get(optimizer, 1e10)
    if name == "fedstale":
        beta, cutoff = options.get("beta", 0.5), options.get("cutoff", 50)
        limit /= beta + cutoff * (1.0 + beta)
    return limit


def make(name: str, options: dict[str, Any], nonfinite: str = "drop") -> Aggregator:
    common: dict[str, Any] = {"nonfinite": nonfinite, "max_norm": None}
    return fastagg.make(name, num_clients=K, num_params=D, **common, **options)


def rounds(count: int) -> list[tuple[Tensor, list[int]]]:
    g = torch.Generator().manual_seed(8)
    return [
        (torch.randn(4, D, generator=g), sorted(torch.randperm(K, generator=g)[:4].tolist()))
        for _ in range(count)
    ]


@exact_rule
@pytest.mark.parametrize("form", ["matrix", "stream"])
@pytest.mark.parametrize("size", [LARGEST, 1e32])
def test_a_client_with_huge_rows_stops_no_round(
    same_bits: Check,
    same_state: Check,
    name: str,
    options: dict[str, Any],
    form: str,
    size: float,
) -> None:
    """Every round in which client 0 is active: the others have the bits of a run without it."""
    agg, twin_agg = make(name, options), make(name, options)
    params, twin = torch.randn(D), torch.zeros(D)
    twin.copy_(params)
    dropped = 0
    for updates, clients in rounds(12):
        bad = 0 in clients
        honest = updates[1:] if bad else updates
        if bad:
            updates[0] = size * torch.tensor([1.0, -1.0]).repeat(D)[:D]
            dropped += 1
        rows: Any = updates
        if form == "stream":
            rows = ColumnBlocks(lambda u=updates: u.split(7, dim=1), num_rows=4, num_params=D)
        report = agg.step(params, rows, clients)
        assert report.rejected.tolist() == ([0] if bad else [])
        if bad:
            assert "but at most" in report.reasons[0]
        twin_agg.step(twin, honest, clients[1:] if bad else clients)
        same_bits(params, twin)
        same_state(agg, twin_agg)
    assert dropped >= 5


@pytest.mark.slow
@every_rule
def test_rows_at_the_limit_stop_no_round(name: str, options: dict[str, Any]) -> None:
    """All clients send rows just below the limit, in 300 rounds; they add up."""
    agg, params = make(name, options), torch.zeros(D)
    signs = torch.tensor([1.0, -1.0]).repeat(D)[:D]
    norm = D**0.5 if name in GRAM else 1.0
    size = (
        0.99
        * documented(name, options)
        / norm
        / (2.0 if name in ("scaffold", "amplified", "fedau") else 1.0)
    )
    for t in range(300):
        clients = [k for k in range(K) if (t + k) % 3]
        report = agg.step(params, (size * signs).repeat(len(clients), 1), clients)
        assert not len(report.rejected)
    assert torch.isfinite(params).all()


@every_rule
def test_the_limit_is_the_documented_one(name: str, options: dict[str, Any]) -> None:
    """One column of just below the limit is accepted, and a slightly larger number is not."""
    limit = documented(name, options)
    if name == "scaffold":
        limit *= 0.5  # local_work
    below = torch.nextafter(torch.tensor(limit), torch.tensor(0.0)).item()
    if name in ("amplified", "fedau") or "buffer_size" in options:
        # a larger row is accepted if the aggregate is not
        limit, below = 6.0 * limit, 2.9 * below
    for size, accepted in ((below, True), (limit * 1.0001, False)):
        agg, rows = make(name, options), torch.zeros(1, D)
        rows[0, 3] = size
        report = agg.step(torch.zeros(D), rows, [2])
        assert bool(len(report.rejected)) is not accepted


@pytest.mark.parametrize("name", ["fedavg", "mifa", "krum"])
def test_server_lr_lowers_the_limit(name: str) -> None:
    agg = make(name, {})
    agg.server_lr = 1e10
    rows = torch.zeros(2, D)
    rows[:, 0] = torch.tensor([1.0, 3e20])
    report = agg.step(torch.zeros(D), rows, [0, 1])
    assert report.rejected.tolist() == [1]
    assert report.reasons[1].endswith("3e+20, but at most 1e+20 is accepted")


def test_amplified_divides_the_limit_by_its_gain() -> None:
    agg = make("amplified", {"beta": 1e9})
    rows = torch.zeros(2, D)
    rows[:, 0] = torch.tensor([1.0, 1e29])
    assert agg.step(torch.zeros(D), rows, [0, 1]).rejected.tolist() == [1]


@every_rule
def test_with_raise_nothing_is_left_out(name: str, options: dict[str, Any]) -> None:
    agg = make(name, options, nonfinite="raise")
    params, rows = torch.randn(D), torch.randn(4, D)
    old = params.clone()
    rows[1] = 1e31
    try:
        report = agg.step(params, rows, [0, 1, 3, 5])
    except ValueError:
        assert torch.equal(params, old)
    else:
        assert not len(report.rejected)
