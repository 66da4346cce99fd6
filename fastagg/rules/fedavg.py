# SPDX-License-Identifier: Apache-2.0
"""FedAvg: the mean of the active updates."""

from __future__ import annotations

from fastagg.registry import register
from fastagg.report import Plan
from fastagg.rules._client_weights import active_shares, relative
from fastagg.rules._weighted_rule import AveragingRule
from fastagg.staleness import discounted
from fastagg.updates.cohort import Cohort


@register("fedavg")
class FedAvg(AveragingRule[Plan]):
    """``params += server_lr * sum_s w_s u_s / sum_s w_s`` over the active clients s.

    If all clients are active, this is "Full" of FL-FDMS (eq. 4), otherwise "Dropout" (eq. 5). The
    weight of a late row is ``s(age) w_s``, also in the sum.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: equal. ``weights``
            of a step replace them.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    A step raises ValueError if all active clients have weight 0.
    """

    no_weights = ""

    def _plan(self, cohort: Cohort) -> Plan:
        shares = active_shares(self.client_weights, cohort)
        if cohort.ages is not None:
            shares = relative(discounted(shares, cohort, self.staleness), "the active clients")
        return Plan(shares)
