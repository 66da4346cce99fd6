# SPDX-License-Identifier: Apache-2.0
"""The inbox in memory: policies, bounds, threads, wrong arguments."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastagg
from fastagg import Inbox
from fastagg.inbox import InboxFull
from tests.inboxes import D, K, make, row


def test_ages_and_rows_of_a_step() -> None:
    inbox = make()
    update = row(1.0)
    assert inbox.put(2, update, round=0)
    update.zero_()  # put has copied it
    assert inbox.put(0, torch.arange(6.0)[::2], round=3)
    answers = inbox.take(2, round=4)
    assert answers is not None and len(answers) == 2
    with answers as (updates, clients, ages):
        assert clients == [2, 0] and ages == [4, 1]
        assert [u.tolist() for u in updates] == [[1.0, 1.0, 1.0], [0.0, 2.0, 4.0]]
    assert len(inbox) == 0 and inbox.take(round=5) is None


def test_newest_replaces_the_answer_of_a_client() -> None:
    inbox = make()
    assert inbox.put(1, row(1.0), round=1)
    assert inbox.put(2, row(2.0), round=0)
    assert inbox.put(1, row(3.0), round=2)
    assert not inbox.put(1, row(4.0), round=1)
    assert inbox.put(2, row(5.0), round=0)
    assert inbox.waiting() == [(1, 2), (2, 0)]
    answers = inbox.take(round=2)
    assert answers is not None
    assert [u[0].item() for u in answers.updates] == [3.0, 5.0]


def test_a_queue_keeps_several_of_a_client_in_order() -> None:
    inbox = make(policy="queue")
    for value, (client, r) in enumerate([(1, 1), (1, 0), (0, 0), (1, 1)]):
        assert inbox.put(client, row(value), round=r)
    assert inbox.waiting() == [(1, 0), (0, 0), (1, 1)]  # the last one came again
    answers = inbox.take(2, round=3)
    assert answers is not None
    assert (answers.clients, answers.ages) == ([1, 0], [3, 3])
    assert inbox.waiting() == [(1, 1)]


def test_full() -> None:
    inbox = make(capacity=2)
    inbox.put(0, row(0.0), round=0)
    inbox.put(1, row(0.0), round=0)
    inbox.put(1, row(0.0), round=1)  # replaces
    with pytest.raises(InboxFull, match="2 answers wait and 0 are in a step, of capacity = 2"):
        inbox.put(2, row(0.0), round=0)
    answers = inbox.take(1, round=1)
    assert answers is not None
    with pytest.raises(InboxFull, match="1 answers wait and 1 are in a step"):
        inbox.put(2, row(0.0), round=0)
    with answers:
        pass
    assert inbox.put(2, row(0.0), round=0)


def test_full_drops_the_oldest() -> None:
    inbox = make(capacity=2, full="oldest")
    for client in range(4):
        assert inbox.put(client, row(0.0), round=client)
    assert inbox.waiting() == [(2, 2), (3, 3)] and inbox.dropped == 2
    answers = inbox.take(round=3)
    with pytest.raises(InboxFull):  # those of a step are not dropped
        inbox.put(0, row(0.0), round=0)
    assert answers is not None


def test_a_failed_step_leaves_the_answers(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "answers"):
        inbox = make(folder=folder)
        agg, params = fastagg.make("fedavg", num_clients=K, num_params=D), torch.zeros(D)
        for client in (3, 1):
            inbox.put(client, row(2.0), round=1)
        answers = inbox.take(2, round=2)
        assert answers is not None
        with pytest.raises(ValueError, match="staleness"):
            answers.step(agg, params)
        assert inbox.waiting() == [(3, 1), (1, 1)] and params.tolist() == [0.0] * D
        with pytest.raises(RuntimeError, match="their step has ended"):  # they would count twice
            answers.step(agg, params)
        with pytest.raises(RuntimeError, match="their step has ended"), answers:
            pass
        inbox.put(3, row(5.0), round=2)  # newer than the answer that goes back
        again = inbox.take(2, round=2)
        assert again is not None and (again.clients, again.ages) == ([1, 3], [1, 0])
        inbox.put(1, row(8.0), round=2)
        with pytest.raises(KeyError), again:
            raise KeyError
        assert inbox.waiting() == [(3, 2), (1, 2)]
        third = inbox.take(round=2)
        assert third is not None
        third.step(agg, params)
        assert params.tolist() == [6.5] * D and len(inbox) == 0
        inbox.close()


def test_answers_wait_again_after_a_step_of_something_else() -> None:
    inbox = make(capacity=1)
    inbox.put(0, row(2.0), round=1)
    answers = inbox.take(round=2)
    assert answers is not None
    with pytest.raises(TypeError, match=r"aggregator: expected an aggregator .*, got Inbox; "):
        answers.step(inbox, torch.zeros(D))  # type: ignore[arg-type]
    assert inbox.waiting() == [(0, 1)]


def test_a_step_that_took_effect_uses_the_answers_up() -> None:
    """Also if a signal handler raises an exception out of the call."""
    inbox = make()
    agg, params = fastagg.make("fedavg", num_clients=K, num_params=D), torch.zeros(D)
    inbox.put(0, row(1.0), round=0)
    answers = inbox.take(round=0)
    assert answers is not None
    agg_commit = agg._note_commit

    def interrupt(report: Any) -> None:
        agg_commit(report)
        os.kill(os.getpid(), signal.SIGINT)

    agg._note_commit = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        answers.step(agg, params)
    assert params.tolist() == [1.0] * D and len(inbox) == 0


def test_take_waits_for_others() -> None:
    inbox = make()

    def send() -> None:
        for client in range(3):
            time.sleep(0.02)
            inbox.put(client, row(client), round=0)

    thread = threading.Thread(target=send)
    thread.start()
    answers = inbox.take(3, round=0, timeout=60.0)
    thread.join()
    assert answers is not None and answers.clients == [0, 1, 2]
    start = time.monotonic()
    inbox.put(0, row(0.0), round=0)
    assert inbox.take(2, round=0, timeout=0.05) is None
    assert time.monotonic() - start >= 0.05 and len(inbox) == 1
    few = inbox.take(2, round=0, timeout=0.01, least=1)
    assert few is not None and few.clients == [0]
    inbox.put(1, row(1.0), round=0)
    last = inbox.take(1, round=0, timeout=None)
    assert last is not None and last.clients == [1]


def test_an_answer_that_another_thread_took_meanwhile_is_not_taken_again() -> None:
    inbox = Inbox(num_clients=2, num_params=1, capacity=2)
    inbox.put(0, torch.ones(1), round=0)
    found: list[object] = ["nothing"]

    def wait() -> None:
        found[0] = inbox.take(2, round=0, timeout=0.5, least=1)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    answers = inbox.take(round=0)
    assert answers is not None
    thread.join()
    assert found == [None] and len(answers.clients) == 1


def test_many_threads_lose_and_double_nothing() -> None:
    """Six threads put and two take; every row is taken exactly once."""
    count, inbox = 60, Inbox(num_clients=6, num_params=1, capacity=20, policy="queue")
    seen: list[float] = []

    def send(client: int) -> None:
        for r in range(count):
            while True:
                try:
                    inbox.put(client, torch.tensor([float(client * count + r)]), round=r)
                    break
                except InboxFull:
                    time.sleep(0.001)

    def receive() -> None:
        draw = random.Random(1)
        while len(seen) < 6 * count:
            answers = inbox.take(3, round=count, timeout=0.01, least=1)
            if answers is None:
                continue
            if draw.random() < 0.3:
                with pytest.raises(KeyError), answers:
                    raise KeyError
            else:
                with answers as (updates, _, _):
                    seen.extend(u.item() for u in updates)

    threads = [threading.Thread(target=send, args=(client,)) for client in range(6)]
    threads += [threading.Thread(target=receive) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(6 * count))


@given(data=st.data())
def test_it_follows_a_model(data: st.DataObject) -> None:
    """Against a list of (client, round, value), for both policies and both ways of being full."""
    policy = data.draw(st.sampled_from(["newest", "queue"]))
    full = data.draw(st.sampled_from(["refuse", "oldest"]))
    inbox = Inbox(num_clients=3, num_params=1, capacity=4, policy=policy, full=full)
    model: list[tuple[int, int, float]] = []
    for value in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            client, r = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
            gone = [a for a in model if a[0] == client and (policy == "newest" or a[1] == r)]
            if any(a[1] > r for a in gone):
                assert not inbox.put(client, torch.tensor([float(value)]), round=r)
                continue
            if len(model) - len(gone) == 4:
                if full == "refuse":
                    with pytest.raises(InboxFull):
                        inbox.put(client, torch.tensor([float(value)]), round=r)
                    continue
                gone = model[:1]
            assert inbox.put(client, torch.tensor([float(value)]), round=r)
            model = [a for a in model if a not in gone] + [(client, r, float(value))]
        else:
            count = data.draw(st.integers(1, 5))
            answers = inbox.take(count, round=3)
            assert (answers is None) == (len(model) < count)
            if answers is not None:
                found = zip(answers.clients, answers.ages, answers.updates, strict=True)
                assert [(k, 3 - age, u.item()) for k, age, u in found] == model[:count]
                with answers:
                    model = model[count:]
        assert inbox.waiting() == [(client, r) for client, r, _ in model]


def test_discard(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        inbox = make(folder=folder)
        for client in range(4):
            inbox.put(client, row(0.0), round=client)
        assert inbox.discard(lambda client, r: client == 1 or r == 3) == [(1, 1), (3, 3)]
        assert inbox.waiting() == [(0, 0), (2, 2)]
        if folder is not None:
            assert len([*folder.iterdir()]) == 2
        inbox.close()


def test_answers_of_later_rounds_may_wait() -> None:
    inbox = make()
    for client, r in ((0, 2), (1, 1), (2, 2)):
        inbox.put(client, row(0.0), round=r)
    assert inbox.take(2, round=2, until=1) is None and inbox.take(round=2, until=0) is None
    answers = inbox.take(round=2, until=1)
    assert answers is not None and answers.clients == [1]
    assert inbox.waiting() == [(0, 2), (2, 2)]


def test_an_answer_of_a_round_that_is_not_there_yet_blocks_no_step() -> None:
    inbox = make()
    for client, r in ((3, 10**6), (0, 0), (1, 0)):
        inbox.put(client, row(0.0), round=r)
    answers = inbox.take(2, round=0)
    assert answers is not None and answers.clients == [0, 1] and answers.ages == [0, 0]
    assert inbox.waiting() == [(3, 10**6)] and inbox.take(round=1) is None
    assert inbox.discard(lambda client, r: r > 1) == [(3, 10**6)]


def test_answers_of_a_step_that_the_caller_makes() -> None:
    inbox = make()
    inbox.put(0, row(0.0), round=0)
    for used in (False, True):
        answers = inbox.take(round=0)
        assert answers is not None
        answers.finish(used=used)
        answers.finish(used=not used)  # nothing
        assert len(inbox) == (not used)


def test_some_answers_of_a_step_wait_again(tmp_path: Path) -> None:
    inbox = make(folder=tmp_path / "answers")
    for client in range(3):
        inbox.put(client, torch.zeros(D), round=client)
    answers = inbox.take(round=4)
    assert answers is not None
    with pytest.raises(ValueError, match="used: expected 3 flags, one per answer, got 2"):
        answers.finish(used=[True, False])
    answers.finish(used=[False, True, False])
    answers.finish(used=[False, False, False])
    assert inbox.waiting() == [(0, 0), (2, 2)]
    inbox.settle(5)
    inbox.close()
    inbox = make(folder=tmp_path / "answers", round=5)
    assert inbox.waiting() == [(0, 0), (2, 2)]
    inbox.close()


@pytest.mark.parametrize(
    ("note", "error", "match"),
    [
        ([], TypeError, "expected a dict"),
        ({1: 2}, TypeError, "expected a dict"),
        ({"a": float("nan")}, TypeError, "JSON"),
        ({"a": b""}, TypeError, "JSON"),
        ({"a": "x" * (1 << 18)}, ValueError, "at most 262144 bytes"),
    ],
)
def test_wrong_notes(note: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    inbox = make(folder=tmp_path)
    with pytest.raises(error, match=f"^note: .*{match}"):
        inbox.put(0, row(0.0), round=0, note=note)
    assert len(inbox) == 0 and not any(tmp_path.iterdir())
    largest = {"a": '"' * ((1 << 17) - 10)}  # escaped twice
    assert inbox.put(0, row(0.0), round=0, note=largest)
    inbox.close()


# --- wrong arguments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "update", "rounds", "error", "match"),
    [
        (4, row(1.0), 0, IndexError, r"client: expected an id in \[0, 4\), got 4"),
        (-1, row(1.0), 0, IndexError, "client"),
        (1.0, row(1.0), 0, TypeError, "client"),
        (True, row(1.0), 0, TypeError, "client"),
        (1, torch.zeros(2), 0, ValueError, r"update: expected shape \[3\]"),
        (1, torch.zeros(1, 3), 0, ValueError, r"update: expected shape \[3\]"),
        (1, torch.zeros(3, dtype=torch.float64), 0, TypeError, "update: expected a dense float32"),
        (1, torch.zeros(3, device="meta"), 0, ValueError, "update: .* on meta"),
        (1, [0.0, 0.0, 0.0], 0, TypeError, "update: expected a torch.Tensor"),
        (1, row(float("nan")), 0, ValueError, "update: expected finite values"),
        (1, row(1.0), -1, ValueError, "round: expected at least 0"),
        (1, row(1.0), 0.5, TypeError, "round"),
    ],
)
def test_wrong_answers(
    client: Any, update: Any, rounds: Any, error: type[Exception], match: str
) -> None:
    inbox = make(finite=True)
    with pytest.raises(error, match=match):
        inbox.put(client, update, round=rounds)
    assert len(inbox) == 0


def test_wrong_calls() -> None:
    inbox = make()
    inbox.put(0, row(0.0), round=5)
    with pytest.raises(ValueError, match="until: expected at most round, which is 4, got 5"):
        inbox.take(round=4, until=5)
    for wrong in ({"count": 0}, {"count": 1.5}, {"timeout": -1.0}, {"timeout": float("nan")},
                  {"timeout": "1"}, {"timeout": -(10**400)}, {"count": 2, "least": 3}):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=[*wrong][-1]):
            inbox.take(round=5, **wrong)
    assert len(inbox) == 1
    for options in ({"capacity": 0}, {"policy": "last"}, {"full": "wait"}, {"finite": 1},
                    {"round": -1}, {"num_clients": 0}, {"num_params": 0}):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            make(**options)


@pytest.mark.parametrize("durable", [False, True])
def test_a_closed_inbox_refuses_calls_and_wakes_those_who_wait(
    durable: bool, tmp_path: Path
) -> None:
    inbox = make(folder=tmp_path / "answers" if durable else None)
    inbox.put(0, row(1.0), round=0)
    taken = inbox.take(round=0)
    assert taken is not None
    said: list[str] = []

    def wait() -> None:
        try:
            inbox.take(5, round=0, timeout=None)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    inbox.close()
    thread.join(timeout=30.0)
    assert not thread.is_alive() and said == ["inbox: it is closed; make another one"]
    for call in (
        lambda: inbox.put(1, row(2.0), round=0),  # it would be in no file
        lambda: inbox.take(round=0),
        lambda: inbox.discard(lambda client, round: True),
        lambda: inbox.settle(1),
    ):
        with pytest.raises(RuntimeError, match="inbox: it is closed; make another one"):
            call()
    inbox.close()
    taken.finish(used=False)  # a step that was in progress may end
    if durable:
        again = make(folder=tmp_path / "answers")
        assert again.waiting() == [(0, 0)]
        again.close()
