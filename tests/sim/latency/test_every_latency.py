# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fastagg_sim.latency import LatencyProcess, available, make_latency, needs
from fastagg_sim.latency.trace import write_trace

K = 20
GROUPS = [client // 4 for client in range(K)]
OPTIONS: dict[str, dict[str, Any]] = {
    "lognormal": {"median": 3.0, "sigma": 0.7},
    "pareto": {"minimum": 2.0, "shape": 1.2},
    "classes": {"medians": [1.0, 10.0], "by": "group"},
}


def make(name: str, seed: int = 0, **options: Any) -> LatencyProcess:
    chosen = {**OPTIONS[name], **options}
    return make_latency(name, num_clients=K, seed=seed, groups=GROUPS, **chosen)


def test_all_are_tested() -> None:
    assert {*OPTIONS, "trace"} == set(available())


@pytest.mark.parametrize("name", OPTIONS)
class TestEveryLatency:
    def test_pure_function_of_seed_client_and_round(self, name: str) -> None:
        draws = [(client, t) for t in range(10) for client in range(K)]
        process = make(name)
        forward = [process.seconds(*draw) for draw in draws]
        torch.rand(7)  # neither reads nor moves the global random state
        state = torch.random.get_rng_state()
        again = make(name)
        backward = [again.seconds(*draw) for draw in reversed(draws)]
        assert forward == backward[::-1]
        assert torch.equal(state, torch.random.get_rng_state())
        assert len(set(forward)) == len(forward)
        assert all(math.isfinite(s) and s > 0 for s in forward)
        assert not set(forward) & {make(name, seed=1).seconds(*draw) for draw in draws}

    def test_what_it_does_not_need_has_no_effect(self, name: str) -> None:
        groups = GROUPS if needs(name, OPTIONS[name]) else None
        bare = make_latency(name, num_clients=K, seed=0, groups=groups, **OPTIONS[name])
        assert bare.seconds(3, 5) == make(name).seconds(3, 5)

    def test_bad_arguments_are_refused(self, name: str) -> None:
        with pytest.raises(TypeError, match=f"latency process '{name}'.*bogus.*options: m"):
            make(name, bogus=1)
        with pytest.raises(IndexError, match=r"client: expected an id in \[0, 20\), got 20"):
            make(name).seconds(20, 0)
        with pytest.raises(ValueError, match="round: expected 0 or more, got -1"):
            make(name).seconds(0, -1)

    def test_extreme_draws_are_finite(self, name: str) -> None:
        wide = {"lognormal": {"median": 1e9, "sigma": 10.0}, "pareto": {"shape": 0.1}}
        process = make(name, **wide.get(name, {"sigma": 10.0}))
        for u in (0.5 / 2**52, 1 - 0.5 / 2**52):  # the extreme values of seeds.uniform
            assert 0 < process.draw(0, 0, u) < math.inf


def test_a_trace_of_another_process_gives_the_same_numbers(tmp_path: Path) -> None:
    process = make("pareto")
    draws = [(t, client, process.seconds(client, t)) for t in range(5) for client in range(K)]
    write_trace(tmp_path / "t.csv", draws)
    replay = make_latency("trace", num_clients=K, seed=9, path=tmp_path / "t.csv")
    assert all(replay.seconds(client, t) == seconds for t, client, seconds in draws)


def test_unknown_process() -> None:
    with pytest.raises(ValueError, match="unknown latency process 'normal'; there are: classes, "):
        make_latency("normal", num_clients=K, seed=0)
