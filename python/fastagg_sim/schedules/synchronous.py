# SPDX-License-Identifier: Apache-2.0
"""The server waits for all."""

from __future__ import annotations

from collections.abc import Sequence

from fastagg_sim.schedules.base import Plan, ServerSchedule, of_round, register


@register("synchronous")
class Synchronous(ServerSchedule):
    """A round ends when all active clients have answered: it takes as long as the slowest one.

    A round without an active client takes no time.
    """

    def _plan(self, round: int, active: Sequence[int]) -> Plan:
        slowest = max((self.latency.seconds(client, round) for client in active), default=0.0)
        return Plan(tuple(active), of_round(active, round), 0, self.time + slowest)
