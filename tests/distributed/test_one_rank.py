# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one rank: forged ones are refused by one error, and a save waits for a step."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastagg
from fastagg import CheckpointError, checkpoint
from fastagg.distributed import ShardedAggregator, storage
from fastagg.distributed.ranks import Ranks

K, D = 4, 7


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "state", "match"),
    [
        ({"server_lr": "x"}, {}, "options: server_lr: expected a number"),
        ({"empty_rounds": []}, {}, "options: empty_rounds"),
        ({"nonfinite": 5}, {}, "options: nonfinite"),
        ({"more": 1}, {}, "options: expected some of"),
        ({"memory_folder": "/tmp"}, {}, "options: expected some of"),
        ({}, {"total": torch.full((D,), 1e300, dtype=torch.float64)}, r"state\['total'\]"),
        ({}, {"total": torch.full((D,), math.nan, dtype=torch.float64)}, r"state\['total'\]"),
        ({}, {"total": torch.zeros(D, dtype=torch.int64)}, r"state\['total'\]: expected dtype"),
        ({}, {"total": torch.zeros(2 * D)}, "total: expected 7 columns"),
        ({}, {"total": torch.zeros(2 * D, dtype=torch.float64)}, "state: expected"),
    ],
)
def test_a_forged_file_is_refused(
    options: dict[str, Any], state: dict[str, torch.Tensor], match: str, tmp_path: Path
) -> None:
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D)
    agg.step(torch.zeros(D), torch.randn(2, D), [0, 2])
    folder = tmp_path / "checkpoint"
    agg.save(folder)
    file = folder / storage.describe(folder).manifest.file(0)
    rule, saved, tensors = checkpoint.read(file)
    checkpoint.write(file, rule, saved | options, tensors | state)
    with pytest.raises(CheckpointError, match=match) as raised:
        ShardedAggregator.load(folder)
    assert str(raised.value).startswith(str(folder))


def test_an_error_that_names_a_file_whose_name_is_no_text_reaches_all_ranks(tmp_path: Path) -> None:
    name = os.fsdecode(b"missing-\xff")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        ShardedAggregator.load(tmp_path / name)
    with pytest.raises(KeyError, match="missing"):
        Ranks(None).agree("the options", error=KeyError(name))


def test_an_error_in_an_option_of_the_caller_stays_what_it_is(tmp_path: Path) -> None:
    ShardedAggregator("mifa", num_clients=K, num_params=D).save(tmp_path / "checkpoint")
    with pytest.raises(TypeError, match="server_lr: expected a number"):
        ShardedAggregator.load(tmp_path / "checkpoint", server_lr="x")


def test_bounds_are_set_after_the_state_was_read(tmp_path: Path) -> None:
    agg = ShardedAggregator("fedavg", num_clients=K, num_params=D, clip_norm={"initial": 2.0})
    agg.step(torch.zeros(D), torch.ones(K, D), range(K))
    agg.save(tmp_path / "checkpoint")
    for value, bound in (
        ({"initial": 2.0}, float(agg.local.state_dict()["clip_bound"])),
        ({"initial": 50.0}, 50.0),
    ):
        given = {"clip_norm": value, "nonfinite": "drop"}
        loaded = ShardedAggregator.load(tmp_path / "checkpoint", **given).aggregator
        assert float(loaded.local.state_dict()["clip_bound"]) == bound
        assert loaded.max_norm is not None
    with pytest.raises(ValueError, match="clip_norm: count_noise: expected 0"):
        ShardedAggregator.load(tmp_path / "checkpoint", clip_norm={"count_noise": 1.0})


def test_a_save_waits_for_a_step_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D)
    entered, leave, real = threading.Event(), threading.Event(), agg.local._commit

    def slow(*arguments: Any) -> None:
        entered.set()
        leave.wait(60.0)
        real(*arguments)

    monkeypatch.setattr(agg.local, "_commit", slow)
    step = threading.Thread(target=agg.step, args=(torch.zeros(D), torch.ones(2, D), [0, 2]))
    step.start()
    assert entered.wait(60.0)
    save = threading.Thread(target=agg.save, args=(tmp_path / "checkpoint",))
    save.start()
    save.join(0.2)
    assert save.is_alive() and not (tmp_path / "checkpoint").exists()
    leave.set()
    step.join()
    save.join()
    found = ShardedAggregator.load(tmp_path / "checkpoint").aggregator.state_dict()
    assert torch.equal(found["memory"][0], torch.ones(D))


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("notes", "error"),
    [
        ({"loss": math.nan}, ValueError),
        ({"losses": [1.0, -math.inf]}, ValueError),
        ({5: 1, "5": 2}, ValueError),
        ({"by_client": {5: 1, "5": 2}}, ValueError),
        ({"large": 10**5000}, ValueError),
        ({"deep": nested(100_000)}, ValueError),
        ({"object": object()}, TypeError),
        ({(1, 2): 3}, TypeError),
    ],
)
def test_notes_that_cannot_be_loaded_are_refused(
    notes: dict[Any, Any], error: type[Exception], tmp_path: Path
) -> None:
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D)
    folder = tmp_path / "checkpoint"
    agg.save(folder, notes={"rounds": 0})
    files = {path: path.read_bytes() for path in folder.iterdir()}
    agg.step(torch.zeros(D), torch.randn(2, D), [0, 2])
    with pytest.raises(error, match="notes: expected values that JSON represents"):
        agg.save(folder, notes=notes)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    assert ShardedAggregator.load(folder).notes == {"rounds": 0}


def test_notes_are_loaded_as_json_has_them(tmp_path: Path) -> None:
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D)
    notes = {9: 0.1, 10: None, "pair": (1, [True]), "text": "\ud800 \u00e9"}
    agg.save(tmp_path / "checkpoint", notes=notes)
    expected = {"9": 0.1, "10": None, "pair": [1, [True]], "text": "\ud800 \u00e9"}
    assert ShardedAggregator.load(tmp_path / "checkpoint").notes == expected


@pytest.mark.parametrize("num_params", [D - 1, D + 1])
def test_a_checkpoint_is_not_loaded_with_another_number_of_columns(
    num_params: int, tmp_path: Path
) -> None:
    """The state of some rules does not depend on d, but further columns do."""
    agg = ShardedAggregator("fdms", num_clients=K, num_params=D)
    agg.save(tmp_path / "checkpoint", columns={"params": torch.ones(D)})
    with pytest.raises(ValueError, match=rf"^num_params: expected {D}, .* got {num_params}"):
        ShardedAggregator.load(tmp_path / "checkpoint", num_params=num_params)
    assert ShardedAggregator.load(tmp_path / "checkpoint", num_params=D).aggregator.num_own == D


def test_options_that_may_change_between_steps_are_those_of_the_rule() -> None:
    agg = ShardedAggregator("fedavg", num_clients=K, num_params=D)
    agg.min_active, agg.clip_norm, agg.noise_multiplier = 2, 0.5, 1.0
    rule = agg.local
    assert (rule.min_active, rule.clip_norm, rule.noise_multiplier) == (2, 0.5, 1.0)
    assert (agg.min_active, agg.clip_norm, agg.noise_multiplier) == (2, 0.5, 1.0)
    report = agg.step(torch.zeros(D), 100.0 * torch.ones(2, D), [0, 1])
    assert report.clip_norm == 0.5 and report.noise is not None
    for wrong in (fastagg.AdaptiveClip(count_noise=2.0), 0.0):
        with pytest.raises(ValueError, match=r"^clip_norm: "):
            agg.clip_norm = wrong
    assert agg.clip_norm == rule.clip_norm == 0.5
    with pytest.raises(ValueError, match="min_active: expected at most"):
        agg.min_active = K + 1
    with pytest.raises(AttributeError, match="nonfinite"):  # an option without a property here
        agg.nonfinite = "drop"  # type: ignore[attr-defined]


@pytest.mark.parametrize("notes", [[1], "rounds", 3])
def test_notes_without_names_are_refused(notes: Any, tmp_path: Path) -> None:
    agg = ShardedAggregator("fedavg", num_clients=K, num_params=D)
    with pytest.raises(TypeError, match="notes: expected a mapping, got "):
        agg.save(tmp_path / "checkpoint", notes=notes)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda agg: agg.own(torch.tensor(1.0)), ValueError, r"whole: .* of 7, got \[\]"),
        (lambda agg: agg.own([0.0] * D), TypeError, "whole: expected a torch.Tensor, got list"),
        (lambda agg: agg.gather([0.0] * D), TypeError, "own: expected a torch.Tensor, got list"),
        (lambda agg: agg.gather(torch.zeros(D), block=0), ValueError, "block: expected at least 1"),
    ],
)
def test_what_is_no_tensor_of_columns_is_named(
    call: Callable[[ShardedAggregator], object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"^{match}"):
        call(ShardedAggregator("fedavg", num_clients=K, num_params=D))


@pytest.mark.parametrize(
    ("columns", "error", "match"),
    [
        ({"p": [0.0] * D}, TypeError, "columns: p: expected a torch.Tensor, got list"),
        ({"p": torch.tensor(1.0)}, ValueError, "columns: p: expected a last dimension of 7"),
        ({1: torch.zeros(D)}, TypeError, "columns: expected names as keys, got 1"),
        ([torch.zeros(D)], TypeError, "columns: expected a mapping, got list"),
    ],
)
def test_columns_that_cannot_be_saved_are_named(
    columns: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    agg = ShardedAggregator("fedavg", num_clients=K, num_params=D)
    with pytest.raises(error, match=f"^{match}"):
        agg.save(tmp_path / "checkpoint", columns=columns)
    assert not (tmp_path / "checkpoint").exists()


def test_columns_of_any_number_of_dimensions_come_back(tmp_path: Path) -> None:
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D)
    shapes = [(D,), (3, D), (2, 3, D), (0, 2, D)]
    columns = {f"{len(shape)}d-{shape[0]}": torch.randn(shape) for shape in shapes}
    agg.save(tmp_path / "checkpoint", columns=columns)
    found = ShardedAggregator.load(tmp_path / "checkpoint").columns
    assert found.keys() == columns.keys()
    for name, value in columns.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("other", [torch.zeros(3, 5), torch.zeros(2, 5, dtype=torch.int64)])
def test_files_of_other_shapes_and_dtypes_are_refused(other: torch.Tensor, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    agg = ShardedAggregator("fedavg", num_clients=K, num_params=D)
    agg.save(folder, columns={"m": torch.zeros(2, D)})
    manifest = storage.describe(folder).manifest
    halves = dataclasses.replace(manifest, bounds=[[0, 2], [2, D]])
    (folder / storage.MANIFEST).write_text(storage._text(halves))
    options = agg.local.options()
    for rank, column in enumerate((torch.zeros(2, 2), other)):
        path = folder / halves.file(rank)
        checkpoint.write(path, "fedavg", options, {storage._FURTHER + "m": column})
    with pytest.raises(CheckpointError, match=r"m: expected \('F32', \(2,\)\), as in other files"):
        ShardedAggregator.load(folder)


@pytest.mark.parametrize("field", ["columns", "split"])
def test_a_name_that_comes_twice_in_a_manifest_is_refused(field: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D)
    agg.save(folder, columns={"params": torch.ones(D)})
    manifest = storage.describe(folder).manifest
    changed = dataclasses.replace(manifest, **{field: 2 * getattr(manifest, field)})
    (folder / storage.MANIFEST).write_text(storage._text(changed))
    with pytest.raises(CheckpointError, match=f"damaged: {field}"):
        ShardedAggregator.load(folder)


def test_clients_of_mifa_client_withdraw_their_rows() -> None:
    agg = ShardedAggregator("mifa-client", num_clients=K, num_params=D)
    rows = torch.randn(2, D)
    agg.step(torch.zeros(D), rows, [0, 2])
    before = agg.state_dict()
    with pytest.raises(ValueError, match=r"cannot forget .*call withdraw"):
        agg.forget([2])
    for wrong, ids in ((rows[1:, :-1], [2]), (rows[1:] * math.nan, [2]), (rows[1:], [1])):
        with pytest.raises(ValueError, match=r"^rows: expected"):
            agg.withdraw(wrong, ids)
    with pytest.raises(IndexError, match="clients: expected ids"):
        agg.withdraw(rows[1:], [K])
    assert all(torch.equal(value, before[name]) for name, value in agg.state_dict().items())
    agg.withdraw(rows[1:], [2])
    assert agg.state_dict()["answers"].tolist() == [1, 0, 0, 0]
    # one product and one sum in float64
    assert (agg.state_dict()["total"] - rows[0]).abs().max() <= 2.0**-50
    agg.step(torch.zeros(D), rows, [2, 3])
    assert agg.local.committed == 2
    with pytest.raises(TypeError, match="withdraw: expected the rule 'mifa-client', got 'mifa'"):
        ShardedAggregator("mifa", num_clients=K, num_params=D).withdraw(rows, [0, 1])


def test_flushing_denormals_does_not_change_what_is_saved(tmp_path: Path) -> None:
    """Rows that have a reference are computed as they are written."""
    agg = ShardedAggregator("mimic", num_clients=K, num_params=D)
    buffer = fastagg.UpdateBuffer(K, D)
    for client in range(K):
        buffer.row(client).fill_(1e-39 * (client + 1))
    agg.step(torch.zeros(D), buffer, range(K))
    before = agg.state_dict()
    assert 0 < before["corrections"].abs().max() < torch.finfo(torch.float32).tiny
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        agg.save(tmp_path / "checkpoint")
    finally:
        torch.set_flush_denormal(False)
    after = ShardedAggregator.load(tmp_path / "checkpoint").aggregator.state_dict()
    for name, value in before.items():
        assert value.numpy().tobytes() == after[name].numpy().tobytes(), name
