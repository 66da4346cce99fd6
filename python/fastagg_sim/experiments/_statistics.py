# SPDX-License-Identifier: Apache-2.0
"""The statistics that claims compare, and their estimates from the curves of one or more seeds.

A statistic is the mean of a series over a window of a run. Methods are compared in pairs: a
`contrast` subtracts their series evaluation by evaluation, seed by seed, before it takes the mean.

name                  series                                  window
last 10 evaluations   accuracy                                last 10 evaluations
area under the curve  accuracy                                the whole run
mean absolute change  |accuracy - that of the evaluation      second half of the run
                      before|
rise within blocks    largest difference between a value and  five equal blocks of the second half
                      an earlier one of the same block

The series `over_time` has values at equal distances of simulated time, so that methods with many
steps and with few are compared at the same times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastagg_sim.records import Curve
from fastagg_sim.verdicts import Estimate, over_blocks, over_seeds

RISE_BLOCKS = 5
POINTS = 100  # of a series over simulated time
CHANCE = 0.1


@dataclass(frozen=True)
class Trace:
    """A series over the course of one run.

    seed: the seed of the run.
    x: where the values were measured, ascending: rounds, or uploads.
    y: the values, in the same order.
    weights: how much each value counts in a mean; None: equally. Series at different x can only be
        combined if these are the distances to the next x, where the value ends.
    """

    seed: int
    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray | None = None

    @property
    def end(self) -> float:
        """Return the x up to which there are values."""
        return float(self.x[-1] + (0 if self.weights is None else self.weights[-1]))

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the values at x: between two, or the one before if values are weighted."""
        if self.weights is None:
            return np.interp(x, self.x, self.y)
        return self.y[np.searchsorted(self.x, x, side="right") - 1]

    def weights_at(self, x: np.ndarray) -> np.ndarray | None:
        """Return the weights of the values at x, each of which is one of its own."""
        return None if self.weights is None else self.weights[np.searchsorted(self.x, x)]


@dataclass(frozen=True)
class Statistic:
    """The mean of a series over a window.

    text: its name in claims.
    trace: `trace(curve)` returns the series.
    window: `window(x)` returns the window, a slice of indices of x.
    blocks: each value of the series already summarises a block of the run.
    """

    text: str
    trace: Callable[[Curve], Trace]
    window: Callable[[np.ndarray], slice]
    blocks: bool = False

    def of(self, curves: Sequence[Curve]) -> float:
        """Return the mean of the statistic over seeds."""
        return contrast([(1.0, curves)], self).value


Terms = Sequence[tuple[float, Sequence[Curve]]]


def contrast(terms: Terms, statistic: Statistic) -> Estimate:
    """Return the estimate of a sum of methods, each times a factor: [(1, a), (-1, b)] is a - b.

    Each method has one curve per seed; the seeds that all of them have are used. With several of
    them the estimate is `over_seeds`, with one it is `over_blocks`.
    """
    return combine(
        [(factor, list(map(statistic.trace, curves))) for factor, curves in terms], statistic
    )


def combine(terms: Sequence[tuple[float, Sequence[Trace]]], statistic: Statistic) -> Estimate:
    """As `contrast`, for series instead of curves.

    If a series has no values, or none where the others have some, the value is NaN and its error is
    not known.
    """
    by_seed: list[tuple[float, Mapping[int, Trace]]] = [
        (factor, {trace.seed: trace for trace in traces}) for factor, traces in terms
    ]
    seeds = sorted(set.intersection(*(set(traces) for _, traces in by_seed)))
    if not seeds:
        raise ValueError("terms: expected a seed that all methods have, found none")
    if any(len(trace.x) == 0 for _, traces in by_seed for trace in traces.values()):
        return Estimate(math.nan, None, 0, len(seeds))
    estimates = [
        _of_one_seed([(factor, traces[seed]) for factor, traces in by_seed], statistic)
        for seed in seeds
    ]
    if any(math.isnan(estimate.value) for estimate in estimates):
        return Estimate(math.nan, None, 0, len(seeds))
    return estimates[0] if len(seeds) == 1 else over_seeds([e.value for e in estimates])


def _of_one_seed(terms: Sequence[tuple[float, Trace]], statistic: Statistic) -> Estimate:
    """As `combine`, for one series of each method, in the range of x where all have values.

    Series that were measured at different x count with their own means, so the order of terms does
    not matter. The error is that of the sum at the x of the series with the fewest values there.
    """
    start = max(trace.x[0] for _, trace in terms)
    end = min(trace.end for _, trace in terms)
    own = [trace.x[(trace.x >= start) & (trace.x <= end)] for _, trace in terms]
    x = min(own, key=lambda x: (len(x), list(x)))
    if len(x) == 0:
        return Estimate(math.nan, None, 0, 1)
    y = sum((factor * trace.at(x) for factor, trace in terms), np.zeros_like(x))
    length = 1 if statistic.blocks else None
    if all(np.array_equal(x, other) for other in own):
        first = terms[0][1]
        return over_blocks(y, statistic.window(x), first.weights_at(x), length=length)
    estimate = over_blocks(y, statistic.window(x), _distances(x, terms), length=length)
    value = 0.0
    every = np.unique(np.concatenate(own))
    for (factor, trace), points in zip(terms, own, strict=True):
        # A weighted value lasts up to the next x, and a window may begin in between.
        at = points if trace.weights is None else every
        weights, window = _distances(at, terms), statistic.window(at)
        counts = None if weights is None else weights[window]
        value += factor * float(np.average(trace.at(at)[window], weights=counts))
    return replace(estimate, value=value)


def _distances(x: np.ndarray, terms: Sequence[tuple[float, Trace]]) -> np.ndarray | None:
    """Return the weights at x of weighted series, up to the first of their ends."""
    if any(trace.weights is None for _, trace in terms):
        return None
    return np.diff(np.append(x, min(trace.end for _, trace in terms)))


# --- series -----------------------------------------------------------------------------------


def over_rounds(curve: Curve, of: str = "accuracy") -> Trace:
    """Return "accuracy" or "train_loss" (`of`) over the number of rounds."""
    return Trace(curve.seed, np.array(curve.rounds) + 1.0, np.array(getattr(curve, of)))


def over_uploads(curve: Curve) -> Trace:
    """Return the accuracy in percent over the fraction of the uploads of the run."""
    uploads = np.array(curve.uploads, dtype=float)
    return Trace(curve.seed, uploads / uploads[-1], 100 * np.array(curve.accuracy))


def over_time(curve: Curve, seconds: float) -> Trace:
    """Return the accuracy of the newest evaluated model at `POINTS` equal distances of simulated
    time, up to `seconds`. Before the first evaluation it is that of guessing one of ten labels."""
    x = seconds * np.arange(1, POINTS + 1) / POINTS
    known = np.searchsorted(np.array(curve.time), x, side="right")  # evaluations up to x
    return Trace(curve.seed, x, np.concatenate([[CHANCE], curve.accuracy])[known])


def changes(trace: Trace) -> Trace:
    """Return the absolute changes between consecutive values."""
    return Trace(trace.seed, trace.x[1:], np.abs(np.diff(trace.y)))


def rises(trace: Trace) -> Trace:
    """Return, for five equal blocks of the second half, the `largest_rise` within the block."""
    parts = np.array_split(trace.y[len(trace.y) // 2 :], RISE_BLOCKS)
    values = np.array([largest_rise(part) if len(part) else 0.0 for part in parts])
    return Trace(trace.seed, np.arange(RISE_BLOCKS, dtype=float), values)


def largest_rise(values: Sequence[float] | np.ndarray) -> float:
    """Return the largest difference between a value and an earlier one; 0 if values only fall."""
    y = np.asarray(values, dtype=float)
    return float(np.max(y - np.minimum.accumulate(y)))


def before_uploads(curve: Curve) -> Trace:
    """Return the accuracy in percent of the model that each upload started from, weighted by the
    number of uploads."""
    trace = over_uploads(curve)
    if len(trace.x) < 2:
        return Trace(trace.seed, trace.x, trace.y)
    return Trace(trace.seed, trace.x[:-1], trace.y[:-1], np.diff(trace.x))


# --- statistics -------------------------------------------------------------------------------


def everything(x: np.ndarray) -> slice:
    return slice(None)


def last(count: int) -> Callable[[np.ndarray], slice]:
    return lambda x: slice(max(0, len(x) - count), len(x))


def from_fraction(fraction: float) -> Callable[[np.ndarray], slice]:
    """The window of all values whose x is at least this fraction of the last one."""
    return lambda x: slice(int(np.searchsorted(x, fraction * x[-1] - 1e-9)), len(x))


def between(start: float, end: float) -> Callable[[np.ndarray], slice]:
    """The window of all values with an x from `start` to `end`."""
    return lambda x: slice(int(np.searchsorted(x, start)), int(np.searchsorted(x, end, "right")))


END = Statistic("mean of the last 10 evaluations", over_rounds, last(10))
AREA = Statistic("area under the curve: mean over the run", over_rounds, everything)
CHANGE = Statistic(
    "mean absolute change between evaluations, second half of the run",
    lambda curve: changes(over_rounds(curve)),
    from_fraction(0.5),
)
LOSS_END = Statistic(
    "train loss, mean of the last 10 evaluations",
    lambda curve: over_rounds(curve, "train_loss"),
    last(10),
)
LOSS_CHANGE = Statistic(
    "train loss, mean absolute change between evaluations, second half of the run",
    lambda curve: changes(over_rounds(curve, "train_loss")),
    from_fraction(0.5),
)
LOSS_RISE = Statistic(
    "train loss, mean over five blocks of the second half of the largest rise within the block",
    lambda curve: rises(over_rounds(curve, "train_loss")),
    everything,
    blocks=True,
)
UPLOADS_END = Statistic(
    "mean over the last fifth of the uploads, in %", over_uploads, from_fraction(0.8)
)
UPLOADS_FINAL = Statistic("after the last upload, in %", over_uploads, last(1))
UPLOADS_AREA = Statistic(
    "area under the curve: mean over the uploads, in %", before_uploads, everything
)
UPLOADS_CHANGE = Statistic(
    "mean absolute change between evaluations, second half of the uploads, in points",
    lambda curve: changes(over_uploads(curve)),
    from_fraction(0.5),
)


def of_rounds(start: float, end: float) -> Statistic:
    """Return the mean accuracy of the evaluations after `start` to `end` rounds."""
    return Statistic(f"mean of rounds {start:g} to {end:g}", over_rounds, between(start, end))
