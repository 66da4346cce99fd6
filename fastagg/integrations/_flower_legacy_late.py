# SPDX-License-Identifier: Apache-2.0
"""Results of Flower's older API that come after the end of their round.

``flwr.server.Server`` calls ``fit`` of every client with the timeout of the round, and waits until
all calls have returned; a client that exceeds it is disconnected, or its message expires. So the
calls of clients are made here, in threads of their own and with a longer timeout. The server gets
an error at the end of the round, and the strategy gets the result when it comes: it goes at once to
whoever keeps it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from flwr.common import Code, FitIns, FitRes
from flwr.server.client_proxy import ClientProxy

from fastagg.integrations._untrusted import cut

_LOG = logging.getLogger("flwr")
_LONGEST = 43200.0  # seconds for a call of a client, as long as Flower's messages live


class LateResults:
    """The clients that have not answered yet.

    All methods may be called from any thread. A client has one call at a time.

    Args:
        keep: is called with the cid, the round and each result that came late, from any thread.
    """

    def __init__(self, keep: Callable[[str, int, FitRes], None]) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._busy: set[str] = set()
        self._called = True  # whether fit was called since the last :meth:`watched`

    def watched(self, proxies: Iterable[ClientProxy], number: int) -> list[ClientProxy]:
        """Return proxies for the calls of a round that this object makes."""
        self._called = False
        return [_WatchedProxy(proxy, number, self) for proxy in proxies]

    def check_called(self) -> None:
        """Check that somebody has called the proxies of :meth:`watched`.

        Raises:
            ValueError: nobody has, so no late result can come.
        """
        if not self._called:
            raise ValueError(
                "max_staleness: expected a server that calls ClientProxy.fit, as "
                "flwr.server.Server does, got one that sends messages itself (as DefaultWorkflow "
                "does), so late results cannot be kept; use FastAggStrategy of the message API"
            )

    def wait_for_one(self, clients: Iterable[str], timeout: float) -> set[str]:
        """Return those of ``clients`` that have no call; wait ``timeout`` seconds for one."""
        names = set(clients)
        with self._changed:
            seconds = min(timeout, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: not names or names - self._busy, seconds)
            return names - self._busy

    def call(
        self, proxy: ClientProxy, number: int, ins: FitIns, timeout: float, group_id: int | None
    ) -> FitRes:
        """Call a client, and return its result if it comes within ``timeout`` seconds.

        Raises:
            TimeoutError: it did not come; it will be kept when it comes.
            Exception: that of ``proxy.fit``.
        """
        answer = _Call()
        # Not a pool: its threads would keep the process from ending while a client trains.
        arguments = (answer, proxy, number, ins, group_id)
        thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        with self._changed:
            thread.start()
            self._busy.add(proxy.cid)
            if not self._changed.wait_for(lambda: answer.done, min(timeout, threading.TIMEOUT_MAX)):
                answer.is_late = True
                raise TimeoutError(
                    f"client {proxy.cid}: no result within {timeout:g} s; it counts when it comes"
                )
        if answer.error is not None:
            raise answer.error
        assert answer.result is not None  # it is done without an error
        return answer.result

    def _run(
        self, answer: _Call, proxy: ClientProxy, number: int, ins: FitIns, group_id: int | None
    ) -> None:
        result, error = None, None
        try:
            result = proxy.fit(ins, _LONGEST, group_id)
        except Exception as raised:  # raised by the caller, or logged if the round has ended
            error = raised
        with self._changed:
            answer.result, answer.error, answer.done = result, error, True
            if not answer.is_late:
                self._busy.discard(proxy.cid)
                self._changed.notify_all()
                return
        try:
            if result is not None and result.status.code == Code.OK:
                self._keep(proxy.cid, number, result)
            else:
                reason = cut(repr(error) if result is None else str(result.status))
                _LOG.info("\t> Received late failure: client %s: %s", proxy.cid, reason)
        except Exception:  # nobody waits for this thread
            _LOG.exception("\t> The late result of client %s was not kept", proxy.cid)
        with self._changed:  # after its result is kept, so that the next round has it
            self._busy.discard(proxy.cid)
            self._changed.notify_all()

    def note_call(self) -> None:
        """Note that a proxy of :meth:`watched` was called."""
        self._called = True


class _Call:
    """A call of a client; guarded by the lock of :class:`LateResults`."""

    def __init__(self) -> None:
        self.done, self.is_late = False, False
        self.result: FitRes | None = None
        self.error: Exception | None = None


class _WatchedProxy(ClientProxy):
    """A client whose ``fit`` ends with the round, while the client goes on."""

    def __init__(self, proxy: ClientProxy, number: int, results: LateResults) -> None:
        super().__init__(proxy.cid)
        self.properties = proxy.properties
        if hasattr(proxy, "node_id"):
            self.node_id = proxy.node_id
        self._proxy, self._number, self._results = proxy, number, results

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        self._results.note_call()
        if timeout is None:  # the round has no end, so nobody is late
            return self._proxy.fit(ins, timeout, group_id)
        return self._results.call(self._proxy, self._number, ins, timeout, group_id)

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._proxy.get_properties(ins, timeout, group_id)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._proxy.get_parameters(ins, timeout, group_id)

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._proxy.evaluate(ins, timeout, group_id)

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._proxy.reconnect(ins, timeout, group_id)
