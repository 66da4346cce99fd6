# SPDX-License-Identifier: Apache-2.0
"""FedBuff: a step as soon as M answers are there, whoever sent them (Nguyen et al. 2022)."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from fastagg.aggregator import CommonOptions
from fastagg.ops.memory import picked
from fastagg.options import read_size
from fastagg.registry import register
from fastagg.report import Plan
from fastagg.rules._weighted_rule import AveragingRule
from fastagg.staleness import discounted
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("fedbuff")
class FedBuff(AveragingRule[Plan]):
    """``params += server_lr / M * sum_i s(age_i) u_i`` over the M rows of a step (Algorithm 1).

    The server does not wait for certain clients: it steps when M answers are there. Clients train
    all the time, each from the model that was the newest when it started, so their rows have
    different ages, and a client may have several rows in a step, of different ages. The factors
    s(age_i) / M are not divided by their sum, so old rows make a step small.

    With M = 1 this is FedAsync (Xie et al. 2019), ``params = (1 - a) params + a local_model`` with
    a = ``server_lr * s(age)``, if u_i is the local model minus the *present* parameters, as the
    paper has it, and not minus those that the client started from.

    ``StepReport.active`` has the id of a client once for each of its rows, in the order of their
    ages, and ``min_active`` counts clients. If a row of a client is not finite or too long, all
    rows of this client in the step are left out.

    Args:
        buffer_size: M, >= 1. A step then takes at most M rows and divides by M, also if there are
            fewer, because some were rejected or the server did not wait; None: M is the number of
            rows that the step uses.
        client_weights: [K] relative weights, for instance sample counts: s(age_i) is multiplied by
            the weight of the client divided by the mean of all K; None: equal.
        **options: the options of every rule; see :class:`fastagg.Aggregator`. ``staleness`` is
            "polynomial" by default: 1 / sqrt(1 + age), as in the paper.

    A step raises ValueError if it has more than ``buffer_size`` rows.
    """

    repeats_clients = True
    own_defaults = MappingProxyType({"staleness": "polynomial"})
    no_weights = (
        "it divides by the number of rows and not by the sum of their weights, so numbers in other "
        "units, such as sample counts, would scale the step; client_weights are relative to the "
        "mean of all clients"
    )
    no_noise = "a client may have several rows in a step, which accountants do not expect"

    def __init__(
        self,
        *,
        buffer_size: int | None = None,
        client_weights: Any = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        options.setdefault("staleness", self.own_defaults["staleness"])
        super().__init__(client_weights=client_weights, **options)
        self.buffer_size = None if buffer_size is None else read_size("buffer_size", buffer_size)
        weights = self.client_weights  # [K]
        self._relative = torch.ones_like(weights)
        if not bool((weights == weights[0]).all()):
            self._relative = weights * (self.num_clients / math.fsum(weights.tolist()))

    def _plan(self, cohort: Cohort) -> Plan:
        size = len(cohort)
        if self.buffer_size is not None and size > self.buffer_size:
            raise ValueError(
                f"updates: expected at most buffer_size = {self.buffer_size} rows, got {size}"
            )
        weights = discounted(picked(self._relative, cohort.clients), cohort, self.staleness)
        return Plan(weights / (self.buffer_size or size))
