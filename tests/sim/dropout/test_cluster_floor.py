# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, active_count, make_dropout

K = 20
GROUPS = [client // 4 for client in range(K)]
Make = Callable[..., DropoutProcess]


class TestClusterFloor:
    @pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7, 0.75])
    def test_count_and_floor(self, alpha: float, make: Make) -> None:
        process = make("cluster-floor", alpha=alpha)
        for t in range(100):
            ids = process.active(t).tolist()
            assert len(ids) == active_count(K, alpha)
            assert {GROUPS[client] for client in ids} == set(range(5))

    @pytest.mark.slow
    def test_splits_are_uniform(self, make: Make) -> None:
        # 101 ways to write 10 as five numbers from 1 to 4. The statistic is chi-squared with 100
        # degrees of freedom: mean 100, standard deviation sqrt(200).
        rounds = 4040
        process = make("cluster-floor")
        splits = [s for s in itertools.product(range(1, 5), repeat=5) if sum(s) == 10]
        seen = Counter(
            tuple(torch.bincount(process.active(t) // 4, minlength=5).tolist())
            for t in range(rounds)
        )
        assert set(seen) <= set(splits)
        expected = rounds / len(splits)
        statistic = sum((seen[s] - expected) ** 2 / expected for s in splits)
        assert abs(statistic - 100.0) <= 5.0 * math.sqrt(200.0)

    @pytest.mark.slow
    def test_clients_of_a_group_are_equally_likely(
        self,
        make: Make,
        indicator: Callable[..., torch.Tensor],
        pair_counts: Callable[..., torch.Tensor],
        assert_rate: Callable[..., None],
    ) -> None:
        rounds = 2000
        active = indicator(make("cluster-floor", alpha=0.7), rounds)
        assert_rate(active.sum(dim=0), rounds, 6 / 20)
        # At 0.7 one group has two active clients and the others have one.
        friends = sum(pair_counts(group) for group in active.split(4, dim=1))
        assert_rate(friends, rounds, 1 / 6)

    def test_unequal_groups_in_any_order(self) -> None:
        groups = [7, 0, 7, 7, 7, 3, 7, 0]
        process = make_dropout("cluster-floor", num_clients=8, seed=0, groups=groups, alpha=0.5)
        splits = set()
        for t in range(200):
            counts = Counter(groups[client] for client in process.active(t).tolist())
            splits.add((counts[0], counts[3], counts[7]))
        assert splits == {(1, 1, 2), (2, 1, 1)}

    def test_many_groups_need_more_than_64_bits(self) -> None:
        groups = [client // 10 for client in range(1000)]
        process = make_dropout("cluster-floor", num_clients=1000, seed=0, groups=groups, alpha=0.5)
        ids = process.active(0)
        assert len(ids) == 500
        assert len({groups[client] for client in ids.tolist()}) == 100

    def test_too_few_active_clients(self, make: Make) -> None:
        with pytest.raises(
            ValueError, match="leaves 4 of 20 clients active, fewer than the 5 groups"
        ):
            make("cluster-floor", alpha=0.8)

    def test_groups_are_needed(self) -> None:
        with pytest.raises(ValueError, match="groups: cluster-floor needs the group"):
            make_dropout("cluster-floor", num_clients=K, seed=0, alpha=0.5)
        with pytest.raises(ValueError, match="expected one group per client, 20, got 2"):
            make_dropout("cluster-floor", num_clients=K, seed=0, groups=[0, 1], alpha=0.5)
