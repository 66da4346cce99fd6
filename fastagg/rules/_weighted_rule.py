# SPDX-License-Identifier: Apache-2.0
"""Base of the rules whose aggregate is one weight per received row."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Prepared, State
from fastagg.costs import Cost, Sizes
from fastagg.rules._client_weights import read_client_weights
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _no_state() -> None:
    """The state change of a rule that has no state."""


@dataclass(frozen=True)
class Plan:
    """What a rule wants done with the rows of a round, and with its own state."""

    weights: Tensor  # [S] float64
    friends: Tensor | None = None  # [K] int64
    pairs: int = 0
    commit_state: Callable[[], None] = _no_state


class WeightedRule(Aggregator):
    """``params += server_lr * weights @ rows``, with weights from ``_plan``.

    The aggregate is made in a scratch vector. If that is finite, so was every row (NaN and Inf
    survive any weight, 0 included), so the rows are read once and finiteness costs nothing.

    Args:
        client_weights: [K] finite numbers >= 0, not all zero; None: 1/K each.
        **options: those of :class:`fastagg.Aggregator`.
    """

    def __init__(self, *, client_weights: Any = None, **options: Unpack[CommonOptions]) -> None:
        super().__init__(**options)
        self.client_weights = read_client_weights(client_weights, self.num_clients)  # [K]
        self._scratch = torch.zeros(self.num_params, device=self.device)  # [d]

    @abstractmethod
    def _plan(self, cohort: Cohort) -> Plan:
        """Choose a weight for every row; must change neither rows nor state."""

    def _receive(self, cohort: Cohort) -> Cohort:
        return cohort  # rows need not be in memory

    def _prepare(self, params: Tensor, cohort: Cohort) -> Prepared:
        plan = self._plan(cohort)
        commit_state = self._aggregate(cohort, plan)
        peak, aggregate = self._peaks_with(params, [self._scratch])
        if not math.isfinite(aggregate):
            self._row_peaks(cohort)
        self._check_range(peak, aggregate)

        def commit() -> None:
            ops.weighted_sum_(params, [self._scratch], self._rate)
            commit_state()

        return Prepared(plan.weights, commit, plan.friends, plan.pairs)

    def _aggregate(self, cohort: Cohort, plan: Plan) -> Callable[[], None]:
        """Make ``weights @ rows`` in the scratch vector; returns the state change of the commit.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf (may be left to the caller, who looks again).
        """
        self.columns.weighted_sum_(self._scratch, cohort.rows, plan.weights, beta=0.0)
        return plan.commit_state

    def options(self) -> dict[str, Any]:
        return super().options() | {"client_weights": self.client_weights}

    def _state(self) -> State:
        return {}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # rows read, scratch written; abs_max of both params and scratch; scratch to params
        S, d = sizes.S, sizes.d
        return Cost(state=0, scratch=4 * d, moved=4 * S * d + 24 * d, flops=2 * S * d)
