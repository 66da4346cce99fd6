# SPDX-License-Identifier: Apache-2.0
"""The rule for verdicts, on synthetic data of known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastagg_sim.verdicts import (
    Estimate,
    Statement,
    difference,
    judge,
    over_blocks,
    over_seeds,
    t_quantile,
)

RUNS = 400


def autoregressive(rng: np.random.Generator, runs: int, length: int, rho: float) -> np.ndarray:
    """Return [runs, length] values x_t = rho x_(t-1) + noise, of mean 0."""
    noise = rng.standard_normal((runs, length + 100))
    x = np.zeros_like(noise)
    for t in range(1, noise.shape[1]):
        x[:, t] = rho * x[:, t - 1] + noise[:, t]
    return x[:, 100:]


def covered(estimate: Estimate) -> bool:
    low, high = estimate.interval()
    return low <= 0.0 <= high


def test_quantiles_are_students() -> None:
    # tables of the t distribution
    assert t_quantile(0.975, 2) == pytest.approx(4.3027, abs=1e-4)
    assert t_quantile(0.975, 9) == pytest.approx(2.2622, abs=1e-4)


def test_interval_over_seeds() -> None:
    estimate = over_seeds([1.0, 2.0, 3.0])
    assert (estimate.value, estimate.df, estimate.seeds) == (2.0, 2, 3)
    half = 4.3027 / math.sqrt(3)  # deviation 1
    assert estimate.interval() == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert str(estimate) == "2 [-0.4841, 4.484]"
    with pytest.raises(ValueError, match="two or more seeds, got 1"):
        over_seeds([1.0])


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_interval_over_seeds_covers_the_mean(seeds: int) -> None:
    values = np.random.default_rng(0).standard_normal((2000, seeds))
    share = np.mean([covered(over_seeds(list(row))) for row in values])
    # three standard deviations of a share of 0.95 in 2000 draws
    assert abs(share - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 2000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "window", "rho", "least"),
    [
        (500, slice(-10, None), 0.0, 0.92),
        (500, slice(-10, None), 0.5, 0.92),
        (500, slice(-10, None), 0.8, 0.92),
        (500, slice(None), 0.8, 0.92),
        (500, slice(250, None), 0.5, 0.90),
        (100, slice(-10, None), 0.5, 0.92),
        (25, slice(-10, None), 0.5, 0.86),  # five blocks of five
        (100, slice(None), 0.5, 0.90),
        (100, slice(None), 0.8, 0.82),  # blocks of ten: correlated; the docstring says 0.87
        (500, slice(95, 106), 0.5, 0.92),  # in the middle of a run
    ],
)
def test_interval_over_blocks_covers_the_mean(
    length: int, window: slice, rho: float, least: float
) -> None:
    rows = autoregressive(np.random.default_rng(1), RUNS, length, rho)
    share = np.mean([covered(over_blocks(row, window)) for row in rows])
    assert least <= share <= 0.995


def test_independent_errors_would_be_too_small() -> None:
    """What the blocks are for: the plain standard error of ten correlated values covers less."""
    rows = autoregressive(np.random.default_rng(2), RUNS, 500, 0.8)
    naive = np.mean([covered(over_seeds(list(row[-10:]))) for row in rows])
    assert naive < 0.75


def test_a_trend_does_not_widen_the_interval() -> None:
    """Blocks are compared with a line: a run that rises is as certain as one that is level."""
    (row,) = autoregressive(np.random.default_rng(3), 1, 500, 0.3)
    level = over_blocks(row, slice(-10, None))
    rising = over_blocks(row + 0.1 * np.arange(500), slice(-10, None))
    assert level.error is not None
    assert rising.error == pytest.approx(level.error, rel=1e-6)
    assert rising.value == pytest.approx(level.value + 49.45)


def test_blocks_of_a_hand_worked_series() -> None:
    """Blocks of five with means 1, 3, 2, 4, 5: the line is 0.9 k + 1.2, residuals .1 1.2 -.7 .4 .5
    around it in the order of blocks."""
    means = [1.0, 3.0, 2.0, 4.0, 5.0]
    values = [mean + offset for mean in means for offset in (-1, 0, 2, 0, -1)]
    estimate = over_blocks(values, slice(-5, None))
    line = [1.2 + 0.9 * k for k in range(5)]
    squares = sum((m - at) ** 2 for m, at in zip(means, line, strict=True))
    assert estimate.value == 5.0 and estimate.df == 3
    assert estimate.error == pytest.approx(math.sqrt(squares / 3))
    whole = over_blocks(values, slice(None))
    assert whole.value == 3.0 and whole.error == pytest.approx(math.sqrt(squares / 3 / 5))


def test_weights_count_in_all_means() -> None:
    values, weights = [0.0, 1.0] * 30, [1.0, 3.0] * 30
    estimate = over_blocks(values, slice(None), weights)
    # All block means are alike, so the error is that of independent values: neighbours differ by 1,
    # and these weights count as much as (30 + 90)^2 / (30 + 270) equal ones.
    assert estimate.value == pytest.approx(0.75)
    assert estimate.error == pytest.approx(math.sqrt(0.5 / 48))


@pytest.mark.parametrize(
    ("length", "window"), [(24, slice(-10, None)), (24, slice(None)), (100, slice(-4, None))]
)
def test_a_short_run_has_no_interval(length: int, window: slice) -> None:
    estimate = over_blocks(np.random.default_rng(0).standard_normal(length), window)
    assert estimate.error is None and estimate.interval() == (-math.inf, math.inf)
    assert "too few rounds" in str(estimate)
    assert judge([Statement("x", estimate, low=-1e9)]) == "undecided"


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window: expected at least one of 5 values"):
        over_blocks([1.0] * 5, slice(5, None))


def test_verdicts_follow_the_interval() -> None:
    estimate = Estimate(0.02, 0.005, 10, 3)  # [0.0089, 0.0311]
    for low, high, verdict in (
        (0.0, math.inf, "holds"),
        (0.02, math.inf, "undecided"),
        (0.04, math.inf, "fails"),
        (-math.inf, 0.0, "fails"),
        (-0.03, 0.03, "undecided"),
        (-0.04, 0.04, "holds"),
    ):
        assert judge([Statement("x", estimate, low, high)]) == verdict


def test_noise_that_dominates_is_undecided_and_a_clear_difference_is_not() -> None:
    rng = np.random.default_rng(4)
    verdicts = {"holds": 0, "fails": 0, "undecided": 0}
    for row in rng.standard_normal((300, 3)):
        verdicts[judge([Statement("x", over_seeds(list(row)), low=0.0)])] += 1
    assert verdicts["undecided"] > 0.9 * 300  # a true difference of 0: 5 % on the two sides
    above = [over_seeds(list(row + 20)) for row in rng.standard_normal((100, 3))]
    assert sum(judge([Statement("x", e, low=0.0)]) == "holds" for e in above) >= 98


def test_identical_curves_are_not_above_each_other() -> None:
    same = over_blocks([0.0] * 100, slice(-10, None))
    assert judge([Statement("x", same, low=0.0)]) == "fails"
    assert judge([Statement("x", same, -0.03, 0.03)]) == "holds"


def test_a_claim_of_several_statements() -> None:
    good, open_, bad = (Statement("x", Estimate(v, 1.0, 100, 3), low=0.0) for v in (5, 1, -5))
    assert judge([good, good]) == "holds"
    assert judge([good, open_]) == "undecided"
    assert judge([good, open_, bad]) == "fails"
    # refuted by a narrow margin alone, but not as one of ten: 1.98 < 2.2 < 2.87
    narrow = Statement("x", Estimate(-2.2, 1.0, 100, 3), low=0.0)
    assert judge([narrow]) == "fails" and judge([narrow, *[good] * 9]) == "undecided"
    with pytest.raises(ValueError, match="at least one"):
        judge([])


def test_a_wrong_fails_is_rare_however_many_statements_there_are() -> None:
    """All differences are 0, the edge of the claim: "fails" is wrong."""
    rng = np.random.default_rng(5)
    wrong = 0
    for rows in rng.standard_normal((400, 10, 5)):
        wrong += judge([Statement("x", over_seeds(list(r)), low=0.0) for r in rows]) == "fails"
    assert wrong / 400 < 0.05


def test_difference_of_independent_estimates_is_welchs() -> None:
    a, b = Estimate(3.0, 0.3, 4, 1), Estimate(1.0, 0.4, 9, 1)
    found = difference(a, b)
    assert found.value == 2.0 and found.error == pytest.approx(0.5)
    assert found.df == pytest.approx(0.25**2 / (0.09**2 / 4 + 0.16**2 / 9))
    assert difference(a, Estimate(1.0, None, 0, 1)).error is None
