# SPDX-License-Identifier: Apache-2.0
"""Deliver signals after a block of code instead of within it."""

from __future__ import annotations

# The C module behind `signal`, whose wrappers take ten times as long to convert enumerations.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

# Signals whose handlers commonly raise an exception, where the platform has them.
_NUMBERS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1")
    if hasattr(signal, name)
)


class SignalsDeferred:
    """Context manager that runs Python signal handlers after the block, not within it.

    Python runs handlers in the main thread, between any two bytecodes. A handler that raises an
    exception (as for Ctrl-C) would split a commit. Within this block, temporary handlers only
    record the signals. On exit the original handlers run, in the order of arrival. In other threads
    this does nothing, because Python runs no handlers there.
    """

    __slots__ = ("_arrived", "_replaced")

    def __enter__(self) -> None:
        self._replaced: list[tuple[int, _Handler]] = []
        self._arrived: list[int] = []
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._replaced.append((number, handler))
                _signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._replaced:
            _signal.signal(number, handler)
        for number in self._arrived:
            signal.raise_signal(number)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)
