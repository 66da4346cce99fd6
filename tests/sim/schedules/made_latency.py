# SPDX-License-Identifier: Apache-2.0
"""Latencies that a test states, and schedules of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastagg_sim.latency import LatencyProcess
from fastagg_sim.schedules import Plan, ServerSchedule, Work, make_schedule


@dataclass(frozen=True, kw_only=True)
class Stated(LatencyProcess):
    """Each client has the same latency in every round, but for exceptions by (client, round)."""

    each: Sequence[float]
    exceptions: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def draw(self, client: int, round: int, u: float) -> float:
        return self.exceptions.get((client, round), self.each[client])


def schedule(name: str, each: Sequence[float], **options: Any) -> ServerSchedule:
    exceptions = options.pop("exceptions", {})
    latency = Stated(num_clients=len(each), seed=0, each=each, exceptions=exceptions)
    return make_schedule(name, latency, **options)


def plans(made: ServerSchedule, active: Sequence[Sequence[int]]) -> list[Plan]:
    return [made.next(t, clients) for t, clients in enumerate(active)]


def works(*pairs: tuple[int, int]) -> tuple[Work, ...]:
    return tuple(Work(*pair) for pair in pairs)


def reloaded(made: ServerSchedule, fresh: ServerSchedule, round: int) -> ServerSchedule:
    """Load the state of `made` before `round`, through JSON, into the equal schedule `fresh`."""
    fresh.load(json.loads(json.dumps(made.state())), round)
    return fresh
