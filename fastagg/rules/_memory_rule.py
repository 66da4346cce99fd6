# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that remember the last row of every client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Plan, Reading, State
from fastagg.costs import Cost, Sizes
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import element_bytes, read_store
from fastagg.options import FLOAT32_LIMIT
from fastagg.rules._client_weights import read_client_weights, relative
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MemoryOptions(CommonOptions, total=False):
    """The options that every rule with a memory has; :class:`MemoryRule` describes them."""

    client_weights: Any
    memory_dtype: str
    memory_folder: str | os.PathLike[str] | None


@dataclass
class MemoryPlan(Plan):
    """How the new rows count in the total."""

    shares: Tensor = field(kw_only=True)  # [S] float64, the clients' shares of the total
    norm: float = field(kw_only=True)  # makes the new total a mean


@dataclass
class Remembered(Reading):
    """What follows from the rows; the new total and the new memory rows are in scratch."""

    peaks: Tensor  # [K] float64, >= |memory[k]| after the step
    reference: Tensor | None  # [d], of rows whose ownership the rule takes as models


class MemoryRule(Aggregator[MemoryPlan, Remembered]):
    """``params += server_lr * mean of the remembered updates``, or towards that of the models.

    The weighted total of the memory is kept in float64 and moves with the rows that change, so a
    step reads S rows of the memory, not K. One pass over the received rows computes the new total
    and writes the new memory rows into spare rows. If the rule may take ownership of the received
    rows, they become the memory as they are, and nothing is copied; a model is then remembered as
    its update and the parameters of its round.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        memory_dtype: "float32", or "bfloat16" for half the memory: the rule then computes what it
            would compute in float32 from updates rounded to bfloat16, bit for bit. An element is
            off by up to 2^-8 of its magnitude, and errors do not add up over rounds.
        memory_folder: keep the rows in a file in this folder, mapped into memory; the file is
            deleted with the process. Not part of a checkpoint: name it again in
            :func:`fastagg.load`. None: in memory.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    Attributes:
        memory: [K, d] float32, the last row of every client, zeros for those never seen;
            ``memory[k]`` is a copy of one, ``memory.clone()`` a tensor.
        total: [d] float64, ``shares @ memory`` with the weights divided by their sum.
    """

    column_state = frozenset({"memory", "total"})
    collects_streams = False
    remembers_models: ClassVar[bool] = False
    """Whether a memory row is a local model instead of an update."""

    def __init__(
        self,
        *,
        client_weights: Any = None,
        memory_dtype: str = "float32",
        memory_folder: str | os.PathLike[str] | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**options)
        self.client_weights = read_client_weights(client_weights, self.num_clients)  # [K]
        self._shares = relative(self.client_weights, "all clients")  # [K], sums to 1
        store = read_store(memory_dtype, memory_folder)
        self.memory_dtype = memory_dtype
        if self.remembers_models and store.dtype != torch.float32:
            raise ValueError(
                "memory_dtype: expected 'float32', since models are remembered relative to the "
                f"global one, got {memory_dtype!r}"
            )
        self.memory = RowMemory(self.num_clients, self.num_params, self.device, store=store)
        self.total = torch.zeros(self.num_params, dtype=torch.float64, device=self.device)
        self._next_total = torch.zeros_like(self.total)  # [d], scratch
        self._peaks = torch.zeros(self.num_clients, dtype=torch.float64)  # >= |memory[k]|

    def _norm(self, clients: Tensor) -> float:
        """Return the factor that makes ``total`` a mean once ``clients`` have been seen."""
        return 1.0  # the mean over all K clients

    def _receive(self, cohort: Cohort) -> Cohort:
        return self.memory.receive(cohort, self.columns)

    def _plan(self, cohort: Cohort) -> MemoryPlan:
        shares, norm = self._shares[cohort.clients], self._norm(cohort.clients)
        return MemoryPlan(norm * shares, shares=shares, norm=norm)

    def _read(self, params: Tensor, cohort: Cohort, plan: MemoryPlan) -> Remembered:
        peak = self._params_peak(params)
        return self._remember(params, peak, cohort, plan, self._read_rows(params, cohort, plan))

    def _read_rows(self, params: Tensor, cohort: Cohort, plan: MemoryPlan) -> Tensor:
        """Compute the new total and write the new memory rows; return the rows' peaks [S]."""
        ids, own = cohort.ids, self.memory.of(cohort.ids)
        kept: list[Tensor] = []
        if cohort.owner is None:
            refuse_shared_memory(cohort, own)
            kept = self.memory.spares.rows(ids)
        peaks = torch.empty(len(cohort), device=self.device)
        self.columns.memory_total_(
            self._next_total,
            peaks,
            self.total,
            own,
            cohort.rows,
            cohort.clients,
            plan.shares,
            self.memory.references_of(ids),
            params if self.remembers_models else None,
            kept,
        )
        return self._check_peaks(cohort, self.columns.join_peaks(peaks))

    def _remember(
        self, params: Tensor, peak: float, cohort: Cohort, plan: MemoryPlan, row_peaks: Tensor
    ) -> Remembered:
        """Check that memory and parameters stay in range, for a bound ``peak`` of the latter."""
        clients, reference = cohort.clients, None
        if self.remembers_models:
            row_peaks = row_peaks + peak
            if cohort.owner is not None:
                reference = self.memory.new_reference().copy_(params)
        if not bool((row_peaks + self._peaks[clients] <= FLOAT32_LIMIT).all()):
            raise ValueError("updates: too large to be remembered in float32")
        peaks = self._peaks.index_copy(0, clients, row_peaks)
        aggregate = plan.norm * float(self._shares @ peaks)
        self._check_range(peak, aggregate + peak if self.remembers_models else aggregate)
        return Remembered(plan.weights, peaks, reference)

    def _commit(
        self, params: Tensor, cohort: Cohort, plan: MemoryPlan, reading: Remembered
    ) -> None:
        ops.add_total_(params, self._next_total, self.server_lr, plan.norm, self.remembers_models)
        self.memory.exchange(cohort.ids, cohort.owner, reading.reference)
        self.total, self._next_total = self._next_total, self.total
        self._peaks = reading.peaks

    def _state(self) -> State:
        return {"memory": self.memory, "total": self.total}

    def _state_loaded(self) -> None:
        self._peaks = self.columns.abs_max(self.memory.rows).to(torch.float64)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        K, S, d = sizes.K, sizes.S, sizes.d
        state = element_bytes(options) * K * d + 8 * d
        flops = (4 if cls.remembers_models else 3) * S * d + 3 * d
        # abs_max of params; rows, memory, total read, its successor written; total to params
        moved = 8 * S * d + 36 * d
        if not sizes.adopting:  # the new memory rows are written into spare rows
            spares = element_bytes(options) * S * d
            return Cost(state, 8 * d + spares, moved + spares, flops)
        if not cls.remembers_models:
            return Cost(state, 8 * d, moved, flops)
        # params read by the sum and copied to a reference, an earlier reference read
        references = 4 * (K - S + 1) * d
        return Cost(state + references, 12 * d, moved + 16 * d, flops + S * d)
