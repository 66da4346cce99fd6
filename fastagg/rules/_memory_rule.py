# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that remember the last row of every client."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator, CommonOptions, State
from fastagg.checkpoint import invariants
from fastagg.clipping import FLOAT64_SUM, ClipNorm, check_remembered
from fastagg.costs import Cost, Sizes
from fastagg.memory.int8 import (
    COLUMN_BLOCKS,
    SCALES,
    Int8Memory,
    check_int8,
    make_memory,
    remembered,
)
from fastagg.memory.overlap import refuse_shared_memory
from fastagg.memory.rows import RowMemory, add_to_each_
from fastagg.memory.stores import read_store, row_bytes
from fastagg.ops.memory import count_up_, dot, picked, replaced
from fastagg.options import FLOAT32_LIMIT
from fastagg.report import Aggregate, Plan, Reading
from fastagg.rules._ages import age_bytes, check_ages, make_ages, read_max_age
from fastagg.rules._client_weights import read_client_weights, relative
from fastagg.rules._interval_state import Intervals
from fastagg.staleness import none_but_constant
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import copy_in_pieces_, scale_in_pieces_, uninitialized

if TYPE_CHECKING:
    from typing_extensions import Unpack


_BLOCK = 1 << 18  # columns of the total that are checked or changed at a time
_DRIFT = 1e30
"""Largest accumulated rounding error of a step's result: that of 10^6 steps with rows near 3.4e38
is below 10^29, and the range check of a step has a margin of 2.8e35."""


class MemoryOptions(CommonOptions, total=False):
    """Options of every memory rule; :class:`MemoryRule` describes them."""

    client_weights: Any
    memory_dtype: str
    memory_folder: str | os.PathLike[str] | None
    max_age: int | None


@dataclass
class MemoryPlan(Plan):
    """The plan of a memory rule: how the new rows enter the total, and which old ones leave it."""

    shares: Tensor = field(kw_only=True)  # [S] float64, the clients' shares of the total
    norm: float = field(kw_only=True)  # factor that makes the new total a mean
    expired: list[int] = field(kw_only=True)  # ids of clients whose memory rows count no longer
    blank: list[int] = field(kw_only=True)  # those of them that are absent: their rows become 0
    part: float = field(kw_only=True)  # the total moves by this part of the way to the aggregate
    intervals: Intervals | None = None  # of the clients after the round, if the rule counts them
    faded: Tensor | None = None  # [d] float64, scratch for the aggregate if it is not the new total
    faded_weights: Tensor | None = None  # [S] float64, those of the rows in it
    fading: float = 1.0  # factor of the total and of old rows in it


@dataclass
class Remembered(Reading):
    """Results of the pass over the rows; the new total and memory rows are in scratch."""

    peaks: Tensor  # [K] float64, >= |memory[k]| after the step
    reference: Tensor | None  # [d], of the new rows, if they are the caller's and models
    base: Tensor | None  # [d] float64, the total without the expired rows, if there are any


class MemoryRule(Aggregator[MemoryPlan, Remembered]):
    """``params += server_lr * (weighted mean of the memory rows)``.

    If memory rows are local models (``remembers_models``), the step is
    ``params += server_lr * (weighted mean of the memory rows - params)``.

    The rule keeps the weighted total of the memory rows in float64. A step changes the total by the
    S rows that change, so it reads S memory rows, not K. One pass over the received rows computes
    the new total and writes the new memory rows into spare rows. If the rule may take ownership of
    the received rows, they become memory rows without a copy; a model is then remembered as its
    update with the parameters of its round as the reference. Streamed updates are copied, and the
    parameters are added to the copies.

    With ``max_age``, rows that are too old are subtracted from the total before the round's rows
    enter it. They count as never seen: in the mean, in differences to new rows, in ``memory``.

    With ``staleness``, a late row becomes the memory row of its client if it is of a later round
    than this; otherwise it is rejected. From then on, the state is that which the rule would have
    if the row had arrived in time. No other factor than "constant" is possible, because the memory
    row of an absent client counts in full, however old it is.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        memory_dtype: "float32", or "bfloat16" for half the memory, or "int8" for a quarter. With
            the latter two, results are bit for bit those of a float32 memory for updates rounded to
            this dtype, and errors do not accumulate over rounds. With "bfloat16" the relative error
            of an element is at most 2^-8. With "int8" (:func:`fastagg.ops.quantize_`) the error of
            an element is at most 1/253 of the largest magnitude in its block of 256 columns, or
            2^-119 = 1.5e-36 if that is more.
        memory_folder: folder for a memory-mapped file that holds the rows and that is deleted when
            the process ends; None: rows are in memory. Checkpoints do not store this option: pass
            it to :func:`fastagg.load` again.
        max_age: number of rounds, >= 1, skipped ones included, after which the row of an absent
            client expires: with 1, only rows of the previous round count. None: never.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        memory: [K, d] in ``memory_dtype``, the last update (or model) of every client, zeros for
            clients never active. ``memory[k]`` returns a copy of row k, ``memory.clone()`` of all;
            as float32 if ``memory_dtype`` is "int8".
        total: [d] float64, ``shares @ memory``; shares are the weights divided by their sum.
        ages: the ages of the memory rows; None without ``max_age`` and ``staleness``.
    """

    column_state = frozenset({"memory", SCALES, "total"})
    state_options = frozenset({"client_weights"})  # those of the rows in the total
    refused_staleness = none_but_constant(
        "the remembered row of an absent client counts in full, however old it is, and so does a "
        "late one; max_age leaves old rows out"
    )
    column_blocks = COLUMN_BLOCKS
    collects_streams = False
    gathers_rows = True
    no_weights = (
        "it keeps a total of remembered rows with constant shares, so the weight of a row cannot "
        "change; client_weights are the weights of all rounds"
    )
    no_noise = "no bound is known of what one client can change in its memory rows together"
    keeps_aggregate = True
    remembers_models: ClassVar[bool] = False
    """Whether a memory row is a local model instead of an update."""

    def __init__(
        self,
        *,
        client_weights: Any = None,
        memory_dtype: str = "float32",
        memory_folder: str | os.PathLike[str] | None = None,
        max_age: int | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        if memory_dtype != "float32" and not self.no_noise:
            self.no_noise = (
                f"rows that are rounded to {memory_dtype} may be longer than clip_norm; use "
                'memory_dtype="float32"'
            )
        super().__init__(**options)
        self.max_age = read_max_age(max_age)
        rounds = torch.zeros((), dtype=torch.int64, device="cpu")
        self.ages = make_ages(self.num_clients, self.max_age, self.staleness, rounds)
        self.client_weights = read_client_weights(client_weights, self.num_clients)  # [K]
        self._shares = relative(self.client_weights, "all clients")  # [K], sums to 1
        store = read_store(memory_dtype, memory_folder)
        self.memory_dtype = memory_dtype
        if self.remembers_models and store.dtype != torch.float32:
            raise ValueError(
                "memory_dtype: expected 'float32', because models are remembered relative to the "
                f"global model, got {memory_dtype!r}"
            )
        self.memory = make_memory(self.num_clients, self.num_params, self.device, store)
        self.total = allocate_vector(self.num_params, self.device, torch.float64)
        self._next_total = allocate_vector(self.num_params, self.device, torch.float64)  # scratch
        # >= |memory[k]|
        self._peaks = torch.zeros(self.num_clients, dtype=torch.float64, device="cpu")

    def _norm(self, clients: Tensor) -> float:
        """Return the factor that makes the total a mean after a round with ``clients`` active."""
        return 1.0  # the mean over all K clients

    def _expired(self) -> list[int]:
        """Return the ids of the clients whose memory rows count no longer, ascending."""
        return [] if self.ages is None else self.ages.expired()

    def _too_late(self, cohort: Cohort, ages: Tensor) -> dict[int, str]:
        return {} if self.ages is None else self.ages.too_late(cohort, ages)

    def _receive(self, cohort: Cohort) -> Cohort:
        # The norms that max_norm limits are those of the rows that the rule uses: rounded ones.
        # Copies are multiplied as they are written; so are float32 rows on a CPU, in the pass.
        scales, narrow = cohort.scales is not None, self.memory.dtype != torch.float32
        on_cpu, is_int8 = self.device.type == "cpu", isinstance(self.memory, Int8Memory)
        copy = (narrow and self.max_norm is not None) or (scales and (is_int8 or not on_cpu))
        return self.memory.receive(cohort, self.columns, copy=copy)

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True

    def _plan(self, cohort: Cohort) -> MemoryPlan:
        shares, norm = picked(self._shares, cohort.clients), self._norm(cohort.clients)
        weights = shares if norm == 1.0 else norm * shares
        return self._memory_plan(cohort, weights, shares, norm)

    def _memory_plan(
        self,
        cohort: Cohort,
        weights: Tensor,
        shares: Tensor,
        norm: float = 1.0,
        part: float = 1.0,
    ) -> MemoryPlan:
        expired = self._expired()
        active = set(cohort.ids) if expired else ()
        blank = [client for client in expired if client not in active]
        return MemoryPlan(
            weights, shares=shares, norm=norm, expired=expired, blank=blank, part=part
        )

    def _read(self, params: Tensor, cohort: Cohort, plan: MemoryPlan) -> Remembered:
        models = self.remembers_models  # bounds of memory rows then need the peak
        peak = self._params_peak(params) if models else self._known_peak(params, plan)
        base = self._total_without(plan.expired) if plan.expired else None
        peaks = self._read_rows(params, cohort, plan, self.total if base is None else base)
        return self._remember(params, peak, cohort, plan, peaks, base)

    def _total_without(self, clients: list[int]) -> Tensor:
        """Return the total [d] without the memory rows of ``clients``."""
        base = self.total.clone()
        for begin in range(0, len(base), _BLOCK):
            part = base[begin : begin + _BLOCK]
            for client in clients:
                row = self.memory.part(client, begin, begin + len(part))
                part -= row.to(torch.float64).mul_(float(self._shares[client]))
        return base

    def _read_rows(
        self, params: Tensor, cohort: Cohort, plan: MemoryPlan, total: Tensor
    ) -> list[float]:
        """Compute the new total and memory rows in scratch; return the S peaks of the rows."""
        if not cohort.ids:
            copy_in_pieces_(self._next_total, total)
            if plan.faded is not None:
                scale_in_pieces_(plan.faded, total, plan.fading)
            return []
        ids, memory = cohort.ids, self.memory
        renewed = set(plan.expired).intersection(ids)  # their old rows have left the total
        peaks = uninitialized([len(cohort)], self.device)
        if cohort.owner is None:
            tensors = memory.tensors
            refuse_shared_memory(cohort, [tensors[client] for client in ids])
        if cohort.owner is None and isinstance(memory, Int8Memory):
            self.columns.quantized_total_(
                self._next_total,
                peaks,
                total,
                memory.of(ids, renewed),
                cohort.rows,
                cohort.clients,
                plan.shares,
                *memory.spare(ids),
                faded=plan.faded,
                faded_weights=plan.faded_weights,
                fading=plan.fading,
            )
        else:
            references = memory.references_of(ids)
            if references and renewed:
                listed = zip(ids, references, strict=True)
                references = [None if k in renewed else reference for k, reference in listed]
            self.columns.memory_total_(
                self._next_total,
                peaks,
                total,
                memory.of(ids, renewed),
                cohort.rows,
                cohort.clients,
                plan.shares,
                references,
                params if self.remembers_models else None,
                memory.spares.rows(ids) if cohort.owner is None else (),
                cohort.scales,
                plan.faded,
                plan.faded_weights,
                plan.fading,
            )
        return self._check_peaks(cohort, self.columns.join_peaks(peaks))

    def _remember(
        self,
        params: Tensor,
        peak: float,
        cohort: Cohort,
        plan: MemoryPlan,
        row_peaks: list[float],
        base: Tensor | None,
    ) -> Remembered:
        """Check that memory and parameters stay in range.

        Args:
            params: [d].
            peak: the largest magnitude in them; 0 if the commit checks them.
            cohort, plan: as for ``_read``.
            row_peaks: S largest magnitudes in the rows.
            base: what ``_total_without`` returned; None: no row has expired.
        """
        before = self._peaks
        if plan.expired:
            before = before.index_fill(0, torch.tensor(plan.expired, device="cpu"), 0.0)
        reference = None
        if self.remembers_models:
            row_peaks = [row_peak + peak for row_peak in row_peaks]
            if cohort.owner is self.memory.spares:  # copies of updates: no reference is needed
                add_to_each_(cohort.tensors(), params)
            elif cohort.owner is not None and isinstance(self.memory, RowMemory):
                reference = self.memory.new_reference().copy_(params)
        peaks, old_peaks = replaced(before, cohort.ids, row_peaks)
        changes = list(map(operator.add, row_peaks, old_peaks))  # >= |new row - old row|
        if not max(changes, default=0.0) <= FLOAT32_LIMIT:
            raise ValueError("updates: too large, memory rows would leave the range of float32")
        aggregate = self._aggregate_peak(plan, before, peaks, changes)
        vector = self._next_total if plan.faded is None else plan.faded
        if self.remembers_models:
            aggregate += peak
            self._check_range(peak, aggregate)
            v = Aggregate(vector, aggregate, plan.norm, models=True)
        else:
            v = self._total(plan, peak, vector, aggregate, plan.norm)
        return Remembered(plan.weights, v, peaks, reference, base)

    def _aggregate_peak(
        self, plan: MemoryPlan, before: Tensor, peaks: Tensor, changes: list[float]
    ) -> float:
        """Return an upper bound of the magnitudes in the aggregate.

        Args:
            plan: the plan of the round.
            before: [K] float64, >= |memory[k]| before the step, 0 for expired rows.
            peaks: [K] float64, >= |memory[k]| after the step.
            changes: S numbers, >= |new row - old row|.
        """
        return plan.norm * dot(self._shares, peaks)

    def _check_noise_change(self, clip_norm: ClipNorm, multiplier: float) -> None:
        has_rows = "_peaks" in vars(self) and bool(self._peaks.any())  # a new rule has none
        before = (self.clip_norm, self.noise_multiplier) if has_rows else None
        check_remembered(self.name, before, clip_norm, multiplier)

    def _largest_change(self, cohort: Cohort, plan: MemoryPlan) -> float:
        # Which rows count follows from who was active, and is the same without a client's rows.
        return plan.norm * float(self._shares.max())

    def _largest_rounding(self, cohort: Cohort, plan: MemoryPlan) -> float:
        return FLOAT64_SUM * plan.norm * float(self._shares.sum())

    def _commit(self, cohort: Cohort, plan: MemoryPlan, reading: Remembered) -> None:
        self.memory.forget(plan.blank)
        self.memory.exchange(cohort.ids, cohort.owner, reading.reference)
        self.total, self._next_total = self._next_total, self.total
        self._peaks = reading.peaks
        if self.ages is not None:
            self.ages.renew(cohort.clients, plan.expired, cohort.ages)
            count_up_(self.ages.rounds)

    def _skip(self) -> None:
        if self.ages is not None:
            count_up_(self.ages.rounds)

    def _forget(self, ids: list[int]) -> None:
        peaks = self._peaks.index_fill(0, torch.tensor(ids, device="cpu"), 0.0)
        total = self._total_without(sorted(ids))  # the order of subtractions shows in the bits
        if not bool(peaks.any()):
            total.zero_()  # no rounding errors remain
        self.memory.forget(ids)
        self.total, self._peaks = total, peaks
        if self.ages is not None:
            self.ages.forget(ids)

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        if self.ages is not None:
            check_ages(state, "memory")
        check_int8(state)
        total, row = cast(Tensor, state["total"]), remembered(state)
        invariants.check_range("total", total, -FLOAT32_LIMIT, FLOAT32_LIMIT)
        # Roundings of steps add up. They depend on magnitudes that rows had at any time, of which
        # the state shows nothing, so the tolerance is for the largest magnitudes there are. It
        # keeps steps in the range of float32, which is checked with bounds of the rows.
        for begin in range(0, len(total), _BLOCK):
            end = begin + _BLOCK
            rest = total[begin:end].clone()
            for client, share in enumerate(self._shares.tolist()):
                rest.sub_(row(client, begin, end).to(rest.device, torch.float64), alpha=share)
            off = float(rest.abs().max()) * self._largest_norm(state) * max(1.0, self.server_lr)
            drift = min(_DRIFT, self.server_optimizer.largest_error)
            invariants.require(off <= drift, "total", "the weighted sum of the memory rows")

    def _widened(self, state: dict[str, Tensor | RowMemory]) -> dict[str, Tensor | RowMemory]:
        total, row = torch.zeros_like(self.total), remembered(state)
        for client, share in enumerate(self._shares.tolist()):
            total.add_(row(client, 0, len(total)), alpha=share)
        return {**state, "total": total}

    def _largest_norm(self, state: State) -> float:
        """Return an upper bound of ``_norm`` in steps that follow a state."""
        return 1.0

    def _state(self) -> State:
        state = self.memory.state() | {"total": self.total}
        if self.ages is not None:
            state |= {"last": self.ages.last, "rounds": self.ages.rounds}
        return state

    def _state_loaded(self) -> None:
        self._peaks = self.memory.peaks(self.columns)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        K, S, d = sizes.K, sizes.S, sizes.d
        row = row_bytes(options, d)
        state = K * row + 8 * d + age_bytes(options, K)
        flops = (4 if cls.remembers_models else 3) * S * d + 3 * d
        scratch = 8 * d
        if options.get("max_age") is not None:  # the total without expired rows, a row of zeros,
            scratch += 8 * d + row + 12 * min(d, _BLOCK)  # and a part of an expired row
        # abs_max reads params; rows, memory rows and total are read and the new total is written;
        # the total is added to params.
        moved = S * (4 * d + row) + 36 * d
        if not sizes.owned:  # the new memory rows are written into spare rows
            spares = S * row
            return Cost(state, scratch + spares, moved + spares, flops)
        if not cls.remembers_models:
            return Cost(state, scratch, moved, flops)
        # the sum reads params and an earlier reference; params are copied to a new reference
        references = 4 * (K - S + 1) * d
        scratch, moved = scratch + 4 * d, moved + 16 * d
        return Cost(state, scratch, moved, flops + S * d, references=references)
