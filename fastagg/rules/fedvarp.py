# SPDX-License-Identifier: Apache-2.0
"""FedVARP: remembered updates as control variates of the mean (Jhunjhunwala et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.costs import Cost, Sizes
from fastagg.registry import register
from fastagg.rules._client_weights import relative
from fastagg.rules._memory_rule import MemoryOptions, MemoryPlan, MemoryRule, Remembered
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("fedvarp")
class FedVARP(MemoryRule):
    """``params += server_lr * (sum_s a_s (u_s - m_s) + sum_k w_k m_k)``, then ``m_s = u_s``.

    m_k is client k's last update, and zero before its first one. a_s are the weights of the active
    clients divided by their sum (1/S by default); w_k are those of all clients divided by theirs.
    MIFA gives the difference u_s - m_s the weight w_s. Here it has the larger weight a_s, so that
    the active clients represent all clients: unbiased if they are sampled uniformly, but with more
    variance. Source: Jhunjhunwala et al. 2022.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: 1/K each.
        **options: ``memory_dtype`` and ``memory_folder`` (:class:`MemoryRule`), and the options of
            every rule (:class:`fastagg.Aggregator`).

    A step raises ValueError if all active clients have weight 0.
    """

    def __init__(self, **options: Unpack[MemoryOptions]) -> None:
        super().__init__(**options)
        self._moved = torch.zeros(
            self.num_params, device=self.device, dtype=torch.float32
        )  # [d], scratch

    def _plan(self, cohort: Cohort) -> MemoryPlan:
        weights = relative(self.client_weights[cohort.clients], "the active clients")
        return MemoryPlan(weights, shares=self._shares[cohort.clients], norm=1.0)

    def _read(self, params: Tensor, cohort: Cohort, plan: MemoryPlan) -> Remembered:
        # params += server_lr * (new total), as in MIFA, already contains the differences u_s - m_s
        # with weight w_s. The remaining weight, a_s - w_s, is added before, in the scratch vector.
        rest = self.server_lr * (plan.weights - plan.shares)  # [S], >= 0
        row_peaks = self._read_rows(params, cohort, plan)
        peaks = row_peaks + self._peaks[cohort.clients]  # [S], >= |u_s - m_s|
        reach = self._params_peak(params) + float(rest @ peaks)
        self._check_range(reach, 0.0)
        reading = self._remember(params, reach, cohort, plan, row_peaks)
        rows = [*cohort.rows, *self.memory.of(cohort.ids)]
        self._moved.copy_(params)
        self.columns.weighted_sum_(self._moved, rows, torch.cat([rest, -rest]))
        return reading

    def _commit(
        self, params: Tensor, cohort: Cohort, plan: MemoryPlan, reading: Remembered
    ) -> None:
        params.copy_(self._moved)
        super()._commit(params, cohort, plan, reading)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # that of MIFA, plus rows and memory rows added to a copy of params, which is copied back
        base = super().cost(sizes, options)
        S, d = sizes.S, sizes.d
        moved = base.moved + 8 * S * d + 24 * d
        return Cost(base.state, base.scratch + 4 * d, moved, base.flops + 4 * S * d)
