# SPDX-License-Identifier: Apache-2.0
"""MimiC with corrections that fade with their age."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.costs import Cost, Sizes
from fastagg.options import read_part
from fastagg.registry import register
from fastagg.rules._ages import RowAges
from fastagg.rules._correction_rule import CorrectionOptions, CorrectionPlan, CorrectionRule
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import factors_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("mimic-aged")
class MimiCAged(CorrectionRule):
    """``v = mean_s(u_s + fading^(age_s - 1) c_s)``, ``params += server_lr * v``, ``c_s = v - u_s``.

    **Not from a paper.** MimiC's authors name corrections that depend on staleness as future work;
    this rule is one choice. age_s is the number of rounds since client s was last active, skipped
    rounds included: 1 if it was active in the previous round. Of a late row, it is counted in the
    row's own round. An old correction has a small factor,
    so the update is then used almost as in FedAvg. ``fading=1`` equals MimiC to the bit;
    ``fading=0`` corrects only clients that were also active in the previous round.

    Args:
        fading: in [0, 1].
        **options: ``memory_folder`` and ``max_age`` (:class:`CorrectionRule`), and the options of
            every rule (:class:`fastagg.Aggregator`).

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active. ``corrections[k]`` returns
            a copy of row k, ``corrections.clone()`` of all.
        last: [K] int64, the round of the client's correction; -1: it has none.
        rounds: [] int64, rounds so far, skipped ones included.
    """

    def __init__(self, *, fading: float = 0.9, **options: Unpack[CorrectionOptions]) -> None:
        super().__init__(**options)
        self.fading = read_part("fading", fading)
        rounds = torch.zeros((), dtype=torch.int64, device="cpu")
        self.ages = self._row_ages = RowAges(self.num_clients, self.max_age, rounds)

    @property
    def last(self) -> Tensor:
        """The round of each client's correction."""
        return self._row_ages.last

    @property
    def rounds(self) -> Tensor:
        """Rounds so far."""
        return self._row_ages.rounds

    def _plan(self, cohort: Cohort) -> CorrectionPlan:
        plan = super()._plan(cohort)
        ages: list[int] = self._correction_ages(cohort).tolist()
        # Python's powers do not depend on vector instructions, as torch's do. 0^0 is 1.
        factors = [self.fading ** (age - 1) for age in ages]
        if self.max_age is not None:
            both = zip(factors, ages, strict=True)
            factors = [0.0 if age > self.max_age else factor for factor, age in both]
        plan.fading = factors_tensor(factors)  # [S]
        return plan

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        base = super().cost(sizes, options)
        return dataclasses.replace(base, state=base.state + 8 * sizes.K + 8)
