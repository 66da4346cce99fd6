# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that remember the last row of every client."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Prepared, State
from fastagg.costs import Cost, Sizes
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import dtype_name, element_bytes, read_store
from fastagg.options import FLOAT32_LIMIT
from fastagg.rules._client_weights import read_client_weights, relative
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.buffer import RowExchange
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MemoryOptions(CommonOptions, total=False):
    """The options that every rule with a memory has; :class:`MemoryRule` describes them."""

    client_weights: Any
    memory_dtype: str
    memory_folder: str | os.PathLike[str] | None


class MemoryRule(Aggregator):
    """``params += server_lr * mean of the remembered updates``, or towards that of the models.

    The weighted total of the memory is kept in float64 and moves with the rows that change, so
    a step touches S rows of the memory, not K. Rows that are handed over become the memory as they
    are; a model is then remembered as its update and the parameters of its round.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        memory_dtype: "float32", or "bfloat16" for half the memory: the rule then does what it does
            in float32 with updates rounded to bfloat16, bit for bit. An element is off by up to
            2^-8 of its magnitude, and errors do not add up over rounds.
        memory_folder: keep the rows in a file in this folder, mapped into memory, instead of in
            memory; the file disappears with the process. Not part of a checkpoint: name it again
            in :func:`fastagg.load`. None: in memory.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    Attributes:
        memory: [K, d] float32, the last row of every client, zeros for those never seen;
            ``memory[k]`` is a copy of one, ``memory.clone()`` a tensor.
        total: [d] float64, ``shares @ memory`` with the weights divided by their sum.
    """

    column_state = frozenset({"memory", "total"})
    remembers_models: ClassVar[bool] = False
    """Whether a remembered row is a local model instead of an update."""

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
        if self.remembers_models and store.dtype != torch.float32:
            raise ValueError(
                "memory_dtype: expected 'float32', since models are remembered relative to the "
                f"global one, got {memory_dtype!r}"
            )
        self.memory = RowMemory(self.num_clients, self.num_params, self.device, store=store)
        self.total = torch.zeros(self.num_params, dtype=torch.float64, device=self.device)
        self._next_total: Tensor | None = None  # [d] float64, made when rows are first handed over
        self._peaks = torch.zeros(self.num_clients, dtype=torch.float64)  # >= |memory[k]|

    @abstractmethod
    def _norm(self, clients: Tensor) -> float:
        """The factor that makes ``total`` a mean once ``clients`` have been seen."""

    def _commit_seen(self, clients: Tensor) -> None:
        """Note that ``clients`` have been seen."""

    def _prepare(self, params: Tensor, cohort: Cohort) -> Prepared:
        return self._prepare_memory(params, self._params_peak(params), cohort)

    def _prepare_memory(self, params: Tensor, peak: float, cohort: Cohort) -> Prepared:
        """The step, for a bound ``peak`` of the parameters just before it."""
        clients, ids = cohort.clients, cohort.ids
        weights = self._shares[clients]
        next_total = reference = None
        buffer = cohort.buffer
        if buffer is None:
            refuse_shared_memory(cohort, self.memory.of(ids))
            row_peaks = self._row_peaks(cohort)  # [S]
        else:
            next_total, row_peaks = self._sum(params, cohort, weights)
            if self.remembers_models:
                reference = self.memory.new_reference()
        if self.remembers_models:
            row_peaks = row_peaks + peak
        if not bool((row_peaks + self._peaks[clients] <= FLOAT32_LIMIT).all()):
            raise ValueError("updates: too large to be remembered in float32")
        peaks = self._peaks.index_copy(0, clients, row_peaks)
        norm = self._norm(clients)
        aggregate = norm * float(self._shares @ peaks)
        self._check_range(peak, aggregate + peak if self.remembers_models else aggregate)

        def copy() -> None:
            self.memory.settle_(ids)
            ops.memory_update_(
                params,
                self.total,
                self.memory.of(ids),
                cohort.tensors,
                clients,
                weights,
                self.server_lr,
                norm,
                self.remembers_models,
            )

        def adopt(buffer: RowExchange, total: Tensor) -> None:
            if reference is not None:
                reference.copy_(params)
            ops.add_total_(params, total, self.server_lr, norm, self.remembers_models)
            self.memory.adopt(ids, buffer, reference)
            self.total, self._next_total = total, self.total

        def commit() -> None:
            if buffer is None or next_total is None:
                copy()
            else:
                adopt(buffer, next_total)
            self._peaks = peaks
            self._commit_seen(clients)

        return Prepared(norm * weights, commit)

    def _receive(self, cohort: Cohort) -> Cohort:
        return self.memory.receive(cohort, self.columns)

    def _sum(self, params: Tensor, cohort: Cohort, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The total once the rows are remembered, [d] float64, and the rows' magnitudes [S]."""
        if self._next_total is None:
            self._next_total = torch.zeros_like(self.total)
        peaks, ids = torch.empty(len(cohort), device=self.device), cohort.ids
        self.columns.memory_total_(
            self._next_total,
            peaks,
            self.total,
            self.memory.of(ids),
            cohort.rows,
            cohort.clients,
            weights,
            self.memory.references_of(ids),
            params if self.remembers_models else None,
        )
        return self._next_total, self._check_peaks(cohort, self.columns.join_peaks(peaks))

    def _state(self) -> State:
        return {"memory": self.memory, "total": self.total}

    def _state_loaded(self) -> None:
        self._peaks = self.columns.abs_max(self.memory.rows).to(torch.float64)

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "client_weights": self.client_weights,
            "memory_dtype": dtype_name(self.memory.store),
        }

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        K, S, d = sizes.K, sizes.S, sizes.d
        state = element_bytes(options) * K * d + 8 * d
        flops = (4 if cls.remembers_models else 3) * S * d + 3 * d
        if not sizes.adopting:
            # abs_max of params and rows; then rows and memory read, memory, total, params written
            return Cost(state, 0, 16 * S * d + 28 * d, flops)
        # abs_max of params; rows, memory, total read, its successor written; total to params
        moved = 8 * S * d + 36 * d
        if not cls.remembers_models:
            return Cost(state, 8 * d, moved, flops)
        # params read by the sum and copied to a reference, an earlier reference read
        references = 4 * (K - S + 1) * d
        return Cost(state + references, 12 * d, moved + 16 * d, flops + S * d)
