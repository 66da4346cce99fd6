# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg_sim.latency import make_latency
from fastagg_sim.latency.classes import Classes


def make(num_clients: int = 10, seed: int = 0, **options: Any) -> Classes:
    process = make_latency("classes", num_clients=num_clients, seed=seed, **options)
    assert isinstance(process, Classes)
    return process


class TestClasses:
    def test_slow_groups(self) -> None:
        groups = [4, 3, 2, 1, 0] * 2
        process = make(medians=[1, 5], shares=[3, 2], by="group", groups=groups)
        assert process.classes == (1, 1, 0, 0, 0) * 2

    def test_by_id_and_at_random(self) -> None:
        assert make(medians=[1, 2, 3], shares=[1, 1, 2], by="id").classes == (
            *(0, 0),
            *(1, 1, 1),  # round(2.5) = 2, round(5) = 5
            *(2, 2, 2, 2, 2),
        )
        seen = {make(seed=seed).classes for seed in range(20)}
        assert len(seen) > 15 and {sum(classes) for classes in seen} == {5}

    def test_every_client_is_slow_at_its_share(self) -> None:
        """Over seeds, within five standard errors."""
        seeds, p = 400, 0.3
        slow = torch.zeros(10)
        for seed in range(seeds):
            slow += torch.tensor(make(seed=seed, medians=[1, 2], shares=[0.7, 0.3]).classes)
        assert (slow - seeds * p).abs().max() < 5 * math.sqrt(seeds * p * (1 - p))

    @given(st.integers(1, 60), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
    def test_classes_have_their_shares(self, num_clients: int, shares: list[float]) -> None:
        classes = make(num_clients, medians=[1.0] * len(shares), shares=shares).classes
        assert len(classes) == num_clients
        for c, share in enumerate(shares):
            exact = num_clients * share / math.fsum(shares)
            # Both ends of a class are rounded by at most a half.
            assert abs(classes.count(c) - exact) <= 1 + 1e-9

    def test_latencies_surround_the_median_of_the_class(self) -> None:
        process = make(medians=[2.0, 30.0], sigma=0.4, by="id")
        rounds = 800
        for client, median in ((0, 2.0), (9, 30.0)):
            draws = [process.seconds(client, t) for t in range(rounds)]
            z = (torch.tensor(draws, dtype=torch.float64) / median).log() / 0.4
            assert abs(z.mean()) < 5 / math.sqrt(rounds)
            assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / rounds)
        assert make(medians=[2.0, 30.0], sigma=0, by="id").seconds(9, 3) == 30.0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"medians": 3}, "medians: expected a list of numbers, one per class, got 3"),
            ({"medians": []}, "medians: expected a list of numbers"),
            ({"medians": [1, -1]}, "medians: expected a number between 1e-09 and 1e[+]09, got -1"),
            ({"shares": [1, 2, 3]}, "shares: expected one per class, 2, got 3"),
            ({"shares": [1, 0]}, "shares: expected a number between .* got 0"),
            ({"sigma": 11}, "sigma: expected a number between 0 and 10, got 11"),
            ({"by": "speed"}, "by: expected one of client, group, id, got 'speed'"),
            ({"by": "group"}, 'groups: classes with by="group" needs the group of every client'),
        ],
    )
    def test_bad_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(**options)
