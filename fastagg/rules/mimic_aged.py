# SPDX-License-Identifier: Apache-2.0
"""MimiC with corrections that fade with their age."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fastagg.aggregator import State
from fastagg.checkpoint import invariants
from fastagg.costs import Cost, Sizes
from fastagg.options import read_part
from fastagg.registry import register
from fastagg.rules._correction_rule import (
    Corrected,
    CorrectionOptions,
    CorrectionPlan,
    CorrectionRule,
)
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("mimic-aged")
class MimiCAged(CorrectionRule):
    """``v = mean_s(u_s + fading^(age_s - 1) c_s)``, ``params += server_lr * v``, ``c_s = v - u_s``.

    **Not from a paper.** MimiC's authors name corrections that depend on staleness as future work;
    this rule is one choice. age_s is the number of rounds since client s was last active, skipped
    rounds included: 1 if it was active in the previous round. An old correction has a small factor,
    so the update is then used almost as in FedAvg. ``fading=1`` equals MimiC to the bit;
    ``fading=0`` corrects only clients that were also active in the previous round.

    Args:
        fading: in [0, 1].
        **options: ``memory_folder`` and ``max_age`` (:class:`CorrectionRule`), and the options of
            every rule (:class:`fastagg.Aggregator`).

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active. ``corrections[k]`` returns
            a copy of row k, ``corrections.clone()`` of all.
        last: [K] int64, the round in which the client was last active; -1: never.
        rounds: [] int64, rounds so far, skipped ones included.
    """

    def __init__(self, *, fading: float = 0.9, **options: Unpack[CorrectionOptions]) -> None:
        super().__init__(**options)
        self.fading = read_part("fading", fading)
        self.last = torch.full((self.num_clients,), -1, dtype=torch.int64)
        self.rounds = torch.zeros((), dtype=torch.int64)

    def _plan(self, cohort: Cohort) -> CorrectionPlan:
        plan = super()._plan(cohort)
        ages = (self.rounds - self.last.index_select(0, cohort.clients)).to(torch.float64)
        plan.fading = self.fading ** (ages - 1.0)  # [S]; 0^0 is 1
        if self.max_age is not None:
            plan.fading = plan.fading.masked_fill(ages > self.max_age, 0.0)
        return plan

    def _commit(self, cohort: Cohort, plan: CorrectionPlan, reading: Corrected) -> None:
        super()._commit(cohort, plan, reading)
        self.last[cohort.clients] = self.rounds
        self.rounds += 1

    def _skip(self) -> None:
        self.rounds += 1

    def _forget(self, ids: list[int]) -> None:
        super()._forget(ids)
        for client in ids:
            self.last[client] = -1

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        last, rounds = cast(Tensor, state["last"]), int(cast(Tensor, state["rounds"]))
        invariants.check_range("last", last, -1, rounds - 1)
        never = last == -1
        invariants.check_blank_rows("corrections", state["corrections"], never, "it was not active")

    def _state(self) -> State:
        return {**super()._state(), "last": self.last, "rounds": self.rounds}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        base = super().cost(sizes, options)
        return dataclasses.replace(base, state=base.state + 8 * sizes.K + 8)
