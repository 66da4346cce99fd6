# SPDX-License-Identifier: Apache-2.0
"""Decide whether results confirm a claim: holds, fails or undecided.

The rule. A claim says that a number, in most cases the difference of two methods, lies in a range:
above a margin, or within a tolerance. The results give an estimate of this number and a 95 %
confidence interval of it. The claim

    holds      if the whole interval is inside the range,
    fails      if the whole interval is outside the range,
    undecided  otherwise.

The interval of an estimate is that of Student's t:

- Several seeds (`over_seeds`). The number is computed for each seed, from runs with the same
  partition and the same dropout, so that methods are compared in pairs. The interval follows from
  the mean and the standard deviation over the n seeds, with n - 1 degrees of freedom.
- One seed (`over_blocks`). The number is a mean over consecutive evaluations of one run. The
  interval follows from means over blocks of consecutive evaluations ("batch means"), which allows
  for autocorrelation within blocks. It says how much the number fluctuates in the course of this
  run. It cannot say how much it would differ with another seed, so a verdict from one seed is
  always shown together with the words "one seed". Where there are ten seeds, single ones can be
  tested, for the difference of each two methods: over the run, the interval of one seed covers the
  mean of the other nine in 60.2 % of 400 cases in `friends-from-means-cifar` and in 90.0 % of 180
  in `fdms-fig1-mnist`; over the last ten evaluations, in 87.5 and 100 %. It is never on the other
  side of zero than the interval of ten seeds. But of those on CIFAR-10 that exclude zero, 34 and
  24 % are alone in that (`python results/check.py --coverage`).

A claim that consists of several statements ("the best of all") holds if each of them holds, and
fails if one of them fails. The intervals that make it fail have a level of 1 - 0.05 / n for n
statements, so that the probability of a wrong "fails" stays below 5 %.

A claim about what happened in every round of the runs at hand, or about a quantity that is
computed without noise, is counted: it holds or fails, without an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

LEVEL = 0.95
SHORTEST = 5
"""Evaluations in the shortest block."""
FEWEST = 5
"""Blocks that an interval needs."""
MOST = 10
"""Blocks that are used at most, or as many as the window has."""

Verdict = Literal["holds", "fails", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "undecided")


@dataclass(frozen=True)
class Estimate:
    """A number measured in noisy runs.

    value: the number; NaN if there is none.
    error: its standard error; None if the runs are too short to tell.
    df: the degrees of freedom of `error`.
    seeds: the number of seeds of which it is the mean.
    """

    value: float
    error: float | None
    df: float
    seeds: int

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the ends of the confidence interval; infinite if the error is not known."""
        if self.error is None:
            return -math.inf, math.inf
        half = t_quantile(0.5 + level / 2, self.df) * self.error if self.error else 0.0
        return self.value - half, self.value + half

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "no value: too few rounds"
        if self.error is None:
            return f"{self.value:.4g} [too few rounds for an interval]"
        low, high = self.interval()
        return f"{self.value:.4g} [{low:.4g}, {high:.4g}]"


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t distribution with `df` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, of which there is one per seed, at least two."""
    if len(values) < 2:
        raise ValueError(f"values: expected those of two or more seeds, got {len(values)}")
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(float(np.mean(values)), error, len(values) - 1, len(values))


def over_blocks(
    values: Sequence[float] | np.ndarray,
    window: slice,
    weights: Sequence[float] | np.ndarray | None = None,
    *,
    length: int | None = None,
) -> Estimate:
    """Return the mean of `values[window]`, a part of the series of one run, and its error.

    The window is divided into blocks of equal length: five to ten blocks of ten or more values, or
    five shorter ones, if it has at least 25 values; otherwise it is one block, or two if it has at
    least 20. If these are fewer than five blocks, the nearest ones of the same length before and
    after the window are added, up to ten in all; in a short run, blocks are shortened until five
    of them fit. The standard error of the window's mean is the standard deviation of the block
    means around the straight line that fits them, divided by the root of the number of blocks in
    the window. It is not known (None) with fewer than five blocks, or if a block would have fewer
    than five values. It is at least that of independent values with the deviation that differences
    of neighbours show: few block means may lie on a line by chance.

    A steady rise or fall within the window is no error of the window's mean. So the interval may
    exclude zero although a difference vanishes at the end of the window.

    The interval is too narrow where the values are correlated over more than a block: in 100 values
    with a correlation of 0.8 from one to the next, it covers the mean in 87 instead of 95 % of all
    cases (tests/sim/test_verdicts.py).

    values: the series, in order.
    window: the part of which the mean is taken, a slice of step 1.
    weights: weights of the values in all means; by default they are equal.
    length: the length of the blocks, instead of the one above. 1 means that each value already
        summarises a block of the run.
    """
    y = np.asarray(values, dtype=float)
    w = np.ones_like(y) if weights is None else np.asarray(weights, dtype=float)
    start, stop, _ = window.indices(len(y))
    size = stop - start
    if size < 1:
        raise ValueError(f"window: expected at least one of {len(y)} values, got {window}")
    mean = float(np.average(y[start:stop], weights=w[start:stop]))
    if length is None:
        inside = max(1, size // 10)
        if size >= FEWEST * SHORTEST:
            inside = min(MOST, max(FEWEST, inside))
        length = min(size // inside, len(y) // FEWEST)
        if length < SHORTEST:
            return Estimate(mean, None, 0, 1)
    inside = size // length
    first = -inside  # blocks are numbered from the end of the window
    before = (stop - inside * length) // length
    after = (len(y) - stop) // length
    last = 0
    while inside < FEWEST and last - first < MOST and (before or after):
        if before and (not after or -first - inside <= last):
            first, before = first - 1, before - 1
        else:
            last, after = last + 1, after - 1
    if last - first < FEWEST:
        return Estimate(mean, None, 0, 1)
    numbers = np.arange(first, last)
    parts = [slice(stop + k * length, stop + (k + 1) * length) for k in numbers]
    means = np.array([np.average(y[part], weights=w[part]) for part in parts])
    residuals = means - np.polynomial.Polynomial.fit(numbers, means, 1)(numbers)
    df = len(means) - 2
    variance = float(residuals @ residuals) / df
    if variance <= 1e-24 * max(1.0, float(means @ means)):  # rounding errors of the fit
        variance = 0.0
    variance /= inside
    if length > 1:
        steps = np.diff(y[parts[0].start : parts[-1].stop])
        within = w[start:stop]
        independent = float(within.sum()) ** 2 / float(within @ within)  # as many equal weights
        variance = max(variance, float(steps @ steps) / (2 * len(steps)) / independent)
    return Estimate(mean, math.sqrt(variance), df, 1)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return a - b for independent estimates, with Welch's degrees of freedom."""
    if a.error is None or b.error is None:
        return Estimate(a.value - b.value, None, 0, min(a.seeds, b.seeds))
    variances = a.error**2, b.error**2
    total = sum(variances)
    shares = [v**2 / df for v, df in zip(variances, (a.df, b.df), strict=True)]
    df = total**2 / sum(shares) if total else min(a.df, b.df)
    return Estimate(a.value - b.value, math.sqrt(total), df, min(a.seeds, b.seeds))


@dataclass(frozen=True)
class Statement:
    """The statement that the number behind `estimate` lies between `low` and `high`.

    name: what the number is, for tables.
    """

    name: str
    estimate: Estimate
    low: float = -math.inf
    high: float = math.inf

    def holds(self) -> bool:
        low, high = self.estimate.interval()
        return low > self.low and high < self.high

    def fails(self, level: float = LEVEL) -> bool:
        low, high = self.estimate.interval(level)
        return high <= self.low or low >= self.high


def judge(statements: Sequence[Statement]) -> Verdict:
    """Return the verdict on the claim that all `statements` are true; see the rule above."""
    if not statements:
        raise ValueError("statements: expected at least one")
    level = 1 - (1 - LEVEL) / len(statements)
    if any(statement.fails(level) for statement in statements):
        return "fails"
    return "holds" if all(statement.holds() for statement in statements) else "undecided"
