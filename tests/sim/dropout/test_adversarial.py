# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fastagg_sim.dropout import make_dropout
from fastagg_sim.dropout.adversarial import Adversarial
from fastagg_sim.dropout.shadow import choose_candidates

M = 100  # clients
PAPER = list(range(35))


def adversarial(candidates: Any = PAPER, **options: Any) -> Adversarial:
    chosen = {"sizes": "equal", **options}
    process = make_dropout("adversarial", num_clients=M, seed=0, candidates=candidates, **chosen)
    assert isinstance(process, Adversarial)
    return process


def silenced(process: Adversarial, t: int) -> set[int]:
    return set(process.sampled(t)) - set(process.active(t).tolist())


class TestAdversarial:
    @pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.7, 0.8, 1.0])
    def test_follows_section_6_1(self, epsilon: float) -> None:
        process = adversarial(epsilon=epsilon)
        most = min(round(10 * epsilon), 9)
        for t in range(200):
            sampled = process.sampled(t)
            assert len(set(sampled)) == 10
            wanted = [client for client in sampled if client in PAPER]
            assert silenced(process, t) == set(wanted[:most])
            assert set(process.active(t).tolist()) <= set(sampled)

    def test_the_sample_is_uniform(self) -> None:
        rounds = 2000
        hits = Counter(client for t in range(rounds) for client in adversarial().sampled(t))
        bound = 5 * math.sqrt(rounds * 0.1 * 0.9)
        assert all(abs(hits[client] - 0.1 * rounds) < bound for client in range(M))

    def test_35_candidates_cannot_give_the_published_fraction(self) -> None:
        # Candidates in the sample are hypergeometric: 3.5 on average, 8 or more with probability
        # 0.31 %; the mean of min(8, .) / 10 is .35.
        rounds = 2000
        process = adversarial(epsilon=0.8)
        fractions = [process.silenced_fraction(t) for t in range(rounds)]
        assert max(fractions) <= 0.8
        deviation = math.sqrt(10 * 0.35 * 0.65 * 90 / 99) / 10
        assert abs(sum(fractions) / rounds - 0.35) < 5 * deviation / math.sqrt(rounds)
        eight = sum(fraction > 0.75 for fraction in fractions) / rounds
        assert abs(eight - 0.0031) < 5 * math.sqrt(0.0031 / rounds)

    def test_two_of_ten_nearly_always(self) -> None:
        rounds = 2000
        process = adversarial(epsilon=0.2)
        two = sum(len(silenced(process, t)) == 2 for t in range(rounds))
        none_or_one = sum(
            math.comb(35, n) * math.comb(65, 10 - n) / math.comb(100, 10) for n in (0, 1)
        )
        bound = 5 * math.sqrt(rounds * none_or_one)
        assert abs(two - rounds * (1 - none_or_one)) < bound

    def test_all_candidates_give_the_published_fraction_and_nothing_adversarial(self) -> None:
        rounds = 2000
        process = adversarial("all")
        hits: Counter[int] = Counter()
        for t in range(rounds):
            assert process.silenced_fraction(t) == pytest.approx(0.8, abs=1e-12)
            hits.update(process.active(t).tolist())
        bound = 5 * math.sqrt(rounds * 0.02 * 0.98)
        assert all(abs(hits[client] - 0.02 * rounds) < bound for client in range(M))

    def test_the_budget_counts_samples(self) -> None:
        counts = [[1, 0], [1, 1], [2, 1], [30, 64]]  # 1 + 2 + 3 + 94 = 100 samples
        process = make_dropout(
            "adversarial",
            num_clients=4,
            seed=0,
            label_counts=counts,
            candidates="all",
            sample=4,
            epsilon=0.05,
        )
        assert isinstance(process, Adversarial)
        seen = set()
        for t in range(100):
            gone = silenced(process, t)
            seen.add(tuple(sorted(gone)))
            # 94 never fits; of 1, 2 and 3, the last one fits only if 5 samples are not yet used up.
            assert process.silenced_fraction(t) == sum([1, 2, 3, 94][i] for i in gone) / 100
        assert seen == {(0, 1), (0, 2), (1, 2)}

    def test_strict_is_the_released_comparison(self) -> None:
        for t in range(50):
            paper, released = adversarial("all"), adversarial("all", epsilon=0.9, strict=True)
            assert torch.equal(paper.active(t), released.active(t))
            assert len(adversarial("all", strict=True).active(t)) == 3

    def test_one_client_is_always_left(self) -> None:
        assert {len(adversarial("all", epsilon=1.0).active(t)) for t in range(20)} == {1}
        assert len(adversarial("all", epsilon=1.0, sample=1).active(0)) == 1

    def test_budgets_are_nested(self) -> None:
        for t in range(50):
            assert silenced(adversarial(epsilon=0.2), t) <= silenced(adversarial(epsilon=0.5), t)

    def test_candidates_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "candidates.csv"
        path.write_text("shadow,client\n" + "".join(f"fedavg,{i}\n" for i in PAPER))
        for t in range(20):
            assert torch.equal(adversarial(str(path)).active(t), adversarial().active(t))
        path.write_text("client\n100\n")
        with pytest.raises(ValueError, match="candidates: expected ids from 0 to 99, got 100"):
            adversarial(str(path))
        with pytest.raises(ValueError, match=r"candidates: cannot read .*none.csv"):
            adversarial(str(tmp_path / "none.csv"))

    def test_bad_options(self) -> None:
        with pytest.raises(ValueError, match="label_counts: adversarial needs the samples"):
            make_dropout("adversarial", num_clients=M, seed=0, candidates="all")
        with pytest.raises(ValueError, match=r"candidates: expected no id twice, got \[1, 1\]"):
            adversarial([1, 1])
        with pytest.raises(ValueError, match=r"candidates: expected client ids, got 1\.5"):
            adversarial([1.5])
        with pytest.raises(ValueError, match=r"epsilon: expected a number in \[0, 1\], got 1\.1"):
            adversarial(epsilon=1.1)
        with pytest.raises(ValueError, match="sample: expected at most num_clients = 100, got 101"):
            adversarial(sample=101)
        with pytest.raises(ValueError, match="strict: expected true or false, got 'yes'"):
            adversarial(strict="yes")
        with pytest.raises(ValueError, match="sizes: expected one of samples, equal"):
            adversarial(sizes="batch")
        with pytest.raises(TypeError, match="'candidates'"):
            make_dropout("adversarial", num_clients=M, seed=0)


class TestChooseCandidates:
    def test_the_setting_of_the_paper(self, tmp_path: Path) -> None:
        rng = torch.Generator().manual_seed(0)
        fedavg, clipping = torch.rand(2, 151, M, generator=rng)
        found = choose_candidates(fedavg, clipping)
        assert len(found.fedavg) == 25 and len(found.clipping) == 10 and len(found.ids) == 35
        change = (fedavg[150] - fedavg[5]).abs()
        assert set(found.fedavg) == set(change.topk(25).indices.tolist())
        rest = (clipping[150] - clipping[5]).abs()
        rest[list(found.fedavg)] = -1.0
        assert list(found.clipping) == rest.topk(10).indices.tolist()
        found.write(tmp_path / "candidates.csv")
        process, listed = adversarial(str(tmp_path / "candidates.csv")), adversarial(found.ids)
        assert torch.equal(process.active(3), listed.active(3))

    def test_growth_and_change(self) -> None:
        norms = torch.tensor([[5.0, 1.0, 2.0, 2.0], [1.0, 2.0, 2.0, 2.5]])
        window = {"first_round": 0, "last_round": 1, "num_clipping": 1}
        # changes -4, 1, 0, 0.5
        both = choose_candidates(norms, norms, num_fedavg=2, **window)
        assert (both.fedavg, both.clipping) == ((0, 1), (3,))
        growth = choose_candidates(norms, norms, num_fedavg=2, absolute=False, **window)
        assert (growth.fedavg, growth.clipping) == ((1, 3), (2,))
        flat = torch.ones(2, 4)
        assert choose_candidates(flat, flat, num_fedavg=2, **window).ids == [0, 1, 2]  # ties by id

    def test_bad_arguments(self) -> None:
        norms = torch.rand(151, M)
        with pytest.raises(ValueError, match=r"expected \[rounds, clients\], got \(100,\)"):
            choose_candidates(norms[0], norms)
        with pytest.raises(ValueError, match="clipping_norms: expected 100 clients as in"):
            choose_candidates(norms, norms[:, :50])
        with pytest.raises(ValueError, match="< 150, the rounds of clipping_norms, got 5 and 150"):
            choose_candidates(norms, norms[:150])
        with pytest.raises(ValueError, match="expected at most 100 clients together"):
            choose_candidates(norms, norms, num_fedavg=91)
        norms[150, 3] = math.nan
        with pytest.raises(ValueError, match="fedavg_norms: expected finite norms in"):
            choose_candidates(norms, torch.rand(151, M))
