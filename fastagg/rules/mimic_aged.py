# SPDX-License-Identifier: Apache-2.0
"""MimiC with corrections that fade with age. Not from a paper."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Plan, Reading, State
from fastagg.checkpoint import invariants
from fastagg.costs import Cost, Sizes
from fastagg.memory.rows import RowMemory
from fastagg.ops.row_lists import RowList
from fastagg.options import FLOAT32_LIMIT
from fastagg.registry import register
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROUNDING = 1.0 + 2.0**-20
"""Margin for the float32 rounding of v and c."""


@dataclass
class AgedPlan(Plan):
    """The plan of MimiCAged: how much each correction has faded."""

    faded: Tensor = field(kw_only=True)  # [S] float64, their weights in v
    last: Tensor = field(kw_only=True)  # [K] int64, ``MimiCAged.last`` after the round


@register("mimic-aged")
class MimiCAged(Aggregator[AgedPlan, Reading]):
    """``v = mean_s(u_s + fading^(age_s - 1) c_s)``, ``params += server_lr * v``, ``c_s = v - u_s``.

    **Not from a paper.** MimiC's authors name corrections that depend on staleness as future work;
    this rule is one choice. age_s is the number of rounds since client s was last active, skipped
    rounds included: 1 if it was active in the previous round. An old correction has a small factor,
    so the update is then used almost as in FedAvg. ``fading=1`` equals MimiC; ``fading=0`` corrects
    only clients that were also active in the previous round.

    Args:
        fading: in [0, 1].
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active. ``corrections[k]`` returns
            a copy of row k, ``corrections.clone()`` of all.
        last: [K] int64, the round in which the client was last active; -1: never.
        rounds: [] int64, rounds so far, skipped ones included.
    """

    column_state = frozenset({"corrections"})

    def __init__(self, *, fading: float = 0.9, **options: Unpack[CommonOptions]) -> None:
        super().__init__(**options)
        self.fading = _read_fading(fading)
        self.corrections = RowMemory(self.num_clients, self.num_params, self.device)
        self.last = torch.full((self.num_clients,), -1, dtype=torch.int64)
        self.rounds = torch.zeros((), dtype=torch.int64)
        self._aggregate = torch.zeros(
            self.num_params, device=self.device, dtype=torch.float32
        )  # [d], scratch

    def _plan(self, cohort: Cohort) -> AgedPlan:
        size, clients = len(cohort), cohort.clients
        weights = torch.full((size,), 1.0 / size, dtype=torch.float64)
        ages = (self.rounds - self.last[clients]).to(torch.float64)
        faded = weights * self.fading ** (ages - 1.0)  # [S]; 0^0 is 1
        last = self.last.index_fill(0, clients, int(self.rounds))
        return AgedPlan(weights, faded=faded, last=last)

    def _read(self, params: Tensor, cohort: Cohort, plan: AgedPlan) -> Reading:
        own, new = self.corrections.of(cohort.ids), self.corrections.spares.rows(cohort.ids)
        refuse_shared_memory(cohort, [*own, *new])
        row_peaks = self._row_peaks(cohort)  # [S]
        factors = torch.cat([plan.weights, plan.faded])
        self.columns.weighted_sum_(self._aggregate, [*cohort.rows, *own], factors, beta=0.0)
        peak, aggregate = self._peaks_with(params, [self._aggregate])
        self._check_range(peak, aggregate)
        new_peaks = (aggregate + row_peaks) * _ROUNDING
        if not bool((new_peaks <= FLOAT32_LIMIT).all()):
            raise ValueError("updates: too large, corrections could leave the range of float32")
        difference = torch.tensor([1.0, -1.0], dtype=torch.float64)
        for correction, row in zip(new, cohort.tensors(), strict=True):
            both = RowList([self._aggregate, row])
            ops.weighted_sum_(correction, both, difference, beta=0.0)
        return Reading(plan.weights)

    def _commit(self, params: Tensor, cohort: Cohort, plan: AgedPlan, reading: Reading) -> None:
        ops.weighted_sum_(params, [self._aggregate], self._rate)
        self.corrections.exchange(cohort.ids, None)
        self.last = plan.last
        self.rounds += 1

    def _skip(self) -> None:
        self.rounds += 1

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        last, rounds = cast(Tensor, state["last"]), int(cast(Tensor, state["rounds"]))
        invariants.check_range("last", last, -1, rounds - 1)
        never = last == -1
        invariants.check_blank_rows("corrections", state["corrections"], never, "it was not active")

    def _state(self) -> State:
        return {"corrections": self.corrections, "last": self.last, "rounds": self.rounds}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # abs_max reads params, rows and v; rows and corrections are added to v, v is added to
        # params; rows and v give the new corrections
        K, S, d = sizes.K, sizes.S, sizes.d
        scratch = 4 * d + 4 * S * d  # v, and spare rows
        return Cost(4 * K * d + 8 * K + 8, scratch, 24 * S * d + 24 * d, 6 * S * d + 2 * d)


def _read_fading(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"fading: expected a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"fading: expected a number in [0, 1], got {number}")
    return number
