# SPDX-License-Identifier: Apache-2.0
"""The server asks more clients than it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastagg_sim.latency import LatencyProcess
from fastagg_sim.schedules.base import Plan, ServerSchedule, of_round, read_count, register
from fastagg_sim.seeds import generator


@register("over-selection")
class OverSelection(ServerSchedule):
    """The server asks take + extra of the active clients and takes the first `take` answers
    (Bonawitz et al., 2019). The others stop, and their work is lost.

    The clients that it asks are a uniform sample. If fewer are active, it asks all of them, and if
    these are no more than `take`, it waits for all. A round without an active client takes no time.

    take: number of answers, at least 1.
    extra: number of further clients that it asks.
    """

    def __init__(self, latency: LatencyProcess, take: int, extra: int) -> None:
        super().__init__(latency)
        self.take = read_count("take", take)
        self.extra = read_count("extra", extra, zero=True)

    def _plan(self, round: int, active: Sequence[int]) -> Plan:
        asked = list(active)
        if len(asked) > self.take + self.extra:
            rng = generator(self.latency.seed, "schedule", "over-selection", round)
            chosen = torch.randperm(len(asked), generator=rng)[: self.take + self.extra]
            asked = [active[i] for i in chosen.tolist()]
        order = self._latencies(round, asked)
        first = order[: self.take]
        clients = sorted(client for _, client in first)
        time = self.time + (first[-1][0] if first else 0.0)
        return Plan(tuple(clients), of_round(clients, round), len(order) - len(first), time)
