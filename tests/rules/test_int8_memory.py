# SPDX-License-Identifier: Apache-2.0
"""Rules that remember rows as int8 numbers with scales (``memory_dtype="int8"``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer, ops
from fastagg.churn import widened_state
from fastagg.distributed import ShardedAggregator
from fastagg.ops.scales import num_scales
from fastagg.updates.columns import Columns
from fastagg.updates.streams import ColumnBlocks

K, D = 6, 5_003
SEGMENT = 1_024  # d is between four and five segments
Check = Callable[..., None]

RULES: list[tuple[str, dict[str, Any]]] = [
    ("mifa", {}),
    ("mifa", {"max_norm": 75.0}),  # about half of the rows are longer
    ("stale", {"client_weights": [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]}),
    ("stale", {"max_age": 1}),
    ("fedvarp", {"server_lr": 0.7}),
    ("fedstale", {"cutoff": 3, "max_age": 2}),
    ("krum", {"reuse": True}),
    ("centered-clip", {"reuse": True, "tau": 90.0}),
    ("geometric-median", {"reuse": True, "max_age": 2}),
    ("nnm", {"reuse": True, "num_byzantine": 1}),
    ("bucketing", {"reuse": True}),
]
every_rule = pytest.mark.parametrize(("name", "options"), RULES)


def make(name: str, options: dict[str, Any], dtype: str = "int8", **more: Any) -> Aggregator:
    agg = fastagg.make(name, num_clients=K, num_params=D, memory_dtype=dtype, **options, **more)
    agg.columns = Columns(SEGMENT)
    return agg


def rounded(rows: Tensor) -> Tensor:
    """Return rows [S, d] as a memory of int8 reads them."""
    numbers = [torch.empty(rows.shape[1], dtype=torch.int8) for _ in rows]
    scales, out = torch.empty(len(rows), num_scales(rows.shape[1])), torch.empty_like(rows)
    ops.quantize_(numbers, scales, rows)
    ops.dequantize_(list(out), numbers, list(scales))
    return out


def rounds(count: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    for t in range(count):
        clients = torch.randperm(K)[: 3 + t % 2]
        yield torch.randn(2, D)[clients % 2] + 0.4 * torch.randn(len(clients), D), clients


def forms(updates: Tensor, clients: Tensor) -> list[Any]:
    """Return the updates in every form that a step accepts."""
    buffer = UpdateBuffer(K, D)
    for client, row in zip(clients.tolist(), updates, strict=True):
        buffer.row(client).copy_(row)
    stream = ColumnBlocks(
        lambda: iter(updates.split(900, dim=1)), num_rows=len(updates), num_params=D
    )
    return [updates, list(updates), buffer, stream]


@every_rule
@pytest.mark.parametrize("folder", [False, True])
def test_it_is_a_float32_memory_of_rounded_updates(
    same_bits: Check,
    same_report: Check,
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    folder: bool,
) -> None:
    where = {"memory_folder": tmp_path} if folder else {}
    narrow, wide = make(name, options, **where), make(name, options, "float32")
    params = torch.randn(D)
    twin = params.clone()
    for t, (updates, clients) in enumerate(rounds()):
        same_report(
            narrow.step(params, forms(updates, clients)[t % 4], clients),
            wide.step(twin, rounded(updates), clients),
        )
        same_bits(params, twin)
    same_bits(narrow.memory.clone(), wide.memory.clone())  # type: ignore[attr-defined]
    same_bits(narrow.memory[3], wide.memory[3])  # type: ignore[attr-defined]
    assert narrow.memory_bytes < 0.27 * wide.memory_bytes + 8 * D
    one, other = narrow.state_dict(), wide.state_dict()
    assert one.pop("memory").dtype == torch.int8
    assert one.pop("memory_scales").shape == (K, num_scales(D))
    del other["memory"]
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())


@given(seed=st.integers(0, 2**31), d=st.integers(1, 600), threads=st.integers(1, 3))
def test_arrival_order_and_threads_do_not_matter(seed: int, d: int, threads: int) -> None:
    g = torch.Generator().manual_seed(seed)
    before = torch.get_num_threads()
    one, other = (
        fastagg.make("stale", num_clients=K, num_params=d, memory_dtype="int8") for _ in range(2)
    )
    params = torch.randn(d, generator=g)
    twin = params.clone()
    for _ in range(3):
        clients = torch.randperm(K, generator=g)[:4]
        updates, order = torch.randn(4, d, generator=g), torch.randperm(4, generator=g)
        one.step(params, updates, clients)
        torch.set_num_threads(threads)
        other.step(twin, updates[order], clients[order])
        torch.set_num_threads(before)
        assert torch.equal(params, twin)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("name", ["mifa", "fedvarp"])
def test_the_total_does_not_drift(name: str) -> None:
    agg = fastagg.make(name, num_clients=K, num_params=300, memory_dtype="int8")
    params = torch.zeros(300)
    for _ in range(300):
        clients = torch.randperm(K)[:3]
        agg.step(params, torch.randn(3, 300) * 10.0 ** torch.randint(-3, 3, (3, 1)), clients)
    exact = agg.memory.clone().double().mean(dim=0)  # type: ignore[attr-defined]
    # 300 rounds of float64 roundings of numbers up to 400
    assert (agg.state_dict()["total"] - exact).abs().max() <= 300 * 2.0**-53 * 400


def test_by_hand() -> None:
    agg = fastagg.make("mifa", num_clients=2, num_params=3, memory_dtype="int8")
    params = torch.zeros(3)
    agg.step(params, torch.tensor([[127.0, 1.4, -0.6]]), [1])
    assert params.tolist() == [63.5, 0.5, -0.5]  # the mean of zeros and [127, 1, -1]
    state = agg.state_dict()
    assert state["memory"].tolist() == [[0, 0, 0], [127, 1, -1]]
    assert state["memory_scales"].tolist() == [[0.0], [1.0]]
    agg.forget([1])
    assert not any(bool(value.any()) for value in agg.state_dict().values())


@every_rule
def test_checkpoints(
    same_bits: Check, same_state: Check, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options)
    params = torch.randn(D)
    for updates, clients in rounds(4):
        agg.step(params, updates, clients)
    agg.save(tmp_path / "a")
    loaded, copied = fastagg.load(tmp_path / "a", memory_folder=tmp_path), make(name, options)
    state = agg.state_dict()
    state["memory"] = state["memory"].T.contiguous().T  # rows that are not contiguous
    copied.load_state_dict(state)
    for other in (loaded, copied):
        other.columns = Columns(SEGMENT)
        same_state(agg, other)
        twin, g = params.clone(), torch.Generator().manual_seed(1)
        again = make(name, options)
        again.load_state_dict(agg.state_dict())
        mine = params.clone()
        for clients in ([0, 2, 3], [4, 1, 5]):
            updates = torch.randn(3, D, generator=g)
            again.step(mine, updates, clients)
            other.step(twin, updates, clients)
            same_bits(mine, twin)


@every_rule
def test_more_clients(name: str, options: dict[str, Any]) -> None:
    plain = {key: value for key, value in options.items() if key != "client_weights"}
    few = make(name, plain)
    for updates, clients in rounds(3):
        few.step(torch.zeros(D), updates, clients)
    many = fastagg.make(name, num_clients=K + 2, num_params=D, memory_dtype="int8", **plain)
    many.load_state_dict(widened_state(many, few.state_dict(), K))
    memory = many.memory.clone()
    assert torch.equal(memory[:K], few.memory.clone())  # type: ignore[attr-defined]
    assert not memory[K:].any()
    many.step(torch.zeros(D), 0.1 * torch.randn(3, D), [0, K, K + 1])


def forged(key: str, place: tuple[int, ...], value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[key][place] = value

    return change


@pytest.mark.parametrize(
    ("name", "options"), [("mifa", {}), ("stale", {"max_age": 5}), ("krum", {"reuse": True})]
)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (forged("memory", (2, 7), -128), "memory.*expected numbers in .-127, 127"),
        (forged("memory_scales", (2, 1), 0.0), "memory.*expected numbers in .-127, 127"),
        (forged("memory_scales", (2, 1), -1.0), "memory_scales.*expected 0 or numbers in"),
        (forged("memory_scales", (2, 1), 1e-40), "memory_scales.*expected 0 or numbers in"),
        (forged("memory_scales", (2, 1), 3e36), "memory_scales.*expected 0 or numbers in"),
        (forged("memory_scales", (2, 1), math.nan), "memory_scales.*expected finite values"),
        (forged("memory_scales", (5, 1), 1.0), "memory.*expected numbers in .-127, 127"),
        (forged("memory", (5, 300), 1), "memory.*expected"),
    ],
)
def test_forged_states_are_refused(
    same_state: Check,
    name: str,
    options: dict[str, Any],
    change: Callable[[dict[str, Tensor]], None],
    match: str,
) -> None:
    """Client 5 was never active, client 2 was."""
    agg, twin = make(name, options), make(name, options)
    for other in (agg, twin):
        g = torch.Generator().manual_seed(3)
        other.step(torch.zeros(D), torch.randn(4, D, generator=g), [0, 1, 2, 3])
    state = agg.state_dict()
    change(state)
    with pytest.raises(ValueError, match=match):
        agg.load_state_dict(state)
    same_state(agg, twin)


def test_a_total_of_other_rows_is_refused() -> None:
    agg = make("mifa", {})
    agg.step(torch.zeros(D), torch.randn(2, D), [0, 1])
    state = agg.state_dict()
    state["total"][4_000] = 1e36
    with pytest.raises(ValueError, match=r"total.*weighted sum of the memory rows"):
        agg.load_state_dict(state)


def test_rows_that_leave_the_range_of_float32_are_refused(same_state: Check) -> None:
    agg, twin = make("mifa", {}), make("mifa", {})
    for value in (torch.finfo(torch.float32).max, math.inf, math.nan):
        params, updates = torch.zeros(D), torch.randn(2, D)
        updates[1, 77] = value
        for form in forms(updates, torch.tensor([0, 1])):
            with pytest.raises(ValueError, match="updates"):
                agg.step(params, form, [0, 1])
        assert not params.any()
        same_state(agg, twin)


def test_ranks_begin_at_blocks(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/ranks", world_size=1, rank=0)
    try:
        with pytest.raises(ValueError, match="segment: expected a multiple of 256 columns"):
            ShardedAggregator(
                "mifa", num_clients=2, num_params=1000, segment=500, memory_dtype="int8"
            )
        ShardedAggregator("mifa", num_clients=2, num_params=1000, segment=500)
    finally:
        dist.destroy_process_group()
