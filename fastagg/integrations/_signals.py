# SPDX-License-Identifier: Apache-2.0
"""Saving before SIGINT or SIGTERM end the process, and never in the middle of a change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalGuard:
    """Saves when a signal comes, then lets it do what it would have done without the guard.

    While :meth:`held`, a signal waits. While the state is being saved the old handlers are already
    back, so a second signal does not wait for a save that hangs.

    Args:
        save: writes what must not be lost; called in the main thread, at most once.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._previous: dict[int, object] = {}
        self._held = 0
        self._pending: int | None = None

    def install(self) -> bool:
        """Take the signals over. Returns False outside of the main thread, where nobody can."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._previous:
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return True

    def uninstall(self) -> None:
        """Give the signals back, except where somebody else has taken them since."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                # None: the handler was not installed from Python and cannot be put back
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is saved within, and no signal that the guard has taken interrupts it."""
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
        self.uninstall()
        try:
            self._save()
        finally:
            signal.raise_signal(number)
