# SPDX-License-Identifier: Apache-2.0
"""FedAU: weights from how often clients have taken part (Wang and Ji 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._client_weights import relative
from fastagg.rules._weighted_rule import Plan, WeightedRule
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("fedau")
class FedAU(WeightedRule):
    """``params += server_lr * sum_s p_s omega_s u_s`` over the active clients s (Algorithm 2).

    omega_k estimates 1 / (client k's rate of participation): the mean of the intervals, in rounds,
    between its participations so far, each cut off at ``cutoff``, and 1 before the first. A client
    that is absent for longer starts a new interval. So rarely seen clients count for more, without
    any memory of updates. Rounds without anybody count too.

    Args:
        cutoff: longest interval, >= 1; the paper's K, which is 50 in its experiments.
        client_weights: [K] relative weights p; None: 1/K each.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    Attributes:
        factors: [K] float64, omega.
        intervals: [K] int64, how many intervals omega is the mean of.
        waiting: [K] int64, rounds since the last interval ended.
    """

    def __init__(
        self, *, cutoff: int = 50, client_weights: Any = None, **options: Unpack[CommonOptions]
    ) -> None:
        super().__init__(client_weights=client_weights, **options)
        self.cutoff = read_count("cutoff", cutoff, least=1)
        self._shares = relative(self.client_weights, "all clients")  # [K], sums to 1
        self.factors = torch.ones(self.num_clients, dtype=torch.float64)
        self.intervals = torch.zeros(self.num_clients, dtype=torch.int64)
        self.waiting = torch.zeros(self.num_clients, dtype=torch.int64)

    def _plan(self, cohort: Cohort) -> Plan:
        clients = cohort.clients
        weights = self._shares[clients] * self.factors[clients]
        return Plan(weights, commit_state=lambda: self._count(clients))

    def _count(self, clients: Tensor) -> None:
        """One round more, with ``clients`` active."""
        self.waiting += 1
        ended = self.waiting == self.cutoff
        ended[clients] = True
        self.intervals += ended
        change = (self.waiting - self.factors) / self.intervals.clamp_min(1)
        self.factors += torch.where(ended, change, 0.0)
        self.waiting.masked_fill_(ended, 0)

    def _skip(self) -> None:
        self._count(torch.zeros(0, dtype=torch.int64))

    def _state(self) -> State:
        return {"factors": self.factors, "intervals": self.intervals, "waiting": self.waiting}

    def options(self) -> dict[str, Any]:
        return super().options() | {"cutoff": self.cutoff}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        base = super().cost(sizes, options)
        return Cost(24 * sizes.K, base.scratch, base.moved, base.flops)
