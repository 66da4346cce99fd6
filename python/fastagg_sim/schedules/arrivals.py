# SPDX-License-Identifier: Apache-2.0
"""The queue of answers that are on their way to the server."""

from __future__ import annotations

import heapq
from typing import Any

from fastagg_sim.schedules.base import Work, read_seconds


class Arrivals:
    """Work that clients have started, ordered by the time at which the answer arrives.

    Answers that arrive at the same time are ordered by client, then by round. The order does not
    depend on the order in which they were added.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, Work]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time: float, work: Work) -> None:
        """Add work whose answer arrives at `time`."""
        heapq.heappush(self._heap, (time, work))

    def pop(self) -> tuple[float, Work]:
        """Remove the first answer and return it with its time; IndexError if there is none."""
        return heapq.heappop(self._heap)

    def until(self, time: float) -> list[Work]:
        """Remove all answers that arrive at `time` or before, and return their work in order."""
        found = []
        while self._heap and self._heap[0][0] <= time:
            found.append(self.pop()[1])
        return found

    def clients(self) -> set[int]:
        """Return the clients that are at work."""
        return {work.client for _, work in self._heap}

    def works(self) -> list[Work]:
        """Return all work, ascending."""
        return sorted(work for _, work in self._heap)

    def state(self) -> list[list[float | int]]:
        """Return [time, client, round] of all answers, in order, as JSON values."""
        return [[time, work.client, work.round] for time, work in sorted(self._heap)]

    @staticmethod
    def load(state: Any, now: float, round: int, num_clients: int) -> Arrivals:
        """Return the queue of which `state` was the state at the time `now`, before `round`.

        Raises ValueError for anything else: an answer before `now`, a client or a round out of
        range, two answers of a client.
        """
        if not isinstance(state, list):
            raise ValueError(f"schedule: arrivals: expected a list, got {state!r}")
        found = Arrivals()
        for row in state:
            if not isinstance(row, list) or len(row) != 3:
                raise ValueError(f"schedule: arrivals: expected [time, client, round], got {row!r}")
            time = read_seconds("arrivals", row[0], now)
            found.add(time, _work("arrivals", row[1:], round, num_clients))
        if len(found.clients()) != len(found):
            raise ValueError("schedule: arrivals: expected each client once")
        return found


def _work(name: str, value: Any, round: int, num_clients: int) -> Work:
    """Return the work in [client, round] of a loaded state, before `round`; else ValueError."""
    whole = isinstance(value, list) and [type(number) for number in value] == [int, int]
    if not whole or not (0 <= value[0] < num_clients and 0 <= value[1] < round):
        raise ValueError(
            f"schedule: {name}: expected a client below {num_clients} and a round below {round}, "
            f"got {value!r}"
        )
    return Work(*value)
