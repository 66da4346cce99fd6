# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, make_dropout
from fastagg_sim.dropout.time_varying import TimeVarying

Make = Callable[..., DropoutProcess]


class TestTimeVarying:
    @pytest.mark.parametrize(("fraction", "count"), [(0.1, 3), (0.3, 9), (0.5, 15), (1.0, 30)])
    def test_count_is_that_of_the_paper(self, fraction: float, count: int) -> None:
        process = make_dropout("time-varying", num_clients=30, seed=0, fraction=fraction)
        assert {len(process.active(t)) for t in range(20)} == {count}

    def test_clients_are_equally_active_and_rounds_independent(
        self, make: Make, indicator: Callable[..., torch.Tensor], assert_rate: Callable[..., None]
    ) -> None:
        rounds = 2000
        active = indicator(make("time-varying", fraction=0.3), rounds)
        assert_rate(active.sum(dim=0), rounds, 0.3)
        assert_rate((active[1:] * active[:-1]).sum(dim=0), rounds - 1, 0.09)

    @pytest.mark.slow
    def test_weights_decide(self) -> None:
        # With 6 clients and the weights a of a round, the first one is i with probability a_i / A,
        # the second j with a_i / A * a_j / (A - a_i). The expected number of active clients whose
        # weight is among the two largest follows; its variance is at most that of a fair coin each.
        rounds = 4000
        process = make_dropout("time-varying", num_clients=6, seed=0, fraction=1 / 3)
        assert isinstance(process, TimeVarying) and process.count == 2
        hits = expected = fair = 0.0
        for t in range(rounds):
            a = process.weights(t)
            assert float(a.min()) >= 1.0 and float(a.max()) <= 10.0
            first = a / a.sum()
            second = (first[:, None] * a[None, :] / (a.sum() - a)[:, None]).fill_diagonal_(0.0)
            rate = first + second.sum(dim=0)
            top = a.topk(2).indices
            expected += float(rate[top].sum())
            fair += 2 * 2 / 6
            hits += len(set(top.tolist()) & set(process.active(t).tolist()))
        error = 5 * math.sqrt(rounds * 2 * 0.25)
        assert abs(hits - expected) < error
        assert hits - fair > 5 * error  # and not as if the weights did not count

    def test_only_the_ratio_of_the_weights_matters(self, make: Make) -> None:
        released = make("time-varying", low=0.1, high=1.0)
        for t in range(50):
            assert torch.equal(released.active(t), make("time-varying").active(t))

    def test_bad_options(self, make: Make) -> None:
        with pytest.raises(ValueError, match=r"fraction: expected a number in \(0, 1\], got 0"):
            make("time-varying", fraction=0)
        with pytest.raises(ValueError, match="of 20 clients is less than one client"):
            make("time-varying", fraction=0.04)
        with pytest.raises(ValueError, match="low, high: expected 0 < low <= high, got low = 0,"):
            make("time-varying", low=0)
