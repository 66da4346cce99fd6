# SPDX-License-Identifier: Apache-2.0
"""Every rule with updates that are read piece by piece, and with bfloat16 or mapped memories.

test_int8_memory.py has the int8 ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer
from fastagg.memory.stores import RowStore
from fastagg.updates.columns import Columns
from fastagg.updates.streams import ColumnBlocks, TensorRows

K, D = 6, 5_003
SEGMENT = 1_024  # d is between four and five segments
Check = Callable[..., None]

every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder

REMEMBERING: list[tuple[str, dict[str, Any]]] = [
    ("mifa", {}),
    ("stale", {"client_weights": [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]}),
    ("fedvarp", {"server_lr": 0.7}),
    ("fedstale", {"cutoff": 3}),
    ("centered-clip", {"reuse": True, "tau": 90.0}),
    ("nnm", {"reuse": True, "num_byzantine": 1}),
]
MAPPABLE = [*REMEMBERING, ("mimic", {"server_lr": 0.7}), ("stale-models", {"server_lr": 0.7})]


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    agg = fastagg.make(name, num_clients=K, num_params=D, **options, **more)
    agg.columns = Columns(SEGMENT)
    return agg


def rounds(count: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    for t in range(count):
        clients = torch.randperm(K)[: 3 + t % 2]
        yield torch.randn(2, D)[clients % 2] + torch.randn(len(clients), D), clients


def blocks(updates: Tensor, *widths: int, budget: int | None = None) -> ColumnBlocks:
    def passes() -> Iterator[Tensor]:
        begin = 0
        while begin < updates.shape[1]:
            for width in widths:
                yield updates[:, begin : begin + width]
                begin += width

    whole = 4 * SEGMENT * len(updates)  # bytes of a segment of all rows
    return ColumnBlocks(
        passes, num_rows=len(updates), num_params=updates.shape[1], budget=budget or whole
    )


# --- streams --------------------------------------------------------------------------------


@every_rule
def test_a_stream_has_the_bits_of_rows_in_memory(
    same_bits: Check, same_state: Check, same_report: Check, name: str, options: dict[str, Any]
) -> None:
    first, second = make(name, options), make(name, options)
    params = torch.randn(D)
    twin = params.clone()
    for t, (updates, clients) in enumerate(rounds()):
        source = blocks(updates, *[(1024,), (700, 0, 13), (D,), (1,) * 2 + (4096,)][t])
        same_report(first.step(params, updates, clients), second.step(twin, source, clients))
        same_bits(params, twin)
        same_state(first, second)


@pytest.mark.parametrize("segment", [SEGMENT, 1 << 13])  # several pieces; one piece, which is kept
@every_rule
def test_blocks_may_all_be_the_same_tensor(
    same_bits: Check, name: str, options: dict[str, Any], segment: int
) -> None:
    first, second = make(name, options), make(name, options)
    first.columns = second.columns = Columns(segment)
    params = torch.randn(D)
    twin = params.clone()
    for width, (updates, clients) in zip((700, D, 900, 5_000), rounds(), strict=True):

        def passes(width: int = width, updates: Tensor = updates) -> Iterator[Tensor]:
            space = torch.empty(len(updates), width)
            for part in updates.split(width, dim=1):
                yield space[:, : part.shape[1]].copy_(part)
                space.fill_(math.nan)

        first.step(params, updates, clients)
        source = ColumnBlocks(passes, num_rows=len(updates), num_params=D)
        second.step(twin, source, clients)
        same_bits(params, twin)


@every_rule
def test_a_smaller_budget_changes_only_roundings(name: str, options: dict[str, Any]) -> None:
    first, second = make(name, options), make(name, options)
    second.columns = Columns(1 << 20)
    params = torch.randn(D)
    twin = params.clone()
    for updates, clients in rounds():
        first.step(params, updates, clients)
        small = blocks(updates, 100, budget=4 * 1024 * len(updates) + 17)
        second.step(twin, small, clients)
    # Gram matrices differ by 1e-8 of the norms; iterations multiply this in the factors.
    assert (params - twin).abs().max() <= 1e-6 * params.abs().max()


@pytest.mark.parametrize("name", ["geometric-median", "fdms", "krum"])
def test_a_budget_of_all_columns_gives_the_bits_of_memory(same_bits: Check, name: str) -> None:
    """d is between two powers of two. The budget holds d columns of all rows, and not more."""
    updates, starts = torch.randn(3, D), itertools.count()

    def passes() -> Iterator[Tensor]:
        next(starts)
        yield updates

    budget = 4 * 3 * D
    sources = [TensorRows(updates, budget=budget)]
    sources.append(ColumnBlocks(passes, num_rows=3, num_params=D, budget=budget))
    expected = torch.zeros(D)
    fastagg.make(name, num_clients=K, num_params=D).step(expected, updates, [0, 1, 2])
    for source in sources:
        params = torch.zeros(D)
        fastagg.make(name, num_clients=K, num_params=D).step(params, source, [0, 1, 2])
        same_bits(params, expected)
    assert next(starts) == 1  # the piece is kept for the second pass


def test_a_budget_of_a_few_columns_is_enough_if_there_are_no_more(same_bits: Check) -> None:
    updates = torch.randn(3, 5)
    params, expected = torch.zeros(5), torch.zeros(5)
    agg = fastagg.make("fedavg", num_clients=K, num_params=5)
    agg.step(expected, updates, [0, 1, 2])
    agg.step(params, TensorRows(updates, budget=4 * 3 * 5), [0, 1, 2])
    same_bits(params, expected)
    with pytest.raises(ValueError, match="budget: expected at least 60 bytes, for 5 columns"):
        agg.step(params, TensorRows(updates, budget=4 * 3 * 5 - 1), [0, 1, 2])
    same_bits(params, expected)


@every_rule
def test_rows_of_other_dtypes_are_converted(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    first, second = make(name, options), make(name, options)
    params, twin = torch.zeros(D), torch.zeros(D)
    for updates, clients in rounds(2):
        narrow = [row.bfloat16() if s % 2 else row.half() for s, row in enumerate(updates)]
        first.step(params, [row.float() for row in narrow], clients)
        second.step(twin, TensorRows(narrow), clients)
        same_bits(params, twin)


@every_rule
def test_a_stream_that_breaks_changes_nothing(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any]
) -> None:
    agg, twin = make(name, options), make(name, options)
    params = torch.randn(D)
    old = params.clone()
    for updates, clients in rounds(2):
        agg.step(params, updates, clients)
        twin.step(old, updates, clients)
    updates = torch.randn(3, D)
    for last in range(1, _passes(name, options) + 1):
        calls = itertools.count(1)

        def passes(calls: Iterator[int] = calls, last: int = last) -> Iterator[Tensor]:
            yield updates[:, :3000]
            if next(calls) == last:
                raise OSError("the network is gone")
            yield updates[:, 3000:]

        source = ColumnBlocks(passes, num_rows=3, num_params=D, budget=4 * 3 * 1024)
        with pytest.raises(OSError, match="network"):
            agg.step(params, source, [0, 1, 2])
        same_bits(params, old)
        same_state(agg, twin)


def test_a_source_can_be_used_again_with_other_numbers(same_bits: Check) -> None:
    agg, twin = make("fdms", {}), make("fdms", {})
    params, other = torch.zeros(D), torch.zeros(D)
    received: list[Tensor] = []
    for segment in (1 << 20, SEGMENT):  # all columns in one piece, or several pieces
        agg.columns = twin.columns = Columns(segment)
        source = ColumnBlocks(lambda: received[-1:], num_rows=3, num_params=D)
        for _ in range(2):
            updates = torch.randn(3, D)
            received.append(updates)
            agg.step(params, source, [0, 1, 2])
            twin.step(other, updates, [0, 1, 2])
            same_bits(params, other)


def test_a_source_can_be_used_again_after_it_broke_in_its_second_piece(same_bits: Check) -> None:
    updates, calls = torch.randn(3, D), itertools.count()

    def passes() -> Iterator[Tensor]:
        yield updates[:, :1024]
        if next(calls) == 0:
            raise OSError("the network is gone")
        yield updates[:, 1024:]

    source = ColumnBlocks(passes, num_rows=3, num_params=D, budget=4 * 3 * 1024)
    agg, params, expected = make("fedavg", {}), torch.zeros(D), torch.zeros(D)
    with pytest.raises(OSError, match="network"):
        agg.step(params, source, [0, 1, 2])
    agg.step(params, source, [0, 1, 2])
    make("fedavg", {}).step(expected, updates, [0, 1, 2])
    same_bits(params, expected)


def _passes(name: str, options: dict[str, Any]) -> int:
    """Return how often a step reads its rows."""
    count = 0
    updates = torch.randn(3, D)

    def passes() -> Iterator[Tensor]:
        nonlocal count
        count += 1
        return iter([updates])

    source = ColumnBlocks(passes, num_rows=3, num_params=D, budget=4 * 3 * 1024)
    make(name, options).step(torch.zeros(D), source, [0, 1, 2])
    return count


@every_rule
def test_a_step_reads_rows_at_most_twice(name: str, options: dict[str, Any]) -> None:
    assert _passes(name, options) <= 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("fedavg", "amplified", "fedau", "fedbuff")),
        ("median", {}),
        ("fdms", {}),
        ("mifa", {}),
        ("mifa-client", {}),
        ("mimic", {}),
        ("mimic", {"mode": "client"}),
    ],
)
def test_a_step_reads_rows_once(name: str, options: dict[str, Any]) -> None:
    assert _passes(name, options) == 1


@every_rule
def test_nan_in_a_stream_is_dropped_and_reported(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any]
) -> None:
    agg = make(name, options, nonfinite="drop", max_norm=None)
    twin = make(name, options)
    params, other = torch.zeros(D), torch.zeros(D)
    updates = torch.randn(4, D)
    bad = updates.clone()
    bad[1, 4444] = math.nan
    report = agg.step(params, blocks(bad, 900), [3, 0, 5, 1])
    assert report.rejected.tolist() == [0] and report.active.tolist() == [1, 3, 5]
    twin.step(other, updates[[0, 2, 3]], [3, 5, 1])
    same_bits(params, other)
    same_state(agg, twin)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (lambda u: blocks(u[:, :-1], 900), "expected rows of 5003 elements, got 5002"),
        (lambda u: ColumnBlocks(lambda: [u[:2]], num_rows=3, num_params=D), r"blocks \[3, n\]"),
        (lambda u: ColumnBlocks(lambda: [u[:, 9:]], num_rows=3, num_params=D), "got 4994"),
        (lambda u: ColumnBlocks(lambda: [u, u], num_rows=3, num_params=D), "got more"),
        (lambda u: blocks(u, 900, budget=100), "budget: expected at least 12288 bytes"),
        (lambda u: blocks(u[:2], 900), r"one id per row of updates \(2\), got 3"),
    ],
)
def test_bad_streams(source: Callable[[Tensor], ColumnBlocks], match: str) -> None:
    agg, params = make("fdms", {}), torch.zeros(D)
    with pytest.raises(ValueError, match=match):
        agg.step(params, source(torch.randn(3, D)), [0, 1, 2])
    assert params.count_nonzero() == 0


@pytest.mark.parametrize("rows", [5, None, torch.tensor(1.0), torch.zeros(3), "ab"])
def test_rows_that_are_no_sequence(rows: Any) -> None:
    with pytest.raises(TypeError, match=r"^rows: expected a tensor \[S, d\] or a sequence"):
        TensorRows(rows)


def test_bad_sources() -> None:
    with pytest.raises(TypeError, match="a function that starts an iterator"):
        ColumnBlocks(iter([torch.zeros(3, D)]), num_rows=3, num_params=D)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected blocks of floating-point tensors"):
        source = ColumnBlocks(lambda: [torch.ones(3, D).int()], num_rows=3, num_params=D)
        make("fedavg", {}).step(torch.zeros(D), source, [0, 1, 2])
    with pytest.raises(ValueError, match=r"rows\[1\]: expected 5 columns, got 6"):
        TensorRows([torch.zeros(5), torch.zeros(6)])
    with pytest.raises(TypeError, match=r"rows\[0\]: expected a floating-point tensor"):
        TensorRows([torch.zeros(5).int()])


# --- memory ---------------------------------------------------------------------------------


def forms(updates: Tensor, clients: Tensor) -> Iterator[Any]:
    """Yield the updates in every form that a step accepts."""
    buffer = UpdateBuffer(K, D)
    for client, row in zip(clients.tolist(), updates, strict=True):
        buffer.row(client).copy_(row)
    yield from (updates, list(updates), buffer, blocks(updates, 900))


@pytest.mark.parametrize(("name", "options"), REMEMBERING)
@pytest.mark.parametrize("folder", [False, True])
def test_a_bfloat16_memory_is_a_float32_one_of_rounded_updates(
    same_bits: Check, tmp_path: Path, name: str, options: dict[str, Any], folder: bool
) -> None:
    where = {"memory_folder": tmp_path} if folder else {}
    narrow = make(name, options, memory_dtype="bfloat16", **where)
    wide = make(name, options)
    assert narrow.memory_bytes < 0.6 * wide.memory_bytes + 8 * D
    params = torch.randn(D)
    twin = params.clone()
    for t, (updates, clients) in enumerate(rounds(8)):
        narrow.step(params, list(forms(updates, clients))[t % 4], clients)
        wide.step(twin, updates.bfloat16().float(), clients)
        same_bits(params, twin)
    for key, value in narrow.state_dict().items():
        expected = wide.state_dict()[key]
        assert torch.equal(value.to(expected.dtype), expected)


def test_a_bfloat16_memory_of_many_clients_can_be_loaded(tmp_path: Path) -> None:
    """More rows than can be converted to float32 together."""
    K, d = 20_000, 3
    agg = fastagg.make("mifa", num_clients=K, num_params=d, memory_dtype="bfloat16")
    params, path = torch.zeros(d), tmp_path / "rule"
    agg.step(params, torch.randn(2, d), [1, K - 1])
    agg.save(path, params=params)
    twin = torch.zeros(d)
    loaded = fastagg.load(path, params=twin)
    for aggregator, vector in ((agg, params), (loaded, twin)):
        aggregator.step(vector, torch.ones(1, d), [7])
    assert torch.equal(params, twin)


@pytest.mark.parametrize(("name", "options"), REMEMBERING)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_memory_rows_are_converted_however_many_there_are(
    same_bits: Check,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    dtype: str,
) -> None:
    """More rows than the internal budget holds 1024 columns of, with 3 instead of 16,385 rows."""
    plenty, scarce = (make(name, options, memory_dtype=dtype) for _ in range(2))
    params = torch.randn(D)
    twin = params.clone()
    for updates, clients in rounds():
        plenty.step(params, updates, clients)
        with monkeypatch.context() as patch:
            patch.setattr("fastagg.updates.any_rows.SCRATCH_BYTES", 4 * 2 * 1024)
            scarce.step(twin, updates, clients)
        same_bits(params, twin)


def test_rounding_to_bfloat16_is_as_small_as_stated() -> None:
    updates = torch.randn(2, 10_000) * torch.logspace(-20, 20, 10_000)
    error = (updates.bfloat16().float() - updates).abs()
    assert (error <= 2.0**-8 * updates.abs()).all()
    assert (error > 2.0**-9 * updates.abs()).any()  # the bound is tight to a factor of 2


@pytest.mark.parametrize(("name", "options"), MAPPABLE)
def test_a_mapped_memory_has_the_same_bits(
    same_bits: Check, same_state: Check, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    mapped, plain = make(name, options, memory_folder=tmp_path), make(name, options)
    assert list(tmp_path.iterdir()) == []  # the file has no name
    params = torch.randn(D)
    twin = params.clone()
    for t, (updates, clients) in enumerate(rounds(8)):
        mapped.step(params, list(forms(updates, clients))[t % 4], clients)
        plain.step(twin, updates, clients)
        same_bits(params, twin)
        same_state(mapped, plain)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *MAPPABLE,
        ("mifa", {"memory_dtype": "bfloat16"}),
        ("stale", {"memory_dtype": "int8"}),
        ("krum", {"memory_dtype": "int8", "reuse": True}),
    ],
)
def test_checkpoints_of_other_memories(
    same_bits: Check, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    mapped = make(name, options, memory_folder=tmp_path)
    params = torch.randn(D)
    for updates, clients in rounds():
        mapped.step(params, blocks(updates, 900), clients)
    mapped.save(tmp_path / "a")
    again, plain = (
        fastagg.load(tmp_path / "a", memory_folder=tmp_path),
        fastagg.load(tmp_path / "a"),
    )
    for agg in (again, plain):
        agg.columns = Columns(SEGMENT)
    others = [params.clone(), params.clone()]
    for updates, clients in rounds():
        mapped.step(params, updates, clients)
        for agg, other in zip((again, plain), others, strict=True):
            agg.step(other, updates, clients)
            same_bits(params, other)


def test_rows_in_a_file_are_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory_folder: expected None on cuda"):
        RowStore(folder=tmp_path).allocate(1, 3, torch.device("cuda"))
    assert list(tmp_path.iterdir()) == []


def test_rows_of_the_memory_itself_are_refused(tmp_path: Path) -> None:
    agg = make("geometric-median", {"reuse": True}, memory_folder=tmp_path)
    agg.step(torch.zeros(D), torch.randn(2, D), [1, 4])
    with pytest.raises(ValueError, match=r"must not share memory .* client 3"):
        agg.step(torch.zeros(D), [torch.randn(D), agg.memory.rows[4]], [0, 3])


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedvarp", {}), ("mifa", {}), ("stale-models", {}), ("mimic", {})],
)
def test_rows_that_the_step_would_overwrite_are_refused_before_anything_is_written(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any]
) -> None:
    agg, twin = make(name, options), make(name, options)
    params = torch.randn(D)
    old, updates = params.clone(), torch.randn(3, D)
    agg.step(params, updates, [1, 4, 5])
    twin.step(old, updates, [1, 4, 5])
    memory = agg.corrections if isinstance(agg, fastagg.MimiC) else agg.memory
    for rows, clients in (([memory.rows[4]], [4]), ([memory.rows[4], updates[0]], [1, 4])):
        with pytest.raises(ValueError, match=r"must not share memory .* client"):
            agg.step(params, rows, clients)
        same_bits(params, old)
        same_state(agg, twin)


@pytest.mark.parametrize(
    ("name", "options", "error", "match"),
    [
        ("mifa", {"memory_dtype": "float16"}, ValueError, "memory_dtype: expected one of"),
        ("mifa", {"memory_folder": "/nowhere/at/all"}, ValueError, "memory_folder: expected a fol"),
        ("stale-models", {"memory_dtype": "bfloat16"}, ValueError, "models are remembered rel"),
        ("stale-models", {"memory_dtype": "int8"}, ValueError, "models are remembered rel"),
        ("mifa", {"memory_dtype": ["int8"]}, ValueError, "memory_dtype: expected one of"),
        ("mimic", {"memory_dtype": "bfloat16"}, TypeError, "no option.*memory_dtype"),
        ("fedavg", {"memory_folder": "."}, TypeError, "no option.*memory_folder"),
        ("krum", {"memory_dtype": "bfloat16"}, ValueError, "expected reuse=True"),
        ("krum", {"memory_dtype": "int8"}, ValueError, "expected reuse=True"),
    ],
)
def test_bad_memory_options(
    name: str, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fastagg.make(name, num_clients=2, num_params=3, **options)


@pytest.mark.parametrize("folder", [5, b"x", {"a": 1}])
def test_a_memory_folder_that_is_no_path_is_named(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^memory_folder: expected a folder, got "):
        fastagg.make("mifa", num_clients=3, num_params=2, memory_folder=folder)
    fastagg.make("mifa", num_clients=3, num_params=2).save(tmp_path / "a")
    with pytest.raises(TypeError, match=r"^memory_folder: expected a folder, got "):
        fastagg.load(tmp_path / "a", memory_folder=folder)
