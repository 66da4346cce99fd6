# SPDX-License-Identifier: Apache-2.0
"""Base of the rules whose aggregate is a weighted sum of the received rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator, CommonOptions, R, State
from fastagg.clipping import FLOAT32_SUM
from fastagg.costs import Cost, Sizes
from fastagg.report import Aggregate, Plan, Reading, RowSum, Unchecked
from fastagg.rules._client_weights import read_client_weights
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.any_rows import in_memory
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = TypeVar("P", bound=Plan)


class WeightedRule(Aggregator[P, R]):
    """``params += server_lr * weights @ rows``, with the weights of ``_plan``.

    The aggregate is computed in a scratch vector. NaN and Inf propagate through any weight, 0
    included, so a finite aggregate shows that every row is finite. Rows are therefore read only
    once; the check needs no further pass.

    Args:
        client_weights: [K] finite numbers >= 0, not all zero; None: 1/K each.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    collects_streams = False
    gathers_rows = True

    def __init__(self, *, client_weights: Any = None, **options: Unpack[CommonOptions]) -> None:
        super().__init__(**options)
        self.client_weights = read_client_weights(client_weights, self.num_clients)  # [K]
        self._aggregate = allocate_vector(self.num_params, self.device)  # [d], scratch

    def _receive(self, cohort: Cohort) -> Cohort:
        return cohort  # rows need not be in memory

    def _check_aggregate(
        self, params: Tensor, cohort: Cohort, plan: Plan, factors: Tensor | None = None
    ) -> Aggregate:
        """Return the aggregate, which must be in the scratch vector.

        :meth:`_check_sum` checks it, or the commit.
        """
        if plan.commit_checks:
            return Unchecked(self._aggregate, self._largest_row(factors))
        largest = self._check_sum(params, cohort, self._aggregate, factors)
        return Aggregate(self._aggregate, largest)

    def _state(self) -> State:
        return {}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # Reads rows, writes scratch; abs_max reads params and scratch; adds scratch to params.
        S, d = sizes.S, sizes.d
        return Cost(state=0, scratch=4 * d, moved=4 * S * d + 24 * d, flops=2 * S * d)


class AveragingRule(WeightedRule[P, Reading]):
    """A weighted rule whose weights do not depend on the rows.

    Rows in memory are read once, by the commit, which moves the parameters in the same pass.
    Streamed rows are read once, also if their norms are limited.
    """

    reads_streams_once = True
    moves_at_once = True
    remembers_clients = False
    sums_rows_by_plan = True
    no_noise = ""

    def _read(self, params: Tensor, cohort: Cohort, plan: P) -> Reading:
        rows = cohort.rows
        if plan.commit_checks and in_memory(rows):
            peak = self._largest_row(plan.weights)
            return Reading(
                plan.weights, RowSum(self._aggregate, peak, rows=rows, weights=plan.weights)
            )
        if cohort.streamed:
            squares = self.columns.sum_and_squares_(self._aggregate, cohort.rows, plan.weights)
            if self.max_norm is not None:
                self._check_squares(cohort, squares.tolist())
        else:
            self.columns.weighted_sum_(self._aggregate, cohort.rows, plan.weights, beta=0.0)
        return Reading(plan.weights, self._check_aggregate(params, cohort, plan, plan.weights))

    def _largest_change(self, cohort: Cohort, plan: P) -> float:
        # [K], of all rows of a client
        whole = torch.zeros(self.num_clients, dtype=torch.float64, device="cpu")
        return float(whole.index_add_(0, cohort.clients, plan.weights.abs()).max())

    def _largest_rounding(self, cohort: Cohort, plan: P) -> float:
        return FLOAT32_SUM * float(plan.weights.abs().sum())
