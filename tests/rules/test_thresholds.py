# SPDX-License-Identifier: Apache-2.0
"""Compare threshold sequences with numbers from the paper and from its released code."""

from __future__ import annotations

import math

import pytest

from fastagg import ReleasedThreshold, Theorem2Threshold
from fastagg.options import to_saved
from fastagg.rules.thresholds import Threshold, from_option, named_threshold


def first_below_one(threshold: Threshold) -> int:
    return next(t for t in range(1, 10_000) if threshold(t) < 1.0)


def theorem2(**changes: float) -> Theorem2Threshold:
    options = {"rounds": 500, "beta": 0.5, "p": 0.01, "b_max": 3, "delta_f": 0.01} | changes
    return Theorem2Threshold(num_clients=20, **options)


# 2 ln(2 * 20^2 * 500 * 3) - 2 ln .01 = 27.996 + 9.210 = 37.206
@pytest.mark.parametrize(
    ("threshold", "root", "constant", "first", "at_500"),
    [
        (theorem2(), 8.626, 0.01, 76, 0.396),  # sqrt(37.206 / .5)
        (theorem2(factor=0.5), 4.313, 0.005, 19, 0.198),  # half of all of it
        (named_threshold("theorem2", 20), 8.626, 0.01, 76, 0.396),
        (named_threshold("released_case1", 20), 6.099, 0.01, 38, 0.283),  # sqrt(37.2)
        (named_threshold("released_case2", 20), 3.050, 0.01, 10, 0.146),  # half of the root
    ],
)
def test_published_constants(
    threshold: Threshold, root: float, constant: float, first: int, at_500: float
) -> None:
    assert threshold(1) == pytest.approx(root + constant, abs=1e-3)
    assert threshold(400) == pytest.approx(root / 20 + constant, abs=1e-4)
    assert first_below_one(threshold) == first
    assert threshold(500) == pytest.approx(at_500, abs=5e-4)


def test_with_an_honest_beta_nothing_is_eliminated_for_long() -> None:
    assert first_below_one(theorem2(beta=0.2368)) in range(149, 165)


def test_theorem2_by_name_uses_the_number_of_clients() -> None:
    # ln K^2 grows by 2 ln 5 from K = 20 to K = 100: 37.206 + 4 ln 5 = 43.644
    assert named_threshold("theorem2", 100)(1) == pytest.approx(
        math.sqrt(43.644 / 0.5) + 0.01, 1e-4
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("beta", 0.0), ("beta", 1.5), ("p", 0.0), ("p", 1.0), ("rounds", 0), ("b_max", 0),
     ("delta_f", -0.1), ("delta_f", math.nan), ("factor", 0.0), ("factor", math.inf)],
)  # fmt: skip
def test_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        theorem2(**{name: value})


@pytest.mark.parametrize("threshold", [theorem2(factor=0.3), ReleasedThreshold(0.25)])
def test_thresholds_survive_a_checkpoint(threshold: Threshold) -> None:
    option = to_saved("elimination", threshold)
    assert isinstance(option, dict)
    assert from_option(option) == threshold


def test_a_custom_callable_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="elimination: a custom callable"):
        to_saved("elimination", lambda t: 1.0 / t)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"elimination.*kind"):
        from_option({"kind": "Mystery"})
