# SPDX-License-Identifier: Apache-2.0
"""FedAU: weights from the participation intervals of clients (Wang and Ji 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.report import Plan, Reading
from fastagg.rules._client_weights import absent_without_weights, all_shares, relative
from fastagg.rules._interval_state import check_interval_state
from fastagg.rules._weighted_rule import AveragingRule
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LONGEST = 1 << 31  # rounds


@dataclass
class _Counted(Plan):
    """The plan of FedAU, with the state after the round."""

    state: tuple[Tensor, Tensor, Tensor] = field(kw_only=True)  # factors, intervals, waiting


@register("fedau")
class FedAU(AveragingRule[_Counted]):
    """``params += server_lr * sum_s p_s omega_s u_s`` over the active clients s (Algorithm 2).

    omega_k estimates 1 / (participation rate of client k). It is the mean length in rounds of the
    client's intervals so far, and 1 before the first one ends. An interval ends when the client is
    active, or after ``cutoff`` rounds. So rarely active clients have large weights, and no update
    needs to be remembered. Skipped rounds (without active clients) count too.

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
        self.cutoff = read_count("cutoff", cutoff, least=1, most=_LONGEST)
        self._shares = relative(self.client_weights, "all clients")  # [K], sums to 1
        self.no_weights = absent_without_weights(self.client_weights)
        self.factors = torch.ones(self.num_clients, dtype=torch.float64)
        self.intervals = torch.zeros(self.num_clients, dtype=torch.int64)
        self.waiting = torch.zeros(self.num_clients, dtype=torch.int64)

    def _plan(self, cohort: Cohort) -> _Counted:
        shares = all_shares(self.client_weights, self._shares, cohort)
        weights = shares.index_select(0, cohort.clients) * self.factors.index_select(
            0, cohort.clients
        )
        return _Counted(weights, state=self._counted(cohort.clients))

    def _counted(self, clients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after another round, with ``clients`` [S] int64 active."""
        waiting = self.waiting + 1
        ended = waiting == self.cutoff
        ended[clients] = True
        intervals = self.intervals + ended
        change = (waiting - self.factors) / intervals.clamp_min(1)
        factors = self.factors + torch.where(ended, change, 0.0)
        return factors, intervals, waiting.masked_fill_(ended, 0)

    def _commit(self, cohort: Cohort, plan: _Counted, reading: Reading) -> None:
        self.factors, self.intervals, self.waiting = plan.state

    def _skip(self) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        self.factors, self.intervals, self.waiting = self._counted(none)

    def _forget(self, ids: list[int]) -> None:
        places = torch.tensor(ids)
        state = (
            self.factors.index_fill(0, places, 1.0),
            self.intervals.index_fill(0, places, 0),
            self.waiting.index_fill(0, places, 0),
        )
        self.factors, self.intervals, self.waiting = state

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        check_interval_state(state, self.cutoff)

    def _state(self) -> State:
        return {"factors": self.factors, "intervals": self.intervals, "waiting": self.waiting}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        return replace(super().cost(sizes, options), state=24 * sizes.K)
