# SPDX-License-Identifier: Apache-2.0
"""Saving the state when SIGINT or SIGTERM arrives, but never in the middle of a change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalGuard:
    """Saves the state when SIGINT or SIGTERM arrives, then raises the signal again for its handler.

    Within :meth:`held` a signal is delayed. The previous handlers are restored before the state is
    saved, so a second signal acts at once, even if saving hangs.

    Another handler may stand in the place of the guard's for a while and call it, as that of
    :class:`fastagg.signals.SignalsDeferred` does. The guard cannot restore a handler then. It
    passes further signals on to the previous handlers.

    Args:
        save: saves the state; called in the main thread, at most once per :meth:`install`.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._previous: dict[int, object] = {}
        self._installed = False
        self._held = 0
        self._pending: int | None = None

    def install(self) -> bool:
        """Install the handlers; return False outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._installed:
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before != self._handle:  # else somebody put it back after it was uninstalled
                    self._previous[number] = before
                    signal.signal(number, self._handle)
            self._installed = True
        return True

    def uninstall(self) -> None:
        """Restore the previous handlers, except where the handler was replaced since."""
        if not self._installed:
            return
        self._installed = False
        for number in SIGNALS:
            if signal.getsignal(number) == self._handle:
                self._restore(number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay the guard's signals within this context; nothing is saved until it ends."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._held == 0 and self._pending is not None:
                number, self._pending = self._pending, None
                self._leave(number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._pending = number
        else:
            self._leave(number, frame)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """Save the state and raise a signal again, for the previous handler."""
        if not self._installed:
            self._pass_on(number, frame)
            return
        self.uninstall()
        try:
            self._save()
        finally:
            signal.raise_signal(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the previous handler of a signal does."""
        handler = self._previous[number]
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            self._restore(number)
            signal.raise_signal(number)

    def _restore(self, number: int) -> None:
        """Restore the previous handler of a signal."""
        handler = self._previous[number]
        # None: it was not installed from Python and cannot be restored
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
