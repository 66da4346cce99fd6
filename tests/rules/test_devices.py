# SPDX-License-Identifier: Apache-2.0
"""Every rule on every device: a GPU agrees with the CPU and keeps the same guarantees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer, ops

K, D = 6, 1_037
every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder

Rounds = list[tuple[Tensor, Tensor]]


@pytest.fixture(params=ops.devices())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rounds(random_rounds: Callable[..., Iterator[tuple[Tensor, Tensor]]]) -> Rounds:
    return list(random_rounds(K, D, 8, 0))


def make(name: str, options: dict[str, Any], device: str) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, device=device, **options)


def start(device: str) -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(3)).to(device)


@every_rule
def test_a_device_agrees_with_the_cpu(
    name: str, options: dict[str, Any], device: str, rounds: Rounds
) -> None:
    agg, twin = make(name, options, device), make(name, options, "cpu")
    params, expected = start(device), start("cpu")
    for updates, clients in rounds:
        report = agg.step(params, updates.to(device), clients)
        wanted = twin.step(expected, updates, clients)
        for field in ("active", "weights", "rejected", "friends"):
            got = getattr(report, field)
            assert got is None or got.device.type == "cpu"
        assert torch.equal(report.active, wanted.active)
        # Gram entries agree to 1e-5 of the rows' norms, and so do weights computed from them.
        # Distances are differences of such entries: to the root of 1e-5 where rows nearly coincide.
        assert torch.allclose(report.weights, wanted.weights, rtol=0, atol=1e-3)
        if wanted.friends is not None:
            assert report.friends is not None and torch.equal(report.friends, wanted.friends)
        assert (report.pairs, report.skipped) == (wanted.pairs, wanted.skipped)
    assert torch.allclose(params.cpu(), expected, rtol=0, atol=1e-3 * expected.abs().max().item())


@every_rule
def test_the_order_of_rows_does_not_matter(
    same_bits: Callable[..., None],
    name: str,
    options: dict[str, Any],
    device: str,
    rounds: Rounds,
) -> None:
    agg, twin = make(name, options, device), make(name, options, device)
    params, other = start(device), start(device)
    for updates, clients in rounds:
        order = torch.randperm(len(clients))
        agg.step(params, updates.to(device), clients)
        twin.step(other, list(updates[order].to(device)), clients[order])
        same_bits(params.cpu(), other.cpu())


@every_rule
def test_taking_ownership_of_rows_changes_no_bit(
    same_bits: Callable[..., None],
    name: str,
    options: dict[str, Any],
    device: str,
    rounds: Rounds,
) -> None:
    agg, keeper = make(name, options, device), make(name, options, device)
    params, other = start(device), start(device)
    buffer = UpdateBuffer(K, D, device)
    for updates, clients in rounds:
        agg.step(params, updates.to(device), clients)
        for row, update in zip(buffer.rows(clients), updates, strict=True):
            row.copy_(update)
        keeper.step(other, buffer, clients)
        same_bits(params.cpu(), other.cpu())


@every_rule
def test_a_bad_update_changes_nothing(
    same_bits: Callable[..., None], name: str, options: dict[str, Any], device: str
) -> None:
    agg = make(name, options, device)
    params = start(device)
    agg.step(params, torch.randn(4, D).to(device), [0, 1, 2, 3])
    old, state = params.clone(), agg.state_dict()
    updates = torch.randn(3, D)
    updates[1, 77] = math.nan
    with pytest.raises(ValueError, match=r"client\(s\) \[4\]"):
        agg.step(params, updates.to(device), [0, 4, 2])
    same_bits(params.cpu(), old.cpu())
    for key, value in agg.state_dict().items():
        same_bits(value.cpu(), state[key].cpu(), key)


@every_rule
def test_a_loaded_checkpoint_continues_with_the_same_bits(
    tmp_path: Path,
    same_bits: Callable[..., None],
    name: str,
    options: dict[str, Any],
    device: str,
    rounds: Rounds,
) -> None:
    agg, params = make(name, options, device), start(device)
    for updates, clients in rounds[:4]:
        agg.step(params, updates.to(device), clients)
    agg.save(tmp_path / "server.safetensors")
    loaded, other = fastagg.load(tmp_path / "server.safetensors"), params.clone()
    assert loaded.device == agg.device
    for updates, clients in rounds[4:]:
        agg.step(params, updates.to(device), clients)
        loaded.step(other, updates.to(device), clients)
        same_bits(params.cpu(), other.cpu())
    elsewhere = fastagg.load(tmp_path / "server.safetensors", device="cpu")
    assert elsewhere.device.type == "cpu"
