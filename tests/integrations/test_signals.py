# SPDX-License-Identifier: Apache-2.0
"""A last checkpoint on SIGINT and SIGTERM, tested in a separate process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastagg.integrations._server import AggregationServer
from fastagg.integrations._signals import SIGNALS, SignalGuard
from fastagg.signals import SignalsDeferred
from tests.scripts import HANG


@pytest.fixture(autouse=True)
def _same_handlers() -> Iterator[None]:
    """Check that a test leaves the handlers as they were."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


# Runs rounds without end; checkpoint_every is too large for a scheduled checkpoint.
SERVER = """
import io, sys, time
import numpy as np
from fastagg.integrations._report import Answer
from fastagg.integrations._server import AggregationServer

def pack(values):
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()

server = AggregationServer("mifa", num_clients=2, checkpoint_path=sys.argv[1],
                           checkpoint_every=10**9)
server.set_model({"w": pack(np.zeros(50_000, np.float32))})
assert server.guard.install()
while True:
    server.open_round(["a", "b"])
    moved = np.load(io.BytesIO(server.arrays()["w"])) + np.float32(1)
    server.close_round([Answer("a", {"w": pack(moved)}, 0), Answer("b", {"w": pack(moved)}, 1)])
    if server.rounds == 3:
        print("running", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_whole_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            assert not path.exists()
            process.send_signal(number)
            _, errors = process.communicate(timeout=HANG)
        finally:
            process.kill()  # it has no effect on a process that has ended
    # The default effect of the signal: KeyboardInterrupt (as a status or a signal), or death.
    assert process.returncode in ({1, -2, 130} if number == signal.SIGINT else {-15})
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    server = AggregationServer("mifa", num_clients=2)
    server.resume(path)
    assert server.rounds >= 3
    # Every round moves every parameter by one, and the memory is that of the last round.
    assert torch.equal(server.params, torch.full((50_000,), float(server.rounds)))
    assert torch.equal(server.aggregator.state_dict()["memory"], torch.ones(2, 50_000))


def test_a_signal_waits_while_it_is_held() -> None:
    events: list[str] = []
    guard = SignalGuard(lambda: events.append("saved"))
    assert guard.install()
    with pytest.raises(KeyboardInterrupt), guard.held():
        with guard.held():
            signal.raise_signal(signal.SIGINT)
            events.append("inner")
        events.append("outer")
    assert events == ["inner", "outer", "saved"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_old_handlers_come_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    guard = SignalGuard(lambda: pytest.fail("nothing to save"))
    assert guard.install()
    assert guard.install()  # a second install has no effect
    guard.uninstall()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_handlers_set_by_others_stay() -> None:
    before = signal.getsignal(signal.SIGTERM)
    guard = SignalGuard(lambda: None)
    try:
        guard.install()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        guard.uninstall()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_commit_installs_its_handlers(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_signal(which: int, handler: Callable[..., object]) -> object:
        before = _signal.signal(which, handler)
        if which == number and not raised:
            raised.append(which)
            signal.raise_signal(number)
        return before

    def former(which: int, frame: object) -> None:
        events.append("former")
        raise KeyboardInterrupt

    raised: list[int] = []
    events: list[str] = []
    first = signal.signal(number, former)
    others = {s: signal.getsignal(s) for s in SIGNALS if s != number}
    try:
        guard = SignalGuard(lambda: events.append("saved"))
        assert guard.install()
        with monkeypatch.context() as patch:
            module = SimpleNamespace(getsignal=_signal.getsignal, signal=interrupted_signal)
            patch.setattr("fastagg.signals._signal", module)
            with pytest.raises(KeyboardInterrupt), SignalsDeferred():
                events.append("commit")
        assert events == ["saved", "former"]
        with pytest.raises(KeyboardInterrupt):  # the commit put the guard's handler back
            signal.raise_signal(number)
        assert events == ["saved", "former", "former"]
        assert guard.install()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert events[3:] == ["saved", "former"]
        assert signal.getsignal(number) is former
        assert {s: signal.getsignal(s) for s in others} == others
    finally:
        signal.signal(number, first)


def test_an_ignored_signal_stays_ignored_for_a_guard_that_saved() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    events: list[str] = []
    guard = SignalGuard(lambda: events.append("saved"))
    try:
        assert guard.install()
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        signal.signal(signal.SIGTERM, lambda number, frame: handler(number, frame))
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert events == ["saved"]
    finally:
        guard.uninstall()
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_calls_an_earlier_one_is_no_circle() -> None:
    """Each handler runs once, also if the guard was installed again below the handler above it."""

    def former(number: int, frame: object) -> None:
        events.append("former")

    def wrapper(number: int, frame: object) -> None:  # as a library chains to what it finds
        events.append("wrapper")
        assert callable(found)
        found(number, frame)

    events: list[str] = []
    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, former)
    guard = SignalGuard(lambda: events.append("saved"))
    other = SignalGuard(lambda: events.append("saved by another"))
    try:
        assert guard.install()
        found = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, wrapper)
        guard.uninstall()
        assert guard.install()
        signal.raise_signal(signal.SIGTERM)
        assert events == ["saved", "wrapper", "former"]
        events.clear()
        signal.signal(signal.SIGTERM, former)
        assert guard.install()
        assert other.install()
        guard.uninstall()
        assert guard.install()
        signal.raise_signal(signal.SIGTERM)
        assert events == ["saved", "saved by another", "former"]
        assert signal.getsignal(signal.SIGTERM) is former  # no handler of a guard is left
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        guard.uninstall()
        other.uninstall()
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_another_thread_delays_saves_in_the_main_thread() -> None:
    def work() -> None:
        try:
            with guard.held():
                inside.set()
                go.wait(HANG)
            events.append("no error")
        except BaseException as error:
            events.append(repr(error))

    def handler(number: int, frame: object) -> None:
        events.append("former")

    def save() -> None:
        assert threading.current_thread() is threading.main_thread()
        events.append("saved")

    events: list[str] = []
    before = signal.signal(signal.SIGTERM, handler)
    guard = SignalGuard(save)
    inside, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    try:
        assert guard.install()
        thread.start()
        assert inside.wait(HANG)
        signal.raise_signal(signal.SIGTERM)
        assert events == []
        go.set()
        thread.join(HANG)
        assert sorted(events) == ["former", "no error", "saved"]
    finally:
        go.set()
        guard.uninstall()
        signal.signal(signal.SIGTERM, before)


def test_no_handler_is_installed_outside_the_main_thread() -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(SignalGuard(lambda: None).install()))
    thread.start()
    thread.join()
    assert results == [False]
