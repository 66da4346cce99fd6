# SPDX-License-Identifier: Apache-2.0
"""The comparison of two trees: its interval, its verdicts, and its worker processes."""

from __future__ import annotations

import random

import pytest

from benchmarks.intervals import interval
from benchmarks.machine import ROOT
from benchmarks.regress.compare import Compared, Worker, compare


def test_the_interval_of_few_ratios_is_unbounded():
    assert interval([1.0, 1.1, 0.9]) == (0.0, float("inf"))


def test_the_interval_has_the_ranks_of_a_sign_test():
    # With 21 ratios, P(at most 5 lie below the median) = 0.0133, P(at most 6) = 0.0392.
    assert interval([float(i) for i in range(21)]) == (5.0, 15.0)


def test_the_interval_covers_the_median_as_often_as_it_says():
    generator = random.Random(0)
    hits = 0
    for _ in range(400):
        low, high = interval([generator.lognormvariate(0.0, 0.3) for _ in range(21)])
        hits += low <= 1.0 <= high
    assert hits >= 0.93 * 400  # 97.3 % expected; four standard deviations below are 94 %


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (1.10, 1.02, 1.20, "SLOWER"),
        (1.10, 0.98, 1.30, ""),
        (1.04, 1.02, 1.06, ""),
        (0.90, 0.85, 0.95, "faster"),
    ],
)
def test_a_verdict_needs_the_ratio_and_the_interval(ratio, low, high, verdict):
    assert Compared("case", 1.0, 1.0, ratio, low, high).verdict == verdict


def test_two_workers_time_a_case_in_turn_and_say_what_they_cannot_run():
    own, other = Worker(ROOT, 1), Worker(ROOT, 1)
    try:
        case = "step fedavg S=10 d=610 copied"
        assert case in own.ask("list")
        for worker in (own, other):
            assert worker.ask("prepare", case, 0.001)["calls"] >= 1
        compared = compare(case, own, other, rounds=7)
        assert compared.low <= compared.ratio <= compared.high
        assert 0 < compared.seconds < 1
        assert "KeyError" in own.ask("prepare", "no such case", 0.001)["error"]
    finally:
        own.close()
        other.close()
