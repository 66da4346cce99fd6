# SPDX-License-Identifier: Apache-2.0
"""Which senders a server asks: at random, or those first that were asked the longest ago."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg import CheckpointError, checkpoint
from fastagg.integrations._report import Answer
from fastagg.integrations._server import AggregationServer

NAMES = [f"n{k}" for k in range(9)]


def pack(vector: torch.Tensor) -> dict[str, bytes]:
    stream = io.BytesIO()
    np.save(stream, vector.numpy())
    return {"w": stream.getvalue()}


def serve(**options: Any) -> AggregationServer:
    given = {"num_clients": len(NAMES), "selection": "longest-absent"} | options
    server = AggregationServer("mifa", **given)
    server.set_model(pack(torch.zeros(3)))
    return server


def run_round(
    server: AggregationServer, present: list[str], count: int, silent: Collection[str] = ()
) -> list[str]:
    """Ask ``count`` of those that are present; all but ``silent`` answer. Return who was asked."""
    asked = server.sample(present, count, seed=3)
    server.open_round(asked, present)
    params = server.params + server.rounds
    server.close_round([Answer(n, pack(params), int(n[1:])) for n in asked if n not in silent])
    return asked


@given(data=st.data(), count=st.integers(1, 4))
def test_follows_the_oracle(data: st.DataObject, count: int) -> None:
    """FedLaAvg: of those available, the ``count`` whose last participation is the earliest."""
    server = serve(max_empty_rounds=100)
    last = dict.fromkeys(NAMES, -1)
    for t in range(data.draw(st.integers(1, 8))):
        present = data.draw(st.lists(st.sampled_from(NAMES), unique=True))
        asked = run_round(server, present, count)
        assert len(asked) == len(set(asked)) == min(count, len(present))
        rest = set(present) - set(asked)
        assert all(last[a] <= last[r] for a in asked for r in rest)
        last |= dict.fromkeys(asked, t)


def test_everybody_is_asked_equally_often() -> None:
    server = serve()
    asked = [name for _ in range(9) for name in run_round(server, NAMES, 3)]
    assert [asked.count(name) for name in NAMES] == [3] * 9
    assert sorted(asked[:9]) == sorted(asked[9:18]) == NAMES
    assert asked[:9] != asked[9:18] != NAMES  # ties are at random


def test_who_does_not_answer_is_not_asked_again_at_once() -> None:
    server = serve()
    asked = [run_round(server, NAMES, 3, silent={"n4"}) for _ in range(3)]
    assert sum("n4" in names for names in asked) == 1


def test_a_resumed_run_asks_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    whole, first = serve(), serve(checkpoint_path=path)
    asked = [run_round(whole, NAMES[t % 3 :], 2) for t in range(8)]
    for t in range(5):
        run_round(first, NAMES[t % 3 :], 2)
    later = serve()
    later.resume(path)
    assert [run_round(later, NAMES[t % 3 :], 2) for t in range(5, 8)] == asked[5:]
    assert torch.equal(later.params, whole.params)


def test_a_run_that_is_interrupted_within_a_round_asks_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    whole, first = serve(), serve(checkpoint_path=path, checkpoint_every=4)
    asked = [run_round(whole, NAMES, 2) for _ in range(8)]
    for _ in range(5):
        run_round(first, NAMES, 2)
    assert first.sample(NAMES, 2, seed=3) == asked[5]
    first.open_round(asked[5], NAMES)
    first.guard._save()  # as a signal does
    later = serve()
    later.resume(path)
    assert later.rounds == 5
    assert [run_round(later, NAMES, 2) for _ in range(5, 8)] == asked[5:]


def test_an_older_checkpoint_and_one_of_a_random_selection_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    server = serve(selection="random", checkpoint_path=path)
    run_round(server, NAMES, 2)
    again = serve()
    again.resume(path)
    assert again.selection.asked == {}
    kind, content, state = checkpoint.read(path, limit=checkpoint.LISTS_LIMIT)
    del content["asked"]
    checkpoint.write(path, kind, content, state, limit=checkpoint.LISTS_LIMIT)
    serve().resume(path)


@pytest.mark.parametrize("asked", [[], {"n0": -1}, {"n0": True}, {"n0": "1"}, {"n0": 10**30}])
def test_a_forged_map_is_refused(asked: object, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_round(serve(checkpoint_path=path), NAMES, 2)
    kind, content, state = checkpoint.read(path, limit=checkpoint.LISTS_LIMIT)
    content["asked"] = asked
    checkpoint.write(path, kind, content, state, limit=checkpoint.LISTS_LIMIT)
    server = serve()
    with pytest.raises(CheckpointError, match="asked: expected a map of senders to rounds"):
        server.resume(path)
    assert server.rounds == 0


def test_names_of_who_has_left_are_dropped() -> None:
    server = serve(max_empty_rounds=100)
    for t in range(20):
        present = [f"m{t}", *NAMES[:2]]
        server.open_round(server.sample(present, 3, seed=0), present)
        server.close_round([])
    assert sorted(server.selection.asked) == ["m19", "n0", "n1"]


def test_evaluation_is_random() -> None:
    server = serve()
    drawn = [server.sample(NAMES, 3, seed, "evaluate") for seed in range(20)]
    run_round(server, NAMES, 3)
    assert len({tuple(sorted(names)) for names in drawn}) > 5


def test_wrong_selections() -> None:
    with pytest.raises(ValueError, match="selection: expected one of"):
        serve(selection="oldest")
