# SPDX-License-Identifier: Apache-2.0
"""FedAU: weights from the participation intervals of clients (Wang and Ji 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from fastagg.aggregator import CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.ops.memory import picked
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.report import Plan, Reading
from fastagg.rules._client_weights import absent_without_weights, all_shares, relative
from fastagg.rules._interval_state import (
    LONGEST,
    Intervals,
    check_interval_state,
    first_intervals,
    intervals_after,
    intervals_without,
)
from fastagg.rules._weighted_rule import AveragingRule
from fastagg.staleness import discounted
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class _Counted(Plan):
    """The plan of FedAU, with the state after the round."""

    state: Intervals = field(kw_only=True)


@register("fedau")
class FedAU(AveragingRule[_Counted]):
    """``params += server_lr * sum_s p_s omega_s u_s`` over the active clients s (Algorithm 2).

    omega_k estimates 1 / (participation rate of client k). It is the mean length in rounds of the
    client's intervals so far, and 1 before the first one ends. An interval ends when the client is
    active, or after ``cutoff`` rounds. So rarely active clients have large weights, and no update
    needs to be remembered. Skipped rounds (without active clients) count too. The factor of a late
    row is multiplied by s(age); its client is active in the round in which the row arrives.

    Args:
        cutoff: length of the longest interval in rounds, >= 1; K in the paper, which uses 50. The
            default of the released code is 100,000, longer than its runs.
        client_weights: [K] relative weights p; None: 1/K each. With them, a step takes ``weights``
            for the active clients.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        factors: [K] float64, omega.
        intervals: [K] int64, number of intervals that have ended.
        waiting: [K] int64, rounds since the last interval ended.
    """

    remembers_clients = True

    def __init__(
        self, *, cutoff: int = 50, client_weights: Any = None, **options: Unpack[CommonOptions]
    ) -> None:
        super().__init__(client_weights=client_weights, **options)
        self.cutoff = read_count("cutoff", cutoff, least=1, most=LONGEST)
        self._shares = relative(self.client_weights, "all clients")  # [K], sums to 1
        self.no_weights = absent_without_weights(self.client_weights)
        self.factors, self.intervals, self.waiting = first_intervals(self.num_clients)

    @property
    def _intervals(self) -> Intervals:
        return self.factors, self.intervals, self.waiting

    def _plan(self, cohort: Cohort) -> _Counted:
        shares = all_shares(self.client_weights, self._shares, cohort)
        weights = picked(shares, cohort.clients)
        weights = weights * picked(self.factors, cohort.clients)
        weights = discounted(weights, cohort, self.staleness)
        return _Counted(
            weights, state=intervals_after(self._intervals, cohort.clients, self.cutoff)
        )

    def _commit(self, cohort: Cohort, plan: _Counted, reading: Reading) -> None:
        self.factors, self.intervals, self.waiting = plan.state

    def _skip(self) -> None:
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        state = intervals_after(self._intervals, none, self.cutoff)
        self.factors, self.intervals, self.waiting = state

    def _forget(self, ids: list[int]) -> None:
        state = intervals_without(self._intervals, ids)
        self.factors, self.intervals, self.waiting = state

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        check_interval_state(state, self.cutoff)

    def _state(self) -> State:
        return {"factors": self.factors, "intervals": self.intervals, "waiting": self.waiting}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        return replace(super().cost(sizes, options), state=24 * sizes.K)
