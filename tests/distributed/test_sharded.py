# SPDX-License-Identifier: Apache-2.0
"""ShardedAggregator with real processes: the same bits as one process, failures, restarts.

Ranks are gloo processes on this machine that rendezvous through a file. worker.py is their code.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg.updates.columns import Columns
from tests.distributed import worker

PATIENCE = 180.0  # seconds for a job on a busy machine; each takes 1 to 10

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module", name="run")
def _run() -> Run:
    """run(job, ranks, folder, dead=()) -> the results of each rank (None for dead ranks)."""
    # Ranks are forked from a server that has already imported torch, which saves seconds per rank.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])

    def run(job: str, ranks: int, folder: Path, dead: tuple[int, ...] = ()) -> list[Any]:
        folder.mkdir(exist_ok=True)
        (folder / f"{job}.store").unlink(missing_ok=True)
        processes = [
            context.Process(target=worker.main, args=(job, folder, rank, ranks))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(PATIENCE)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for rank, process in enumerate(processes):
            expected = -signal.SIGKILL if rank in dead else 0
            said = (folder / f"{job}-{rank}.log").read_text()
            assert process.exitcode == expected, f"rank {rank}:\n{said}"
        return [
            None if rank in dead else torch.load(folder / f"{job}-{rank}.pt", weights_only=False)
            for rank in range(ranks)
        ]

    return run


class ArrayLike:
    """An array of a kind that prints few of its numbers, such as a column of a table."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numbers, dtype)

    def __repr__(self) -> str:
        return "ArrayLike(1.0, ..., 3000.0)"


def alone(
    name: str, options: dict[str, Any], rounds: int
) -> tuple[fastagg.Aggregator, Tensor, list[list[float]]]:
    """Run the same rounds in this process, with the same segments."""
    agg = fastagg.make(name, num_clients=worker.K, num_params=worker.D, **options)
    agg.columns = Columns(worker.SEGMENT)
    params = worker.first_params()
    weights = [
        agg.step(
            params,
            updates,
            clients,
            ages=worker.ages_of(options, t, clients),
            weights=worker.round_weights(agg, clients),
        ).weights.tolist()
        for t, (updates, clients) in enumerate(worker.rounds(0, rounds))
    ]
    return agg, params, weights


def test_every_rule_takes_part() -> None:
    assert sorted({name for name, _ in worker.RULES}) == fastagg.available()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ranks_later"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.long)]
)
def test_every_rule_gives_the_bits_of_one_process_also_after_a_restart_on_other_ranks(
    run: Run, tmp_path: Path, ranks: int, ranks_later: int
) -> None:
    first = run("equal", ranks, tmp_path)
    later = run("resume", ranks_later, tmp_path)
    for number, (name, options) in enumerate(worker.RULES):
        _, params, weights = alone(name, options, worker.ROUNDS)
        for seen in first:
            assert seen[number][1] == weights, name
            assert torch.equal(seen[number][0], params), name
        complete = [len(of_round) for of_round in weights] == [4, 4, 0, 4]
        some_left_out = "max_norm" in options or (
            name in ("stale", "mimic") and "staleness" in options
        )
        assert complete is not some_left_out
        agg, params, _ = alone(name, options, 2 * worker.ROUNDS)
        state = agg.state_dict()
        for seen in later:
            assert torch.equal(seen[number][0], params), name
            assert seen[number][1].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(seen[number][1][key], value), (name, key)


@pytest.mark.slow
def test_rules_that_grow_and_forget_have_the_bits_of_one_process(run: Run, tmp_path: Path) -> None:
    expected = []
    for name, options, more in worker.GROWN:
        agg = fastagg.make(name, num_clients=worker.K, num_params=worker.D, **options)
        agg.columns = Columns(worker.SEGMENT)
        params = worker.first_params()
        worker.churn(agg, params, lambda rows: rows, more)
        expected.append(params)
    for results, said, num_clients, answers, total in run("grow", 2, tmp_path):
        for (name, *_), params, wanted in zip(worker.GROWN, results, expected, strict=True):
            assert torch.equal(params, wanted), name
        assert said[0].startswith("RankError: the arguments of grow: expected the same")
        assert said[1].startswith(("ValueError: num_clients: expected at least", "RankError"))
        assert said[2].startswith("RankError: the clients to forget: expected the same")
        assert said[3].startswith(("IndexError: clients", "RankError"))
        assert num_clients == worker.K
        assert said[4].startswith(("ValueError: rows: expected finite", "RankError: withdrawing"))
        assert said[5].startswith(("RankError: the clients that withdraw", "ValueError: clients"))
        assert said[6] == "done" and answers.tolist() == [0, 1, 0, 0, 0, 0]
        assert total.tolist() == [1.0] * worker.D
        assert "MemoryError" in said[7] and said[7].startswith(("MemoryError", "RankError: forget"))
        assert said[8] == "True"  # no rank has forgotten the client


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_all_ranks(run: Run, tmp_path: Path) -> None:
    zero, one = run("refuse", 2, tmp_path)
    assert one["shape"].startswith("ValueError: updates: expected shape")
    assert (
        zero["shape"].startswith("RankError: ")
        and "rank 1 of 2 refused: ValueError" in zero["shape"]
    )
    for key in ("clients", "ages", "weights", "options"):
        for seen in (zero, one):
            assert seen[key].startswith("RankError: ") and "expected the same" in seen[key]
    for key in ("read", "again"):  # in the middle of a step
        assert one[key].startswith("ValueError: updates: expected 907 columns, got 902"), one[key]
        assert (
            zero[key].startswith("RankError: ") and "rank 1 of 2 refused: ValueError" in zero[key]
        )
    for seen in (zero, one):
        assert seen["nan"].startswith("ValueError: updates: expected finite values, got NaN or Inf")
    assert one["gather"].startswith("ValueError: own: expected a last dimension")
    assert zero["gather"].startswith(
        "RankError: gathering columns: rank 1 of 2 refused: ValueError"
    )
    assert one["folder"].startswith("ValueError: memory_folder: expected a folder")
    assert zero["folder"].startswith("RankError: making the rule: rank 1 of 2 refused: ValueError")
    assert one["save"].startswith("ValueError")
    assert zero["save"].startswith("RankError: writing the checkpoint: rank 1 of 2 refused")
    for seen in (zero, one):
        for key in ("shapes", "dtypes"):
            assert seen[key].startswith("RankError: writing the checkpoint: expected the same")
        assert seen["load"].startswith("FileNotFoundError: folder: there is no checkpoint")
        assert seen["unchanged"]
        assert seen["rejected"] == [1]
        assert seen["active"] == [3, 5]


@pytest.mark.slow
def test_a_killed_rank_is_an_error_on_the_others_and_a_restart_ends_at_the_same_bits(
    run: Run, tmp_path: Path
) -> None:
    seen = run("killed", 4, tmp_path, dead=(1,))
    for rank in (0, 2, 3):
        said, seconds, unchanged = seen[rank]
        assert said.startswith(f"RankError: rank {rank} of 4 got no answer in a maximum"), said
        assert seconds < worker.TIMEOUTS["killed"]  # the connection breaks at once
        assert unchanged
    ends = run("restarted", 2, tmp_path)
    _, params, _ = alone("geometric-median", {}, 6)
    for end in ends:
        assert torch.equal(end, params)


@pytest.mark.slow
def test_a_late_rank_is_an_error_within_the_timeout(run: Run, tmp_path: Path) -> None:
    said, seconds, unchanged = run("hung", 2, tmp_path)[0]
    assert said.startswith("RankError: rank 0 of 2 got no answer in the arguments"), said
    assert worker.TIMEOUTS["hung"] - 0.5 < seconds < worker.TIMEOUTS["hung"] + 10.0
    assert unchanged


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest", "version", "flip"])
def test_a_damaged_checkpoint_is_refused(
    run: Run, tmp_path: Path, damage: str, checkpoint: Path
) -> None:
    from fastagg.distributed import storage

    manifest = storage.describe(checkpoint).manifest
    shard = checkpoint / manifest.file(1)
    header = checkpoint / storage.MANIFEST
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-5])
    elif damage == "missing":
        shard.unlink()
    elif damage == "manifest":
        header.write_text(header.read_text()[:-20])
    elif damage == "flip":  # still a valid manifest
        header.write_text(header.read_text().replace('"segment": 5', '"segment": 4'))
    else:
        header.write_text(json.dumps(json.loads(header.read_text()) | {"version": 99}))
    with pytest.raises(
        (ValueError, FileNotFoundError), match=r"truncated|no checkpoint|damaged|99"
    ):
        manifest = storage.describe(checkpoint).manifest
        storage.read(checkpoint, manifest, 0, manifest.num_params)


def test_a_manifest_of_an_older_version_loads_with_a_warning(checkpoint: Path) -> None:
    from fastagg.distributed import storage

    header = checkpoint / storage.MANIFEST
    content = json.loads(header.read_text()) | {"version": 1}
    del content["sha256"]
    header.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="older fastagg and has no checksum"):
        storage.describe(checkpoint)
    header.write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ValueError, match="its checksum is wrong"):
        storage.describe(checkpoint)


def test_a_large_manifest_is_refused(checkpoint: Path) -> None:
    from fastagg.distributed import storage

    def agree(*_: object, error: Exception | None = None) -> None:
        if error is not None:
            raise error

    old = storage.describe(checkpoint).manifest
    agg = fastagg.make("mifa", num_clients=2, num_params=5)
    notes = {"history": [0.5] * 200_000}
    new = dataclasses.replace(old, bounds=[(0, 5)], generation="1" * 16, notes=notes)
    ranks: Any = types.SimpleNamespace(rank=0, agree=agree)
    with pytest.raises(ValueError, match="notes: expected a manifest of at most 1048576 bytes"):
        storage.write(checkpoint, new, agg.options(), agg.state_dict(), {}, ranks)
    assert storage.describe(checkpoint).manifest == old
    (checkpoint / storage.MANIFEST).write_text(" " * (1 << 20) + "{}")
    with pytest.raises(ValueError, match="damaged: expected at most 1048576 bytes"):
        storage.describe(checkpoint)


def test_saving_removes_its_own_old_files_only(checkpoint: Path) -> None:
    from fastagg.distributed import storage

    old = storage.describe(checkpoint).manifest
    model = checkpoint / "model-00001-of-00002.safetensors"
    model.write_bytes(b"another model")
    agg = fastagg.make("mifa", num_clients=2, num_params=5)
    new = dataclasses.replace(old, bounds=[(0, 5)], generation="1" * 16)
    ranks: Any = types.SimpleNamespace(rank=0, agree=lambda *_, **__: None)
    storage.write(checkpoint, new, agg.options(), agg.state_dict(), {}, ranks)
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
        [new.file(0), storage.MANIFEST, model.name]
    )


@pytest.fixture(name="checkpoint")
def _checkpoint(tmp_path: Path) -> Path:
    """Write the checkpoint of two ranks from one process."""
    from fastagg import checkpoint
    from fastagg.distributed import storage

    agg = fastagg.make("mifa", num_clients=2, num_params=5)
    bounds = [(0, 5), (5, 10)]
    manifest = storage.Manifest("mifa", 10, 5, bounds, "0" * 16, ["memory", "total"], [], {})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for rank in range(2):
        checkpoint.write(folder / manifest.file(rank), "mifa", agg.options(), agg.state_dict())
    header = {"format": storage.FORMAT, "version": storage.VERSION, **vars(manifest)}
    header["sha256"] = storage._digest(header)
    (folder / storage.MANIFEST).write_text(json.dumps(header))
    state, _ = storage.read(folder, storage.describe(folder).manifest, 3, 9)
    assert state["memory"].shape == (2, 6)
    return folder


def test_a_missing_process_group_is_a_clear_error() -> None:
    from fastagg.distributed import ShardedAggregator

    with pytest.raises(RuntimeError, match="not initialised: launch with torchrun"):
        ShardedAggregator("fedavg", num_clients=2, num_params=10)


@pytest.mark.parametrize(
    ("num_params", "ranks", "segment", "expected"),
    [
        (10, 1, 4, [(0, 10)]),
        (10, 3, 4, [(0, 4), (4, 8), (8, 10)]),
        (9, 2, 1, [(0, 4), (4, 9)]),
        (
            5 << 20,
            4,
            1 << 20,
            [(0, 1 << 20), (1 << 20, 2 << 20), (2 << 20, 3 << 20), (3 << 20, 5 << 20)],
        ),
    ],
)
def test_ranks_have_whole_segments(
    num_params: int, ranks: int, segment: int, expected: list[tuple[int, int]]
) -> None:
    from fastagg.distributed import shard_bounds

    assert shard_bounds(num_params, ranks, segment) == expected


@pytest.mark.parametrize(
    "form",
    [
        np.asarray,
        torch.from_numpy,
        lambda weights: weights.astype(object),
        lambda weights: {"client_weights": weights[:, None]},
        lambda weights: np.repeat(weights, 2)[::2],
        ArrayLike,
    ],
)
def test_every_number_of_an_array_is_compared(form: Callable[[Any], Any]) -> None:
    from fastagg.distributed.ranks import digest_of

    one = np.arange(1.0, 3001.0)
    other = one.copy()
    other[1500] = 0.5
    assert digest_of([form(one)]) == digest_of([form(one.copy())])
    assert digest_of([form(one)]) != digest_of([form(other)])


def test_too_few_segments() -> None:
    from fastagg.distributed import shard_bounds
    from fastagg.distributed.shards import default_segment

    with pytest.raises(ValueError, match="got 2 segments of 5 columns in 10"):
        shard_bounds(10, 3, 5)
    with pytest.raises(ValueError, match="at least one column for each of 11 ranks"):
        default_segment(10, 11)
    assert default_segment(10, 10) == 1
    assert default_segment(10**9, 8) == 1 << 22  # at most 256 segments


@pytest.mark.parametrize("name", fastagg.available())
def test_rules_declare_which_state_has_columns(name: str) -> None:
    options = {"scaffold": {"local_work": 1.0}}.get(name, {})
    for more in ({}, {"reuse": True}):
        try:
            small, large = (
                fastagg.make(name, num_clients=3, num_params=d, **options, **more).state_dict()
                for d in (7, 8)
            )
        except TypeError:  # no such option
            continue
        differ = {key for key in small if small[key].shape != large[key].shape}
        rule = type(fastagg.make(name, num_clients=3, num_params=7, **options))
        assert differ == rule.column_state & small.keys()
