# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg_sim.dropout import DropoutProcess, active_count, available, make_dropout, needs
from fastagg_sim.dropout.base import PROCESSES

K = 20
WITH_A_SEED = [name for name in available() if name != "trace"]
Make = Callable[..., DropoutProcess]


def test_available() -> None:
    assert {"exact", "markov", "trace"} <= set(available())


@pytest.mark.parametrize("name", WITH_A_SEED)
class TestEveryProcess:
    def test_ids_are_sorted_distinct_and_in_range(self, name: str, make: Make) -> None:
        process = make(name)
        for t in range(50):
            ids = process.active(t)
            assert ids.dtype == torch.int64
            assert ids.ndim == 1
            assert ids.tolist() == sorted(set(ids.tolist()) & set(range(K)))

    def test_pure_function_of_seed_and_round(self, name: str, make: Make) -> None:
        forward = [make(name).active(t).tolist() for t in range(10)]
        process = make(name)
        backward = [process.active(t).tolist() for t in reversed(range(10))]
        assert forward == backward[::-1]
        torch.rand(7)  # neither reads nor moves the global random state
        state = torch.random.get_rng_state()
        assert process.active(3, history=[torch.arange(2)]).tolist() == forward[3]
        assert torch.equal(state, torch.random.get_rng_state())

    def test_seeds_and_rounds_differ(self, name: str, make: Make) -> None:
        if name == "full":
            return
        process = make(name)
        sets = {tuple(process.active(t).tolist()) for t in range(20)}
        assert len(sets) > 10
        assert any(
            process.active(t).tolist() != make(name, seed=1).active(t).tolist() for t in range(5)
        )

    def test_what_it_does_not_need_has_no_effect(
        self, name: str, make: Make, options: dict[str, dict[str, Any]]
    ) -> None:
        given = make(name)
        needed = {argument: getattr(given, argument) for argument in needs(name, options[name])}
        bare = make_dropout(name, num_clients=K, seed=given.seed, **needed, **options[name])
        for t in range(10):
            assert torch.equal(bare.active(t), given.active(t))

    def test_unknown_option_is_refused(self, name: str, make: Make) -> None:
        with pytest.raises(
            TypeError, match=f"dropout process '{name}'.*bogus.*; options: "
        ) as found:
            make(name, bogus=1)
        assert "num_clients" not in str(found.value)  # the run has it

    def test_rounds_are_not_negative(self, name: str, make: Make) -> None:
        with pytest.raises(ValueError, match="round: expected 0 or more, got -1"):
            make(name).active(-1)


@pytest.mark.parametrize("name", ["exact", "cluster-floor", "bernoulli", "time-varying", "markov"])
@pytest.mark.slow
def test_at_ratio(
    name: str, make: Make, indicator: Callable[..., torch.Tensor], assert_rate: Callable[..., None]
) -> None:
    process = make(name, **PROCESSES[name].at_ratio(0.7))
    rounds = 1000
    # 0.7 of 20 is a whole number. With a memory of at most 0.8, the Markov chain's rounds count as
    # rounds / 9 independent ones.
    assert_rate(indicator(process, rounds).sum(dim=0) / 9, rounds // 9, 0.3)


def test_unknown_process() -> None:
    with pytest.raises(
        ValueError, match="unknown dropout process 'uniform'; there are: adversarial, "
    ):
        make_dropout("uniform", num_clients=K, seed=0)


def test_num_clients_is_positive() -> None:
    with pytest.raises(ValueError, match="num_clients: expected a positive number, got 0"):
        make_dropout("full", num_clients=0, seed=0)


def test_full(make: Make) -> None:
    assert make("full").active(5).tolist() == list(range(K))


class TestActiveCount:
    def test_fractions_of_k_are_exact(self) -> None:
        # (1 - 0.9) * 10 is 1 - 2e-16 and (1 - 0.7) * 20 is 6 + 9e-16 in float64.
        for clients in range(1, 200):
            for dropped in range(clients + 1):
                assert active_count(clients, dropped / clients) == clients - dropped

    @given(st.integers(1, 10_000), st.integers(0, 1000))
    def test_decimal_ratios_mean_what_is_written(self, clients: int, thousandths: int) -> None:
        exact = math.floor((1 - Fraction(thousandths, 1000)) * clients)
        assert active_count(clients, thousandths / 1000) == exact

    def test_the_paper(self) -> None:
        assert [active_count(20, alpha) for alpha in (0.3, 0.5, 0.7)] == [14, 10, 6]

    @pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf])
    def test_alpha_is_a_ratio(self, alpha: float, make: Make) -> None:
        with pytest.raises(ValueError, match=r"alpha: expected a dropout ratio in \[0, 1\]"):
            active_count(20, alpha)
        for name in ("exact", "cluster-floor"):
            with pytest.raises(ValueError, match="alpha"):
                make(name, alpha=alpha)
