# SPDX-License-Identifier: Apache-2.0
"""Taking ownership of rows gives the same bits as copying; a failed step leaves the rows alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer
from fastagg.memory.rows import RowMemory

K = 6
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 0.0]

RULES: list[tuple[str, dict[str, Any]]] = [
    ("mimic", {"server_lr": 0.7}),
    ("mifa", {"client_weights": WEIGHTS}),
    ("stale", {}),
    ("stale-models", {"server_lr": 0.7, "client_weights": [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]}),
    ("fdms", {}),  # keeps no rows
]
TAKES_OWNERSHIP = {"mimic", "mifa", "stale", "stale-models"}
rules = pytest.mark.parametrize(("name", "options"), RULES, ids=[name for name, _ in RULES])


def make(name: str, options: dict[str, Any], d: int = 23) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=d, **options)


def fill(buffer: UpdateBuffer, clients: list[int], generator: torch.Generator) -> Tensor:
    """Draw the rows of ``clients``, with zeros of both signs; return a copy [S, d]."""
    for row in buffer.rows(clients):
        row.normal_(generator=generator)
        row.mul_(torch.rand(len(row), generator=generator) < 0.8)
    if not clients:
        return torch.zeros(0, buffer.num_params)
    return torch.stack(buffer.rows(clients))


def draw_clients(generator: torch.Generator) -> list[int]:
    size = int(torch.randint(0, K + 1, (), generator=generator))
    return torch.randperm(K, generator=generator)[:size].tolist()


@rules
@given(seed=st.integers(0, 2**32), forms=st.lists(st.booleans(), min_size=1, max_size=12))
def test_taking_ownership_has_the_bits_of_copying(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    same_report: Callable[..., None],
    name: str,
    options: dict[str, Any],
    seed: int,
    forms: list[bool],
) -> None:
    """Compare over random rounds and orders; each round gives the rows away or has them copied."""
    generator = torch.Generator().manual_seed(seed)
    d = int(torch.randint(1, 70, (), generator=generator))
    copying, taking = make(name, options, d), make(name, options, d)
    buffer = UpdateBuffer(K, d)
    params = torch.randn(d, generator=generator)
    twin = params.clone()
    for give in forms:
        clients = draw_clients(generator)
        updates = fill(buffer, clients, generator)
        before = [row.data_ptr() for row in buffer.rows(clients)]
        order = torch.randperm(len(clients), generator=generator)
        first = copying.step(params, updates[order], torch.tensor(clients)[order].long())
        second = taking.step(twin, buffer if give else buffer.rows(clients), clients)
        same_report(first, second)
        same_bits(params, twin)
        same_state(copying, taking)
        after = [row.data_ptr() for row in buffer.rows(clients)]
        if give and name in TAKES_OWNERSHIP:
            assert not set(before) & set(after)
        else:
            assert before == after


@rules
@pytest.mark.slow
def test_any_number_of_threads_and_many_clients(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    options: dict[str, Any],
) -> None:
    d, many = 20_011, 21  # several blocks of columns, groups of 8, 4, 2 and 1 rows
    options = {key: value for key, value in options.items() if key != "client_weights"}

    def run(threads: int, give: bool) -> tuple[Aggregator, Tensor]:
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(1)
        agg = fastagg.make(name, num_clients=many, num_params=d, **options)
        buffer, params = UpdateBuffer(many, d), torch.zeros(d)
        for size in (21, 15, 12, 3, 19):
            clients = torch.randperm(many, generator=generator)[:size].tolist()
            fill(buffer, clients, generator)
            agg.step(params, buffer if give else buffer.rows(clients), clients)
        return agg, params

    expected_agg, expected = run(1, give=False)
    for threads in (1, 2, 3):
        agg, params = run(threads, give=True)
        same_bits(params, expected)
        same_state(agg, expected_agg)


@pytest.mark.every_rule
@pytest.mark.parametrize("graph", [False, True])
def test_rows_that_require_gradients_do_not_become_state_that_does(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    options: dict[str, Any],
    graph: bool,
) -> None:
    """Clients may train their rows with autograd: as leaves, or as results of a graph."""
    plain, agg = make(name, options), make(name, options)
    buffer, generator = UpdateBuffer(K, 23), torch.Generator().manual_seed(4)
    params, twin = torch.zeros(23), torch.zeros(23)
    for clients in ([0, 1, 2, 3, 4], [0, 2, 5], [1, 2, 3, 5], [0, 1, 4]):
        updates, own = fill(buffer, clients, generator), buffer.rows(clients)
        for row in own:
            if graph:
                row.mul_(torch.ones(23, requires_grad=True))
            else:
                row.requires_grad_(True)
        agg.step(params, buffer, clients)
        plain.step(twin, updates, clients)
        assert not any(value.requires_grad for value in agg.state_dict().values())
        for value in agg.live_state().values():
            for part in value.rows if isinstance(value, RowMemory) else [value]:
                assert not part.requires_grad
        for row, before in zip(buffer.rows(clients), own, strict=True):
            assert row is before or not row.requires_grad
            row.detach_()
    same_bits(params, twin)
    same_state(agg, plain)


def rows_of(agg: Aggregator) -> list[Tensor]:
    """Return all memory rows and spare rows of a rule, not copied."""
    memories = [value for value in agg.live_state().values() if isinstance(value, RowMemory)]
    return [row for memory in memories for row in [*memory.rows, *memory.spares.every_row]]


@pytest.mark.every_rule
@pytest.mark.parametrize("how", ["as it is", "copied", "loaded"])
def test_params_may_not_share_memory_with_a_row_of_the_rule(
    same_bits: Callable[..., None], name: str, options: dict[str, Any], how: str
) -> None:
    """A view of a buffer's row that was kept across a step may show a memory row."""
    agg, buffer, generator = make(name, options), UpdateBuffer(K, 23), torch.Generator()
    every, kept, params = list(range(K)), buffer.rows(range(K)), torch.zeros(23)
    for _ in range(3):
        fill(buffer, every, generator)
        agg.step(params, buffer, every)
        agg.step(params, torch.randn(2, 23, generator=generator), [0, 1])  # spares memory rows
    if how == "copied":
        agg = copy.deepcopy(agg)
    elif how == "loaded":
        agg.load_state_dict(agg.state_dict())
    places = {row.data_ptr() for row in rows_of(agg)}
    views = [row for row in kept if row.data_ptr() in places]
    assert views or how != "as it is" or options or name not in TAKES_OWNERSHIP
    views += [row for row in rows_of(agg) if row.dtype == torch.float32]
    before, updates = agg.state_dict(), torch.ones(2, 23)
    for vector in views:
        content = vector.clone()
        with pytest.raises(ValueError, match="params: must not share memory with a remembered row"):
            agg.step(vector, updates, [2, 3])
        same_bits(vector, content)
    for key, value in agg.state_dict().items():
        same_bits(value, before[key], key)
    agg.step(params, updates, [2, 3])


@pytest.mark.parametrize(
    ("name", "options", "ages"),
    [
        ("geometric-median", {"reuse": True}, None),
        ("krum", {"reuse": True}, None),
        ("mifa", {}, None),
        ("mimic", {"staleness": "constant", "max_staleness": 3}, [0, 1]),
        ("fedstale", {"clip_norm": 30.0}, None),
    ],
)
def test_rows_may_not_share_memory_with_a_spare_row(
    name: str, options: dict[str, Any], ages: list[int] | None
) -> None:
    """A view of a buffer's row from before a step that took the row, which is a spare row now."""
    agg, buffer = fastagg.make(name, num_clients=3, num_params=8, **options), UpdateBuffer(3, 8)
    params, view = torch.zeros(8), buffer.row(0)
    view.fill_(1.0)
    agg.step(params, buffer, [0])
    agg.step(params, torch.full((1, 8), 2.0), [0])
    view.copy_(torch.arange(8.0))
    before = params.clone()
    with pytest.raises(ValueError, match=r"updates: .*shares? memory"):
        agg.step(params, [torch.full((8,), 20.0), view], [0, 1], ages=ages)
    assert torch.equal(view, torch.arange(8.0)) and torch.equal(params, before)


def test_a_memory_knows_each_row_that_it_has_had_and_parts_of_them() -> None:
    few, more = (RowMemory(size, 40, torch.device("cpu")) for size in (3, 5))
    apart = torch.zeros(100, 40)  # allocated last: likely between rows, or beside them
    for row in few.rows:
        assert few.overlaps(row) and few.overlaps(row[39:]) and few.overlaps(row[:1])
        assert not more.overlaps(row)
    more.share(few)
    assert all(more.overlaps(row) for row in [*few.rows, *more.rows])
    undo = few.replace(torch.ones(3, 40))
    assert all(few.overlaps(row) for row in few.rows)
    assert not any(few.overlaps(row) for row in more.rows)
    undo()
    assert all(few.overlaps(row) for row in few.rows)
    assert not any(memory.overlaps(row) for memory in (few, more) for row in apart)
    assert not more.overlaps(torch.zeros(0)) and not more.overlaps(more.rows[0][:0])


@rules
@given(seed=st.integers(0, 2**32))
def test_saved_and_loaded_in_the_middle(
    tmp_path: Path,
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    options: dict[str, Any],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    path = tmp_path / "a"
    agg, buffer = make(name, options), UpdateBuffer(K, 23)
    params = torch.zeros(23)
    for _ in range(4):
        clients = draw_clients(generator)
        fill(buffer, clients, generator)
        agg.step(params, buffer, clients)
    agg.save(path)
    loaded, other, twin = fastagg.load(path), UpdateBuffer(K, 23), params.clone()
    same_state(agg, loaded)
    for _ in range(4):
        clients = draw_clients(generator)
        for row, update in zip(other.rows(clients), fill(buffer, clients, generator), strict=True):
            row.copy_(update)
        agg.step(params, buffer, clients)
        loaded.step(twin, other, clients)
        same_bits(params, twin)
    same_state(agg, loaded)
    state = agg.state_dict()
    agg.load_state_dict(state)  # into an aggregator that has taken ownership of rows
    same_state(agg, loaded)


@rules
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.3e38])
def test_after_an_exception_everything_is_as_before(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    options: dict[str, Any],
    bad: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    agg, twin_agg = make(name, options), make(name, options)
    buffer, other = UpdateBuffer(K, 23), UpdateBuffer(K, 23)
    params = torch.randn(23)
    for given_agg, given_buffer in ((agg, buffer), (twin_agg, other)):
        generator.manual_seed(0)
        for clients in ([0, 2, 4], [1, 2, 3, 5], [0, 5]):
            fill(given_buffer, clients, generator)
            given_agg.step(params.clone(), given_buffer, clients)
    clients = [5, 1, 2]
    fill(buffer, clients, generator)
    buffer.row(1)[7] = bad
    if bad == 3.3e38:
        buffer.row(2)[7] = bad
        agg.server_lr = 1e4
    rows = buffer.rows(range(K))
    contents, old = [row.clone() for row in rows], params.clone()
    with pytest.raises(ValueError, match=r"updates: .*\[1\]" if bad != 3.3e38 else "float32"):
        agg.step(params, buffer, clients)
    agg.server_lr = twin_agg.server_lr
    same_bits(params, old)
    same_state(agg, twin_agg)
    for now, row, content in zip(buffer.rows(range(K)), rows, contents, strict=True):
        assert now.data_ptr() == row.data_ptr()
        same_bits(now, content)
    # the next valid step gives the same result as without the failed one
    buffer.row(1)[7] = buffer.row(2)[7] = 1.0
    for row, update in zip(other.rows(clients), buffer.rows(clients), strict=True):
        row.copy_(update)
    twin = params.clone()
    agg.step(params, buffer, clients)
    twin_agg.step(twin, other, clients)
    same_bits(params, twin)
    same_state(agg, twin_agg)


@rules
def test_rejected_rows_stay_with_the_buffer(
    same_bits: Callable[..., None],
    same_state: Callable[..., None],
    name: str,
    options: dict[str, Any],
) -> None:
    dropping = make(name, options | {"nonfinite": "drop"})
    twin_agg = make(name, options | {"nonfinite": "drop"})
    buffer, params = UpdateBuffer(K, 23), torch.randn(23)
    twin = params.clone()
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        clients = draw_clients(generator)
        fill(buffer, clients, generator)
        if len(clients) > 2:
            buffer.row(clients[1])[4] = math.nan
        updates = [row.clone() for row in buffer.rows(clients)]
        kept = {k: buffer.row(k).data_ptr() for k in clients[1:2] if len(clients) > 2}
        report = dropping.step(params, buffer, clients)
        expected = twin_agg.step(twin, updates, clients)
        assert report.rejected.tolist() == expected.rejected.tolist() == list(kept)
        assert all(buffer.row(k).data_ptr() == address for k, address in kept.items())
        same_bits(params, twin)
        same_state(dropping, twin_agg)


@pytest.mark.parametrize("name", sorted(TAKES_OWNERSHIP))
def test_the_received_row_itself_becomes_the_memory(name: str) -> None:
    agg, buffer = make(name, {}), UpdateBuffer(K, 23)
    row = buffer.row(3).fill_(2.0)
    agg.step(torch.zeros(23), buffer, [3])
    memory = agg.corrections if name == "mimic" else agg.memory  # type: ignore[attr-defined]
    assert memory.rows[3].data_ptr() == row.data_ptr() != buffer.row(3).data_ptr()
    storages = {r.untyped_storage().data_ptr() for r in [*memory.rows, *buffer.rows(range(K))]}
    assert len(storages) == 2 * K


@pytest.mark.parametrize("name", ["mimic", "stale-models"])
def test_unused_reference_vectors_are_reused(name: str) -> None:
    agg, buffer, params = make(name, {}), UpdateBuffer(K, 23), torch.zeros(23)
    memory = agg.corrections if name == "mimic" else agg.memory  # type: ignore[attr-defined]
    seen = set()
    for _ in range(10):
        agg.step(params, buffer, range(K))
        (address,) = {r.vector.data_ptr() for r in memory.references}
        seen.add(address)
    assert len(seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mifa", "stale", "stale-models"])
@pytest.mark.parametrize("give", [False, True])
def test_after_two_thousand_rounds_the_total_is_a_fresh_sum(name: str, give: bool) -> None:
    many, d = 12, 40
    weights = torch.rand(many, dtype=torch.float64) + 0.1
    agg = fastagg.make(name, num_clients=many, num_params=d, client_weights=weights)
    buffer, params = UpdateBuffer(many, d), torch.zeros(d)
    generator = torch.Generator().manual_seed(0)
    for t in range(2_000):
        clients = torch.randperm(many, generator=generator)[:4].tolist()
        for row in buffer.rows(clients):  # every seventh round is ten thousand times as large
            row.normal_(generator=generator).mul_(100.0 if t % 7 == 0 else 0.01)
        agg.step(params.zero_(), buffer if give else buffer.rows(clients), clients)
    fresh = (weights / weights.sum()) @ agg.memory.clone().double()  # type: ignore[attr-defined]
    error = (agg.total - fresh).abs().max() / fresh.abs().max()  # type: ignore[attr-defined]
    # 8,000 float64 roundings of sums that were up to ten thousand times the last one: 9e-9 at the
    # worst, if all had the same sign. A float32 total is off by 1e-2 here.
    assert error <= 1e-9


@pytest.mark.parametrize(
    ("buffer", "clients", "match"),
    [
        (UpdateBuffer(K, 22), [0], r"updates: expected a buffer with rows of 23 .*num_params=22"),
        (UpdateBuffer(3, 23), [0, 3], r"updates: expected a buffer with a row for client 3"),
    ],
)
def test_a_buffer_that_does_not_fit(buffer: UpdateBuffer, clients: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make("mifa", {}).step(torch.zeros(23), buffer, clients)


def test_rows_of_a_buffer_made_in_inference_mode_can_be_taken(tmp_path: Path) -> None:
    with torch.inference_mode():
        buffer = UpdateBuffer(K, 23)
        params = torch.zeros(23)
    agg = make("mimic", {})
    agg.step(params, buffer, [1, 2])
    agg.step(params, [torch.ones(23)], [1])
    agg.load_state_dict(agg.state_dict())


@rules
def test_no_row_is_allocated_after_the_ranks_have_agreed(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Otherwise a process that runs out of memory could fail after other processes have written."""
    agg, buffer = make(name, options), UpdateBuffer(K, 23)
    agreed = []

    def refuse(*arguments: object) -> None:
        raise MemoryError

    def agree(report: fastagg.StepReport) -> None:
        agreed.append(report)
        monkeypatch.setattr("fastagg.memory.stores.allocate_rows", refuse)

    agg.columns.agree = agree  # type: ignore[method-assign]
    for row in buffer.rows([0, 3]):
        row.normal_()
    agg.step(torch.zeros(23), buffer, [0, 3])
    assert len(agreed) == 1
