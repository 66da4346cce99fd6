# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, make_dropout

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

    def test_bad_options(self, make: Make) -> None:
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
