# SPDX-License-Identifier: Apache-2.0
"""FedVARP: remembered updates as control variates of the mean (Jhunjhunwala et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastagg.aggregator import Prepared
from fastagg.costs import Cost, Sizes
from fastagg.registry import register
from fastagg.rules._client_weights import relative
from fastagg.rules._memory_rule import MemoryRule
from fastagg.updates.cohort import Cohort


@register("fedvarp")
class FedVARP(MemoryRule):
    """``params += server_lr * (sum_s a_s (u_s - m_s) + sum_k w_k m_k)``, then ``m_s = u_s``.

    m_k is client k's last update, zero as long as it was never active; a_s are the weights of the
    active clients divided by their sum, 1/S by default, and w_k those of all. Where MIFA gives a
    new update the weight w_s, here its difference to the old one counts for all clients: unbiased
    if the active clients are drawn evenly, at the price of more variance.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: 1/K each.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    A step raises ValueError if all active clients have weight 0.
    """

    def _norm(self, clients: Tensor) -> float:
        return 1.0

    def _prepare(self, params: Tensor, cohort: Cohort) -> Prepared:
        # The memory's part of a step is MIFA's: params += server_lr * (new total), which holds
        # differences with weight w_s. The rest of them comes first, while m_s is still there.
        clients = cohort.clients
        weights = relative(self.client_weights[clients], "the active clients")
        rest = self.server_lr * (weights - self._shares[clients])  # [S], >= 0
        old = self.memory.of(cohort.ids)
        peaks = self._row_peaks(cohort) + self._peaks[clients]  # [S]
        reach = self._params_peak(params) + float(rest @ peaks)
        self._check_range(reach, 0.0)
        memory_step = self._prepare_memory(params, reach, cohort)

        def commit() -> None:
            rows = [*cohort.rows, *old]
            self.columns.weighted_sum_(params, rows, torch.cat([rest, -rest]))
            memory_step.commit()

        return Prepared(weights, commit)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # besides MIFA's: abs_max of rows, and rows and memory to params
        base = super().cost(sizes, options)
        S, d = sizes.S, sizes.d
        return Cost(
            base.state, base.scratch, base.moved + 12 * S * d + 8 * d, base.flops + 4 * S * d
        )
