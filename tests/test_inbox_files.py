# SPDX-License-Identifier: Apache-2.0
"""The files of an inbox with a folder: restarts, damage, failing file systems, forks, kills."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastagg
from fastagg import Inbox, checkpoint
from fastagg.answer_files import AnswerFiles
from fastagg.inbox import InboxFull
from tests.inboxes import D, make, row
from tests.scripts import ROOT


def reopened(inbox: Inbox, folder: Path, **options: Any) -> Inbox:
    inbox.close()
    return make(folder=folder, **options)


def test_answers_survive(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path)
    for client, r in ((1, 2), (0, 1), (1, 3)):
        inbox.put(client, torch.tensor([client + 0.1, r + 0.1, 1e-40]), round=r)
    inbox = reopened(inbox, tmp_path)
    assert inbox.waiting() == [(0, 1), (1, 3)] and not inbox.damaged
    answers = inbox.take(round=3)
    assert answers is not None
    assert torch.equal(answers.updates[1], torch.tensor([1.1, 3.1, 1e-40]))
    assert not os.stat(next(tmp_path.iterdir())).st_mode & 0o077  # only the owner reads it
    inbox.close()


def test_used_answers_come_back_with_an_older_checkpoint(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path)
    for t in range(4):  # checkpoints of rounds 0 and 2; settle after each
        inbox.put(t, row(t), round=t)
        answers = inbox.take(round=t)
        assert answers is not None
        with answers:
            pass
        if t == 1:
            inbox.settle(2)
    assert len(inbox) == 0
    inbox = reopened(inbox, tmp_path, round=2)
    assert inbox.waiting() == [(2, 2), (3, 3)]  # of the rounds after the checkpoint
    inbox = reopened(inbox, tmp_path, round=2)
    assert inbox.waiting() == [(2, 2), (3, 3)]
    inbox.close()


def test_a_checkpoint_that_was_not_settled_has_its_answers(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path)
    inbox.put(0, row(0.0), round=0)
    inbox.take(round=0)
    inbox = reopened(inbox, tmp_path, round=1)  # killed between the checkpoint and settle(1)
    assert len(inbox) == 0 and not any(tmp_path.iterdir())
    inbox.close()


def test_a_replaced_answer_is_not_there_twice(tmp_path: Path) -> None:
    """The process ended between writing the new file and deleting the old one."""
    inbox = make(folder=tmp_path)
    inbox.put(0, row(1.0), round=0)
    old = next(tmp_path.iterdir())
    content = old.read_bytes()
    inbox.put(0, row(2.0), round=1)
    old.write_bytes(content)
    inbox = reopened(inbox, tmp_path)
    assert inbox.waiting() == [(0, 1)] and len([*tmp_path.iterdir()]) == 1
    inbox.close()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [flip, lambda p: p.write_bytes(p.read_bytes()[:-1]), lambda p: p.write_bytes(b"")]
)
def test_a_damaged_file_is_reported_and_stays(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    inbox = make(folder=tmp_path)
    inbox.put(0, row(1.0), round=0)
    inbox.put(1, row(1.0), round=0)
    (tmp_path / ".answer-0000000000000000007.0123456789abcdef.partial").touch()
    (tmp_path / "notes").touch()  # not ours
    first = sorted(tmp_path.glob("answer-*"))[0]
    damage(first)
    inbox = reopened(inbox, tmp_path)
    assert inbox.waiting() == [(1, 0)]
    assert [*inbox.damaged] == [first.name] and str(first) in inbox.damaged[first.name]
    assert first.exists() and (tmp_path / "notes").exists()
    inbox.put(2, row(1.0), round=0)
    assert first.exists() and not [*tmp_path.glob(".answer*")]
    inbox.close()


def test_files_of_another_run_are_damaged(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path)
    inbox.put(3, row(1.0), round=0)
    inbox.close()
    for options in ({"num_params": 2}, {"num_clients": 3}):
        other = make(folder=tmp_path, **options)
        assert len(other) == 0 and len(other.damaged) == 1
        other.close()


def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fastagg.answer_files.fcntl.flock", without_locks)
    with pytest.warns(UserWarning, match="cannot be locked .*would go unnoticed"):
        make(folder=tmp_path).put(1, row(1.0), round=0)


def test_the_folder_has_one_inbox(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path)
    with pytest.raises(ValueError, match="folder: another inbox uses"):
        make(folder=tmp_path)
    inbox.put(0, row(0.0), round=0)
    inbox.put(1, row(0.0), round=0)
    inbox.close()
    with pytest.raises(ValueError, match="capacity: expected room for the 2 answers"):
        make(folder=tmp_path, capacity=1)
    make(folder=tmp_path).close()


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = make(folder=tmp_path)
    inbox.put(0, row(1.0), round=0)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fastagg.checkpoint.atomic.sync", fail)
        with pytest.raises(OSError, match="No space left"):
            inbox.put(0, row(2.0), round=1)
    with monkeypatch.context() as patch:
        patch.setattr("fastagg.answer_files.sync_folder", fail)
        with pytest.raises(OSError, match="No space left"):
            inbox.take(round=1)
    assert inbox.waiting() == [(0, 0)]
    inbox = reopened(inbox, tmp_path)
    assert inbox.waiting() == [(0, 0)]
    inbox.close()


SERVER = """
import sys
from pathlib import Path
import torch
import fastagg

folder, count = Path(sys.argv[1]), int(sys.argv[2])
saved = folder / "rule"
if saved.exists():
    params = torch.empty(count)
    agg = fastagg.load(saved, params=params)
else:
    params, agg = torch.zeros(count), fastagg.make("fedbuff", num_clients=3, num_params=count)
rounds = count + int(params[0])  # later than those of all answers, which tell them apart
inbox = fastagg.Inbox(
    num_clients=3, num_params=count, capacity=count, policy="queue", folder=folder / "answers",
    round=rounds,
)
assert not inbox.damaged
waiting = {r for _, r in inbox.waiting()}
todo = [n for n in range(1, count) if params[n] == 0 and n not in waiting]
print("ready", flush=True)
while todo or len(inbox):
    for n in todo[:3]:
        update = torch.zeros(count)
        update[n] = update[0] = 1.0
        inbox.put(n % 3, update, round=n)
    todo = todo[3:]
    with inbox.take(1, round=rounds) as (updates, clients, ages):
        agg.step(params, updates, clients)
    rounds += 1
    if rounds % 3 == 0:
        agg.save(saved, params=params)
        inbox.settle(rounds)
agg.save(saved, params=params)
inbox.settle(rounds)
print("done", flush=True)
"""


@pytest.mark.slow
def test_every_answer_counts_once_whenever_the_server_is_killed(tmp_path: Path) -> None:
    """A server is killed at random times until it is done; parameter n counts answer n."""
    count, kills, draw = 120, 0, random.Random(5)
    for _ in range(60):
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path), str(count)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.0, 0.25) if kills < 6 else 0.0)
        if kills < 6:
            kills += process.poll() is None
            process.kill()
            process.communicate()
            continue
        said, _ = process.communicate()
        assert process.returncode == 0 and said == "done\n"
        break
    assert kills == 6
    params = torch.empty(count)
    fastagg.load(tmp_path / "rule", params=params)
    assert params[1:].tolist() == [1.0] * (count - 1)
    assert int(params[0]) == count - 1
    assert not any((tmp_path / "answers").iterdir())


# --- names, notes and runs --------------------------------------------------------------------


def test_names_and_notes_survive(tmp_path: Path) -> None:
    inbox = make(num_clients=None, folder=tmp_path, run="a")
    note = {"weight": 3, "text": '"\\', "list": [1, {"b": None}]}
    assert inbox.put("node 7", row(1.0), round=2, note=note)
    note["weight"] = 4  # put has copied it
    assert inbox.put("", row(2.0), round=0)
    assert not inbox.put("node 7", row(3.0), round=1)
    inbox = reopened(inbox, tmp_path, num_clients=None, run="a")
    answers = inbox.take(round=2)
    assert answers is not None and answers.clients == ["node 7", ""]
    assert answers.notes == [{**note, "weight": 3}, {}]
    inbox.close()
    with pytest.raises(TypeError, match="client: expected a name, got 7"):
        make(num_clients=None).put(7, row(0.0), round=0)
    other = make(folder=tmp_path, run="a")  # of numbers: it cannot read names
    assert len(other) == 0 and len(other.damaged) == 2
    other.close()


def test_answers_of_another_run_are_refused(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path, run="a")
    inbox.put(0, row(1.0), round=0)
    inbox.put(1, row(1.0), round=0)
    inbox.take(1, round=5)
    inbox.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for run in ("b", ""):
        with pytest.raises(ValueError, match=rf"expected answers of the run '{run}', got one of"):
            make(folder=tmp_path, run=run, round=9)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    inbox = make(folder=tmp_path, run="a", round=5)
    assert len(inbox) == 2
    inbox.close()
    with pytest.raises(TypeError, match="run: expected a str, got 1"):
        make(run=1)


def test_a_damaged_name_of_a_run_is_no_other_run(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path, run="first")
    inbox.put(0, row(1.0), round=0)
    inbox.put(1, row(1.0), round=0)
    inbox.close()
    path = sorted(tmp_path.iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b"first", b"firsu"))
    inbox = make(folder=tmp_path, run="first")
    assert inbox.waiting() == [(1, 0)]
    assert "its checksum is wrong" in inbox.damaged[path.name]
    inbox.close()


def test_an_answer_of_a_round_beyond_all_is_damaged(tmp_path: Path) -> None:
    content = {"client": 0, "round": 2**62}
    path = tmp_path / "answer-0000000000000000000"
    checkpoint.write(path, "inbox.answer", content, {"row": row(1.0)})
    inbox = make(folder=tmp_path)
    assert not inbox.waiting() and "round: expected a number in" in inbox.damaged[path.name]
    inbox.close()


@pytest.fixture(name="kept")
def _kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a file with this name one that cannot be deleted; "": none."""
    delete, name = Path.unlink, ""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        delete(path, missing_ok=missing_ok)

    def keep(other: str) -> None:
        nonlocal name
        name = other

    monkeypatch.setattr(Path, "unlink", unlink)
    return keep


def test_an_answer_that_cannot_replace_another_leaves_no_file(
    tmp_path: Path, kept: Callable[[str], None]
) -> None:
    inbox = make(folder=tmp_path)
    inbox.put(0, row(1.0), round=0)
    kept("answer-0000000000000000000")
    with pytest.raises(PermissionError):
        inbox.put(0, row(2.0), round=1)
    kept("")
    assert inbox.waiting() == [(0, 0)]
    inbox = reopened(inbox, tmp_path)
    assert inbox.waiting() == [(0, 0)]
    inbox.close()


def test_a_file_that_cannot_be_deleted_keeps_no_answer_from_waiting_again(
    tmp_path: Path, kept: Callable[[str], None]
) -> None:
    inbox = make(folder=tmp_path, policy="queue", capacity=4)
    for client in range(3):
        inbox.put(client, row(1.0), round=0)
    answers = inbox.take(3, round=1)
    assert answers is not None
    inbox.put(0, row(2.0), round=0)
    kept("answer-0000000000000000000")  # another one replaces it
    answers.finish(used=False)
    answers.finish(used=False)  # does nothing
    kept("")
    assert inbox.waiting() == [(1, 0), (2, 0), (0, 0)]
    inbox.put(3, row(1.0), round=0)
    with pytest.raises(InboxFull, match="4 answers wait and 0 are in a step"):
        inbox.put(3, row(1.0), round=1)
    inbox = reopened(inbox, tmp_path, policy="queue")
    assert inbox.waiting() == [(1, 0), (2, 0), (0, 0), (3, 0)]
    inbox.close()


@pytest.mark.parametrize("settled", [False, True])
def test_an_answer_that_could_not_be_unmarked_is_taken_again(
    settled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = make(folder=tmp_path)
    inbox.put(0, row(1.0), round=0)
    answers = inbox.take(round=0)
    assert answers is not None

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("fastagg.answer_files.os.rename", fail)
        answers.finish(used=False)
    if settled:  # which deletes the file, whose name says that round 0 used the answer
        inbox.settle(1)
    answers = inbox.take(round=1)
    assert answers is not None and answers.updates[0].tolist() == [1.0] * D
    inbox.close()
    inbox = make(folder=tmp_path, round=1)
    assert inbox.waiting() == [(0, 0)]
    inbox.close()
    inbox = make(folder=tmp_path, round=2)
    assert inbox.waiting() == [(0, 0)]  # it waited again when the inbox was closed
    inbox.close()


def test_a_signal_takes_no_answer_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of Ctrl-C raises an exception out of the call."""
    inbox = make(folder=tmp_path)
    inbox.put(0, row(1.0), round=0)
    inbox.put(1, row(1.0), round=0)

    def after(call: Callable[..., None]) -> Callable[..., None]:
        def interrupted(*arguments: Any) -> None:
            call(*arguments)
            signal.raise_signal(signal.SIGINT)

        return interrupted

    for name in ("mark", "unmark"):
        monkeypatch.setattr(AnswerFiles, name, after(getattr(AnswerFiles, name)))
    with pytest.raises(KeyboardInterrupt):
        inbox.take(round=0)
    monkeypatch.undo()
    assert inbox.waiting() == [(0, 0), (1, 0)]
    answers = inbox.take(2, round=0)
    assert answers is not None and answers.clients == [0, 1]
    with pytest.raises(InboxFull, match="0 answers wait and 2 are in a step"):
        inbox.capacity = 2
        inbox.put(2, row(1.0), round=0)
    inbox.close()


def test_a_folder_of_an_inbox_that_is_gone_is_free(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path / "answers")
    inbox.put(1, torch.zeros(D), round=0)
    del inbox
    gc.collect()
    inbox = make(folder=tmp_path / "answers")
    assert inbox.waiting() == [(1, 0)]
    inbox.close()
    inbox.close()


FORKED = """
import os, sys
import fastagg

def make():
    return fastagg.Inbox(num_clients=2, num_params=3, capacity=2, folder=sys.argv[1])

inbox, ready, go = make(), os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    if sys.argv[2] == "closes":
        inbox.close()
    os.write(ready[1], b".")
    os.close(go[1])  # which the parent closes, however it ends
    os.read(go[0], 1)
    os._exit(0)
os.read(ready[0], 1)
try:
    make()
except ValueError as error:
    print(error)
inbox.close()
make().close()
os.close(go[1])
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("child", ["closes", "does not close"])
def test_a_forked_child_neither_keeps_nor_frees_the_folder(tmp_path: Path, child: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, tmp_path, child],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("folder: another inbox uses")


CHANGED_BY_A_CHILD = """
import os, sys
import torch
import fastagg

inbox = fastagg.Inbox(num_clients=4, num_params=3, capacity=4, folder=sys.argv[1])
inbox.put(1, torch.ones(3), round=0)
inbox.put(2, torch.ones(3), round=0)
answers = inbox.take(1, round=0)
child = os.fork()
if child == 0:
    calls = [
        lambda: inbox.put(3, torch.zeros(3), round=0),
        lambda: inbox.take(1, round=0),
        lambda: inbox.discard(lambda client, round: True),
        lambda: inbox.settle(1),
        lambda: answers.finish(used=False),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            os.write(1, f"{error}\\n".encode())
    os._exit(0)
os.waitpid(child, 0)
inbox.put(0, torch.ones(3), round=0)
answers.finish(used=False)
inbox.close()
inbox = fastagg.Inbox(num_clients=4, num_params=3, capacity=4, folder=sys.argv[1])
print(inbox.waiting())
"""


def test_a_forked_child_cannot_change_the_files_of_an_inbox(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHANGED_BY_A_CHILD, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *refused, waiting = done.stdout.splitlines()
    assert len(refused) == 5
    assert all("this process was forked from process" in line for line in refused)
    assert waiting == "[(1, 0), (2, 0), (0, 0)]"


def test_a_folder_with_more_than_the_capacity(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path)
    for client in range(3):
        inbox.put(client, row(0.0), round=0)
    inbox.close()
    with pytest.raises(ValueError, match="capacity: expected room for the 3 answers"):
        make(folder=tmp_path, capacity=2)
    inbox = make(folder=tmp_path, capacity=2, full="oldest")
    assert inbox.waiting() == [(1, 0), (2, 0)] and inbox.dropped == 1
    assert len([*tmp_path.iterdir()]) == 2
    inbox.close()
