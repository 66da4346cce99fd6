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
        self._own: _Handlers | None = None  # of the present install
        self._held = 0
        self._pending: tuple[_Handlers, int] | None = None

    def install(self) -> bool:
        """Install the handlers; return False outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._own is None:
            own = _Handlers(self)
            for number in SIGNALS:
                own.previous[number] = _lasting(signal.getsignal(number), number)
                signal.signal(number, own.handle)
            self._own = own
        return True

    def uninstall(self) -> None:
        """Restore the previous handlers, except where the handler was replaced since."""
        own, self._own = self._own, None
        if own is None or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) == own.handle:
                own.restore(number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay the guard's signals within this context; nothing is saved until it ends."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._held == 0 and self._pending is not None:
                (own, number), self._pending = self._pending, None
                if threading.current_thread() is threading.main_thread():
                    self._leave(own, number, None)
                else:  # Python runs handlers in the main thread
                    signal.raise_signal(number)

    def has(self, own: _Handlers) -> bool:
        """Return whether these are the handlers of the present install."""
        return self._own is own

    def arrived(self, own: _Handlers, number: int, frame: FrameType | None) -> None:
        """Do what the handlers of this guard do when a signal arrives."""
        if self._held:
            self._pending = own, number
        else:
            self._leave(own, number, frame)

    def _leave(self, own: _Handlers, number: int, frame: FrameType | None) -> None:
        """Save the state and raise a signal again, for the previous handler.

        Handlers of an earlier install, which somebody else has kept, pass the signal on.
        """
        if not self.has(own):
            own.pass_on(number, frame)
            return
        self.uninstall()
        try:
            self._save()
        finally:
            signal.raise_signal(number)


class _Handlers:
    """The handlers of one install. Those to which they pass signals on never change."""

    def __init__(self, guard: SignalGuard) -> None:
        self.guard = guard
        self.previous: dict[int, object] = {}

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.guard.arrived(self, number, frame)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the previous handler of a signal does."""
        handler = self.previous[number]
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            self.restore(number)
            signal.raise_signal(number)

    def restore(self, number: int) -> None:
        """Restore the previous handler of a signal."""
        handler = _lasting(self.previous[number], number)
        # None: it was not installed from Python and cannot be restored
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]


def _lasting(handler: object, number: int) -> object:
    """Return a handler, or the one to which it passes signals on if its install has ended.

    The handlers of an install cannot be removed while somebody else's handler is above them.
    """
    while isinstance(own := getattr(handler, "__self__", None), _Handlers):
        if own.guard.has(own):
            break
        handler = own.previous[number]
    return handler
