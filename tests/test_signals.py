# SPDX-License-Identifier: Apache-2.0
"""A signal that arrives during a commit is delivered after it and does not split it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import fastagg
from fastagg import Aggregator
from fastagg.signals import SignalsDeferred


def test_handlers_run_after_the_block() -> None:
    seen: list[object] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)

    numbers = (signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        with SignalsDeferred():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)
            seen.append("end of the block")
        assert seen[0] == "end of the block"
        assert sorted(map(int, seen[1:])) == [signal.SIGINT, signal.SIGUSR1]  # type: ignore[call-overload]
        assert all(signal.getsignal(number) is note for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_error_in_the_block_comes_before_the_signal() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, SignalsDeferred():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("in the block")
    assert isinstance(raised.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_handler_runs_if_the_first_one_raises() -> None:
    ran: list[int] = []

    def fail(number: int, _: FrameType | None) -> None:
        ran.append(number)
        if len(ran) == 1:
            raise ValueError(number)

    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = {number: signal.signal(number, fail) for number in numbers}
    try:
        with pytest.raises(ValueError), SignalsDeferred():
            for number in numbers:
                signal.raise_signal(number)
        assert sorted(ran) == sorted(numbers)
        assert all(signal.getsignal(number) is fail for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_handler_that_raises_while_others_are_replaced_loses_no_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a signal that is not deferred yet arrives in __enter__
    first = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("fastagg.signals._NUMBERS", (int(signal.SIGINT), -1))
    with pytest.raises((ValueError, OSError)), SignalsDeferred():
        pytest.fail("not reached")
    assert signal.getsignal(signal.SIGINT) is first


def test_other_threads_are_left_alone() -> None:
    handlers: list[object] = []

    def work() -> None:
        with SignalsDeferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


@pytest.mark.parametrize("name", fastagg.available())
def test_ctrl_c_during_a_commit_leaves_the_step_complete(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options: dict[str, Any] = {"local_work": 1.0} if name == "scaffold" else {}
    d, clients = 7, [3, 0, 1]
    interrupted, plain = (
        fastagg.make(name, num_clients=4, num_params=d, **options) for _ in range(2)
    )
    params, twin = torch.zeros(d), torch.zeros(d)
    real: Callable[..., None] = type(interrupted)._commit

    def interrupt(self: Aggregator[Any, Any], *arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)  # Python would run the handler at the next call
        real(self, *arguments)

    for _ in range(3):
        updates = torch.randn(3, d)
        with monkeypatch.context() as patched:
            patched.setattr(type(interrupted), "_commit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                interrupted.step(params, updates, clients)
        report = plain.step(twin, updates, clients)
        assert interrupted.committed == plain.committed
        assert interrupted.last_report is not None
        assert torch.equal(interrupted.last_report.weights, report.weights)
        assert torch.equal(params, twin)
        state = plain.state_dict()
        assert all(torch.equal(v, state[k]) for k, v in interrupted.state_dict().items())
