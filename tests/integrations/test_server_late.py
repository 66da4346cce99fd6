# SPDX-License-Identifier: Apache-2.0
"""Late answers to fastagg.Server: keys of earlier rounds, ages, restarts, threads."""

from __future__ import annotations

import itertools
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import CheckpointError, Server, checkpoint
from fastagg.integrations.server import Task

K, D = 4, 6
FIRST = torch.arange(D, dtype=torch.float32) / 8


def server(rule: str = "fedavg", **options: Any) -> Server:
    every: dict[str, Any] = {"staleness": "constant", "max_staleness": 2, "max_norm": None}
    return Server(rule, {"w": FIRST}, num_clients=K, **every | options)


def expire(loop: Server) -> Any:
    """End the open round as its deadline does; return the report."""
    assert loop._round is not None
    loop._round.deadline = time.monotonic() - 1.0
    return loop.finish_round()


def noise(client: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + client)
    return torch.randn(D, generator=generator)


def weights(sent: Tensor, client: int, number: int) -> dict[str, Tensor]:
    return {"w": sent + noise(client, number)}


class Run:
    """A server, and the tasks and models of its rounds."""

    def __init__(self, loop: Server) -> None:
        self.loop = loop
        self.tasks: dict[int, Task] = {}
        self.models: dict[int, Tensor] = {}

    def begin(self, clients: Iterable[int] | None = None) -> int:
        task = self.loop.begin_round(clients)
        self.tasks[task.round], self.models[task.round] = task, self.loop.model()["w"]
        return task.round

    def answer(self, client: int, number: int) -> str | None:
        """Send the answer of a client to the task of a round."""
        sent = weights(self.models[number], client, number)
        return self.loop.submit(client, sent, self.tasks[number].key)

    def round(self, answers: Sequence[tuple[int, int]]) -> Any:
        """Run a round in which these answers come: (client, round that it answers to)."""
        self.begin()
        for client, number in answers:
            assert self.answer(client, number) is None
        return expire(self.loop)


@pytest.mark.parametrize("answers", ["weights", "updates"])
@pytest.mark.parametrize(
    ("staleness", "expected"),
    [("constant", 6.0), ({"name": "polynomial", "a": 1.0}, 2.0 + 10 / 3)],
)
def test_one_late_answer_by_hand(answers: str, staleness: Any, expected: float) -> None:
    """Client 1 has 6 for the model 0 of round 1, client 0 has 4 for the model 2 of round 2.

    The updates are 6 and 2: their mean is 4, and (6/2 + 2) / (1/2 + 1) if age 1 has the factor 1/2.
    """
    options = {"staleness": staleness, "max_staleness": 1, "answers": answers, "max_norm": None}
    loop = Server("fedavg", {"w": torch.zeros(1)}, num_clients=2, **options)
    first = loop.begin_round()
    assert loop.submit(0, {"w": torch.tensor([2.0])}, first.key) is None
    assert expire(loop).absent == {"1": 1}
    assert loop.model()["w"].tolist() == [2.0]
    second = loop.begin_round()
    fresh = 4.0 if answers == "weights" else 2.0
    assert loop.submit(1, {"w": torch.tensor([6.0])}, first.key) is None
    assert loop.submit(0, {"w": torch.tensor([fresh])}, second.key) is None
    report = expire(loop)
    assert report.active == (0, 1) and report.late == {"1": 1}
    assert report.absent == report.ignored == report.rejected == {}
    assert "late: client 1 (1), age 1" in report.lines()
    assert loop.model()["w"].item() == pytest.approx(expected, rel=1e-6)  # float32


# What arrives in each round: (client, round that it answers to).
SCRIPT = [
    [(0, 1), (1, 1), (2, 1)],
    [(0, 2), (3, 1), (2, 2)],
    [(0, 3), (1, 2)],
    [],
    [(3, 3), (2, 4), (1, 5)],
]


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("fedavg", {"staleness": "polynomial"}),
        ("fdms", {"staleness": "hinge"}),
        ("mifa", {}),
        ("mimic", {}),
        ("median", {}),
    ],
)
@pytest.mark.parametrize("answers", ["weights", "updates"])
def test_same_bits_as_the_rule(rule: str, options: dict[str, Any], answers: str) -> None:
    loop = server(rule, answers=answers, **options)
    every = {"staleness": "constant", "max_staleness": 2, "max_norm": None} | options
    agg = fastagg.make(rule, num_clients=K, num_params=D, nonfinite="drop", **every)
    params, keys, models = FIRST.clone(), {}, {}
    for number, arrived in enumerate(SCRIPT, start=1):
        keys[number], models[number] = loop.begin_round().key, params.clone()
        rows = [(models[r] + noise(k, r)) - models[r] for k, r in arrived]
        for (client, r), row in zip(arrived, rows, strict=True):
            sent = row if answers == "updates" else models[r] + noise(client, r)
            assert loop.submit(client, {"w": sent}, keys[r]) is None
        report = expire(loop)
        expected = agg.step(
            params, rows, [k for k, _ in arrived], ages=[number - r for _, r in arrived]
        )
        assert torch.equal(loop.model()["w"], params)
        assert report.active == tuple(expected.active.tolist()) and not report.rejected
        assert report.late == {str(k): number - r for k, r in arrived if r < number}


@given(st.permutations([(0, 3), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]))
def test_the_order_of_arrival_does_not_matter(order: Sequence[tuple[int, int]]) -> None:
    """Whichever comes first, the newest answer of a client counts, and the others are reported."""
    run = Run(server("mimic"))
    for _ in range(2):
        run.round([(0, run.loop.rounds + 1)])
    run.begin()
    for client, number in order:
        assert run.answer(client, number) in (None, "a newer answer of this client counts")
    report = expire(run.loop)
    assert report.late == {"1": 1, "2": 1} and report.active == (0, 1, 2, 3)
    why = "a newer answer of this client counts"
    late = {"2 (of round 1)", "3 (of round 1)", "3 (of round 2)"}
    assert report.rejected == dict.fromkeys(late, why)
    twin = Run(server("mimic"))
    for _ in range(2):
        twin.round([(0, twin.loop.rounds + 1)])
    twin.round([(0, 3), (1, 2), (2, 2), (3, 3)])
    assert run.loop.model_bytes() == twin.loop.model_bytes()


def test_without_an_open_round_answers_wait_for_the_next_one() -> None:
    run = Run(server())
    for _ in range(2):
        run.round([(0, run.loop.rounds + 1)])
    before = run.loop.model_bytes()
    assert run.answer(1, 1) is None and run.answer(2, 2) is None
    assert run.answer(1, 2) is None  # newer
    assert run.loop.model_bytes() == before
    # Of each client one answer waits, the newest.
    assert run.loop._core._late.waiting() == [("2", 2), ("1", 2)]
    report = run.round([(0, 3)])
    assert report.late == {"1": 1, "2": 1} and not run.loop._core._late.waiting()
    assert report.rejected == {"1 (of round 1)": "a newer answer of this client counts"}


def test_an_answer_after_the_deadline_waits_for_the_next_round() -> None:
    """Nobody has ended the round yet, and the answer must not count in it."""
    run = Run(server(round_seconds=0.01))
    run.begin()
    time.sleep(0.02)
    assert run.loop.task(0) is None
    assert run.answer(0, 1) is None
    assert run.loop.submit(1, weights(FIRST, 1, 1)) is None  # without a key: of the same round
    assert run.answer(1, 1) == "has answered in round 1 already"
    report = run.loop.finish_round()
    assert report.active == () and report.absent == {str(k): k for k in range(K)}
    assert run.round([]).late == {"0": 1, "1": 1}


def test_keys_that_do_not_count() -> None:
    run = Run(server())
    run.round([(0, 1)])
    run.begin([0, 1])
    assert run.answer(0, 2) is None
    expire(run.loop)
    run.round([(0, 3)])
    now = run.begin()
    before = run.loop.model_bytes()
    assert run.answer(0, 2) == "was not asked in round 2, or has answered already"
    assert run.answer(3, 2) == "was not asked in round 2, or has answered already"
    assert run.answer(3, 3) is None
    assert run.answer(3, 3) == "has answered in round 3 already"
    number, _, checksum = run.tasks[3].key.partition("-")
    keys = {
        "too old": run.tasks[1].key,
        "forged": f"{number}-{int(checksum, 16) ^ 1:08x}",
        "of the future": f"{now + 1}-{checksum}",
        "no key": "",
        "long": "x" * 10000,
    }
    for key in keys.values():
        reason = run.loop.submit(2, weights(FIRST, 2, 1), key)
        expected = f"model {run.tasks[now].key}, or for one of at most 2 steps before, got one for"
        assert reason is not None and reason.endswith(f"{expected} {key[:40]!r}")
    assert run.loop.model_bytes() == before
    report = expire(run.loop)
    assert report.active == (3,) and report.late == {"3": 1}
    assert report.ignored.keys() == {"0", "2", "3"}
    assert run.loop.submit(2, weights(FIRST, 2, 1), keys["forged"]) == "late: no round is open"


def broken_answers() -> dict[str, tuple[dict[str, Tensor], bool]]:
    """Return late answers that do not count, and whether :meth:`Server.submit` sees it."""
    return {
        "NaN": ({"w": torch.full((D,), math.nan)}, False),
        "Inf": ({"w": torch.full((D,), math.inf)}, False),
        "too long": ({"w": torch.full((D,), 1e9)}, False),
        "shape": ({"w": torch.zeros(D + 1)}, True),
        "no arrays": ({}, True),
    }


@pytest.mark.parametrize("case", broken_answers())
def test_a_broken_late_answer_changes_nothing_else(case: str) -> None:
    sent, seen = broken_answers()[case]
    ends = []
    for broken in (True, False):
        run = Run(server("mifa", max_norm=100.0))
        for _ in range(2):
            run.round([(0, run.loop.rounds + 1)])
        run.begin()
        if broken:
            reason = run.loop.submit(1, sent, run.tasks[2].key)
            assert (reason is not None) is seen
        for client, number in [(0, 3), (2, 1), (3, 2)]:
            assert run.answer(client, number) is None
        report = expire(run.loop)
        assert report.active == (0, 2, 3) and report.late == {"2": 2, "3": 1}
        assert len(report.rejected) == broken
        assert run.round([(0, 4), (1, 4)]).active == (0, 1)
        ends.append(run.loop.model_bytes())
    assert ends[0] == ends[1]


def test_a_broken_newer_answer_does_not_take_the_place_of_an_older_one() -> None:
    run = Run(server())
    for _ in range(2):
        run.round([(0, run.loop.rounds + 1)])
    assert run.answer(1, 1) is None
    assert run.loop.submit(1, {}, run.tasks[2].key) is not None
    report = run.round([])
    assert report.late == {"1": 2} and report.rejected.keys() == {"1 (of round 2)"}


def test_a_late_answer_has_its_weight() -> None:
    options = {"staleness": "constant", "max_staleness": 1, "weighted": True, "max_norm": None}
    loop = Server("fedavg", {"w": torch.zeros(1)}, num_clients=2, **options)
    first = loop.begin_round()
    expire(loop)
    second = loop.begin_round()
    reason = loop.submit(1, {"w": torch.tensor([8.0])}, first.key)
    assert reason == "weight: expected a number, got None"
    assert loop.submit(0, {"w": torch.tensor([8.0])}, first.key, weight=3) is None
    report = expire(loop)
    assert report.late == {"0": 1} and report.rejected == {"1 (of round 1)": reason}
    third = loop.begin_round()
    assert loop.submit(1, {"w": torch.tensor([0.0])}, second.key, weight=3) is None
    assert loop.submit(0, {"w": torch.tensor([16.0])}, third.key, weight=1) is None
    expire(loop)
    assert loop.model()["w"].tolist() == [10.0]  # 8 + (3 * 0 + 1 * 8) / 4


def test_without_max_staleness_late_answers_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for options in ({"staleness": None, "max_staleness": None}, {"max_staleness": None}):
        run = Run(server(checkpoint_path=path, **options))
        run.round([(0, 1)])
        run.begin()
        reason = run.answer(1, 1)
        assert reason == (
            f"expected an answer for the model {run.tasks[2].key}, got one for {run.tasks[1].key!r}"
        )
        report = expire(run.loop)
        assert report.ignored == {"1": reason} and report.late == {}
        _, content, state = checkpoint.read(path)
        assert "earlier" not in content
        assert not [name for name in state if name.startswith("earlier")]


def test_late_answers_wait_on_when_a_round_does_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(server("mifa"))
    run.round([(0, 1)])
    run.begin()
    assert run.answer(1, 1) is None and run.answer(0, 2) is None
    run.loop.abort_round()
    step = fastagg.Aggregator.step

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(fastagg.Aggregator, "step", fail)
    with pytest.raises(MemoryError):
        run.round([(2, 1)])
    monkeypatch.setattr(fastagg.Aggregator, "step", step)
    report = run.round([(0, 2)])
    assert report.round == 2 and report.late == {"1": 1, "2": 1}
    twin = Run(server("mifa"))
    twin.round([(0, 1)])
    twin.round([(1, 1), (2, 1), (0, 2)])
    assert run.loop.model_bytes() == twin.loop.model_bytes()


def test_the_deadline_and_then_an_abort() -> None:
    """An answer that came too late for a round that never happened counts in no other one."""
    run = Run(server(round_seconds=0.01))
    run.begin()
    time.sleep(0.02)
    assert run.answer(0, 1) is None
    run.loop.abort_round()
    assert run.answer(1, 1) == "late: no round is open"
    run.loop.round_seconds = 600.0
    assert run.round([(0, 1)]).late == {}
    assert run.loop.rounds == 1


def test_forgotten_clients_have_no_late_answers() -> None:
    run = Run(server("mifa"))
    run.round([(0, 1)])
    assert run.answer(1, 1) is None
    run.loop.forget([1, 2])
    run.begin()
    assert run.answer(1, 1) == "was not asked in round 1, or has answered already"
    assert run.answer(2, 1) == "was not asked in round 1, or has answered already"
    assert run.answer(3, 1) is None
    assert expire(run.loop).late == {"3": 1}


def test_a_closed_server_takes_no_late_answer() -> None:
    run = Run(server())
    run.round([(0, 1)])
    run.loop.close()
    assert run.answer(1, 1) == "the server is closed"


# --- restarts -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["fedavg", "fdms", "mifa", "mimic"])
@pytest.mark.parametrize("answers", ["weights", "updates"])
@pytest.mark.parametrize("killed", [1, 2, 3, 4])
def test_late_answers_count_after_a_restart(
    rule: str, answers: str, killed: int, tmp_path: Path
) -> None:
    """The server is killed within the round after ``killed`` rounds, and resumes."""
    path = tmp_path / "run"
    ends = []
    for kill in (False, True):
        run = Run(server(rule, answers=answers, checkpoint_path=path))
        reports = []
        for number, arrived in enumerate(SCRIPT, start=1):
            if kill and number == killed + 1:
                run.begin()
                assert run.answer(*arrived[0]) is None if arrived else True  # lost
                old, run.loop = run.loop, server(rule, answers=answers, checkpoint_path=path)
                assert run.loop.resume(path) == []
                assert run.loop.rounds == killed and run.loop.model_bytes() == old.model_bytes()
            reports.append(run.round(arrived))
        late = [report.late for report in reports]
        ends.append((run.loop.model_bytes(), late, [report.rejected for report in reports]))
    assert ends[0] == ends[1]
    assert sum(map(len, ends[0][1])) == 4


@pytest.mark.parametrize("folder", [False, True])
def test_a_late_answer_before_the_first_round_after_a_restart(folder: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_path": tmp_path / "run"}
    options |= {"inbox_path": tmp_path / "late"} if folder else {}
    run = Run(server(**options))
    run.round([(0, 1)])
    assert run.answer(1, 1) is None
    run.loop.close()
    run.loop = server(**options)
    run.loop.resume(tmp_path / "run")
    assert run.answer(2, 1) is None
    if folder:
        assert run.answer(1, 1) == "has answered in round 1 already"
    assert run.round([(0, 2)]).late == {"1": 1, "2": 1} if folder else {"2": 1}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_an_older_checkpoint_has_its_late_answers(keep: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_path": tmp_path / "run", "inbox_path": tmp_path / "late"}
    options |= {"checkpoint_keep": keep, "max_staleness": 5}
    run = Run(server("mifa", **options))
    answers = [[(0, 1)], [(0, 2), (1, 1)], [(0, 3), (1, 2)], [(0, 4), (1, 3)]]
    for number, arrived in enumerate(answers, start=1):
        run.round(arrived)
        if number < len(answers):
            assert run.answer(2, number) is None  # waits; the checkpoint says that it has come
    end = run.loop.model_bytes()
    run.loop.close()
    for back in range(keep):
        shutil.copytree(tmp_path, tmp_path / f"copy {back}", ignore=lambda *_: ["copy 0", "copy 1"])
        again = {**options, "inbox_path": tmp_path / f"copy {back}" / "late"}
        again["checkpoint_path"] = tmp_path / f"copy {back}" / "run"
        run.loop = server("mifa", **again)
        run.loop.resume(again["checkpoint_path"].with_name(f"run.{back}" if back else "run"))
        rounds = run.loop.rounds
        assert rounds == len(answers) - back
        for number, arrived in enumerate(answers, start=1):
            if number > rounds:
                # Late answers to rounds of the checkpoint wait in the folder.
                run.round([(client, to) for client, to in arrived if to > rounds])
                if number < len(answers):
                    assert run.answer(2, number) is None
        assert run.loop.model_bytes() == end
        run.loop.close()
    files = [file for file in (tmp_path / "late").iterdir() if file.suffix]
    assert len(files) <= keep, files


def test_a_restart_while_another_server_uses_the_folder(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_path": tmp_path / "run", "inbox_path": tmp_path / "late"}
    run = Run(server(**options))
    run.round([(0, 1)])
    old, run.loop = run.loop, server(**options)
    run.loop.resume(tmp_path / "run")
    assert run.answer(1, 1) == "inbox: it is closed, or its folder cannot be used"
    with pytest.raises(ValueError, match="another inbox uses"):
        run.begin()
    old.close()
    assert run.answer(1, 1) == "inbox: it is closed, or its folder cannot be used"
    run.begin()
    assert run.answer(1, 1) is None
    assert expire(run.loop).late == {"1": 1}


def test_a_second_restart_and_an_older_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = Run(server("mimic", checkpoint_path=path, checkpoint_every=2))
    for number in (1, 2, 3):
        run.round([(0, number)])
    for _ in range(2):  # round 3 is begun again, from the same model
        run.loop = server("mimic", checkpoint_path=path, checkpoint_every=2)
        run.loop.resume(path)
        assert run.loop.rounds == 2
    report = run.round([(0, 3), (1, 1), (2, 2)])
    assert report.late == {"1": 2, "2": 1}
    assert run.answer(1, 1) == "late: no round is open"  # it is too old now
    assert run.answer(2, 2) == "was not asked in round 2, or has answered already"


def test_what_a_checkpoint_has_of_earlier_rounds(tmp_path: Path) -> None:
    """Models of the rounds whose answers may still come, each once; other rounds have none."""
    path = tmp_path / "run"
    run = Run(server(checkpoint_path=path, min_answers=1, max_staleness=3))
    run.round([(k, 1) for k in range(K)])  # nobody is missing
    run.round([(0, 2)])
    run.round([])  # no step: the next round has the same model
    run.round([(0, 4), (1, 2)])
    run.begin()  # an open round is in no checkpoint
    run.loop.close()
    _, content, state = checkpoint.read(path)
    keys = {number: task.key for number, task in run.tasks.items()}
    assert content["earlier"] == [
        [1, 3, keys[1], [], None],
        [2, 2, keys[2], ["2", "3"], 2],
        [3, 1, keys[3], ["0", "1", "2", "3"], 3],
        [4, 1, keys[4], ["1", "2", "3"], 3],
    ]
    models = {name: value for name, value in state.items() if name.startswith("earlier")}
    assert models.keys() == {"earlier.2", "earlier.3"}
    assert torch.equal(models["earlier.3"], run.models[4])
    again = server(checkpoint_path=tmp_path / "again", min_answers=1, max_staleness=3)
    again.resume(path)
    again._core.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_checkpoint_of_before_loads(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = Run(server(checkpoint_path=path))
    run.round([(0, 1)])
    kind, content, state = checkpoint.read(path)
    del content["earlier"], state["earlier.1"]
    checkpoint.write(path, kind, content, state)
    run.loop = server()
    run.loop.resume(path)
    run.begin()
    reason = run.answer(1, 1)
    assert reason is not None and reason.startswith("expected an answer for the model")
    assert run.answer(0, 2) is None and expire(run.loop).active == (0,)


def test_updates_of_another_run_have_no_models(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = Run(server(answers="updates", checkpoint_path=path))
    run.round([(0, 1)])
    assert not [name for name in checkpoint.read(path)[2] if name.startswith("earlier")]
    with pytest.raises(CheckpointError, match="expected the model of round 1"):
        server(answers="weights").resume(path)


FORGED: dict[str, tuple[Callable[[list[Any]], object], dict[str, Tensor | None], str]] = {
    "no list": (lambda e: {}, {}, "expected a list of rounds, got dict"),
    "no round": (lambda e: [e[0], 7], {}, "expected number, age, key"),
    "a short round": (lambda e: [e[0][:4]], {}, "expected number, age, key"),
    "a number as text": (lambda e: [["1", *e[0][1:]]], {}, "expected number, age, key"),
    "a flag as age": (lambda e: [[1, True, *e[0][2:]]], {}, "expected number, age, key"),
    "a key that is none": (lambda e: [[1, 2, 5, *e[0][3:]]], {}, "expected number, age, key"),
    "a sender that is none": (lambda e: [[*e[0][:3], [1], 1]], {}, "expected number, age, key"),
    "a later model": (lambda e: [[*e[0][:4], 2], e[1]], {}, "expected number, age, key"),
    "a round of the future": (lambda e: [*e, [3, 0, "k", [], None]], {}, "rounds up to 2"),
    "round 0": (lambda e: [[0, 2, "k", [], None], e[1]], {}, "rounds up to 2"),
    "twice": (lambda e: [e[0], e[0], e[1]], {}, "rounds up to 2"),
    "another order": (lambda e: e[::-1], {}, "rounds up to 2"),
    "too old": (lambda e: [[1, 3, *e[0][2:]], e[1]], {}, "ages of at most 2 that fall"),
    "older than its round": (lambda e: [e[0], [2, 2, *e[1][2:]]], {}, "that fall"),
    "a negative age": (lambda e: [e[0], [2, -1, *e[1][2:]]], {}, "that fall"),
    "growing ages": (lambda e: [[1, 0, *e[0][2:]], e[1]], {}, "that fall"),
    "one key twice": (lambda e: [e[0], [2, 1, e[0][2], *e[1][3:]]], {}, "different keys"),
    "without a model": (lambda e: [[*e[0][:4], None], e[1]], {}, "the model of round 1"),
    "a missing model": (lambda e: e, {"earlier.1": None}, "earlier.1: expected .* got none"),
    "a model too much": (lambda e: e, {"earlier.7": torch.zeros(D)}, "got .'earlier.7'"),
    "another size": (
        lambda e: e,
        {"earlier.1": torch.zeros(D + 1)},
        r"expected \[6\] .* got \[7\]",
    ),
    "another dtype": (lambda e: e, {"earlier.1": torch.zeros(D).double()}, "got .* torch.float64"),
    "NaN": (lambda e: e, {"earlier.1": torch.full((D,), math.nan)}, "expected finite values"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_rounds_are_refused_and_change_nothing(case: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = Run(server("mifa", checkpoint_path=path))
    run.round([(0, 1)])
    run.round([(0, 2), (1, 2)])
    kind, content, state = checkpoint.read(path)
    change, tensors, match = FORGED[case]
    content["earlier"] = change(content["earlier"])
    merged: dict[str, Tensor | None] = {**state, **tensors}
    kept = {name: value for name, value in merged.items() if value is not None}
    checkpoint.write(tmp_path / "forged", kind, content, kept)
    before = run.loop.model_bytes()
    with pytest.raises(CheckpointError, match=match) as raised:
        run.loop.resume(tmp_path / "forged")
    assert str(raised.value).startswith(str(tmp_path / "forged"))
    assert run.loop.rounds == 2 and run.loop.model_bytes() == before
    assert run.round([(0, 3), (2, 1), (3, 2)]).late == {"2": 2, "3": 1}


def test_a_damaged_model_of_an_earlier_round_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = Run(server(checkpoint_path=path))
    run.round([(0, 1)])
    data = path.read_bytes()
    place = data.index(FIRST.numpy().tobytes())
    path.write_bytes(data[:place] + b"\x01" + data[place + 1 :])
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        server().resume(path)


# --- threads --------------------------------------------------------------------------------


def test_threads_send_late_answers_while_rounds_close() -> None:
    """Every answer that is taken counts once: in its round, or in a later one with its age.

    Each of eight clients answers to every key that it has seen, from a thread of its own. Its
    update for the model of round r is r at its own column, so a step shows whose answers it used,
    and to which round. Of what is taken, a newer answer of the client may replace an older one.
    """
    clients, rounds, most = 8, 60, 3
    loop = Server(
        "fedavg",
        {"w": torch.zeros(clients)},
        num_clients=clients,
        answers="updates",
        staleness="constant",
        max_staleness=most,
        max_empty_rounds=rounds,
        max_norm=None,
    )
    taken: list[set[int]] = [set() for _ in range(clients)]
    keys: dict[int, str] = {}

    def answer(client: int) -> None:
        column = torch.zeros(clients)
        column[client] = 1.0
        for step in itertools.count():
            if loop.closed:
                return
            recent = sorted(keys)[-most - 1 :]
            if not recent:
                continue
            number = recent[(client + step) % len(recent)]
            if number == recent[-1] and (client + number) % 3 == 0:
                continue  # else a fast machine answers every round in time, and nothing is late
            if loop.submit(client, {"w": number * column}, keys[number]) is None:
                assert number not in taken[client]
                taken[client].add(number)

    expected, used, late = torch.zeros(clients, dtype=torch.float64), [], 0
    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(answer, client) for client in range(clients)]
        try:
            for number in range(1, rounds + 1):
                loop.round_seconds = 0.004
                keys[number] = loop.begin_round().key
                report = loop.finish_round()
                for reason in report.rejected.values():  # it may become too old while it waits
                    assert reason.endswith(("a newer answer of this client counts", "is 3")), reason
                late += len(report.late)
                for client in report.active:
                    of = number - report.late.get(str(client), 0)
                    used.append((client, of))
                    expected[client] += of / len(report.active)
        finally:
            loop.close()
        for future in futures:
            future.result(timeout=60)
    assert len(used) == len(set(used)) > late > 0
    assert all(of in taken[client] for client, of in used)
    # Sums of up to 60 float32 numbers, each rounded to 6e-8 of at most 2000.
    found = loop.model()["w"].double()
    torch.testing.assert_close(found, expected, rtol=0, atol=60 * 6e-8 * 2000)


def test_one_late_answer_from_eight_threads_is_taken_once() -> None:
    for _ in range(10):
        run = Run(server())
        run.round([(0, 1)])
        ready = threading.Barrier(8)

        def submit(_: int, run: Run = run, ready: threading.Barrier = ready) -> bool:
            ready.wait()
            return run.answer(1, 1) is None

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(submit, range(8))) == 1
        assert run.round([(0, 2)]).late == {"1": 1}
