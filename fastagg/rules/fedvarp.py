# SPDX-License-Identifier: Apache-2.0
"""FedVARP: remembered updates as control variates of the mean (Jhunjhunwala et al. 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastagg import ops
from fastagg.clipping import FLOAT64_SUM
from fastagg.costs import Cost, Sizes
from fastagg.ops.memory import dot, picked
from fastagg.registry import register
from fastagg.rules._client_weights import shares_among
from fastagg.rules._memory_rule import MemoryPlan, MemoryRule, Remembered
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import factors_tensor


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
        **options: ``memory_dtype``, ``memory_folder``, ``max_age`` (:class:`MemoryRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    A step raises ValueError if all active clients have weight 0.
    """

    no_noise = ""

    def _plan(self, cohort: Cohort) -> MemoryPlan:
        weights = shares_among(self.client_weights, cohort)
        # The pass computes total + sum_s a_s (u_s - m_s), which is the whole aggregate.
        # w_s = A a_s with A the share of the active clients. So the new total, which changes by
        # sum_s w_s (u_s - m_s), lies between the old one and the aggregate.
        active_share = float(picked(self._shares, cohort.clients).sum())
        return self._memory_plan(cohort, weights, weights, part=active_share)

    def _largest_change(self, cohort: Cohort, plan: MemoryPlan) -> float:
        # An active client s contributes a_s u_s + (w_s - a_s) m_s, an absent one w_k m_k.
        own = picked(self._shares, cohort.clients)
        active = float((plan.weights + (plan.weights - own).abs()).max())
        return max(active, float(self._shares.max()))

    def _largest_rounding(self, cohort: Cohort, plan: MemoryPlan) -> float:
        return FLOAT64_SUM * float(self._shares.sum() + 2.0 * plan.weights.sum())

    def _aggregate_peak(
        self, plan: MemoryPlan, before: Tensor, peaks: Tensor, changes: list[float]
    ) -> float:
        return dot(self._shares, before) + dot(plan.weights, factors_tensor(changes))

    def _commit(self, cohort: Cohort, plan: MemoryPlan, reading: Remembered) -> None:
        before = self.total if reading.base is None else reading.base
        super()._commit(cohort, plan, reading)
        self._next_total = self.total  # scratch again
        self.total = ops.lerp_total_(before, self.total, plan.part)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # that of MIFA; then the total is read together with the aggregate, and written
        base = super().cost(sizes, options)
        d = sizes.d
        return dataclasses.replace(base, moved=base.moved + 24 * d, flops=base.flops + 3 * d)
