# SPDX-License-Identifier: Apache-2.0
"""Run signal handlers after a block of code instead of within it."""

from __future__ import annotations

# The C module behind `signal`, whose wrappers take ten times as long to convert enumerations.
import _signal  # type: ignore[import-not-found]
import _thread
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

# Signals whose handlers may raise an exception, where the platform has them.
_NUMBERS = tuple(
    int(getattr(signal, name))
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGALRM",
        "SIGUSR1",
        "SIGUSR2",
        "SIGHUP",
        "SIGQUIT",
        "SIGVTALRM",
        "SIGPROF",
    )
    if hasattr(signal, name)
)
_mark: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]
_NOWHERE: deque[object] = deque(maxlen=0)


class SignalsDeferred:
    """Context manager that runs Python signal handlers after the block, not within it.

    Python runs handlers in the main thread, between any two bytecodes. A handler that raises an
    exception (as for Ctrl-C) would split a commit. Within this block, temporary handlers only
    record the signals. On exit the original handlers run, those of the lowest signal numbers first,
    as they do in Python. In other threads this does nothing, because Python runs no handlers there.

    No signal is lost, whenever it arrives: outside the block the temporary handlers call the
    original ones, and on exit all recorded signals are marked in one call before any handler runs.
    """

    __slots__ = ("_arrived", "_recording", "_replaced")

    def __enter__(self) -> None:
        self._replaced: dict[int, _Handler] = {}
        self._arrived: list[int] = []
        self._recording = False
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    owner = getattr(handler, "__self__", None)
                    if type(owner) is SignalsDeferred and not owner._recording:
                        handler = owner._replaced[number]  # it was interrupted while it restored
                    self._replaced[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:  # raised by a handler
            self._restore()
            raise
        self._recording = True

    def __exit__(self, *_: object) -> None:
        marking = map(_mark, self._arrived)  # reads the list when it is consumed
        try:
            self._restore()
        finally:
            self._recording = False
            # Consumes the iterator in C: Python runs no handler before all signals are marked.
            _NOWHERE.extend(marking)

    def _restore(self) -> None:
        """Restore all handlers, also if some of them raise meanwhile."""
        numbers, handlers = self._replaced.keys(), self._replaced.values()
        try:
            _NOWHERE.extend(map(_signal.signal, numbers, handlers))
        except BaseException:
            try:
                _NOWHERE.extend(map(_signal.signal, numbers, handlers))
            except BaseException:
                _NOWHERE.extend(map(_signal.signal, numbers, handlers))
                raise
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._recording:
            self._arrived.append(number)
        else:
            self._replaced[number](number, frame)
