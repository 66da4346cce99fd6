# SPDX-License-Identifier: Apache-2.0
"""MimiC: correct each update towards the aggregate of earlier rounds (Sun, Mao and Zhang)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.memory.overlap import refuse_shared_memory
from fastagg.registry import register
from fastagg.report import Aggregate, Unchecked
from fastagg.rules._ages import age_bytes, make_ages
from fastagg.rules._correction_rule import Corrected, CorrectionPlan, CorrectionRule
from fastagg.staleness import no_late_rows
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import factors_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("mimic")
class MimiC(CorrectionRule):
    """``v = mean_s(u_s + c_s)``, ``params += server_lr * v``, ``c_s = v - u_s`` (Algorithm 1).

    The mean is over the active clients s; an absent client's correction does not change. How the
    server keeps corrections, and what it checks, is described at :class:`CorrectionRule`.

    In mode "client" the clients keep their corrections (:class:`fastagg.MimiCClient`) and send
    u_s + c_s. The server has no state: it needs only the sum of the received rows, which secure
    aggregation can compute, and sends v back to the clients of the round. Parameters are those of
    mode "server", up to the rounding of u_s + c_s to float32, unless ``max_norm`` or ``clip_norm``
    takes effect: here they limit u_s + c_s, and a client does not learn that its row was clipped.
    The mean shows whether a step stays in the range of float32, so large rows may cancel. This mode
    takes no late rows: their clients would need the v of their own round.

    Args:
        mode: "server" or "client": where corrections are kept.
        memory_folder, max_age: see :class:`CorrectionRule`. Mode "server" only.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active. ``corrections[k]`` returns
            a copy of row k, ``corrections.clone()`` of all. Mode "server" only.
        aggregate: [d] float32, v of the last step that had active clients; zeros at first. Valid
            until the next step. Mode "client" only. Checkpoints do not store it, and after
            :func:`fastagg.load` it is zeros: clients must have learned it before.
        ages: the ages of the corrections; None without ``max_age`` and ``staleness``.
    """

    def __init__(
        self,
        *,
        mode: str = "server",
        memory_folder: str | os.PathLike[str] | None = None,
        max_age: int | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        if mode not in ("server", "client"):
            raise ValueError(f'mode: expected "server" or "client", got {mode!r}')
        self.mode = mode
        self.remembers_clients = mode == "server"
        if mode == "client":
            self.refused_staleness = no_late_rows(
                'with mode "client" the server has only the v of the last round, and a client\'s '
                "correction belongs to the round in which it started"
            )
        super().__init__(memory_folder=memory_folder, max_age=max_age, **options)
        if self.max_age is not None and mode == "client":
            raise ValueError(
                'max_age: expected None with mode "client", where the server keeps no '
                f"corrections, got {max_age!r}"
            )
        rounds = torch.zeros((), dtype=torch.int64, device="cpu")
        self.ages = make_ages(self.num_clients, self.max_age, self.staleness, rounds)

    def _allocate(self, memory_folder: str | os.PathLike[str] | None) -> None:
        if self.mode == "server":
            return super()._allocate(memory_folder)
        if memory_folder is not None:
            raise ValueError(
                'memory_folder: expected None with mode "client", where the server keeps '
                f"no rows, got {memory_folder!r}"
            )
        self.aggregate = allocate_vector(self.num_params, self.device)
        self._next = allocate_vector(self.num_params, self.device)

    def _receive(self, cohort: Cohort) -> Cohort:
        if self.mode == "client":
            return cohort  # rows need not be in memory
        return super()._receive(cohort)

    def _plan(self, cohort: Cohort) -> CorrectionPlan:
        plan = super()._plan(cohort)
        if self.ages is not None and self.max_age is not None:
            # Clients without a correction may be among them; theirs counts as zero anyway.
            old = self._correction_ages(cohort) > self.max_age
            if old.any():
                plan.fading = factors_tensor((~old).tolist())
        return plan

    def _read(self, params: Tensor, cohort: Cohort, plan: CorrectionPlan) -> Corrected:
        if self.mode == "server":
            return super()._read(params, cohort, plan)
        refuse_shared_memory(cohort, [self.aggregate, self._next])
        factors = cohort.scaled(plan.weights)
        self.columns.weighted_sum_(self._next, cohort.rows, factors, beta=0.0)  # of u_s + c_s
        v: Aggregate
        if plan.commit_checks:
            v = Unchecked(self._next, self._largest_row())
        else:
            v = Aggregate(self._next, self._check_sum(params, cohort, self._next))
        return Corrected(plan.weights, v, [], None)

    def _commit(self, cohort: Cohort, plan: CorrectionPlan, reading: Corrected) -> None:
        if self.mode == "server":
            super()._commit(cohort, plan, reading)
        else:
            self.aggregate, self._next = self._next, self.aggregate

    def _forget(self, ids: list[int]) -> None:
        if self.mode == "server":
            super()._forget(ids)

    def _keep_others(self, before: MimiC) -> None:
        if self.mode == "client":
            self.aggregate = before.aggregate

    def _state(self) -> State:
        return {} if self.mode == "client" else super()._state()

    def _state_loaded(self) -> None:
        if self.mode == "server":
            super()._state_loaded()

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        if options.get("mode") != "client":
            base = super().cost(sizes, options)
            return dataclasses.replace(base, state=base.state + age_bytes(options, sizes.K))
        # rows to v; abs_max of params and v; v to params
        S, d = sizes.S, sizes.d
        return Cost(0, 8 * d, 4 * S * d + 24 * d, 2 * S * d + 2 * d)
