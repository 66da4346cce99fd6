# SPDX-License-Identifier: Apache-2.0
"""Amplified averaging for adversarial client unavailability (Su et al.)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastagg.aggregator import CommonOptions, Plan
from fastagg.options import read_factor
from fastagg.registry import register
from fastagg.rules._weighted_rule import AveragingRule
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("amplified")
class Amplified(AveragingRule[Plan]):
    """``params += server_lr * beta * sum_s w_s u_s`` over the active clients s (Su et al. eq. 2).

    The absent clients' weight is not given to the others: with few active clients the step is
    small, and ``beta`` makes up for it on average. With ``sequential`` the model is moved within
    the loop over the active clients, in the order of their ids, as in the paper's released code:
    ``params = (1 - beta w_s) params + beta w_s (local model of s)``, which weighs update s by
    ``beta w_s prod_j (1 - beta w_j)`` over the clients j that come after s.

    Args:
        beta: amplification, finite, >= 0; M/K (clients over clients sampled) in the paper.
        sequential: move the model client by client.
        client_weights: [K], taken as they stand, not divided by their sum; None: 1/K each.
        **options: those of :class:`fastagg.aggregator.Aggregator`.
    """

    def __init__(
        self,
        *,
        beta: float = 1.0,
        sequential: bool = False,
        client_weights: Any = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(client_weights=client_weights, **options)
        self.beta = read_factor("beta", beta)
        if not isinstance(sequential, bool):
            raise TypeError(f"sequential: expected True or False, got {sequential!r}")
        self.sequential = sequential

    def _plan(self, cohort: Cohort) -> Plan:
        weights = self.beta * self.client_weights[cohort.clients]  # [S], ids ascending
        if self.sequential:
            left = (1.0 - weights).flip(0).cumprod(0).flip(0)  # of 1, from s to the last
            weights[:-1] *= left[1:]
        return Plan(weights)
