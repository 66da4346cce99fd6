# SPDX-License-Identifier: Apache-2.0
"""Late answers of a server in a folder: restarts, other runs, damage, and what is refused."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastagg import CheckpointError, Server, checkpoint
from fastagg.answer_files import AnswerFiles, StoredAnswer
from fastagg.integrations._late_answers import _packed, _unpacked
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer

K, D = 3, 8
Npy = Callable[..., bytes]
NODES = [f"n{client}" for client in range(K)]


class Run:
    """A server whose clients are called n0, n1, ...; it can be killed at any time."""

    def __init__(self, npy: Npy, folder: Path, rule: str = "fedavg", **options: Any) -> None:
        self.npy, self.folder, self.rule = npy, folder, rule
        self.options = {
            "staleness": "constant",
            "max_staleness": 2,
            "max_norm": None,
            "checkpoint_path": folder / "run",
            "inbox_path": folder / "inbox",
            **options,
        }
        self.first = {"w": npy(np.arange(D) / 8, np.float32)}
        self.sent: dict[int, Tensor] = {}
        self.server = self.make()
        self.server.set_model(self.first)

    def make(self) -> AggregationServer:
        return AggregationServer(self.rule, num_clients=K, **self.options)

    def restart(self, path: str = "run") -> AggregationServer:
        """Kill the server, of which nothing but files is left, and make another one."""
        self.server.close()  # the lock of the folder would end with the process
        self.server = self.make()
        self.server.resume(self.folder / path)
        return self.server

    def begin(self, asked: list[str] | None = None, connected: list[str] | None = None) -> int:
        self.server.open_round(NODES if asked is None else asked, connected)
        number = self.server.rounds + 1
        self.sent[number] = self.server.params.clone()
        return number

    def answer(self, client: int, number: int, **changes: Any) -> Answer:
        draw = torch.Generator().manual_seed(100 * number + client)
        model = self.sent[number] + torch.randn(D, generator=draw)
        fields = {"sender": f"n{client}", "arrays": {"w": model.numpy()}, "partition": client}
        return Answer(**fields | changes)

    def late(self, client: int, number: int, **changes: Any) -> str | None:
        return self.server.put_late(self.answer(client, number, round=number, **changes))

    def close(self, *clients: int) -> RoundReport:
        number = self.server.rounds + 1
        return self.server.close_round([self.answer(client, number) for client in clients])

    def round(self, *clients: int) -> RoundReport:
        self.begin()
        return self.close(*clients)

    def files(self) -> list[str]:
        return sorted(path.name.partition("-")[0] for path in (self.folder / "inbox").iterdir())


@pytest.fixture
def made(npy: Npy, tmp_path: Path) -> Callable[..., Run]:
    return lambda *args, **options: Run(npy, tmp_path, *args, **options)


@pytest.mark.parametrize("rule", ["fedavg", "mifa", "mimic", "fdms"])
def test_a_late_answer_survives_and_counts_once(
    made: Callable[..., Run], npy: Npy, tmp_path: Path, rule: str
) -> None:
    ends = []
    for killed in (False, True):
        (tmp_path / str(killed)).mkdir()
        run = Run(npy, tmp_path / str(killed), rule, checkpoint_keep=1)
        run.round(0, 1)
        assert run.late(2, 1, note={"metrics": {"x": math.inf, "b": b"\x00"}}) is None
        if killed:
            run.restart()
        run.begin()
        report = run.close(0)
        assert report.late == {"n2": 1} and report.active == (0, 2)
        assert report.late_notes == {"n2": {"metrics": {"x": math.inf, "b": b"\x00"}}}
        assert run.files() == []
        if killed:
            run.restart()
        assert run.round(0, 1).late == {}
        ends.append(run.server.params)
    assert torch.equal(*ends)


@pytest.mark.parametrize("rounds", [2**53, 2**62 - 1, 2**62])
def test_a_checkpoint_of_very_many_rounds_goes_on_or_is_refused(
    made: Callable[..., Run], rounds: int
) -> None:
    run = made("mifa", saves_earlier=True)
    run.round(0)
    kind, content, state = checkpoint.read(run.folder / "run", limit=checkpoint.LISTS_LIMIT)
    content |= {"rounds": rounds, "earlier": []}
    state = {name: value for name, value in state.items() if not name.startswith("earlier.")}
    checkpoint.write(run.folder / "run", kind, content, state, limit=checkpoint.LISTS_LIMIT)
    if rounds > 2**53:
        with pytest.raises(CheckpointError, match=r"rounds: expected a number in \[0, "):
            run.restart()
        return
    run.restart()
    assert run.round(0).round == rounds + 1
    assert run.late(1, rounds + 1) is None
    assert run.round(0).late == {"n1": 1}


def test_ages_count_steps_across_a_restart(made: Callable[..., Run]) -> None:
    run = made("mifa", min_answers=1)
    run.round(0)
    run.round()  # no step
    assert run.late(1, 1) is None
    run.restart()
    assert run.round(0).late == {"n1": 1}


@pytest.mark.parametrize("written", [False, True])
def test_a_kill_while_a_checkpoint_and_an_answer_are_written(
    made: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """A checkpoint has an answer as missing until its file is there; so it counts once."""
    run = made(saves_earlier=True)
    run.round(0)
    run.begin()
    write = AnswerFiles.write

    def killed(files: AnswerFiles, answer: StoredAnswer) -> None:
        if written:
            write(files, answer)
        run.server.save(tmp_path / "run")  # another thread does
        raise KeyboardInterrupt  # the process ends here

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFiles, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run.late(1, 1)
    run.restart()
    run.begin()
    assert run.server.late_senders(1) == ({"n1"} if written else set())
    assert run.late(1, 1) is None  # it comes again
    report = run.close(0)
    assert report.late == {"n1": 1} and report.active == (0, 1)
    assert run.late(1, 1) == "was not asked in round 1, or has answered already"
    assert run.round(0).late == {}


def test_a_round_that_is_done_again_has_its_answers(made: Callable[..., Run]) -> None:
    """A restart from a checkpoint of before: what the lost rounds used waits again."""
    run = made(checkpoint_every=2)
    run.round(0, 1)
    run.round(0, 1)  # a checkpoint
    assert run.late(2, 2) is None
    assert run.round(0, 1).late == {"n2": 1}
    run.begin()
    assert run.late(1, 4) is None  # to a model that the restarted run does not send
    assert run.files() == ["answer", "used"]
    run.restart()
    report = run.round(0)
    assert report.late == {"n2": 1} and report.active == (0, 2)
    assert report.rejected == {"n1 (of round 4)": "its round is after that of the checkpoint"}


def test_a_round_that_is_begun_again_asks_its_clients_anew(made: Callable[..., Run]) -> None:
    """What came after its deadline is dropped, so no client counts in time and late for it."""
    run = made()
    run.round(0, 1)
    run.begin()
    assert run.late(1, 2) is None
    assert run.files() == ["answer"]
    run.restart()
    report = run.round(0, 1)
    assert report.active == (0, 1)
    assert report.rejected == {"n1 (of round 2)": "its round is begun again, after a restart"}
    report = run.round(0)
    assert report.active == (0,) and report.late == report.rejected == {}


def test_a_round_without_a_step_keeps_late_answers(made: Callable[..., Run]) -> None:
    """They wait for a step, also in a folder across a restart; rejected ones do not."""
    run = made("mifa", min_answers=3, checkpoint_keep=1)
    run.round(0, 1, 2)
    run.begin()
    run.close(0)
    assert run.late(1, 2) is None and run.late(2, 2) is None
    report = run.round(1)
    assert report.step is None and report.late == report.ids == {}
    assert report.rejected == {"n1 (of round 2)": "a newer answer of this client counts"}
    assert report.absent == {"n0": 0, "n2": 2}
    assert run.files() == ["answer"]
    run.restart()
    report = run.round(0, 1)
    assert report.active == (0, 1, 2) and report.late == {"n2": 0} and not report.rejected
    assert run.files() == [] and run.round(0, 1, 2).late == {}


@pytest.mark.parametrize("rule", ["fedavg", "mifa"])
def test_a_round_of_too_few_clients_keeps_late_answers(made: Callable[..., Run], rule: str) -> None:
    """``mifa`` takes a step without clients; ``fedavg`` skips the round."""
    run = made(rule, min_active=3, checkpoint_keep=1)
    run.round(0, 1, 2)
    run.begin()
    run.close(0)
    assert run.late(1, 2) is None and run.late(2, 2) is None
    report = run.round(1)
    assert report.step is not None and report.late == report.ids == {}
    assert report.step.skipped == (rule == "fedavg")
    few = "update of client 1: too few active clients: 2 of min_active = 3"
    assert report.rejected == {
        "n1": few,
        "n1 (of round 2)": "a newer answer of this client counts",
    }
    assert run.files() == ["answer"]
    run.restart()
    report = run.round(0, 1)
    assert report.active == (0, 1, 2) and report.late == {"n2": 2} and not report.rejected
    assert run.files() == [] and run.round(0, 1, 2).late == {}


def test_a_round_without_a_step_is_done_again(made: Callable[..., Run]) -> None:
    """The checkpoint is from before it: what it rejected may count now."""
    run = made(min_answers=2, checkpoint_every=9)
    run.round(0, 1)
    run.server.save(run.folder / "run")
    assert run.late(2, 1) is None
    assert run.round(2).step is None
    assert run.files() == ["used"]
    run.restart()
    assert run.round(0).late == {"n2": 1}


@pytest.mark.parametrize("nested", [False, True])
def test_a_note_that_no_file_may_have_is_rejected(made: Callable[..., Run], nested: bool) -> None:
    value = 10**5000
    run = made()
    run.round(0)
    reason = run.late(1, 1, note={"metrics": {"x": [value]} if nested else value})
    assert reason is not None and reason.startswith("note: expected values that JSON represents")
    report = run.round(0)
    assert report.active == (0,) and report.rejected == {"n1 (of round 1)": reason}


def test_an_answer_with_too_many_metrics_counts_without_them(made: Callable[..., Run]) -> None:
    run = made()
    run.round(0)
    for client, numbers in ((1, 6000), (2, 10_000)):  # of 35 bytes each; 2^18 are accepted
        note = {"metrics": {"x": [0.1 + 1e-9 * number for number in range(numbers)] * 2}}
        assert run.late(client, 1, note=note if client == 2 else {"x": 1.0}) is None
    report = run.round(0)
    assert report.active == (0, 1, 2) and report.late == {"n1": 1, "n2": 1}
    assert report.late_notes == {"n1": {"x": 1.0}}


def spoil(run: Run) -> None:
    """Put folders, which cannot be deleted as files, in the place of the files of answers."""
    for path in (run.folder / "inbox").iterdir():
        path.unlink()
        path.mkdir()


def test_clients_are_not_forgotten_if_a_file_cannot_be_deleted(made: Callable[..., Run]) -> None:
    run = made(rule="mifa")
    run.round(0, 1, 2)
    run.begin()
    run.close(0, 2)
    assert run.late(1, 2) is None
    before = run.server.aggregator.state_dict()
    spoil(run)
    with pytest.raises(OSError, match="Is a directory"):
        run.server.forget([1])
    after = run.server.aggregator.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert run.server.ids.known == {"n0": 0, "n1": 1, "n2": 2}
    for path in (run.folder / "inbox").iterdir():
        path.rmdir()
        path.touch()
    run.server.forget([1])
    assert run.server.ids.known == {"n0": 0, "n2": 2}


def test_a_new_run_refuses_the_answers_of_another_one(made: Callable[..., Run]) -> None:
    run = made()
    run.round(0)
    assert run.late(1, 1) is None
    with pytest.raises(ValueError, match="another inbox uses"):
        made().begin()
    run.server.close()
    other = made()
    before = other.server.params.clone()
    with pytest.raises(ValueError, match="folder: expected answers of the run"):
        other.begin()
    assert torch.equal(other.server.params, before) and run.files() == ["answer"]


def test_a_damaged_file_is_in_the_report(made: Callable[..., Run]) -> None:
    run = made()
    run.round(0)
    assert run.late(1, 1) is None
    (path,) = (run.folder / "inbox").iterdir()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    run.restart()
    report = run.round(0)
    assert report.late == {}
    ((name, why),) = report.rejected.items()
    assert name == f"file {path.name}" and "checksum is wrong" in why
    assert run.files() == ["answer"] and run.round(0).rejected == {}


@pytest.mark.parametrize(
    "note",
    [
        {},
        {"dict": []},
        {"dict": [["steps", "one"]]},
        {"dict": 7},
        {"float": "x"},
        {"dict": [["steps", {"float": "nan"}], ["partition", None], ["weight", 1], ["note", {}]]},
        {"dict": [["steps", 1], ["partition", None], ["weight", 1], ["note", 7]]},
    ],
)
def test_a_forged_note_is_rejected(made: Callable[..., Run], note: dict[str, Any]) -> None:
    run = made()
    run.round(0)
    run.late(1, 1)
    (path,) = (run.folder / "inbox").iterdir()
    kind, content, state = checkpoint.read(path)
    checkpoint.write(path, kind, {**content, "note": note}, state)
    run.restart()
    report = run.round(0)
    why = "its file in the inbox has a damaged note"
    assert report.rejected == {"n1 (of round 1)": why} and report.active == (0,)


def test_a_full_disk_refuses_the_answer_which_may_come_again(
    made: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made()
    run.round(0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFiles, "write", full)
        why = run.late(1, 1)
    assert why == "inbox: [Errno 28] No space left on device"
    assert run.round(0).rejected == {"n1 (of round 1)": why}
    assert run.late(1, 1) is None
    with monkeypatch.context() as patch:
        patch.setattr(AnswerFiles, "mark", full)
        report = run.round(0)
    assert [*report.rejected] == ["inbox"] and report.late == {} and report.active == (0,)
    assert run.server.takes_late_answers and run.server._late.waiting() == [("n1", 1)]
    run.options["max_staleness"] = 2
    report = run.round(0)
    assert report.rejected == {"n1 (of round 1)": "late: round 1 is too old, max_staleness is 2"}


def test_the_client_of_a_late_answer_may_have_a_new_name(made: Callable[..., Run]) -> None:
    """After a restart, n2 is called m2, and answers in time before its late answer counts."""
    run = made("mifa")
    run.round(0, 1, 2)
    run.round(0, 1)
    assert run.late(2, 2) is None
    run.restart()
    names = ["n0", "n1", "m2"]
    number = run.begin(names, names)
    answers = [run.answer(0, number), run.answer(2, number, sender="m2")]
    report = run.server.close_round(answers)
    assert report.active == (0, 2) and report.ids == {"n0": 0, "m2": 2}
    assert report.rejected == {"n2 (of round 2)": "a newer answer of this client counts"}
    assert report.reassigned == {2: ("n2", "m2")}


def test_a_client_that_is_connected_keeps_its_id(made: Callable[..., Run]) -> None:
    run = made("mifa")
    run.round(0, 1, 2)
    run.round(0, 1)
    assert run.late(2, 2) is None
    names = [*NODES, "m2"]
    number = run.begin(names, names)
    report = run.server.close_round([run.answer(2, number, sender="m2")])
    assert report.active == (2,) and report.late == {"n2": 1}
    assert "claims to be client 2" in report.rejected["m2"]


def test_there_is_room_for_two_answers_of_each_client(made: Callable[..., Run]) -> None:
    """Rules that do not tell clients apart have any number of nodes."""
    run = made("fedavg")
    nodes = [f"n{number}" for number in range(2 * K + 1)]
    run.begin(nodes)
    run.close()
    for node in range(len(nodes)):
        assert run.late(node, 1, partition=None) is None
    assert len(run.files()) == 2 * K
    report = run.round()
    assert report.rejected["n0 (of round 1)"] == f"no room: {2 * K} late answers wait"
    assert len(report.late) == K


def test_half_precision_and_statistics(npy: Npy, tmp_path: Path) -> None:
    """A late answer of a float16 model counts as in time, with its running statistics."""
    model = {
        "w": npy(np.ones((2, 2)), np.float16),
        "bn.running_var": npy([1.0, 2.0], np.float32),
        "steps": npy(3),
    }
    ends = []
    for late in (False, True):
        server = AggregationServer(
            "fedavg",
            num_clients=2,
            staleness="constant",
            max_staleness=1,
            checkpoint_path=tmp_path / f"run{late}",
            inbox_path=tmp_path / f"inbox{late}",
        )
        server.set_model(model)
        server.open_round(["a", "b"])
        changed = {**model, "w": npy(np.full((2, 2), 2.0), np.float16)}
        changed["bn.running_var"] = npy([3.0, 4.0], np.float32)
        answer = Answer("a", changed, 0, round=1 if late else None)
        if late:
            assert server.put_late(answer) is None
            bad = {**changed, "bn.running_var": npy([-1.0, 4.0], np.float32)}
            why = server.put_late(Answer("b", bad, 1, round=1))
            assert why is not None and "expected variances >= 0" in why
            assert server.close_round([]).active == ()  # it is for the next round
            server.open_round(["a", "b"])
        report = server.close_round([] if late else [answer])
        assert report.active == (0,)
        ends.append(server.arrays())
    assert ends[0] == ends[1]


def test_what_the_folder_needs(npy: Npy, tmp_path: Path) -> None:
    late: dict[str, Any] = {"staleness": "constant", "max_staleness": 2}
    with pytest.raises(ValueError, match=r"^inbox_path: expected a checkpoint_path"):
        AggregationServer("fedavg", num_clients=K, inbox_path=tmp_path / "inbox", **late)
    for options in ({}, {"staleness": "constant"}):
        with pytest.raises(ValueError, match=r"^inbox_path: .* without which no late"):
            AggregationServer(
                "fedavg",
                num_clients=K,
                inbox_path=tmp_path / "inbox",
                checkpoint_path=tmp_path / "run",
                **options,
            )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "saved",
    [
        [],
        {},
        {"run": 1, "steps": 0},
        {"run": "a", "steps": True},
        {"run": "a", "steps": 2},
        {"run": "a", "steps": -1},
        {"run": "a", "steps": 0, "more": 1},
    ],
)
def test_a_forged_checkpoint_is_refused(made: Callable[..., Run], saved: object) -> None:
    run = made()
    run.round(0)
    path = run.folder / "run"
    kind, content, state = checkpoint.read(path)
    assert content["inbox"] == {"run": run.server._late.run, "steps": 1}
    checkpoint.write(path, kind, {**content, "inbox": saved}, state)
    with pytest.raises(checkpoint.CheckpointError, match="inbox: expected a run and its steps"):
        run.restart()


def test_a_checkpoint_without_an_inbox_resumes_with_one(made: Callable[..., Run]) -> None:
    run = made(inbox_path=None)
    run.round(0)
    assert "inbox" not in checkpoint.read(run.folder / "run")[1]
    run.options["inbox_path"] = run.folder / "inbox"
    run.restart()
    run.round(0)
    assert run.late(1, 2) is None
    run.restart()
    assert run.round(0).late == {"n1": 1}


def server(folder: Path) -> Server:
    """Return a server without a framework, whose checkpoint and late answers are in the folder."""
    return Server(
        "mifa",
        {"w": torch.zeros(D)},
        num_clients=K,
        staleness="constant",
        max_staleness=2,
        checkpoint_path=folder / "run",
        checkpoint_keep=1,
        inbox_path=folder / "inbox",
        round_seconds=0.001,
        max_empty_rounds=9,
    )


def test_the_server_without_a_framework(tmp_path: Path) -> None:
    """The checkpoint has the earlier rounds, the folder the answers that have come."""

    loop = server(tmp_path)
    first = loop.begin_round()
    loop.finish_round()
    assert loop.submit(1, {"w": torch.ones(D)}, first.key) is None
    loop._core.close()  # killed
    loop = server(tmp_path)
    loop.resume(tmp_path / "run")
    loop.begin_round()
    assert loop.submit(1, {"w": torch.ones(D)}, first.key) == "has answered in round 1 already"
    assert loop.submit(2, {"w": torch.ones(D)}, first.key) is None
    report = loop.finish_round()
    assert report.late == {"1": 1, "2": 1} and not any((tmp_path / "inbox").iterdir())


@pytest.mark.parametrize("closed", [True, False])
def test_another_server_in_the_process_uses_the_folder(tmp_path: Path, closed: bool) -> None:
    """The one before was closed, or is gone."""

    loop = server(tmp_path)
    first = loop.begin_round()
    loop.finish_round()
    assert loop.submit(1, {"w": torch.ones(D)}, first.key) is None
    if closed:
        loop.close()
        reason = loop.submit(2, {"w": torch.ones(D)}, first.key)
        assert reason == "the server is closed"
    else:
        del loop
        gc.collect()
    again = server(tmp_path)
    again.resume(tmp_path / "run")
    again.begin_round()
    assert again.finish_round().late == {"1": 1}


def test_a_late_answer_after_the_end_may_come_again(made: Callable[..., Run]) -> None:
    """Threads of a framework may end later than its rounds."""
    run = made(saves_earlier=True)
    run.round(0)
    run.server.close()
    assert run.late(1, 1) == "inbox: it is closed, or its folder cannot be used"
    run.restart()
    assert run.late(1, 1) is None
    assert run.round(0).late == {"n1": 1}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        1 << 80,
        0.1,
        -0.0,
        math.inf,
        "x",
        b"\xff\x00",
        [1, [2.5, "a"]],
        {"a": {"b": [b"", None]}, "float": 1.0},
    ],
)
def test_notes_are_kept_exactly(value: object) -> None:
    found = _unpacked(_packed(value))
    assert found == value and type(found) is type(value) and repr(found) == repr(value)


def test_values_without_json() -> None:
    assert math.isnan(_unpacked(_packed(math.nan)))
    assert _unpacked(_packed(np.float32(0.5))) == 0.5
    assert _unpacked(_packed((1, 2))) == [1, 2]
    assert _unpacked(_packed(object)) == repr(object)
