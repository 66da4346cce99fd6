# SPDX-License-Identifier: Apache-2.0
"""The server does not wait for anybody in particular."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastagg_sim.latency import LatencyProcess
from fastagg_sim.schedules.arrivals import Arrivals
from fastagg_sim.schedules.base import (
    Plan,
    ServerSchedule,
    Work,
    check_entries,
    read_count,
    read_seconds,
    register,
)
from fastagg_sim.seeds import uniform


@register("buffered")
class Buffered(ServerSchedule):
    """The server takes a step whenever it has a number of answers, whoever sent them (FedBuff,
    Nguyen et al., 2022; with size = 1, FedAsync). Rounds count its steps.

    A client that has answered starts again at once from the newest model, unless it has already
    started from that one, or the rule takes no second answer of a client in a step (`repeats`);
    then it waits for the next step. An answer that completes a step starts its client from the
    model that the step makes. A client that is absent in a round does not start from its model;
    work that has begun is completed.

    If fewer clients are at work than a step needs, the step takes the answers that there are, so
    that it does not wait forever. A round without any answer takes no time.

    size: number of answers of a step, at least 1.
    concurrency: number of clients that are at work at most; None: all. Where there are more to
        choose from, each start draws one uniformly.
    """

    late_answers = True

    def __init__(self, latency: LatencyProcess, size: int, concurrency: int | None = None) -> None:
        super().__init__(latency)
        self.size = read_count("size", size)
        self.concurrency = concurrency
        if concurrency is not None:
            read_count("concurrency", concurrency)
        self._arrivals = Arrivals()

    def _plan(self, round: int, active: Sequence[int]) -> Plan:
        now = self.time
        busy = self._arrivals.clients()
        idle = [client for client in active if client not in busy]
        starts: list[int] = []
        answers: list[Work] = []
        self._start(round, now, idle, starts)
        able = set(active)
        while len(answers) < self.size and len(self._arrivals):
            now, arrived = self._arrivals.pop()
            answers.append(arrived)
            # With an answer that completes the step, the newest model is that of the next round.
            if len(answers) < self.size:
                if self.repeats and arrived.client in able and arrived.round != round:
                    idle.append(arrived.client)
                self._start(round, now, idle, starts)
        return Plan(tuple(sorted(starts)), tuple(sorted(answers)), len(self._arrivals), now)

    def _start(self, round: int, now: float, idle: list[int], starts: list[int]) -> None:
        """Let clients start from the model of `round` until enough are at work.

        They move from `idle` to `starts`.
        """
        most = self.concurrency or self.latency.num_clients
        idle.sort()
        while idle and len(self._arrivals) < most:
            chosen = 0
            if len(idle) > most - len(self._arrivals):
                names = ("schedule", "buffered", round, len(starts))
                chosen = int(uniform(self.latency.seed, *names) * len(idle))
            client = idle.pop(chosen)
            starts.append(client)
            self._arrivals.add(now + self.latency.seconds(client, round), Work(client, round))

    def waiting(self) -> list[Work]:
        return self._arrivals.works()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "arrivals": self._arrivals.state()}

    def load(self, state: Any, round: int) -> None:
        check_entries(state, {"time", "arrivals"})
        time = read_seconds("time", state["time"])
        self._arrivals = Arrivals.load(state["arrivals"], time, round, self.latency.num_clients)
        self.time = time
