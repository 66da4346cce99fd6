# SPDX-License-Identifier: Apache-2.0
"""``max_age``: rows and corrections that are not renewed count as never seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer

K, D = 6, 33
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
Configuration = tuple[str, dict[str, Any]]
MEMORY: list[Configuration] = [
    ("mifa", {}),
    ("stale", {"client_weights": WEIGHTS}),
    ("stale-models", {"client_weights": WEIGHTS}),
    ("fedvarp", {"client_weights": WEIGHTS}),
]
REUSING: list[Configuration] = [
    ("geometric-median", {"reuse": True}),
    ("krum", {"reuse": True}),
    ("nnm", {"reuse": True, "num_byzantine": 1, "rule": "centered-clip"}),
    ("bucketing", {"reuse": True}),
]
CORRECTING: list[Configuration] = [("mimic", {}), ("mimic-aged", {"fading": 0.5})]
ALL = [*MEMORY, *REUSING, *CORRECTING]


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, **options, **more)


def test_mifa_worked_by_hand() -> None:
    agg = fastagg.make("mifa", num_clients=2, num_params=1, max_age=2)
    params = torch.zeros(1)
    moves = []
    for clients, updates in (
        ([0, 1], [8.0, 2.0]),
        ([1], [4.0]),
        ([1], [6.0]),
        ([1], [2.0]),
        ([], []),
    ):
        before = params.item()
        agg.step(params, torch.tensor(updates)[:, None], clients)
        moves.append(params.item() - before)
    # 0 has ages 1 and 2, then 3: its 8 counts in two more rounds
    assert moves == [5.0, 6.0, 7.0, 1.0, 1.0]
    assert agg.memory.clone().flatten().tolist() == [0.0, 2.0]  # type: ignore[attr-defined]
    assert agg.ages.last.tolist() == [-1, 3]  # type: ignore[attr-defined]


def test_fedvarp_worked_by_hand() -> None:
    agg = fastagg.make("fedvarp", num_clients=2, num_params=1, max_age=1)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[8.0], [2.0]]), [0, 1])
    assert params.item() == 5.0
    agg.step(params, torch.tensor([[4.0]]), [1])  # (4 - 2) + (8 + 2) / 2
    assert params.item() == 12.0
    agg.step(params, torch.tensor([[6.0]]), [0])  # 0 is as if never seen: (6 - 0) + (0 + 4) / 2
    assert params.item() == 20.0
    assert agg.total.item() == 5.0  # type: ignore[attr-defined]


class Oracle:
    """The equations of docs/rules.md over dictionaries of the rows that have not expired."""

    def __init__(self, name: str, agg: Aggregator, max_age: int) -> None:
        self.name, self.agg, self.max_age = name, agg, max_age
        self.rows: dict[int, np.ndarray] = {}
        self.last: dict[int, int] = {}
        self.w = agg.options()["client_weights"].numpy()
        self.expired = 0

    def __call__(self, params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        t = int(self.agg.ages.rounds)  # type: ignore[attr-defined]
        for k in [k for k, last in self.last.items() if t - last > self.max_age]:
            del self.rows[k], self.last[k]
            self.expired += 1
        w, whole, nothing = self.w, self.w.sum(), np.zeros_like(params)
        before = dict(self.rows)
        for k, u in updates.items():
            self.rows[k], self.last[k] = (params + u if self.name == "stale-models" else u), t
        kept = self.rows
        if self.name == "mifa":
            return params + sum((w[k] / whole * m for k, m in kept.items()), nothing)
        if self.name == "fedvarp":
            share = sum(w[k] for k in updates)
            change = sum(w[k] / share * (u - before.get(k, 0.0)) for k, u in updates.items())
            return params + change + sum((w[k] / whole * m for k, m in before.items()), nothing)
        mean = sum(w[k] * m for k, m in kept.items()) / sum(w[k] for k in kept)
        return mean if self.name == "stale-models" else params + mean


@pytest.mark.parametrize("max_age", [1, 2])
@pytest.mark.parametrize(("name", "options"), MEMORY)
def test_follows_the_oracle(
    follow: Callable[..., None], name: str, options: dict[str, Any], max_age: int
) -> None:
    agg = make(name, options, max_age=max_age)
    oracle = Oracle(name, agg, max_age)
    follow(agg, oracle, tolerance=20 * 2.0**-24)
    assert oracle.expired >= 3


@pytest.mark.parametrize(("name", "options"), REUSING)
def test_reused_rows_that_expire_are_zero(
    random_rounds: Callable[..., Any], name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options, max_age=2)
    all_active = make(name, options)
    params, twin = torch.zeros(D), torch.zeros(D)
    last: dict[int, int] = {}
    rows = torch.zeros(K, D)
    zeroed = 0
    for t, (updates, clients) in enumerate(random_rounds(K, D, 20, seed=4)):
        agg.step(params, updates, clients)
        if not len(clients):
            all_active.step(twin, [], [])
            continue
        for k, update in zip(clients.tolist(), updates, strict=True):
            rows[k], last[k] = update, t
        for k in [k for k, seen in last.items() if t - seen > 2]:
            rows[k].zero_()
            zeroed += int(last.pop(k) >= 0)
        all_active.step(twin, rows, range(K))
        torch.testing.assert_close(params, twin, rtol=1e-5, atol=1e-5)
        assert torch.equal(agg.memory.clone(), rows)  # type: ignore[attr-defined]
    assert zeroed >= 3


def test_mimic_with_max_age_one_is_fading_zero(
    random_rounds: Callable[..., Any], same_bits: Callable[..., None]
) -> None:
    limited, faded = make("mimic", {"max_age": 1}), make("mimic-aged", {"fading": 0.0})
    params, twin = torch.zeros(D), torch.zeros(D)
    for updates, clients in random_rounds(K, D, 15, seed=2):
        limited.step(params, updates, clients)
        faded.step(twin, updates, clients)
        same_bits(params, twin)


@pytest.mark.parametrize("fading", [1.0, 0.8])
def test_old_corrections_count_as_zero(follow: Callable[..., None], fading: float) -> None:
    agg = fastagg.make("mimic-aged", num_clients=K, num_params=D, fading=fading, max_age=2)
    c: dict[int, np.ndarray] = {}
    last: dict[int, int] = {}
    expired = 0

    def oracle(params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        nonlocal expired
        t = int(agg.rounds)  # type: ignore[attr-defined]
        corrected = []
        for k, u in updates.items():
            age = t - last.get(k, t)
            expired += int(age > 2)
            corrected.append(u + (fading ** (age - 1) * c[k] if 1 <= age <= 2 else 0.0))
        v = sum(corrected) / len(corrected)
        for k, u in updates.items():
            c[k], last[k] = v - u, t
        return params + v

    follow(agg, oracle, tolerance=80 * 2.0**-24)
    assert expired >= 3


@pytest.mark.parametrize(("name", "options"), ALL)
def test_an_age_that_is_never_reached_changes_no_bit(
    random_rounds: Callable[..., Any],
    same_bits: Callable[..., None],
    name: str,
    options: dict[str, Any],
) -> None:
    limited, plain = make(name, options, max_age=100), make(name, options)
    params, twin = torch.zeros(D), torch.zeros(D)
    for updates, clients in random_rounds(K, D, 12, seed=2):
        limited.step(params, updates, clients)
        plain.step(twin, updates, clients)
        same_bits(params, twin)


@pytest.mark.parametrize(("name", "options"), ALL)
def test_ownership_and_a_checkpoint_in_between_change_no_bit(
    random_rounds: Callable[..., Any],
    same_bits: Callable[..., None],
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
) -> None:
    """A buffer whose rows the rule takes, and a server that restarts in each round."""
    copying, owning = make(name, options, max_age=2), make(name, options, max_age=2)
    restarted = make(name, options, max_age=2)
    params, owned, third = torch.zeros(D), torch.zeros(D), torch.zeros(D)
    buffer = UpdateBuffer(K, D)
    for updates, clients in random_rounds(K, D, 20, seed=3):
        for client, update in zip(clients.tolist(), updates, strict=True):
            buffer.row(client).copy_(update)
        copying.step(params, updates, clients)
        owning.step(owned, buffer, clients)
        restarted.step(third, updates, clients)
        restarted.save(tmp_path / "a")
        restarted = fastagg.load(tmp_path / "a")
        same_bits(params, owned)
        same_bits(params, third)
        for key, value in copying.state_dict().items():
            same_bits(value, owning.state_dict()[key], key)
            same_bits(value, restarted.state_dict()[key], key)


@pytest.mark.parametrize(("name", "options"), [*MEMORY, *REUSING])
def test_a_poisoned_row_is_gone_after_max_age_rounds(name: str, options: dict[str, Any]) -> None:
    agg, params = make(name, options, max_age=3), torch.zeros(D)
    poison = torch.full((D,), 1e6)
    agg.step(params, torch.stack([poison, *torch.randn(K - 1, D)]), range(K))
    for _ in range(4):
        agg.step(params, torch.randn(K - 1, D), range(1, K))
    before = params.clone()
    agg.step(params, torch.randn(K - 1, D), range(1, K))
    if name != "stale-models":
        assert (params - before).abs().max() < 10
    assert not bool(agg.memory[0].any())  # type: ignore[attr-defined]


def put(key: str, place: int, value: int) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[key].reshape(-1)[place] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("mifa", put("last", 0, 2), r"last.*: expected numbers in \[-1, 1\]"),
        ("mifa", put("last", 0, -2), "last.*: expected numbers in"),
        ("mifa", put("last", 0, -1), "memory.*: expected zeros for client 0"),
        ("fedvarp", put("rounds", 0, -1), "rounds.*: expected numbers in"),
        ("stale", put("last", 5, 0), "seen.*: expected the clients with a last round"),
        ("mimic", put("last", 0, -1), "corrections.*: expected zeros for client 0"),
        ("krum", put("last", 0, -1), "memory.*: expected zeros for client 0"),
    ],
)
def test_impossible_states_are_refused(
    name: str, change: Callable[[dict[str, Tensor]], None], match: str
) -> None:
    agg = make(name, {"reuse": True} if name == "krum" else {}, max_age=2)
    for clients in ([0, 1, 2], [1, 2, 3]):
        agg.step(torch.zeros(D), torch.randn(3, D), clients)
    state = agg.state_dict()
    change(state)
    with pytest.raises(ValueError, match=match):
        agg.load_state_dict(state)


@pytest.mark.parametrize(("name", "options"), ALL)
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_ages(name: str, options: dict[str, Any], value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_age: expected"):
        make(name, options, max_age=value)


def test_where_no_rows_are_kept_there_is_no_age() -> None:
    with pytest.raises(ValueError, match="max_age"):
        make("mimic", {"mode": "client"}, max_age=3)
    with pytest.raises(ValueError, match="max_age: expected reuse=True"):
        make("krum", {}, max_age=3)
