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

    Args:
        save: saves the state; called in the main thread, at most once per :meth:`install`.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._previous: dict[int, object] = {}
        self._held = 0
        self._pending: int | None = None

    def install(self) -> bool:
        """Install the handlers; return False outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._previous:
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return True

    def uninstall(self) -> None:
        """Restore the previous handlers, except where the handler was replaced since."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                # None: the previous handler was not installed from Python and cannot be restored
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous = {}

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
                self._leave(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._pending = number
        else:
            self._leave(number)

    def _leave(self, number: int) -> None:
        """Save the state and raise a signal again, for the previous handler."""
        self.uninstall()
        try:
            self._save()
        finally:
            signal.raise_signal(number)
