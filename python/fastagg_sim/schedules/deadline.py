# SPDX-License-Identifier: Apache-2.0
"""The server does not wait longer than until a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastagg_sim.client_process import check_numbers
from fastagg_sim.latency import LatencyProcess
from fastagg_sim.latency.base import LONGEST, SHORTEST
from fastagg_sim.schedules.arrivals import Arrivals
from fastagg_sim.schedules.base import (
    Plan,
    ServerSchedule,
    Work,
    check_entries,
    of_round,
    read_seconds,
    register,
)


@register("deadline")
class Deadline(ServerSchedule):
    """A round ends `seconds` after its start, or when all clients that started in it have answered,
    if that is earlier. A round in which no client starts takes all of its seconds.

    seconds: between 1e-9 and 1e9.
    late: what happens to answers that are not there in time. An answer at the deadline is in time.
        "lost": the client stops at the deadline; it can start again in the next round, like one
            that was absent.
        "kept": the client goes on, and its answer takes part in the step of the round in which it
            arrives, with its age. Until then it starts in no other round.
    """

    def __init__(self, latency: LatencyProcess, seconds: float, late: str = "lost") -> None:
        super().__init__(latency)
        check_numbers("seconds", (seconds,), SHORTEST, LONGEST)
        if late not in ("lost", "kept"):
            raise ValueError(f"late: expected one of lost, kept, got {late!r}")
        self.seconds = seconds
        self.late = late
        self.late_answers = late == "kept"
        self._arrivals = Arrivals()

    def _plan(self, round: int, active: Sequence[int]) -> Plan:
        busy = self._arrivals.clients()
        starts = [client for client in active if client not in busy]
        order = self._latencies(round, starts)
        wait = self.seconds
        if order:
            wait = min(wait, order[-1][0])
        in_time = [client for seconds, client in order if seconds <= wait]
        end = self.time + wait
        if not self.late_answers:
            stopped = len(order) - len(in_time)
            return Plan(tuple(sorted(in_time)), of_round(in_time, round), stopped, end)
        older = self._arrivals.until(end)
        for seconds, client in order[len(in_time) :]:
            self._arrivals.add(self.time + seconds, Work(client, round))
        answers = sorted([*older, *of_round(in_time, round)])
        return Plan(tuple(starts), tuple(answers), len(self._arrivals), end)

    def waiting(self) -> list[Work]:
        return self._arrivals.works()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "arrivals": self._arrivals.state()}

    def load(self, state: Any, round: int) -> None:
        check_entries(state, {"time", "arrivals"})
        time = read_seconds("time", state["time"])
        arrivals = Arrivals.load(state["arrivals"], time, round, self.latency.num_clients)
        if arrivals.works() and not self.late_answers:
            raise ValueError("schedule: expected no arrivals, since late answers are lost")
        self.time, self._arrivals = time, arrivals
