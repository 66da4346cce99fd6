# SPDX-License-Identifier: Apache-2.0
"""Enqueued FDMS rounds: they commit only if all checks pass, and the host does not wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import FDMS, EnqueuedFDMS
from fastagg.updates.columns import Columns

K, S, D = 9, 5, 40

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"elimination": lambda t: 0.3 / t, "precision": "tf32"}, id="elimination"),
    pytest.param({"max_norm": 60.0}, id="max-norm"),
]


def server(**options: Any) -> FDMS:
    weights = range(1, K + 1)
    return FDMS(num_clients=K, num_params=D, server_lr=0.5, client_weights=weights, **options)


def draw(g: torch.Generator) -> tuple[Tensor, Tensor]:
    clients = torch.randperm(K, generator=g)[:S].sort().values
    return torch.randn(S, D, generator=g) + torch.randn(D, generator=g), clients


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("listed", [False, True])
def test_rounds_are_those_of_the_aggregator(options: dict[str, Any], listed: bool) -> None:
    g = torch.Generator().manual_seed(1)
    one, two = server(**options), server(**options)
    params, theirs = torch.zeros(D), torch.zeros(D)
    rounds = EnqueuedFDMS(one, params)
    for t in range(12):
        rows, clients = draw(g)
        called_off = t == 6 or t == 9 or (t == 10 and "max_norm" in options)
        if t == 6:
            rows[2, 3] = torch.nan
        if t == 9:
            rows *= 1e38
        if t == 10:
            rows[1] *= 20.0
        if t == 3:
            one.server_lr = two.server_lr = 0.25
        happened = rounds.enqueue(list(rows) if listed else rows, clients)
        assert bool(happened) != called_off
        assert rounds.settle() == (not called_off)
        if not called_off:
            two.step(theirs, rows, clients)
        # Weights differ by float64 rounding, so the float32 aggregate almost never differs.
        torch.testing.assert_close(params, theirs, rtol=1e-6, atol=1e-6)
        assert one.rounds == two.rounds
        for name, value in two.state_dict().items():
            assert torch.equal(one.state_dict()[name], value), (t, name)
    assert params.abs().min() > 0
    if two.candidates is not None:
        assert two.candidates.sum() < K * (255 + 1)


def test_thresholds_count_rounds_that_the_host_has_not_waited_for() -> None:
    asked: list[int] = []

    def threshold(t: int) -> float:
        asked.append(t)
        return 1.0

    agg = server(elimination=threshold)
    rounds = EnqueuedFDMS(agg, torch.zeros(D))
    g = torch.Generator().manual_seed(2)
    for _ in range(3):
        rounds.enqueue(*draw(g))
    rows, clients = draw(g)
    # The device calls this round off; the host has not read that yet.
    rounds.enqueue(torch.full_like(rows, torch.inf), clients)
    rounds.enqueue(rows, clients)
    rounds.enqueue(rows, clients, 0.5)  # a given threshold: the callable is not called
    assert asked == [1, 2, 3, 4, 5] and agg.rounds == 0
    assert rounds.settle() == 5 and agg.rounds == 5
    assert rounds.settle() == 0 and agg.rounds == 5
    rounds.enqueue(rows, clients)
    assert asked[5:] == [6]


def test_a_refused_round_changes_nothing() -> None:
    agg, params = server(), torch.zeros(D)
    rounds = EnqueuedFDMS(agg, params)
    rows, clients = draw(torch.Generator().manual_seed(3))
    before = agg.state_dict()
    with pytest.raises(TypeError, match=r"clients: expected int64 \[S\], got torch.int32 \[5\]"):
        rounds.enqueue(rows, clients.int())
    with pytest.raises(ValueError, match="clients: expected one id on cpu for each of 4 rows"):
        rounds.enqueue(rows[:4], clients)
    with pytest.raises(ValueError, match="for each of 0 rows, at least one, got 0"):
        rounds.enqueue(rows[:0], clients[:0])
    with pytest.raises(ValueError, match="d = 40"):
        rounds.enqueue(rows[:, 1:], clients)
    with pytest.raises(TypeError, match="Float"):
        rounds.enqueue(rows.double(), clients)
    assert rounds.settle() == 0 and not params.any()
    for name, value in before.items():
        assert torch.equal(agg.state_dict()[name], value)


@pytest.mark.parametrize("options", [*OPTIONS, pytest.param({"max_share": 0.5}, id="max-share")])
@pytest.mark.parametrize(
    ("position", "wrong", "error", "message"),
    [
        (0, -1, IndexError, r"clients: expected ids in \[0, 9\), got -1 in an enqueued round"),
        (4, K, IndexError, r"clients: expected ids in \[0, 9\), got 9 in an enqueued round"),
        (4, 1 << 60, IndexError, "got 1152921504606846976 in an enqueued round"),
        (1, 4, ValueError, "clients: expected distinct ids, got an id twice in an enqueued round"),
    ],
)
def test_a_round_with_wrong_ids_is_cancelled_and_settle_says_so(
    options: dict[str, Any], position: int, wrong: int, error: type[Exception], message: str
) -> None:
    agg, params = server(**options), torch.zeros(D)
    rounds, g = EnqueuedFDMS(agg, params), torch.Generator().manual_seed(4)
    good = torch.tensor([0, 2, 4, 5, 8])
    bad = good.clone()
    bad[position] = wrong
    assert rounds.enqueue(torch.randn(S, D, generator=g), good)
    before = [params.clone(), *(v.clone() for v in agg.state_dict().values())]
    assert not rounds.enqueue(torch.randn(S, D, generator=g), bad)
    after = [params, *agg.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert rounds.enqueue(torch.randn(S, D, generator=g), good)
    with pytest.raises(error, match=message):
        rounds.settle()
    assert agg.rounds == 0
    assert rounds.settle() == 2 and agg.rounds == 2
    assert rounds.settle() == 0


@pytest.mark.parametrize(
    ("option", "value"), [("clip_norm", 1.0), ("min_active", 2), ("max_norm", "adaptive")]
)
def test_options_that_are_set_later_are_checked(option: str, value: Any) -> None:
    agg, params = server(), torch.zeros(D)
    rounds, before = EnqueuedFDMS(agg, params), getattr(agg, option)
    setattr(agg, option, value)
    with pytest.raises(ValueError, match=f"aggregator: expected .*{option}"):
        rounds.enqueue(torch.randn(S, D), torch.arange(S))
    assert not params.any() and rounds.settle() == 0
    setattr(agg, option, before)
    rounds.enqueue(torch.randn(S, D), torch.arange(S))
    assert rounds.settle() == 1


def test_more_ids_than_clients_are_refused() -> None:
    rounds = EnqueuedFDMS(server(), torch.zeros(D))
    with pytest.raises(ValueError, match="clients: expected at most 9 distinct ids, got 10"):
        rounds.enqueue(torch.randn(K + 1, D), torch.arange(K + 1))


def test_calls_that_cannot_be_enqueued_are_refused() -> None:
    params = torch.zeros(D)
    soft = fastagg.make("fdms-soft", num_clients=K, num_params=D)
    with pytest.raises(TypeError, match="aggregator: expected FDMS, got FDMSSoft"):
        EnqueuedFDMS(soft, params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected similarity \"cosine\", got 'distance'"):
        EnqueuedFDMS(server(similarity="distance"), params)
    for wrong in (torch.zeros(D + 1), torch.zeros(D, dtype=torch.float64), torch.zeros(2 * D)[::2]):
        with pytest.raises(
            ValueError, match=r"params: expected a contiguous float32 tensor \[40\]"
        ):
            EnqueuedFDMS(server(), wrong)

    class Shard(Columns):
        pass

    agg = server()
    agg.columns = Shard(16)
    with pytest.raises(ValueError, match="aggregator: expected all columns in this process"):
        EnqueuedFDMS(agg, params)
