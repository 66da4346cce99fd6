# SPDX-License-Identifier: Apache-2.0
"""FedStale: weights for rarely active clients, and a part of the remembered updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import State
from fastagg.costs import Cost, Sizes
from fastagg.ops.memory import dot, picked
from fastagg.options import read_count, read_factor
from fastagg.registry import register
from fastagg.rules._interval_state import (
    LONGEST,
    Intervals,
    check_interval_state,
    first_intervals,
    intervals_after,
    intervals_without,
)
from fastagg.rules._memory_rule import MemoryOptions, MemoryPlan, MemoryRule, Remembered
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import factors_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("fedstale")
class FedStale(MemoryRule):
    """``params += server_lr * (sum_s w_s omega_s (u_s - beta m_s) + beta sum_k w_k m_k)``.

    Then ``m_s = u_s``. m_k is client k's last update, and zero before its first one. w_k are the
    client weights divided by their sum. omega_k estimates 1 / (participation rate of client k), as
    in ``fedau``: the mean length of the client's intervals so far, in rounds, skipped ones
    included, and 1 before the first one ends.

    With ``beta=0`` the model moves as under ``fedau``, up to rounding. With ``beta=1`` the rule
    is ``fedvarp`` with the weights w_s omega_s in place of 1/S: unbiased for clients that are
    active at different rates. Source: Rodio and Neglia 2024.

    One pass over the rows computes the aggregate and updates the memory, as for ``mifa``. The
    aggregate has other weights than the total of the memory, so it is a second sum of this pass.

    Args:
        beta: how much remembered updates count, in [0, 1].
        cutoff: length of the longest interval in rounds, >= 1: no omega is larger.
        client_weights: [K] relative weights, for instance sample counts; None: 1/K each.
        **options: ``memory_dtype``, ``memory_folder``, ``max_age`` (:class:`MemoryRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    Attributes:
        factors: [K] float64, omega.
        intervals: [K] int64, number of intervals that have ended.
        waiting: [K] int64, rounds since the last interval ended.
    """

    def __init__(
        self, *, beta: float = 0.5, cutoff: int = 50, **options: Unpack[MemoryOptions]
    ) -> None:
        super().__init__(**options)
        self.beta = read_factor("beta", beta)
        if self.beta > 1.0:
            raise ValueError(f"beta: expected a number in [0, 1], got {beta!r}")
        self.cutoff = read_count("cutoff", cutoff, least=1, most=LONGEST)
        self.factors, self.intervals, self.waiting = first_intervals(self.num_clients)
        # [d], scratch
        self._aggregate = allocate_vector(self.num_params, self.device, torch.float64)

    @property
    def _intervals(self) -> Intervals:
        return self.factors, self.intervals, self.waiting

    def _plan(self, cohort: Cohort) -> MemoryPlan:
        shares = picked(self._shares, cohort.clients)
        weights = shares * picked(self.factors, cohort.clients)
        plan = self._memory_plan(cohort, weights, shares)
        plan.intervals = intervals_after(self._intervals, cohort.clients, self.cutoff)
        plan.faded, plan.faded_weights, plan.fading = self._aggregate, weights, self.beta
        return plan

    def _aggregate_peak(
        self, plan: MemoryPlan, before: Tensor, peaks: Tensor, changes: list[float]
    ) -> float:
        changed = dot(plan.weights, factors_tensor(changes))
        return self.beta * dot(self._shares, before) + changed

    def _largest_row(self, factors: Tensor | None = None) -> float:
        # |v| <= beta max|m| + cutoff (max|u| + beta max|m|), because the shares sum to 1.
        gain = self.beta + self.cutoff * (1.0 + self.beta)
        return super()._largest_row() / gain

    def _commit(self, cohort: Cohort, plan: MemoryPlan, reading: Remembered) -> None:
        super()._commit(cohort, plan, reading)
        assert plan.intervals is not None  # from _plan
        self.factors, self.intervals, self.waiting = plan.intervals

    def _skip(self) -> None:
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        state = intervals_after(self._intervals, none, self.cutoff)
        super()._skip()
        self.factors, self.intervals, self.waiting = state

    def _forget(self, ids: list[int]) -> None:
        state = intervals_without(self._intervals, ids)
        super()._forget(ids)
        self.factors, self.intervals, self.waiting = state

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        check_interval_state(state, self.cutoff)

    def _state(self) -> State:
        own = {"factors": self.factors, "intervals": self.intervals, "waiting": self.waiting}
        return {**super()._state(), **own}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # that of MIFA, whose pass writes the aggregate as well; it moves the parameters
        base = super().cost(sizes, options)
        S, d = sizes.S, sizes.d
        return dataclasses.replace(
            base,
            state=base.state + 24 * sizes.K,
            scratch=base.scratch + 8 * d,
            moved=base.moved + 8 * d,
            flops=base.flops + 4 * S * d + d,
        )
