# SPDX-License-Identifier: Apache-2.0
"""FedAU: weights from how often clients have taken part (Wang and Ji 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import CommonOptions, Plan, Reading, State
from fastagg.costs import Cost, Sizes
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._client_weights import relative
from fastagg.rules._weighted_rule import AveragingRule
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class _Counted(Plan):
    """A plan with the state after the round."""

    state: tuple[Tensor, Tensor, Tensor] = field(kw_only=True)  # factors, intervals, waiting


@register("fedau")
class FedAU(AveragingRule[_Counted]):
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

    def _plan(self, cohort: Cohort) -> _Counted:
        weights = self._shares[cohort.clients] * self.factors[cohort.clients]
        return _Counted(weights, state=self._counted(cohort.clients))

    def _counted(self, clients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after one round more, with ``clients`` active."""
        waiting = self.waiting + 1
        ended = waiting == self.cutoff
        ended[clients] = True
        intervals = self.intervals + ended
        change = (waiting - self.factors) / intervals.clamp_min(1)
        factors = self.factors + torch.where(ended, change, 0.0)
        return factors, intervals, waiting.masked_fill_(ended, 0)

    def _commit(self, params: Tensor, cohort: Cohort, plan: _Counted, reading: Reading) -> None:
        super()._commit(params, cohort, plan, reading)
        self.factors, self.intervals, self.waiting = plan.state

    def _skip(self) -> None:
        nobody = torch.zeros(0, dtype=torch.int64)
        self.factors, self.intervals, self.waiting = self._counted(nobody)

    def _state(self) -> State:
        return {"factors": self.factors, "intervals": self.intervals, "waiting": self.waiting}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        base = super().cost(sizes, options)
        return Cost(24 * sizes.K, base.scratch, base.moved, base.flops)
