# SPDX-License-Identifier: Apache-2.0
"""What a step does for the options ``clip_norm`` and ``noise_multiplier``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastagg.clipping import (
    FLOAT32_SUM,
    LEAST_FACTOR,
    AdaptiveClip,
    ClipNorm,
    Clipping,
    check_noise,
    noise_of,
    read_clip_norm,
)
from fastagg.modes import plain_modes
from fastagg.noise import Noise, RandomBytes, add_noise_
from fastagg.options import read_factor
from fastagg.report import Aggregate, RefusedUpdates
from fastagg.row_checks import RowChecks
from fastagg.updates.cohort import Cohort
from fastagg.updates.scaled import scaled
from fastagg.updates.small import factors_tensor, pieces, uninitialized


class ClippedSteps(RowChecks):
    """Scales rows down and adds noise; :class:`fastagg.Aggregator` has the options."""

    name: ClassVar[str]
    num_clients: int
    sums_rows_by_plan: bool = False
    """Whether the aggregate is ``plan.weights @ rows``, so that weights can scale rows down."""
    keeps_aggregate: ClassVar[bool] = False
    """Whether the vector of the aggregate becomes state, which must not get the noise."""
    no_noise: str = "no bound is known of what one client can change in its aggregate"
    """Why the rule takes no ``noise_multiplier``; empty if it does."""
    no_clipping: str = ""
    """Why the rule takes no ``clip_norm``; empty if it does."""
    no_weights: str = "it gives every active client the same weight"
    """Why a step takes no ``weights``; empty if it does."""
    random_bytes: RandomBytes = staticmethod(os.urandom)
    """The source of noise. A simulation, in which there is nothing to protect, may replace it."""
    _clipping: Clipping | None
    _noise_multiplier: float

    @property
    def clip_norm(self) -> ClipNorm:
        """The norm to which longer rows are scaled down; None: none are."""
        return None if self._clipping is None else self._clipping.options

    @clip_norm.setter
    def clip_norm(self, value: float | str | AdaptiveClip | Mapping[str, Any] | None) -> None:
        clip_norm = read_clip_norm(value)
        if clip_norm is not None and self.no_clipping:
            raise ValueError(
                f"clip_norm: expected None for {self.name}, got {clip_norm}: {self.no_clipping}"
            )
        check_noise(self, self._noise_multiplier, clip_norm=clip_norm)
        self._check_noise_change(clip_norm, self._noise_multiplier)
        if clip_norm is None:
            self._clipping = None
        elif self._clipping is None or self._clipping.options != clip_norm:
            with plain_modes():
                self._clipping = Clipping(clip_norm)

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise, in units of the sensitivity; 0: no noise."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        multiplier = read_factor("noise_multiplier", value)
        check_noise(self, multiplier)
        self._check_noise_change(self.clip_norm, multiplier)
        self._noise_multiplier = multiplier

    @property
    def refuses_weights(self) -> str:
        """Why a step takes no ``weights`` with these options; empty if it does."""
        public = "they come from the data of clients, which its noise would not cover"
        return self.no_weights or (public if self._noise_multiplier > 0.0 else "")

    def _check_noise_change(self, clip_norm: ClipNorm, multiplier: float) -> None:
        """Check new values of ``clip_norm`` and ``noise_multiplier``, one of which changes.

        A rule that remembers rows calls :func:`fastagg.clipping.check_remembered`.

        Raises:
            ValueError: the noise would not cover rows that the rule remembers.
        """

    def _clip(self, cohort: Cohort) -> tuple[Cohort, Tensor | None]:
        """Return the cohort with rows up to ``clip_norm``, and factors [S] of its rows.

        If weights can scale rows down, the rows are as they were; so are they if the rule scales
        them itself, with the ``scales`` of the cohort. Otherwise rows that are too long are copied.
        Without ``clip_norm`` there are no factors.

        Raises:
            RefusedUpdates: a factor would be below the normal numbers of float32, in which rules
                scale rows: the scaled row could be longer than ``clip_norm``. (With noise, the
                factor is 0.) Also as :meth:`_check_squares`.
        """
        if self._clipping is None:
            return cohort, None
        if not cohort.ids:
            return cohort, torch.empty(0, dtype=torch.float64, device="cpu")
        squares: list[float] = self.columns.square_norms(cohort.rows).tolist()
        self._check_squares(cohort, squares)
        factors = self._clipping.factors(squares, self.random_bytes)
        if min(factors) < LEAST_FACTOR and self._noise_multiplier > 0.0:
            # A rejection would show in the mean that a row was so long.
            factors = [factor if factor >= LEAST_FACTOR else 0.0 for factor in factors]
        elif min(factors) < LEAST_FACTOR:
            raise RefusedUpdates(
                {
                    client: f"norm {math.sqrt(square):.4g} is more than {1 / LEAST_FACTOR:.1e} "
                    f"times clip_norm = {float(self._clipping.bound):.4g}"
                    for client, square, factor in zip(cohort.ids, squares, factors, strict=True)
                    if factor < LEAST_FACTOR
                }
            )
        found = factors_tensor(factors)
        if self.sums_rows_by_plan or min(factors) == 1.0:
            return cohort, found
        if self._scales_rows(cohort):
            return replace(cohort, owner=None, scales=found), found
        return scaled(cohort, factors), found

    def _scales_rows(self, cohort: Cohort) -> bool:
        """Return whether the rule multiplies these rows by ``cohort.scales`` itself.

        ``_read`` does so in its pass, or ``_receive`` as it copies rows, which then have no scales
        any more. The rule may not take ownership of rows with scales. A rule that does not override
        this gets copies, so that it is right before it is fast.
        """
        return False

    def _noise(self, cohort: Cohort, plan: Any) -> Noise | None:
        """Return the noise of this round, None if there is none."""
        if self._clipping is None or self._noise_multiplier == 0.0:
            return None
        largest = self._largest_change(cohort, plan)
        rounding = self._largest_rounding(cohort, plan)
        return noise_of(self._clipping, self._noise_multiplier, largest, rounding)

    def _noised(self, params: Tensor, aggregate: Aggregate, std: float) -> Aggregate:
        """Return an aggregate with noise, in the vector of the other one if that is only scratch.

        It has been checked that the step is in range.

        Raises:
            ValueError: the step would leave the range of float32.
        """
        vector = aggregate.vector
        if self.keeps_aggregate:
            total, vector = vector, uninitialized(vector.shape, vector.device)
            for part, numbers in zip(pieces(vector), pieces(total), strict=True):
                part.copy_(numbers * aggregate.norm)
        if std > 0.0:
            add_noise_(vector, std, self.random_bytes)
        peak, largest = self._peaks_with(params, [vector])
        self._check_range(peak, largest)
        return Aggregate(vector, largest)

    def _largest_change(self, cohort: Cohort, plan: Any) -> float:
        """Return how much the aggregate can change with one client, for a rule with noise.

        It is the largest norm of the change if one client's rows have norms up to 1 or are zero, in
        this and all earlier rounds, in units of ``clip_norm``. (No row that is remembered was
        clipped at a larger bound: ``_check_noise_change``.)
        """
        raise NotImplementedError(f"{self.name} takes no noise_multiplier")

    def _largest_rounding(self, cohort: Cohort, plan: Any) -> float:
        """Return how much more the aggregate can change because sums over rows are rounded.

        In units of ``clip_norm``, like :meth:`_largest_change`. It grows with the sum of the
        factors of all rows. By default, this sum is taken to be K times the largest change: no row
        of one of the K clients has a larger factor.
        """
        return FLOAT32_SUM * self.num_clients * self._largest_change(cohort, plan)
