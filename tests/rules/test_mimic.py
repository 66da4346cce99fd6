# SPDX-License-Identifier: Apache-2.0
"""MimiC: hand-worked numbers, an oracle, both modes, and the guard against overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import MimiC, MimiCClient, UpdateBuffer
from fastagg.memory.rows import RowMemory


def test_hand_worked() -> None:
    agg = MimiC(num_clients=3, num_params=1, server_lr=0.5)
    params = torch.zeros(1)
    # c = 0: v = mean(2, 6) = 4; c_0 = 4 - 2 = 2, c_2 = 4 - 6 = -2
    report = agg.step(params, torch.tensor([[6.0], [2.0]]), [2, 0])
    assert params.tolist() == [2.0]
    assert agg.corrections.clone().flatten().tolist() == [2.0, 0.0, -2.0]
    assert report.weights.tolist() == [0.5, 0.5]
    # client 0 alone sends 3: v = 3 + 2 = 5; c_0 = 5 - 3 = 2; the other corrections stay
    agg.step(params, torch.tensor([[3.0]]), [0])
    assert params.tolist() == [4.5]
    assert agg.corrections.clone().flatten().tolist() == [2.0, 0.0, -2.0]


def test_follows_the_oracle(follow: Callable[..., None]) -> None:
    correction: dict[int, np.ndarray] = {}

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        v = np.mean([u + correction.get(k, 0.0) for k, u in updates.items()], axis=0)
        correction.update({k: v - u for k, u in updates.items()})
        return params + 0.3 * v

    agg = MimiC(num_clients=6, num_params=33, server_lr=0.3)
    # corrections are kept in float32: each of up to 20 rounds adds a rounding
    follow(agg, oracle, tolerance=40 * 2.0**-24)


def test_corrections_of_a_round_sum_to_zero_when_they_started_at_zero() -> None:
    agg = MimiC(num_clients=5, num_params=7)
    agg.step(torch.zeros(7), torch.randn(3, 7), [0, 1, 4])
    # sum of (v - u_s) with v = mean(u_s); three float32 roundings of numbers below 4
    assert agg.corrections.clone().sum(dim=0).abs().max() <= 3 * 4 * 2.0**-24


def test_client_mode_hand_worked() -> None:
    agg = MimiC(num_clients=3, num_params=1, server_lr=0.5, mode="client")
    clients = {k: MimiCClient(1) for k in (0, 2)}
    params = torch.zeros(1)
    sent = {k: clients[k].correct_(torch.tensor([u])) for k, u in ((2, 6.0), (0, 2.0))}
    report = agg.step(params, list(sent.values()), list(sent))
    assert params.tolist() == [2.0] and agg.aggregate.tolist() == [4.0]
    assert report.weights.tolist() == [0.5, 0.5]
    for k, client in clients.items():
        client.learn(sent[k], agg.aggregate)
    assert [clients[k].correction.item() for k in (0, 2)] == [2.0, -2.0]
    # client 0 alone sends 3 + 2: v = 5; c_0 = 5 - 3 = 2
    row = clients[0].correct_(torch.tensor([3.0]))
    agg.step(params, [row], [0])
    clients[0].learn(row, agg.aggregate)
    assert (row.item(), params.item(), clients[0].correction.item()) == (5.0, 4.5, 2.0)
    assert agg.state_dict() == {} and agg.memory_bytes == 0


def test_client_mode_checks_the_mean_of_large_rows(same_bits: Callable[..., None]) -> None:
    def rows(*values: float) -> Tensor:
        return torch.tensor(values)[:, None].expand(-1, 4).contiguous()

    agg = MimiC(num_clients=3, num_params=4, mode="client", nonfinite="drop", max_norm=None)
    params = torch.zeros(4)
    assert agg.step(params, rows(3e38, -3e38, 3.0), [0, 1, 2]).rejected.tolist() == []
    assert params.tolist() == agg.aggregate.tolist() == [1.0] * 4  # they cancel
    report = agg.step(params, rows(2e38, 1e38, 1.0), [0, 1, 2])
    assert report.rejected.tolist() == [0, 1] and params.tolist() == [2.0] * 4

    agg = MimiC(num_clients=3, num_params=4, mode="client")
    agg.step(params, rows(1.0, 2.0, 3.0), [0, 1, 2])
    before, aggregate = params.clone(), agg.aggregate.clone()
    with pytest.raises(ValueError, match="could leave the range of float32"):
        agg.step(params, rows(3.4028e38, 3.4028e38, 3.4028e38), [0, 1, 2])
    with pytest.raises(ValueError, match=r"NaN or Inf.*\[1\]"):
        agg.step(params, rows(1.0, math.nan, 1.0), [0, 1, 2])
    same_bits(params, before)
    same_bits(agg.aggregate, aggregate)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), rounds=st.integers(1, 40))
def test_both_modes_end_with_the_same_parameters(
    random_rounds: Callable[..., Any], seed: int, rounds: int
) -> None:
    num_clients, d = 6, 33
    server = MimiC(num_clients=num_clients, num_params=d, server_lr=0.7)
    sums = MimiC(num_clients=num_clients, num_params=d, server_lr=0.7, mode="client")
    clients = [MimiCClient(d) for _ in range(num_clients)]
    params, twin = torch.zeros(d), torch.zeros(d)
    scale = 1.0
    for updates, active in random_rounds(num_clients, d, rounds, seed):
        server.step(params, updates, active)
        sent = [clients[k].correct_(u.clone()) for k, u in zip(active, updates, strict=True)]
        sums.step(twin, sent, active)
        for k, row in zip(active.tolist(), sent, strict=True):
            clients[k].learn(row, sums.aggregate)
        corrections = torch.stack([c.correction for c in clients])
        scale = max(scale, params.abs().max().item(), server.corrections.clone().abs().max().item())
        # Four float32 roundings per round (sent row, v, c, parameters); later rounds keep these
        # errors with weight 1.
        bound = 4 * rounds * 2.0**-24 * 2 * scale
        assert (corrections - server.corrections.clone()).abs().max() <= bound
        assert (twin - params).abs().max() <= bound


def test_client_mode_refuses_its_own_vectors(same_bits: Callable[..., None]) -> None:
    agg = MimiC(num_clients=2, num_params=3, mode="client")
    params = torch.zeros(3)
    agg.step(params, torch.ones(1, 3), [0])
    with pytest.raises(ValueError, match=r"must not share memory .* client 1"):
        agg.step(params, [agg.aggregate], [1])
    same_bits(params, torch.ones(3))
    same_bits(agg.aggregate, torch.ones(3))


def test_there_are_two_modes() -> None:
    with pytest.raises(ValueError, match=r'mode: expected "server" or "client", got "?\'?peer'):
        fastagg.make("mimic", num_clients=2, num_params=1, mode="peer")


def test_a_server_that_remembers_nothing_needs_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'memory_folder: expected None with mode "client"'):
        MimiC(num_clients=2, num_params=1, mode="client", memory_folder=tmp_path)


@pytest.mark.slow
def test_the_overflow_bound_never_refuses_ordinary_magnitudes() -> None:
    agg = MimiC(num_clients=2, num_params=1)
    params = torch.zeros(1)
    for t in range(3000):
        agg.step(params.zero_(), torch.full((1, 1), 1e30 * (-1) ** t), [t % 2])
    # the cheap bound grew linearly with the rounds, not exponentially
    assert max(agg._peaks) <= 2 * 3000 * 1e30 * 1.01


def test_a_loose_overflow_bound_is_replaced_by_a_measurement() -> None:
    agg = MimiC(num_clients=2, num_params=1)
    params = torch.zeros(1)
    for _ in range(100):  # u = 1e37 each time: v = 1e37, c = 0, while the bound grows
        agg.step(params.zero_(), torch.full((2, 1), 1e37), [0, 1])
    assert torch.isfinite(params).all()


def test_a_step_that_could_overflow_is_refused() -> None:
    agg = MimiC(num_clients=2, num_params=1)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[1e38], [-1e38]]), [0, 1])
    before = agg.state_dict()
    with pytest.raises(ValueError, match="range of float32"):
        agg.step(params, torch.tensor([[3e38], [3e38]]), [0, 1])
    assert params.tolist() == [0.0]
    assert torch.equal(agg.corrections.clone(), before["corrections"])


def test_a_measurement_that_is_interrupted_changes_no_correction(
    same_bits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owned rows are corrections relative to a reference until they are measured."""
    agg, buffer = MimiC(num_clients=5, num_params=7), UpdateBuffer(5, 7)
    params = torch.zeros(7)
    for clients in ([0, 1, 2, 3], [1, 4], [0, 2, 4]):
        buffer.rows(clients)
        for client in clients:
            buffer.row(client).normal_()
        agg.step(params, buffer, clients)
    assert sum(r is not None for r in agg.corrections.references) == 5
    before, settle = agg.corrections.clone(), RowMemory._add_reference_
    calls = iter(range(5))

    def fail(memory: RowMemory, row: torch.Tensor, client: int) -> None:
        if next(calls) == 2:
            raise MemoryError
        settle(memory, row, client)

    monkeypatch.setattr(RowMemory, "_add_reference_", fail)
    with pytest.raises(MemoryError):
        agg.corrections.settle_()
    monkeypatch.undo()
    assert sum(r is not None for r in agg.corrections.references) == 3
    same_bits(agg.corrections.clone(), before)
    agg.corrections.settle_()
    assert not any(r is not None for r in agg.corrections.references)
    same_bits(agg.corrections.clone(), before)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda c: c.correct_(torch.zeros(3).double()), TypeError, "update: expected dtype"),
        (lambda c: c.correct_(torch.zeros(4)), ValueError, r"update: expected shape \[3\]"),
        (lambda c: c.correct_([0.0]), TypeError, "update: expected a torch.Tensor, got list"),
        (lambda c: c.learn(torch.zeros(4), torch.zeros(3)), ValueError, "sent: expected shape"),
        (lambda c: c.learn(torch.zeros(3), [0.0]), TypeError, "aggregate: expected a torch.Tensor"),
    ],
)
def test_a_client_names_the_argument_that_is_wrong(
    call: Callable[[MimiCClient], object], error: type[Exception], match: str
) -> None:
    client = MimiCClient(3)
    client.correction.fill_(2.0)
    with pytest.raises(error, match=f"^{match}"):
        call(client)
    assert client.correction.eq(2.0).all()


@pytest.mark.parametrize("arguments", [(0,), (3, "gpu")])
def test_a_client_of_no_size_or_device(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"^(num_params|device): expected "):
        MimiCClient(*arguments)
