# SPDX-License-Identifier: Apache-2.0
"""Checks for rules: finite values, the range of float32, norms of rows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.norm_bound import MaxNorm, RecentNorms
from fastagg.ops.row_lists import RowList
from fastagg.options import FLOAT32_LIMIT
from fastagg.report import (
    Aggregate,
    NonFiniteUpdates,
    OversizedUpdates,
    Plan,
    RefusedUpdates,
    RowSum,
    Unchecked,
)
from fastagg.server_optimizer import Moments, ServerOptimizer
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import Columns

_STORED = 1.125
"""Upper limit of what rounding to a ``memory_dtype`` divides the norm of a row by: int8 changes a
number by 1/254 of the largest of 256."""


class RowChecks:
    """What a rule checks in ``_read``; :class:`fastagg.Aggregator` has the attributes."""

    columns: Columns
    nonfinite: str
    server_optimizer: ServerOptimizer
    _norms: RecentNorms | None
    _moments: Moments | None

    @property
    @abstractmethod
    def server_lr(self) -> float:
        """The server learning rate."""

    @property
    @abstractmethod
    def max_norm(self) -> MaxNorm:
        """The largest norm that a row may have."""

    def norm_limit(self, *, adaptive: bool) -> float:
        """Return a norm above which the next step rejects every row; infinite if there is none.

        Args:
            adaptive: whether to return an adaptive ``max_norm``, if it is known before the step.
        """
        if self._norms is not None:
            return self._norms.settled * _STORED if adaptive else math.inf
        return self.max_norm * _STORED if isinstance(self.max_norm, float) else math.inf

    def _params_peak(self, params: Tensor) -> float:
        """Return the largest magnitude in the parameters.

        Raises:
            ValueError: the parameters hold NaN or Inf.
        """
        return self._peaks_with(params, [])[0]

    def _in_range(self, params: Tensor, aggregate: Aggregate) -> bool:
        """Return what the commit will find out about an :class:`Unchecked` aggregate.

        True for a :class:`RowSum`: that takes the pass.
        """
        if isinstance(aggregate, RowSum):
            return True
        narrow = aggregate.vector.dtype == torch.float32
        vectors = RowList([params, aggregate.vector] if narrow else [params])
        peaks = self.columns.abs_max(vectors).tolist()
        added = peaks[-1] if narrow else aggregate.peak
        fits = math.isfinite(sum(peaks)) and added <= aggregate.peak
        return fits and peaks[0] + self.server_lr * added <= FLOAT32_LIMIT

    def _known_peak(self, params: Tensor, plan: Plan) -> float:
        """Return the largest magnitude in the parameters; 0 if the commit checks them.

        Raises:
            ValueError: the parameters hold NaN or Inf, and the commit does not check them.
        """
        return 0.0 if plan.commit_checks else self._params_peak(params)

    def _total(
        self, plan: Plan, peak: float, vector: Tensor, largest: float, norm: float = 1.0
    ) -> Aggregate:
        """Return a float64 aggregate after a check of the step, or leave it to the commit.

        Args:
            plan: of the round.
            peak: what :meth:`_known_peak` returned.
            vector: [d] float64.
            largest: an upper bound of the magnitudes in ``norm * vector``.
            norm: factor that makes ``vector`` a mean.

        Raises:
            ValueError: parameters or moments could leave the range of float32.
        """
        if plan.commit_checks:
            return Unchecked(vector, largest, norm)
        self._check_range(peak, largest)
        return Aggregate(vector, largest, norm)

    def _vector(self, plan: Plan, params: Tensor, vector: Tensor) -> Aggregate:
        """Return a float32 aggregate [d] after a check of the step, or leave it to the commit.

        Raises:
            ValueError: parameters are not finite, or parameters or moments could leave the range of
                float32.
        """
        if plan.commit_checks:
            return Unchecked(vector, math.inf)
        peak, largest = self._peaks_with(params, [vector])
        self._check_range(peak, largest)
        return Aggregate(vector, largest)

    def _peaks_with(self, params: Tensor, vectors: list[Tensor]) -> list[float]:
        """Return the largest magnitudes in the parameters and in each of ``vectors`` [d].

        All are read in one pass. Just before a commit, it also loads the parameters into the cache.

        Raises:
            ValueError: the parameters hold NaN or Inf.
        """
        peaks: list[float] = self.columns.abs_max(RowList([params, *vectors])).tolist()
        if not math.isfinite(peaks[0]):
            raise ValueError("params: expected finite values, got NaN or Inf")
        return peaks

    def _largest_row(self, factors: Tensor | None = None) -> float:
        """Return the largest accepted magnitude in a row; infinite unless rows may be dropped.

        Args:
            factors: [S], >= 0, of the rows; None: their sum is at most 1.
        """
        if self.nonfinite != "drop":
            return math.inf
        gain = 1.0 if factors is None else float(factors.sum())
        largest = self.server_optimizer.largest_row
        return largest / max(1.0, self.server_lr) / max(1.0, gain)

    def _row_peaks(self, cohort: Cohort, largest: float | Tensor | None = None) -> list[float]:
        """Return the largest magnitude in each row, S numbers; see :meth:`_check_peaks`."""
        return self._check_peaks(cohort, self.columns.abs_max(cohort.rows), largest)

    def _check_peaks(
        self, cohort: Cohort, peaks: Tensor, largest: float | Tensor | None = None
    ) -> list[float]:
        """Return ``peaks`` [S], the largest magnitudes in the rows, as S numbers.

        Args:
            cohort: S clients.
            peaks: [S].
            largest: the largest accepted magnitude, one number or [S]; None: ``_largest_row()``.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf.
            OversizedUpdates: rows are near the end of float32, with ``nonfinite="drop"``.
        """
        found: list[float] = peaks.tolist()
        if not math.isfinite(sum(found)):  # no sum of S finite float32 values overflows
            broken = [not math.isfinite(peak) for peak in found]
            raise NonFiniteUpdates(cohort.clients[torch.tensor(broken, device="cpu")])
        if self.nonfinite == "drop":
            limit = self._largest_row() if largest is None else largest
            limits = limit.tolist() if isinstance(limit, Tensor) else [limit] * len(found)
            rows = list(zip(cohort.ids, found, limits, strict=True))
            sizes = {client: peak for client, peak, most in rows if peak > most}
            if sizes:
                accepted = {client: most for client, peak, most in rows if peak > most}
                raise OversizedUpdates(sizes, "largest magnitude", accepted)
        return found

    def _check_squares(self, cohort: Cohort, squares: Sequence[float]) -> None:
        """Refuse rows by their squared Euclidean norms.

        Args:
            cohort: S clients.
            squares: the squared norms of their rows, S values.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf.
            RefusedUpdates: norms are above ``max_norm``, or near the end of float32 with
                ``nonfinite="drop"``.
        """
        if not all(map(math.isfinite, squares)):
            broken = [not math.isfinite(square) for square in squares]
            raise NonFiniteUpdates(cohort.clients[torch.tensor(broken, device="cpu")])
        if self.max_norm is None and self.nonfinite != "drop":
            return
        largest = self._largest_row()
        norms: dict[int, float] = {}  # of a client with several rows, the largest one
        for client, norm in zip(cohort.ids, map(math.sqrt, squares), strict=True):
            norms[client] = max(norm, norms.get(client, 0.0))
        bound, name = math.inf, "max_norm"
        if self._norms is not None:
            name = "the adaptive max_norm"
            bound = self._norms.bound({k: norm for k, norm in norms.items() if norm <= largest})
        elif isinstance(self.max_norm, float):
            bound = self.max_norm
        too_long = {k: norm for k, norm in norms.items() if norm > bound}
        oversized = {k: norm for k, norm in norms.items() if norm > largest and norm <= bound}
        if too_long or oversized:
            reasons = {k: _too_long(n, name, bound) for k, n in too_long.items()}
            limits = dict.fromkeys(oversized, largest)
            raise RefusedUpdates(
                reasons | dict(OversizedUpdates(oversized, "norm", limits).reasons)
            )

    def _check_sum(
        self, params: Tensor, cohort: Cohort, total: Tensor, factors: Tensor | None = None
    ) -> float:
        """Check a weighted sum of the rows, by which the parameters will move.

        NaN and Inf propagate through any weight, 0 included. So a finite sum shows that every row
        is finite, and rows are read one by one only if it is large.

        Args:
            params: [d] float32.
            cohort: the active clients and their rows.
            total: [d], the weighted sum.
            factors: [S], the weights; None: their sum is at most 1.

        Returns:
            The largest magnitude in ``total``.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf.
            OversizedUpdates: rows are near the end of float32, with ``nonfinite="drop"``.
            ValueError: parameters are not finite, or would leave the range of float32.
        """
        peak, added = self._peaks_with(params, [total])
        largest = self._largest_row(factors)
        if not math.isfinite(added) or added > largest:
            self._row_peaks(cohort, largest)
        self._check_range(peak, added)
        return added

    def _check_range(self, peak: float, aggregate: float) -> None:
        """Refuse a step that could leave the range of float32.

        Args:
            peak: the largest magnitude in the parameters.
            aggregate: an upper bound of the magnitudes in the aggregate.

        Raises:
            ValueError: parameters or moments could exceed the range.
        """
        if not self._step_fits(peak, aggregate):
            raise ValueError(
                f"updates: the step could leave the range of float32 (parameters up to "
                f"{peak:.3g}, aggregate up to {aggregate:.3g}, server_lr {self.server_lr:.3g})"
            )

    def _step_fits(self, peak: float, aggregate: float) -> bool:
        """Return whether parameters and moments fit into float32 after a step.

        Every ``_read`` asks this, or calls :meth:`_check_range`, with the ``peak`` of its
        aggregate.

        Args:
            peak: the largest magnitude in the parameters.
            aggregate: an upper bound of the magnitudes in the aggregate.
        """
        moments = self._moments
        if moments is None:
            return peak + self.server_lr * aggregate <= FLOAT32_LIMIT
        if peak + moments.change(aggregate, self.server_lr) <= FLOAT32_LIMIT:
            return True
        moments.measure(self.columns)
        return peak + moments.change(aggregate, self.server_lr) <= FLOAT32_LIMIT


def _too_long(norm: float, name: str, bound: float) -> str:
    """Return why a row is rejected, with as many digits as tell the two numbers apart."""
    digits = 6 if f"{norm:.6g}" != f"{bound:.6g}" else 17
    return f"norm {norm:.{digits}g}, but {name} is {bound:.{digits}g}"
