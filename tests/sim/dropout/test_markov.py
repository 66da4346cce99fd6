# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg_sim.dropout import DropoutProcess, make_dropout, markov
from fastagg_sim.seeds import generator

K = 20
Make = Callable[..., DropoutProcess]


class TestMarkov:
    @pytest.mark.slow
    @pytest.mark.parametrize(("rate", "memory"), [(0.3, 0.0), (0.3, 0.8), (0.7, 0.5)])
    def test_rate_and_stretches(
        self,
        rate: float,
        memory: float,
        make: Make,
        indicator: Callable[..., torch.Tensor],
        assert_rate: Callable[..., None],
    ) -> None:
        rounds = 3000
        active = indicator(make("markov", rate=rate, memory=memory), rounds)
        # A mean over a chain with the correlation memory^n has the variance of
        # n (1 - memory) / (1 + memory) independent rounds.
        effective = rounds * (1 - memory) / (1 + memory)
        error = 5 * math.sqrt(rate * (1 - rate) / effective)
        assert (active.mean(dim=0) - rate).abs().max() < error
        # The steps from a given state are independent of each other: plain binomial bounds.
        before, after = active[:-1], active[1:]
        off = (1 - memory) * (1 - rate)
        assert_rate(((1 - after) * before).sum(), int(before.sum()), off)
        on = (1 - memory) * rate
        assert_rate((after * (1 - before)).sum(), int((1 - before).sum()), on)
        # The mean length of an absence: 1 / on, geometric, whose deviation is below its mean.
        starts = int(((1 - after) * before).sum())
        length = float((1 - active).sum()) / starts
        assert abs(length - 1 / on) < 6 * (1 / on) / math.sqrt(starts) + K / starts

    @pytest.mark.slow
    def test_stationary_from_the_start_and_independent_clients(
        self, pair_counts: Callable[..., torch.Tensor], assert_rate: Callable[..., None]
    ) -> None:
        runs = 2000
        first = torch.zeros(2, runs, 4, dtype=torch.float64)
        for seed in range(runs):
            process = make_dropout("markov", num_clients=4, seed=seed, rate=0.3, memory=0.9)
            for row, t in enumerate((0, 7)):
                first[row, seed, process.active(t)] = 1.0
        for active in first:
            assert_rate(active.sum(dim=0), runs, 0.3)
            assert_rate(pair_counts(active), runs, 0.09)
        together = 0.09 + 0.21 * 0.9**7
        assert_rate((first[0] * first[1]).sum(dim=0), runs, together)

    def test_one_rate_per_client(self, make: Make, indicator: Callable[..., torch.Tensor]) -> None:
        rates = [0.0, 1.0, *[0.5] * (K - 2)]
        active = indicator(make("markov", rate=rates), 300)
        assert active[:, 0].sum() == 0 and active[:, 1].sum() == 300

    @given(st.lists(st.integers(0, 60), max_size=30), st.sampled_from([0.0, 0.6, 0.95]))
    def test_rounds_may_be_queried_in_any_order(self, rounds: list[int], memory: float) -> None:
        def new() -> DropoutProcess:
            return make_dropout("markov", num_clients=K, seed=0, memory=memory)

        asked = new()
        for t in rounds:
            assert torch.equal(asked.active(t), new().active(t))

    def test_a_late_round_is_computed_without_all_earlier_rounds(
        self, monkeypatch: pytest.MonkeyPatch, make: Make
    ) -> None:
        steps: list[object] = []

        def counted(*names: Any) -> torch.Generator:
            steps.append(names)
            return generator(*names)

        monkeypatch.setattr(markov, "generator", counted)
        process = make("markov", memory=0.8)
        process.active(1_000_000)
        # The last of K geometric variables: P(more than n) <= K memory^n = 2e-8 for n = 93.
        assert len(steps) < 93
        steps.clear()
        for t in range(1_000_001, 1_000_051):
            process.active(t)
        assert steps == []  # in turn: the round's own stream only

    def test_bad_options(self, make: Make) -> None:
        for memory in (-0.1, 1.0, math.nan):
            with pytest.raises(ValueError, match=r"memory: expected a number in \[0, 1\)"):
                make("markov", memory=memory)
        with pytest.raises(ValueError, match=r"rate: expected a probability in \[0, 1\], got 2"):
            make("markov", rate=2)
