# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that correct each update by what it missed before (MimiC)."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastagg.aggregator import Aggregator, CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.memory.overlap import refuse_shared_memory
from fastagg.memory.rows import RowMemory, add_to_each_
from fastagg.memory.stores import read_store
from fastagg.ops.memory import count_up_
from fastagg.options import FLOAT32_LIMIT
from fastagg.report import Plan, Reading
from fastagg.rules._ages import RowAges, check_ages, read_max_age
from fastagg.rules._recent_aggregates import RECENT, RecentAggregates, check_recent, recent_bytes
from fastagg.staleness import none_but_constant
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import factors_tensor, uninitialized

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CACHED_BYTES = 8 << 20
"""Rows that are copied and take at most this many bytes together are read twice, from a cache."""
_ROUNDING = 1.0 + 2.0**-22
"""Margin for the float32 rounding of v and c: two roundings of relative size 2^-24."""


class CorrectionOptions(CommonOptions, total=False):
    """Options of every rule with corrections; :class:`CorrectionRule` describes them."""

    memory_folder: str | os.PathLike[str] | None
    max_age: int | None


@dataclass
class CorrectionPlan(Plan):
    """The plan of a rule with corrections: how much each correction counts."""

    fading: Tensor | None = None  # [S] float64 in [0, 1], factors of the corrections; None: ones


@dataclass
class Corrected(Reading):
    """Results of the pass over the rows; v and the new memory rows are in scratch."""

    peaks: list[float]  # S bounds of the active clients' new |corrections[k]|
    reference: Tensor | None  # [d], v, if the new memory rows are relative to it
    rounded: Tensor | None = None  # [d] float32, v
    late: list[int] = field(default_factory=list)  # ids whose new memory rows are corrections


class CorrectionRule(Aggregator[CorrectionPlan, Corrected]):
    """``v = mean_s(u_s + f_s c_s)``, ``params += server_lr * v``, ``c_s = v - u_s``.

    The mean is over the active clients s; an absent client's correction does not change. One pass
    reads rows and corrections. If the rule may take ownership of the received rows, they become
    memory rows; otherwise the pass copies them into spare rows, which become memory rows. c_s is
    then reconstructed from u_s and its reference, the v of its round. Only if rows are copied and
    fit a cache together, the pass writes c_s itself into spare rows, without a reference.

    The server also keeps these references, one for each round in which some client was last active,
    but at most max(4, K / 8, 2^22 / d). If there would be more, the corrections with the oldest
    reference are written into their rows first.

    Before the commit, the rule checks with bounds that no value leaves the range of float32:
    |v| <= mean_s(|u_s| + |c_s|) and |c_s| <= |v| + |u_s|, where |x| is the largest magnitude in x.
    As |c_s| <= |v_old| + |u_old|, the bound of |v| grows by at most 2 max|u| per round, to
    2e6 max|u| after a million rounds. If the bounds would refuse a step, the rule first replaces
    the bounds of all |c| by their exact values and checks again.

    With ``staleness``, a late row of round r is corrected as it would have been in round r, and its
    new correction belongs to round r: ``c_s = v_r - u_s``, with the v of the first round from r on
    that was not skipped, because rows of both rounds started from one model. The rule keeps these v
    of the last ``max_staleness`` rounds, which must be given. A row that is not newer than the
    client's correction is rejected. The mean of the equations has equal weights, so no other factor
    than "constant" is possible.

    Args:
        memory_folder: folder for a memory-mapped file that holds the corrections; see
            :class:`fastagg.rules._memory_rule.MemoryRule`.
        max_age: number of rounds, >= 1, skipped ones included, after which a correction expires:
            if its client was last active more than this many rounds ago, it counts as zero. With 1,
            only clients of the previous round have a correction. None: never.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active. ``corrections[k]`` returns
            a copy of row k, ``corrections.clone()`` of all.
        ages: the ages of the corrections, which subclasses make; None if no option needs them.
        recent: the aggregates of the last rounds; None without ``staleness``.
    """

    column_state = frozenset({"corrections", RECENT})
    collects_streams = False
    gathers_rows = True
    refused_staleness = none_but_constant(
        "MimiC's mean of corrected updates has equal weights; max_staleness leaves old rows out"
    )
    no_noise = "a correction holds an earlier aggregate without its noise"

    def __init__(
        self,
        *,
        memory_folder: str | os.PathLike[str] | None = None,
        max_age: int | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**options)
        self.max_age = read_max_age(max_age)
        self.ages: RowAges | None = None
        self.recent: RecentAggregates | None = None
        if self.staleness is not None:
            if not self.max_staleness:
                raise ValueError(
                    "max_staleness: expected at least 1 with staleness, because the rule keeps the "
                    f"aggregates of this many rounds, got {self.max_staleness}"
                )
            self.recent = RecentAggregates(self.max_staleness, self.num_params, self.device)
        self._allocate(memory_folder)

    def _allocate(self, memory_folder: str | os.PathLike[str] | None) -> None:
        """Make the corrections and the scratch."""
        sizes, store = (self.num_clients, self.num_params), read_store("float32", memory_folder)
        self.corrections = RowMemory(*sizes, self.device, sign=-1.0, store=store)
        self._mean = allocate_vector(self.num_params, self.device, torch.float64)
        self._peaks = [0.0] * self.num_clients  # >= |corrections[k]|

    def _too_late(self, cohort: Cohort, ages: Tensor) -> dict[int, str]:
        return {} if self.ages is None else self.ages.too_late(cohort, ages)

    def _receive(self, cohort: Cohort) -> Cohort:
        late = cohort.ages is not None  # the read phase writes their corrections into the copies
        if late:
            cohort = cohort.with_rows(cohort.rows)
        # Copies are multiplied as they are written; other rows on a CPU are in the pass.
        copy = late or (cohort.scales is not None and self.device.type != "cpu")
        return self.corrections.receive(cohort, self.columns, copy=copy)

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True

    def _plan(self, cohort: Cohort) -> CorrectionPlan:
        return CorrectionPlan(factors_tensor([1.0 / len(cohort)] * len(cohort)))

    def _read(self, params: Tensor, cohort: Cohort, plan: CorrectionPlan) -> Corrected:
        peak, ids = self._known_peak(params, plan), cohort.ids
        self.corrections.settle_(most=_most_references(self.num_clients, self.num_params) - 1)
        own, kept = self.corrections.of(ids), []
        if cohort.owner is None:
            refuse_shared_memory(cohort, own)
            kept = self.corrections.spares.rows(ids)
        copies = 4 * len(ids) * self.num_params > _CACHED_BYTES
        rounded = self.corrections.new_reference()
        found = uninitialized([len(ids)], self.device)
        references = self.corrections.references_of(ids)
        self.columns.mimic_mean_(
            self._mean,
            rounded,
            found,
            cohort.rows,
            own,
            cohort.clients,
            references,
            kept,
            copies,
            plan.fading,
            cohort.scales,
        )
        row_peaks = self._check_peaks(cohort, self.columns.join_peaks(found))
        earlier = self._earlier_aggregates(cohort)
        largest: list[float] = []  # magnitudes, of each of these aggregates
        if earlier:
            largest = self.columns.abs_max([*earlier.values()]).tolist()
        aggregate = self._bound(peak, ids, row_peaks, plan.fading, max(largest, default=0.0))
        own_peaks = [aggregate] * len(ids)
        for (position, vector), bound in zip(earlier.items(), largest, strict=True):
            own_peaks[position] = bound
            add_to_each_([cohort.tensors()[position]], vector, sign=-1.0)
        copied = cohort.owner is None or cohort.owner is self.corrections.spares
        if copied and not copies and not kept:  # streams and late rows
            others = [row for at, row in enumerate(cohort.tensors()) if at not in earlier]
            add_to_each_(others, rounded, sign=-1.0)
        both = zip(own_peaks, row_peaks, strict=True)
        peaks = [(own_peak + row_peak) * _ROUNDING for own_peak, row_peak in both]
        reference = None if copied and not copies else rounded
        late = [cohort.ids[position] for position in earlier]
        v = self._total(plan, peak, self._mean, aggregate)
        return Corrected(plan.weights, v, peaks, reference, rounded, late)

    def _earlier_aggregates(self, cohort: Cohort) -> dict[int, Tensor]:
        """Return the aggregates [d] to which corrections of late rows belong, by position.

        A late row has none if there was no aggregate since its round: it started from the present
        model.
        """
        if cohort.ages is None:
            return {}
        assert self.recent is not None and self.ages is not None
        rounds = int(self.ages.rounds)
        listed = [
            (position, self.recent.find(rounds - age))
            for position, age in enumerate(cohort.ages.tolist())
            if age
        ]
        return {position: vector for position, vector in listed if vector is not None}

    def _commit(self, cohort: Cohort, plan: CorrectionPlan, reading: Corrected) -> None:
        self.corrections.exchange(cohort.ids, cohort.owner, reading.reference, reading.late)
        for client, peak in zip(cohort.ids, reading.peaks, strict=True):
            self._peaks[client] = peak
        self._count(cohort, reading.rounded)

    def _correction_ages(self, cohort: Cohort) -> NDArray[np.int64]:
        """Return the ages of the clients' corrections [S], in the rounds of their rows."""
        assert self.ages is not None
        return self.ages.of(cohort.clients, cohort.ages)

    def _count(self, cohort: Cohort | None = None, aggregate: Tensor | None = None) -> None:
        """Count the round, with the active clients and the aggregate [d], unless it is skipped."""
        if self.ages is None:
            return
        if self.recent is not None:
            self.recent.add(int(self.ages.rounds), aggregate)
        if cohort is not None:
            self.ages.renew(cohort.clients, ages=cohort.ages)
        count_up_(self.ages.rounds)

    def _skip(self) -> None:
        self._count()

    def _bound(
        self,
        peak: float,
        ids: list[int],
        row_peaks: list[float],
        fading: Tensor | None,
        earlier: float,
    ) -> float:
        """Return a bound of |v|; check that corrections and parameters stay in range.

        Args:
            peak: the largest magnitude in the parameters; 0 if the commit checks the step.
            ids: of S clients.
            row_peaks: S largest magnitudes in their rows.
            fading: [S], factors of their corrections, of which only those of 0 lower the bound;
                None: ones.
            earlier: the largest magnitude in the aggregates to which late rows belong.
        """
        bound = self._aggregate_bound(ids, row_peaks, fading)
        if not self._fits(bound, peak, row_peaks, earlier):
            self._measure()
            bound = self._aggregate_bound(ids, row_peaks, fading)
            if not self._fits(bound, peak, row_peaks, earlier):
                raise ValueError(
                    "updates: too large, corrections or parameters could leave the range of "
                    f"float32 (updates up to {max(row_peaks):.3g}, corrections up to "
                    f"{max(self._peaks):.3g})"
                )
        return bound

    def _measure(self) -> None:
        self.corrections.settle_()
        self._peaks = self.columns.abs_max(self.corrections.rows).tolist()

    def _aggregate_bound(
        self, ids: list[int], row_peaks: list[float], fading: Tensor | None
    ) -> float:
        peaks = [self._peaks[client] for client in ids]
        if fading is not None:
            factors = zip(peaks, fading.tolist(), strict=True)
            peaks = [peak if factor > 0.0 else 0.0 for peak, factor in factors]
        return math.fsum(map(operator.add, row_peaks, peaks)) / len(ids) * _ROUNDING

    def _fits(self, aggregate: float, peak: float, row_peaks: list[float], earlier: float) -> bool:
        """Return whether the sum of v, new corrections and new parameters fit into float32."""
        new = max(aggregate, earlier) + max(row_peaks)
        largest = max(aggregate * len(row_peaks), new)
        return largest <= FLOAT32_LIMIT and self._step_fits(peak, aggregate)

    def _forget(self, ids: list[int]) -> None:
        self.corrections.forget(ids)
        for client in ids:
            self._peaks[client] = 0.0
        if self.ages is not None:
            self.ages.forget(ids)

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        if self.ages is not None:
            check_ages(state, "corrections")
        if self.recent is not None:
            check_recent(state)

    def _state(self) -> State:
        state: dict[str, Tensor | RowMemory] = {"corrections": self.corrections}
        if self.ages is not None:
            state |= {"last": self.ages.last, "rounds": self.ages.rounds}
        return state if self.recent is None else state | self.recent.state()

    def _state_loaded(self) -> None:
        self._measure()

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # abs_max of params; rows and corrections read, v written twice; v to params
        K, S, d = sizes.K, sizes.S, sizes.d
        recent = recent_bytes(options, d)  # of which a round writes one aggregate
        state = 4 * K * d + recent
        flops, moved, copied = 5 * S * d + 3 * d, 8 * S * d + (40 if recent else 32) * d, 0
        if not sizes.owned:
            copied = 4 * S * d  # into spare rows
            if copied <= _CACHED_BYTES:
                return Cost(state, 12 * d + copied, moved + copied, flops)
        references = 4 * min(K - S + 1, _most_references(K, d)) * d  # of which one is read
        scratch, moved = 12 * d + copied, moved + 4 * d + copied
        return Cost(state, scratch, moved, flops, references=references)


def _most_references(num_clients: int, num_params: int) -> int:
    """Return how many references a rule keeps at most: an eighth of the rows, or 16 MB."""
    return max(4, num_clients // 8, (1 << 22) // num_params)
