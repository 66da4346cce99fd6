# SPDX-License-Identifier: Apache-2.0
"""Amplified averaging for adversarial client unavailability (Su et al.)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastagg.aggregator import CommonOptions
from fastagg.ops.memory import picked
from fastagg.options import read_factor
from fastagg.registry import register
from fastagg.report import Plan
from fastagg.rules._weighted_rule import AveragingRule
from fastagg.staleness import discounted
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("amplified")
class Amplified(AveragingRule[Plan]):
    """``params += server_lr * beta * sum_s w_s u_s`` over the active clients s (Su et al. eq. 2).

    The weights of the active clients are not divided by their sum, so a step with few active
    clients is small; ``beta`` compensates for this on average. Of a late row, w_s is multiplied by
    s(age).

    With ``sequential``, the aggregate is that of the paper's released code, which changes the model
    once per active client s, ascending by id:
    ``params = (1 - beta w_s) params + beta w_s (local model of s)``. So the factor of u_s is
    ``beta w_s prod_j (1 - beta w_j)``, with j over the active clients that come after s.

    Args:
        beta: amplification, finite, >= 0. In the paper: all clients / clients sampled in a round.
        sequential: use the factors of the released code.
        client_weights: [K], not divided by their sum; None: 1/K each.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    no_weights = (
        "it does not divide weights by their sum, so numbers in other units, such as sample "
        "counts, would scale the step; client_weights are its weights"
    )

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
        weights = self.beta * picked(self.client_weights, cohort.clients)
        weights = discounted(weights, cohort, self.staleness)  # [S], ids ascending
        if self.sequential:
            left = (1.0 - weights).flip(0).cumprod(0).flip(0)  # product of 1 - w_j, j >= s
            weights[:-1] *= left[1:]
        return Plan(weights)
