# SPDX-License-Identifier: Apache-2.0
"""Late rows under every rule: oracles from the equations, and what holds for any ages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Aggregator, Staleness, UpdateBuffer

Check = Callable[..., None]
K, D = 6, 33
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
few_examples = settings(max_examples=max(3, settings.default.max_examples // 3))
every_rule = pytest.mark.every_rule

Configuration = tuple[str, dict[str, Any]]
SUMS: list[Configuration] = [
    ("fedavg", {"staleness": "polynomial", "client_weights": WEIGHTS}),
    ("amplified", {"staleness": "hinge", "beta": 2.0}),
    ("amplified", {"staleness": Staleness("hinge", b=1), "sequential": True}),
    ("fedau", {"staleness": "polynomial", "cutoff": 3}),
    ("fdms", {"staleness": "polynomial", "client_weights": WEIGHTS}),
    ("fdms", {"staleness": "constant", "elimination": "theorem2", "max_share": 0.3}),
    ("fdms", {"staleness": "polynomial", "sketch": 64}),
    ("fdms-soft", {"staleness": "polynomial", "friends": 2}),
    ("fdms-means", {"staleness": "polynomial"}),
    ("fedbuff", {"max_staleness": 3}),
]
ROBUST: list[Configuration] = [
    ("geometric-median", {"staleness": "polynomial"}),
    ("centered-clip", {"staleness": "hinge", "tau": 5.0, "client_weights": WEIGHTS}),
    ("krum", {"staleness": "constant"}),
    ("multi-krum", {"staleness": "polynomial", "keep": 3}),
    ("nnm", {"staleness": "polynomial"}),
    ("bucketing", {"staleness": "polynomial", "seed": 5}),
    ("bulyan", {"staleness": "constant"}),
    ("median", {"staleness": "constant"}),
    ("trimmed-mean", {"staleness": "constant"}),
    ("meamed", {"staleness": "constant"}),
]
MEMORY: list[Configuration] = [
    ("mifa", {"staleness": "constant"}),
    ("mifa", {"staleness": "constant", "max_age": 2, "client_weights": WEIGHTS}),
    ("mifa", {"staleness": "constant", "memory_dtype": "int8"}),
    ("stale", {"staleness": "constant", "client_weights": WEIGHTS}),
    ("stale", {"staleness": "constant", "max_age": 3}),
    ("fedvarp", {"staleness": "constant", "client_weights": WEIGHTS}),
    ("geometric-median", {"staleness": "constant", "reuse": True}),
    ("krum", {"staleness": "constant", "reuse": True, "max_age": 2}),
]
CORRECTING: list[Configuration] = [
    ("mimic", {"staleness": "constant", "max_staleness": 3}),
    ("mimic", {"staleness": "constant", "max_staleness": 2, "max_age": 3, "server_lr": 0.7}),
    ("mimic-aged", {"staleness": "constant", "max_staleness": 3, "fading": 0.5}),
]
ALL = [*SUMS, *ROBUST, *MEMORY, *CORRECTING]


def all_of(configurations: list[Configuration]) -> Any:
    return pytest.mark.parametrize(
        ("name", "options"), configurations, ids=["-".join([n, *o]) for n, o in configurations]
    )


def make(name: str, options: dict[str, Any], num_params: int = D) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=num_params, **options)


Round = tuple[Tensor, list[int], list[int]]


def late_rounds(count: int, seed: int, num_params: int = D) -> Iterator[Round]:
    """Yield (updates [S, d], clients, ages) per round, in random order.

    About every sixth round is empty. Half of the rows are late, by up to four rounds.
    """
    g = torch.Generator().manual_seed(seed)
    directions = 2.0 * torch.randn(2, num_params, generator=g)
    for t in range(count):
        size = (
            0
            if float(torch.rand((), generator=g)) < 1 / 6
            else int(torch.randint(1, K + 1, (), generator=g))
        )
        clients = torch.randperm(K, generator=g)[:size]
        ages = torch.randint(-4, 5, (size,), generator=g).clamp_(min=0, max=t)
        rows = directions[clients % 2] + torch.randn(size, num_params, generator=g)
        yield rows, clients.tolist(), ages.tolist()


# --- what holds for any ages ------------------------------------------------------------------


@every_rule
def test_ages_of_zero_give_the_same_bits(
    same_bits: Check,
    same_state: Check,
    random_rounds: Callable[..., Any],
    name: str,
    options: dict[str, Any],
) -> None:
    agg, twin_agg = make(name, options), make(name, options)
    params, twin = torch.zeros(D), torch.zeros(D)
    for updates, clients in random_rounds(K, D, 8, seed=5):
        agg.step(params, updates, clients)
        report = twin_agg.step(twin, updates, clients, ages=torch.zeros_like(clients))
        assert report.ages is None
        same_bits(params, twin)
    same_state(agg, twin_agg)


@all_of(ALL)
@few_examples
@given(data=st.data())
def test_any_order_and_form_gives_the_same_bits(
    same_bits: Check,
    same_state: Check,
    same_report: Check,
    name: str,
    options: dict[str, Any],
    data: st.DataObject,
) -> None:
    seed = data.draw(st.integers(0, 2**32), "seed")
    agg, other = make(name, options), make(name, options)
    params, twin = torch.ones(D), torch.ones(D)
    for rows, ids, ages in late_rounds(6, seed):
        order = data.draw(st.permutations(range(len(ids))))
        form = data.draw(st.sampled_from(["list", "stream", "buffer", "matrix"]))
        first = agg.step(params, rows, ids, ages=ages)
        mixed = rows[order]
        listed = [ids[i] for i in order]
        given_rows: Any = mixed
        if form == "list":
            given_rows = list(mixed)
        elif form == "stream" and ids:
            parts = mixed.split(7, dim=1)
            given_rows = fastagg.ColumnBlocks(
                lambda parts=parts: parts, num_rows=len(ids), num_params=D
            )
        elif form == "buffer":
            given_rows = UpdateBuffer(K, D)
            for client, row in zip(listed, mixed, strict=True):
                given_rows.row(client).copy_(row)
        second = other.step(
            twin, given_rows, listed, ages=torch.tensor(ages)[order].to(torch.int64)
        )
        same_bits(params, twin)
        same_report(first, second)
        same_state(agg, other)


@all_of(ALL)
def test_a_failed_step_changes_nothing(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any]
) -> None:
    agg, twin_agg = make(name, options), make(name, options)
    params, twin = torch.ones(D), torch.ones(D)
    failed = 0
    for rows, ids, ages in late_rounds(12, seed=3):
        if ids:
            buffer = UpdateBuffer(K, D)
            for client, row in zip(ids, rows, strict=True):
                buffer.row(client).copy_(row)
            buffer.row(ids[0])[2] = math.inf
            before = buffer.rows(range(K))
            copies = [row.clone() for row in before]
            state, old = agg.state_dict(), params.clone()
            try:
                agg.step(params, buffer, ids, ages=ages)
            except ValueError:
                failed += 1
                same_bits(params, old)
                for key, value in agg.state_dict().items():
                    same_bits(value, state[key], key)
                for row, copy in zip(buffer.rows(range(K)), copies, strict=True):
                    same_bits(row, copy)
            else:  # the row was too late, and was not read
                agg.load_state_dict(state)
                params.copy_(old)
        agg.step(params, rows, ids, ages=ages)
        twin_agg.step(twin, rows, ids, ages=ages)
        same_bits(params, twin)
        same_state(agg, twin_agg)
    assert failed >= 5


@all_of(ALL)
def test_a_checkpoint_continues_with_the_same_bits(
    same_bits: Check, same_state: Check, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options)
    params, rejected = torch.ones(D), 0
    for t, (rows, ids, ages) in enumerate(late_rounds(14, seed=6)):
        if t in (0, 1, 7):
            agg.save(tmp_path / "rule", params=params)
            twin = torch.empty(D)
            twin_agg = fastagg.load(tmp_path / "rule", params=twin)
            assert twin_agg.staleness == agg.staleness
        report = agg.step(params, rows, ids, ages=ages)
        twin_agg.step(twin, rows, ids, ages=ages)
        same_bits(params, twin)
        same_state(agg, twin_agg)
        rejected += len(report.rejected)
    assert (rejected > 0) is (
        agg.max_staleness is not None or getattr(agg, "ages", None) is not None
    )


@all_of(ALL)
def test_the_cost_has_the_bytes_of_the_state(name: str, options: dict[str, Any]) -> None:
    agg = make(name, options)
    sizes = {"num_clients": K, "num_params": D, "num_active": 4}
    assert fastagg.plan(name, **sizes, **options).state_bytes == agg.memory_bytes


@all_of(ALL)
def test_old_rows_are_rejected_and_reported(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any]
) -> None:
    options = options | {"max_staleness": 1}
    agg, twin_agg = make(name, options), make(name, options)
    params, twin = torch.ones(D), torch.ones(D)
    for rows, ids, ages in late_rounds(10, seed=8):
        old = {k for k, age in zip(ids, ages, strict=True) if age > 1}
        kept = [i for i, k in enumerate(ids) if k not in old]
        report = agg.step(params, rows, ids, ages=ages)
        for client in old:
            assert client in report.rejected.tolist()
        twin_agg.step(twin, rows[kept], [ids[i] for i in kept], ages=[ages[i] for i in kept])
        same_bits(params, twin)
    same_state(agg, twin_agg)


@all_of(ALL)
def test_rows_from_before_the_first_round_are_rejected_if_they_are_too_old(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    options = options | {"max_staleness": 2}
    agg, twin_agg, rows = make(name, options), make(name, options), torch.randn(4, D)
    params, twin = torch.ones(D), torch.ones(D)
    report = agg.step(params, rows, [0, 1, 2, 3], ages=[0, 5, 0, 0])
    assert report.reasons == {1: "age 5, but at most max_staleness = 2 is accepted"}
    twin_agg.step(twin, rows[[0, 2, 3]], [0, 2, 3])
    same_bits(params, twin)
    report = agg.step(params, rows[:1], [3], ages=[9])
    assert report.reasons[3] == "age 9, but at most max_staleness = 2 is accepted"


# --- weights ----------------------------------------------------------------------------------


def test_fedavg_worked_by_hand() -> None:
    agg = fastagg.make("fedavg", num_clients=3, num_params=1, staleness="polynomial")
    params = torch.zeros(1)
    report = agg.step(params, torch.tensor([[6.0], [3.0]]), [2, 0], ages=[3, 0])
    # s = 1/2 for client 2: (3 + 6 / 2) / (1 + 1 / 2) = 4
    assert params.tolist() == [4.0]
    torch.testing.assert_close(report.weights, torch.tensor([2 / 3, 1 / 3]))


def test_fedavg_of_rows_of_one_age_is_the_mean() -> None:
    late, mean = make("fedavg", {"staleness": "hinge"}), make("fedavg", {})
    params, twin, rows = torch.zeros(D), torch.zeros(D), torch.randn(3, D)
    late.step(params, rows, [0, 1, 2], ages=[9, 9, 9])
    mean.step(twin, rows, [0, 1, 2])
    # two roundings to float32 of the aggregate and of the parameters
    torch.testing.assert_close(params, twin, rtol=4 * 2.0**-24, atol=1e-12)


@pytest.mark.parametrize("staleness", ["polynomial", "hinge"])
@pytest.mark.parametrize("name", ["amplified", "fedau", "fdms", "fdms-soft", "fdms-means"])
def test_the_factor_of_a_late_row_is_multiplied(
    random_rounds: Callable[..., Any], name: str, staleness: str
) -> None:
    """Of the rules whose factors are shares of all clients. With equal ages states are equal."""
    late, plain = make(name, {"staleness": staleness}), make(name, {})
    params, twin = torch.zeros(D), torch.zeros(D)
    for updates, clients in random_rounds(K, D, 6, seed=5):
        late.step(params, updates, clients, ages=torch.full_like(clients, 8))
        plain.step(twin, updates, clients)
    first = late.step(params, torch.ones(3, D), [4, 0, 5], ages=[3, 0, 8])
    second = plain.step(twin, torch.ones(3, D), [4, 0, 5])
    assert late.staleness is not None
    s = late.staleness.factors(torch.tensor([0, 3, 8]))  # of clients 0, 4, 5
    expected = second.weights.double() * s
    torch.testing.assert_close(first.weights.double(), expected, rtol=2.0**-23, atol=0)
    if first.friends is not None and second.friends is not None:
        assert torch.equal(first.friends, second.friends)


def test_sequential_amplified_multiplies_the_mixing_weights() -> None:
    w = torch.tensor([0.3, 0.5, 0.2, 0.1, 0.4, 0.6], dtype=torch.float64)
    options = {"sequential": True, "beta": 0.9, "client_weights": w}
    agg = make("amplified", options | {"staleness": "polynomial"})
    start, rows, ids, ages = torch.randn(D), torch.randn(4, D), [0, 2, 3, 5], [8, 0, 3, 1]
    expected = start.double()
    for k, age, row in zip(ids, ages, rows.double(), strict=True):
        part = 0.9 * float(w[k]) / math.sqrt(1 + age)
        expected = (1 - part) * expected + part * (start.double() + row)
    params = start.clone()
    agg.step(params, rows, ids, ages=ages)
    torch.testing.assert_close(params.double(), expected, rtol=1e-6, atol=1e-6)  # float32 result


@pytest.mark.parametrize("elimination", [None, "theorem2"])
def test_fdms_compares_rows_of_equal_age_only(elimination: str | None) -> None:
    """Against an oracle of eq. 14 and 15 whose common rounds are those with equal ages."""
    options = {"staleness": "polynomial", "elimination": elimination}
    agg = make("fdms", options)
    scores, counts = np.zeros((K, K)), np.zeros((K, K), dtype=np.int64)
    params, compared, mixed = torch.zeros(D), 0, 0
    for rows, ids, ages in late_rounds(30, seed=9):
        report = agg.step(params, rows, ids, ages=ages)
        x, pairs = rows.double().numpy(), 0
        for i, first in enumerate(ids):
            for j, second in enumerate(ids):
                if i == j:
                    continue
                if ages[i] != ages[j]:
                    mixed += 1
                    continue
                cosine = x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j])
                counts[first, second] += 1
                n = counts[first, second]
                scores[first, second] += ((cosine + 1) / 2 - scores[first, second]) / n
                pairs += 1
        assert report.pairs == pairs
        compared += pairs
    assert compared > 50 and mixed > 50
    assert agg.counts.tolist() == counts.tolist()  # type: ignore[attr-defined]
    # A mean of up to 30 cosines is rounded to float32 each time.
    assert np.abs(agg.scores.double().numpy() - scores).max() <= 30 * 2.0**-24  # type: ignore[attr-defined]


@all_of([(n, o) for n, o in ROBUST if o["staleness"] == "constant"])
def test_a_late_row_is_a_row(same_bits: Check, name: str, options: dict[str, Any]) -> None:
    plain = {key: value for key, value in options.items() if key != "staleness"}
    agg, twin_agg = make(name, options), make(name, plain)
    params, twin = torch.zeros(D), torch.zeros(D)
    for rows, ids, ages in late_rounds(6, seed=1):
        agg.step(params, rows, ids, ages=ages)
        twin_agg.step(twin, rows, ids)
        same_bits(params, twin)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("geometric-median", {}),
        ("centered-clip", {"tau": 5.0}),
        ("multi-krum", {"keep": 3}),
        ("nnm", {"num_byzantine": 1, "rule": "geometric-median"}),
        ("bucketing", {}),
    ],
)
def test_staleness_is_a_client_weight_of_robust_rules(name: str, options: dict[str, Any]) -> None:
    ids, ages, rows = [0, 2, 3, 5], [0, 3, 8, 0], torch.randn(4, D)
    weights = torch.ones(K, dtype=torch.float64)
    weights[ids] = 1.0 / torch.tensor([1.0, 4.0, 9.0, 1.0], dtype=torch.float64).sqrt()
    late = make(name, options | {"staleness": "polynomial"})
    weighted = make(name, options | {"client_weights": weights})
    params, twin = torch.zeros(D), torch.zeros(D)
    late.step(params, rows, ids, ages=ages)
    weighted.step(twin, rows, ids)
    # Shares differ by float64 roundings, factors by those and one to float32.
    torch.testing.assert_close(params, twin, rtol=1e-5, atol=1e-6)


# --- memories ---------------------------------------------------------------------------------


class MemoryOracle:
    """The equations of docs/rules.md over the newest row of each client, in float64."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.max_age = name, options.get("max_age", math.inf)
        self.w = np.array(options.get("client_weights", [1.0] * K))
        self.rows: dict[int, np.ndarray] = {}
        self.last: dict[int, int] = {}
        self.rejected = 0

    def __call__(self, params: np.ndarray, t: int, given: dict[int, tuple[int, Any]]) -> np.ndarray:
        w, whole, none = self.w, self.w.sum(), np.zeros_like(params)
        for k in [k for k, last in self.last.items() if t - last > self.max_age]:
            del self.rows[k], self.last[k]
        used = {}
        for k, (age, row) in given.items():
            if age and (t - age <= self.last.get(k, -1) or age > self.max_age):
                self.rejected += 1
            else:
                used[k] = (t - age, row)
        before = dict(self.rows)
        for k, (r, row) in used.items():
            self.rows[k], self.last[k] = row, r
        if self.name == "mifa":
            return params + sum((w[k] / whole * m for k, m in self.rows.items()), none)
        if not used:
            return params
        if self.name == "fedvarp":
            share = sum(w[k] for k in used)
            change = sum(w[k] / share * (u - before.get(k, 0.0)) for k, (_, u) in used.items())
            return params + change + sum((w[k] / whole * m for k, m in before.items()), none)
        return params + sum(w[k] * m for k, m in self.rows.items()) / sum(w[k] for k in self.rows)


@all_of([c for c in MEMORY if c[0] in ("mifa", "stale", "fedvarp") and "memory_dtype" not in c[1]])
def test_memories_take_the_newest_row(name: str, options: dict[str, Any]) -> None:
    agg, oracle = make(name, options), MemoryOracle(name, options)
    params = torch.randn(D)
    for t, (rows, ids, ages) in enumerate(late_rounds(40, seed=2)):
        given_rows = {
            k: (age, row) for k, age, row in zip(ids, ages, rows.double().numpy(), strict=True)
        }
        expected = oracle(params.double().numpy(), t, given_rows)
        agg.step(params, rows, ids, ages=ages)
        error = np.abs(params.double().numpy() - expected).max()
        assert error <= 4 * 2.0**-24 * np.abs(expected).max()  # parameters and aggregate
        for k, row in oracle.rows.items():
            assert np.array_equal(agg.memory[k].double().numpy(), row)  # type: ignore[attr-defined]
    assert oracle.rejected >= 10


@pytest.mark.parametrize("name", ["mifa", "stale"])
def test_the_state_is_that_of_rows_that_came_in_time(
    same_bits: Check, random_rounds: Callable[..., Any], name: str
) -> None:
    """All rows of a run arrive up to three rounds later, in the end all of them."""
    on_time, late = make(name, {"staleness": "constant"}), make(name, {"staleness": "constant"})
    g = torch.Generator().manual_seed(4)
    waiting: list[tuple[int, int, int, Tensor]] = []  # arrival, round, client, row
    for t, (updates, clients) in enumerate(random_rounds(K, D, 15, seed=6)):
        on_time.step(torch.zeros(D), updates, clients)
        for k, row in zip(clients.tolist(), updates, strict=True):
            waiting.append((t + int(torch.randint(0, 4, (), generator=g)), t, k, row))
        arrived = {k: (r, row) for at, r, k, row in waiting if at <= t}  # the newest of each
        waiting = [answer for answer in waiting if answer[0] > t]
        ids = sorted(arrived)
        rows = torch.stack([arrived[k][1] for k in ids]) if ids else torch.zeros(0, D)
        late.step(torch.zeros(D), rows, ids, ages=[t - arrived[k][0] for k in ids])
    for t in range(15, 19):
        arrived = {k: (r, row) for at, r, k, row in waiting if at <= t}
        waiting = [answer for answer in waiting if answer[0] > t]
        ids = sorted(arrived)
        rows = torch.stack([arrived[k][1] for k in ids]) if ids else torch.zeros(0, D)
        late.step(torch.zeros(D), rows, ids, ages=[t - arrived[k][0] for k in ids])
    assert not waiting
    same_bits(late.memory.clone(), on_time.memory.clone())  # type: ignore[attr-defined]
    assert late.ages.last.tolist() == on_time.ages.last.tolist()  # type: ignore[attr-defined]
    total, other = late.total, on_time.total  # type: ignore[attr-defined]
    # float64 sums of up to 60 changes, in another order
    torch.testing.assert_close(total, other, rtol=1e-12, atol=1e-12)


def test_mifa_rejects_what_is_older_than_its_memory() -> None:
    agg = fastagg.make("mifa", num_clients=2, num_params=1, staleness="constant", max_age=3)
    params = torch.zeros(1)
    for _ in range(2):
        agg.step(params, [], [])
    agg.step(params, torch.tensor([[4.0]]), [0], ages=[1])  # round 1, in round 2
    assert params.tolist() == [2.0]
    report = agg.step(params, torch.tensor([[8.0], [6.0]]), [0, 1], ages=[2, 3])  # of 1, of 0
    assert report.reasons == {0: "age 2, but a row of age 2 is remembered"}
    assert params.tolist() == [2.0 + (4.0 + 6.0) / 2]
    report = agg.step(params, torch.tensor([[8.0], [7.0]]), [0, 1], ages=[2, 4])  # of 2, of 0
    assert report.reasons == {1: "age 4, but rows expire at max_age = 3"}
    assert params.tolist() == [7.0 + 8.0 / 2]  # the row of client 1, of round 0, has expired
    with pytest.raises(ValueError, match="ages: expected at most 5, the number of rounds so far"):
        agg.step(params, torch.ones(1, 1), [0], ages=[6])


def test_reused_rows_are_the_newest(same_bits: Check) -> None:
    agg, plain = (
        make("geometric-median", {"reuse": True, "staleness": "constant"}),
        make("geometric-median", {"reuse": True}),
    )
    params, twin, rejected = torch.zeros(D), torch.zeros(D), 0
    for rows, ids, ages in late_rounds(20, seed=12):
        report = agg.step(params, rows, ids, ages=ages)
        kept = [i for i, k in enumerate(ids) if k not in report.rejected.tolist()]
        plain.step(twin, rows[kept], [ids[i] for i in kept])
        same_bits(params, twin)
        rejected += len(report.rejected)
    same_bits(agg.memory.clone(), plain.memory.clone())  # type: ignore[attr-defined]
    assert rejected >= 5


# --- MimiC ------------------------------------------------------------------------------------


def test_mimic_worked_by_hand() -> None:
    agg = fastagg.make("mimic", num_clients=3, num_params=1, staleness="constant", max_staleness=3)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[4.0], [2.0]]), [0, 1])  # v_0 = 3, c = -1, 1
    agg.step(params, [], [])  # round 1 is skipped: its model is that of round 2
    agg.step(params, torch.tensor([[6.0]]), [0])  # v_2 = 6 - 1 = 5, c_0 = -1
    assert params.tolist() == [8.0]
    # Round 3: client 1 sends a row of round 1, client 2 one of round 0.
    report = agg.step(params, torch.tensor([[7.0], [9.0]]), [1, 2], ages=[2, 3])
    assert not len(report.rejected)
    assert params.tolist() == [8.0 + ((7.0 + 1.0) + (9.0 + 0.0)) / 2]
    # c_1 = v_2 - 7, of the first aggregate from round 1 on; c_2 = v_0 - 9
    assert agg.corrections.clone().flatten().tolist() == [-1.0, -2.0, -6.0]  # type: ignore[attr-defined]
    report = agg.step(params, torch.tensor([[1.0]]), [1], ages=[3])  # of round 1 again
    assert report.skipped and report.reasons == {1: "age 3, but a row of age 3 is remembered"}


class MimiCOracle:
    """Algorithm 1 in float64: every row is corrected as in its own round, and so is learned."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.fading, self.lr = options.get("fading", 1.0), options.get("server_lr", 1.0)
        self.max_age = options.get("max_age", math.inf)
        self.most = options["max_staleness"]
        self.c: dict[int, np.ndarray] = {}
        self.last: dict[int, int] = {}
        self.v: dict[int, np.ndarray | None] = {}  # by round
        self.rejected = self.skipped_over = 0

    def __call__(self, params: np.ndarray, t: int, given: dict[int, tuple[int, Any]]) -> np.ndarray:
        used = {}
        for k, (age, u) in given.items():
            if age > self.most or (age and (t - age <= self.last.get(k, -1) or age > self.max_age)):
                self.rejected += 1
            else:
                used[k] = (t - age, u)
        self.v[t] = None
        if not used:
            return params
        corrected = []
        for k, (r, u) in used.items():
            between = r - self.last.get(k, -1)
            counts = k in self.c and between <= self.max_age
            corrected.append(u + (self.fading ** (between - 1) * self.c[k] if counts else 0.0))
        v = sum(corrected) / len(corrected)
        self.v[t] = v
        for k, (r, u) in used.items():
            of_its_model = next(i for i in range(r, t + 1) if self.v[i] is not None)
            self.skipped_over += of_its_model != r
            self.c[k], self.last[k] = self.v[of_its_model] - u, r
        return params + self.lr * v


@all_of(CORRECTING)
@pytest.mark.parametrize("owned", [False, True])
def test_mimic_follows_the_oracle(name: str, options: dict[str, Any], owned: bool) -> None:
    agg, oracle, buffer = make(name, options), MimiCOracle(options), UpdateBuffer(K, D)
    params = torch.randn(D)
    for t, (rows, ids, ages) in enumerate(late_rounds(60, seed=2)):
        given_rows = {
            k: (age, row) for k, age, row in zip(ids, ages, rows.double().numpy(), strict=True)
        }
        expected = oracle(params.double().numpy(), t, given_rows)
        for client, row in zip(ids, rows, strict=True):
            buffer.row(client).copy_(row)
        agg.step(params, buffer if owned else rows, ids, ages=ages)
        # The aggregate and corrections are rounded to float32; corrections carry the roundings of
        # the rounds before, of numbers up to about 4 times the result.
        error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
        assert error <= 60 * 4 * 2.0**-24
    assert oracle.rejected >= 10 and oracle.skipped_over >= 3
    for k, c in oracle.c.items():
        found = agg.corrections[k].double().numpy()  # type: ignore[attr-defined]
        assert np.abs(found - c).max() <= 60 * 4 * 2.0**-24 * max(1.0, np.abs(c).max())


@pytest.mark.parametrize("size", [2, 5_000])
def test_mimic_has_the_same_bits_with_references_and_copies(same_bits: Check, size: int) -> None:
    """Late and fresh rows in one round; few rows are read from a cache, many are not."""
    options = {"staleness": "constant", "max_staleness": 4}
    agg, owning = make("mimic", options, size * 100), make("mimic", options, size * 100)
    buffer = UpdateBuffer(K, size * 100)
    params, twin = torch.zeros(size * 100), torch.zeros(size * 100)
    for rows, ids, ages in late_rounds(8, seed=13, num_params=size * 100):
        for client, row in zip(ids, rows, strict=True):
            buffer.row(client).copy_(row)
        agg.step(params, rows, ids, ages=ages)
        owning.step(twin, buffer, ids, ages=ages)
        same_bits(params, twin)
    same_bits(agg.corrections.clone(), owning.corrections.clone())  # type: ignore[attr-defined]


def test_mimic_needs_a_limit() -> None:
    for most in (None, 0):
        with pytest.raises(ValueError, match="max_staleness: expected at least 1 with staleness"):
            make("mimic", {"staleness": "constant", "max_staleness": most})
        with pytest.raises((TypeError, ValueError), match="max_staleness"):
            sizes = {"num_clients": K, "num_params": D, "num_active": 4}
            fastagg.plan("mimic", **sizes, staleness="constant", max_staleness=most)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"aggregates": torch.tensor(9)}, r"aggregates.*: expected numbers in \[0, 3\]"),
        ({"aggregates": torch.tensor(-1)}, "aggregates"),
        ({"before": torch.tensor([5, 1])}, "before.*: expected numbers of aggregates"),
        ({"before": torch.tensor([2, 0])}, "before.*: expected numbers of aggregates"),
        ({"recent": torch.full((2, 3), 3.4e38).mul(1.0005)}, "recent"),
    ],
)
def test_a_state_that_no_steps_lead_to_is_refused(change: dict[str, Tensor], match: str) -> None:
    agg = fastagg.make("mimic", num_clients=2, num_params=3, staleness="constant", max_staleness=2)
    params = torch.zeros(3)
    agg.step(params, torch.ones(2, 3), [0, 1])
    agg.step(params, [], [])
    agg.step(params, torch.ones(2, 3), [0, 1], ages=[1, 0])
    state = agg.state_dict()
    assert state["before"].tolist() == [1, 1] and int(state["aggregates"]) == 2
    with pytest.raises(ValueError, match=match):
        agg.load_state_dict(state | change)
    agg.load_state_dict(state)


def test_a_step_near_the_end_of_float32_is_refused() -> None:
    """The new correction of a late row is v - u of its round, which may be too large."""
    agg = fastagg.make(
        "mimic", num_clients=3, num_params=1, staleness="constant", max_staleness=2, server_lr=0.0
    )
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[1e38], [-1e38]]), [0, 1])  # c = -1e38, 1e38
    agg.step(params, torch.tensor([[1e38]]), [1])  # v = 2e38
    state = agg.state_dict()
    with pytest.raises(ValueError, match="too large"):
        agg.step(params, torch.tensor([[-1.5e38]]), [2], ages=[1])  # 2e38 + 1.5e38
    assert all(torch.equal(value, state[key]) for key, value in agg.state_dict().items())
    agg.step(params, torch.tensor([[-1.3e38]]), [2], ages=[1])
    assert agg.corrections[2].tolist() == pytest.approx([3.3e38])  # type: ignore[attr-defined]
