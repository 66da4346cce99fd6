# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, make_dropout
from fastagg_sim.dropout.sampled import last_active
from fastagg_sim.seeds import generator

K = 20
Make = Callable[..., DropoutProcess]


class TestSampled:
    def test_sampling_alone(
        self,
        make: Make,
        indicator: Callable[..., torch.Tensor],
        pair_counts: Callable[..., torch.Tensor],
        assert_rate: Callable[..., None],
    ) -> None:
        rounds = 2000
        active = indicator(make("sampled", sample=5, process="full", options={}), rounds)
        assert active.sum(dim=1).unique().tolist() == [5.0]
        assert_rate(active.sum(dim=0), rounds, 5 / 20)
        assert_rate(pair_counts(active), rounds, 5 * 4 / (20 * 19))

    @pytest.mark.slow
    def test_independent_of_the_other_process(
        self,
        make: Make,
        indicator: Callable[..., torch.Tensor],
        pair_counts: Callable[..., torch.Tensor],
        assert_rate: Callable[..., None],
    ) -> None:
        # Both draw from the same seed and round; this test fails if they share a random stream.
        rounds = 4000
        for process, options in (("bernoulli", {"p": 0.5}), ("exact", {"alpha": 0.5})):
            active = indicator(make("sampled", sample=8, process=process, options=options), rounds)
            assert_rate(active.sum(dim=0), rounds, 0.4 * 0.5)
            together = 0.25 if process == "bernoulli" else 10 * 9 / (20 * 19)
            assert_rate(pair_counts(active), rounds, 8 * 7 / (20 * 19) * together)

    @pytest.mark.slow
    @pytest.mark.parametrize("between", [False, True], ids=["sampled", "churn"])
    def test_independent_of_another_sampled(
        self,
        make: Make,
        indicator: Callable[..., torch.Tensor],
        pair_counts: Callable[..., torch.Tensor],
        assert_rate: Callable[..., None],
        between: bool,
    ) -> None:
        """Also with another process between the two."""
        inner = {"sample": 8, "process": "full", "options": {}}
        other: dict[str, Any] = {"process": "sampled", "options": inner}
        if between:
            other = {"process": "churn", "options": {"initial": K, **other}}
        rounds = 2000
        active = indicator(make("sampled", sample=8, **other), rounds)
        assert_rate(active.sum(dim=0), rounds, 0.4**2)
        assert_rate(pair_counts(active), rounds, (8 * 7 / (20 * 19)) ** 2)

    def test_ten_of_ten_of_a_hundred_are_one_on_average(self) -> None:
        """The number of active clients is hypergeometric; of three samples, a tenth of that."""
        twice = {"sample": 10, "process": "sampled", "options": {"sample": 10}}
        for options, mean in ((twice, 1.0), ({**twice, "options": twice}, 0.1)):
            process = make_dropout("sampled", num_clients=100, seed=0, **options)
            counts = [len(process.active(t)) for t in range(600)]
            # Its variance is below its mean; five standard errors.
            assert abs(sum(counts) / 600 - mean) < 5 * (mean / 600) ** 0.5

    def test_the_inner_one_of_two_draws_what_it_draws_alone(self, make: Make) -> None:
        inner = {"sample": 8, "process": "bernoulli", "options": {"p": 0.5}}
        alone = make("sampled", **inner)
        given = {"process": "sampled", "options": inner, "among": "available"}
        for t in range(20):
            assert torch.equal(make("sampled", sample=K, **given).active(t), alone.active(t))

    def test_the_same_clients_can_answer_as_without_sampling(self, make: Make) -> None:
        options = {"rate": 0.5, "memory": 0.7}
        able = make("markov", **options)
        for among in ("all", "available"):
            process = make("sampled", sample=6, process="markov", options=options, among=among)
            for t in range(50):
                active, there = set(process.active(t).tolist()), set(able.active(t).tolist())
                assert active <= there
                if among == "available":
                    assert len(active) == min(6, len(there))

    def test_passes_on_what_it_knows(self, make: Make) -> None:
        assert len(make("sampled", sample=K, process="cluster-floor", options={}).active(0)) == 10
        make("sampled", sample=K, process="label-correlated", options={})
        nested = {"sample": 10, "process": "bernoulli", "options": {"p": 1.0}}
        assert len(make("sampled", sample=K, process="sampled", options=nested).active(0)) == 10

    def test_of_few_clients_the_sample_is_that_of_a_permutation(self, make: Make) -> None:
        """Also with options that draw the whole order, as before there was a shorter way."""
        whole = make("sampled", sample=7, process="bernoulli", options={"p": 1.0})
        short = make("sampled", sample=7, process="full", options={})
        for t in range(20):
            order = torch.randperm(K, generator=generator(short.seed, "dropout", "sampled", t))
            assert torch.equal(short.active(t), order[:7].sort().values)
            assert torch.equal(short.active(t), whole.active(t))

    def test_of_many_clients_only_the_sample_is_drawn(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: object, **__: object) -> None:
            raise AssertionError("a permutation of all clients")

        monkeypatch.setattr(torch, "randperm", refused)
        process = make_dropout("sampled", num_clients=10**9, seed=0, sample=100)
        for t in range(3):
            active = process.active(t)
            assert len(active) == len(active.unique()) == 100
            assert torch.equal(active, active.sort().values)
        assert not torch.equal(process.active(0), process.active(1))

    @pytest.mark.parametrize(
        ("process", "options"),
        [("full", {}), ("bernoulli", {"p": 0.4}), ("markov", {"rate": 0.3, "memory": 0.8})],
    )
    def test_longest_absent_follows_the_oracle(
        self, make: Make, process: str, options: dict[str, object]
    ) -> None:
        """FedLaAvg: of those available, the `sample` whose last participation is the earliest."""
        able = make(process, **options)
        given = {"process": process, "options": options, "selection": "longest-absent"}
        among = "all" if process == "full" else "available"
        sampled = make("sampled", sample=3, among=among, **given)
        last, history, counts = [-1] * K, list[torch.Tensor](), torch.zeros(K)
        for t in range(120):
            active = sampled.active(t, history).tolist()
            there = able.active(t, history).tolist()
            assert set(active) <= set(there) and len(active) == min(3, len(there))
            rest = set(there) - set(active)
            assert all(last[a] <= last[r] for a in active for r in rest)
            assert sampled.active(t, list(history)).tolist() == active  # stores nothing
            for client in active:
                last[client] = t
            counts[active] += 1
            history.append(torch.tensor(active, dtype=torch.int64))
        if process == "full":  # who was sampled in one round may come in any order later
            assert counts.max() - counts.min() <= 2

    def test_longest_absent_breaks_ties_at_random(self, make: Make) -> None:
        first = [
            make(
                "sampled",
                sample=3,
                process="full",
                options={},
                selection="longest-absent",
                seed=seed,
            )
            .active(0)
            .tolist()
            for seed in range(20)
        ]
        assert len({tuple(ids) for ids in first}) > 10

    def test_last_active(self) -> None:
        history = [torch.tensor(ids, dtype=torch.int64) for ids in ([0, 2], [], [2], [1, 2])]
        assert last_active(5, history).tolist() == [0, 3, 3, -1, -1]
        assert last_active(2, []).tolist() == [-1, -1]

    def test_bad_options(self, make: Make) -> None:
        with pytest.raises(ValueError, match="selection: expected one of random, longest-absent"):
            make("sampled", selection="oldest")
        with pytest.raises(ValueError, match="selection: expected random with among=all"):
            make("sampled", selection="longest-absent", process="bernoulli", options={"p": 0.5})
        with pytest.raises(ValueError, match="sample: expected at most num_clients = 20, got 21"):
            make("sampled", sample=21)
        with pytest.raises(ValueError, match="among: expected one of all, available"):
            make("sampled", among="some")
        with pytest.raises(ValueError, match="options: expected the options of bernoulli"):
            make("sampled", options=0.5)
        with pytest.raises(ValueError, match="unknown dropout process 'none'"):
            make("sampled", process="none")
        with pytest.raises(TypeError, match=r"'exact': .*'p'"):
            make("sampled", process="exact", options={"p": 0.5})
        with pytest.raises(ValueError, match="groups: cluster-floor needs"):
            make_dropout("sampled", num_clients=K, seed=0, process="cluster-floor")
