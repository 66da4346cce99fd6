# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, make_dropout

K = 20
ALONE: dict[str, Any] = {"process": "full", "options": {}}
Make = Callable[..., DropoutProcess]


class TestChurn:
    def test_clients_join_in_order_and_stay(self, make: Make) -> None:
        process = make("churn", **ALONE, initial=17, join_every=3, lifetime=None)
        joined = {0: 17, 2: 17, 3: 18, 5: 18, 6: 19, 9: 20, 50: 20}
        for round, count in joined.items():
            assert process.joined(round) == count
            assert process.active(round).tolist() == [*range(count)]
            assert process.left(round) == []

    def test_who_has_left_does_not_come_back(self, make: Make) -> None:
        process, gone = make("churn", **ALONE, initial=5, lifetime=6.0), set[int]()
        for round in range(120):
            gone.update(process.left(round))
            active = set(process.active(round).tolist())
            assert not gone & active
            assert active == set(range(process.joined(round))) - gone
        assert len(gone) == K

    def test_everybody_is_there_for_a_round_at_least(self, make: Make) -> None:
        process = make("churn", **ALONE, initial=K, lifetime=1)
        assert process.active(0).tolist() == [*range(K)]
        assert process.left(1) == [*range(K)]
        assert process.active(1).tolist() == []

    def test_lifetimes(self, assert_rate: Callable[..., None]) -> None:
        count, mean = 20_000, 4.0
        process = make_dropout("churn", num_clients=count, seed=3, initial=count, lifetime=mean)
        for round in (1, 2, 5, 12):
            still = torch.tensor(len(process.active(round)), dtype=torch.float64)
            assert_rate(still, count, (1 - 1 / mean) ** round)

    def test_the_other_process_is_the_same_as_alone(self, make: Make) -> None:
        options = {"rate": 0.5, "memory": 0.7}
        able = make("markov", **options)
        process = make("churn", initial=K, process="markov", options=options, lifetime=None)
        for round in range(30):
            assert torch.equal(process.active(round), able.active(round))

    def test_other_processes_have_no_churn(self, make: Make) -> None:
        process = make("exact")
        assert (process.joined(0), process.joined(99), process.left(5)) == (K, K, [])

    def test_bad_options(self, make: Make) -> None:
        with pytest.raises(ValueError, match="initial: expected at most num_clients = 20, got 21"):
            make("churn", initial=21)
        with pytest.raises(ValueError, match="join_every: expected a whole number >= 1"):
            make("churn", join_every=0)
        for lifetime in (0.5, True, "long", float("nan")):
            with pytest.raises(ValueError, match="lifetime: expected a number of rounds >= 1"):
                make("churn", lifetime=lifetime)
        with pytest.raises(ValueError, match="options: expected the options of bernoulli"):
            make("churn", process="bernoulli", options=0.5)
        with pytest.raises(ValueError, match="unknown dropout process 'none'"):
            make("churn", process="none")
