# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, make_dropout
from fastagg_sim.dropout.base import PROCESSES
from fastagg_sim.dropout.churn import Churn

K = 20
ALONE: dict[str, Any] = {"process": "full", "options": {}}
Make = Callable[..., DropoutProcess]


def _inside(process: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"process": process, "options": options}


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

    @pytest.mark.parametrize("among", ["all", "available"])
    def test_sampled_clients_join_and_leave(self, make: Make, among: str) -> None:
        options = {"initial": 4, "join_every": 2, "lifetime": 9.0}
        alone = make("churn", **ALONE, **options)
        process = make("sampled", sample=6, among=among, process="churn", options=options)
        for round in range(60):
            assert process.joined(round) == alone.joined(round)
            assert process.left(round) == alone.left(round)
            assert {*process.active(round).tolist()} <= {*alone.active(round).tolist()}
        assert process.joined(0) == 4

    def test_churn_within_churn(self, make: Make) -> None:
        """A client is present while it is in both; it leaves once, and never before it joins.

        The inner one is the same as alone; the outer one draws other lifetimes than it.
        """
        inner = {"initial": 2, "join_every": 3, "lifetime": 12.0}
        outer = {"initial": 12, "join_every": 1, "lifetime": 9.0}
        first, second = (make("churn", **ALONE, **options) for options in (inner, outer))
        sampled = {"sample": K, "process": "churn", "options": inner}
        process = make("churn", **outer, process="sampled", options=sampled)
        assert isinstance(process, Churn)
        leaves, gone = process._own_leaves(), set[int]()
        for round in range(150):
            joined = min(first.joined(round), second.joined(round))
            assert process.joined(round) == joined
            left = process.left(round)
            assert not gone & {*left} and all(client < joined for client in left)
            gone.update(left)
            both = {k for k in first.active(round).tolist() if round < leaves[k]}
            both &= {*range(second.joined(round))}
            assert {*process.active(round).tolist()} == {*range(joined)} - gone == both
        assert len(gone) == K

    def test_lifetimes_within_each_other_are_independent(
        self, assert_rate: Callable[..., None]
    ) -> None:
        """A client stays for a round in both with the product of the probabilities."""
        count, mean, rounds = 20_000, 10.0, (1, 2, 5, 12)
        options: dict[str, Any] = {"initial": count, "lifetime": mean}
        twice = {**options, "process": "churn", "options": options}
        between = {"process": "sampled", "options": {"sample": count, **_inside("churn", options)}}
        for inner, churns in (
            (_inside("churn", options), 2),
            (between, 2),
            (_inside("churn", twice), 3),
        ):
            process = make_dropout("churn", num_clients=count, seed=3, **options, **inner)
            assert process.leaves is not None
            for round in rounds:
                still = (process.leaves > round).double().sum()
                assert_rate(still, count, (1 - 1 / mean) ** (churns * round))

    def test_processes_that_change_clients(self) -> None:
        def changes(name: str, options: dict[str, Any]) -> bool:
            return PROCESSES[name].changes_clients(options)

        assert changes("churn", {}) and changes("churn", {"process": "exact"})
        assert changes("sampled", {"process": "churn"})
        assert changes("sampled", {"process": "sampled", "options": {"process": "churn"}})
        assert not changes("sampled", {}) and not changes("exact", {})
        assert not changes("sampled", {"process": "none"})  # the constructor refuses it

    def test_those_absent_the_longest_are_not_sampled_within_churn(self, make: Make) -> None:
        """Clients that have not joined would be."""
        longest = {"sample": 3, "selection": "longest-absent"}
        for process, options in (
            ("sampled", longest),
            ("sampled", {"sample": 3, "process": "sampled", "options": longest}),
        ):
            with pytest.raises(ValueError, match="process: expected sampled with selection=random"):
                make("churn", initial=5, process=process, options=options)
        other = {"initial": 5, "join_every": 2, "lifetime": None}
        given = {"process": "churn", "options": other, "among": "available"}
        process = make("sampled", **longest, **given)
        history: list[torch.Tensor] = []
        for round in range(40):
            history.append(process.active(round, list(history)))
            assert len(history[-1]) == 3
        assert {*torch.cat(history).tolist()} == {*range(K)}

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
