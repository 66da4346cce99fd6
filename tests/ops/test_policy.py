# SPDX-License-Identifier: Apache-2.0
"""Scores, friends and elimination: the ops on [S, S] and [K, K]."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import build_info, ops
from fastagg.ops import bits, reference


def random_state(K: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with ties, counts with zeros, some active clients, some candidates."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (K, K), generator=g).float() / 5
    counts = torch.randint(0, 3, (K, K), generator=g, dtype=torch.int32)
    active = torch.rand(K, generator=g) < 0.5
    candidates = torch.rand(K, K, generator=g) < 0.7
    return scores, counts, active, candidates


def test_cosine_scores_by_hand() -> None:
    # Cosines of (1, 0), (1, 1), (-2, 0): 1/sqrt(2), -1, -1/sqrt(2). The zero row has none.
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [-2.0, 0.0]])
    scores = ops.cosine_scores(ops.gram(rows, dtype=torch.float64))
    h = math.sqrt(0.5)
    cosines = [[1, h, 0, -1], [h, 1, 0, -h], [0, 0, 0, 0], [-1, -h, 0, 1]]
    expected = (torch.tensor(cosines, dtype=torch.float64) + 1) / 2
    assert torch.allclose(scores, expected, rtol=0, atol=1e-15)


def test_a_zero_row_scores_one_half_beside_a_row_whose_square_is_infinite() -> None:
    gram = torch.tensor([[math.inf, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert ops.cosine_scores(gram).tolist() == [[1.0, 0.5], [0.5, 0.5]]
    assert torch.equal(ops.cosine_scores(gram), reference.cosine_scores(gram))


def test_cosine_scores_stay_in_range_and_scale_free() -> None:
    base = torch.randn(8, 300)
    rows = torch.cat([base, base * 3, -base])
    scores = ops.cosine_scores(ops.gram(rows))  # float32: cosines beyond 1 without the clamp
    assert scores.dtype == torch.float32
    assert scores.min() >= 0 and scores.max() <= 1
    big = ops.cosine_scores(ops.gram(rows * 1e30, dtype=torch.float64))
    small = ops.cosine_scores(ops.gram(rows * 1e-30, dtype=torch.float64))
    assert torch.allclose(big, small, rtol=0, atol=1e-7)


def test_distance_scores_by_hand() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 0.0]])
    scores = ops.distance_scores(ops.gram(rows))
    assert scores.tolist() == [[0.0, -5.0, -3.0], [-5.0, 0.0, -4.0], [-3.0, -4.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_against_oracle(dtype: torch.dtype) -> None:
    gram = reference.gram(torch.randn(30, 100), dtype=dtype)
    bound = 1e-6 if dtype == torch.float32 else 1e-14  # one rounding of values up to 20
    for name in ("cosine_scores", "distance_scores"):
        got, expected = getattr(ops, name)(gram), getattr(reference, name)(gram)
        assert got.dtype == dtype
        assert (got - expected).abs().max() <= bound


def test_update_scores_by_hand() -> None:
    scores, counts = torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int32)
    clients = torch.tensor([2, 0])
    for r in (0.5, 1.0, 0.0):  # means 0.5, 0.75, 0.5
        ops.update_scores_(scores, counts, torch.tensor([[1.0, r], [r, 1.0]]), clients)
    assert scores.tolist() == [[0.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    assert counts.tolist() == [[0, 0, 3], [0, 0, 0], [3, 0, 0]]
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    ops.update_scores_(scores, counts, torch.ones(2, 2), clients, nothing)
    assert counts.sum() == 6


@pytest.mark.skipif(
    build_info()["torch"] == "emulated", reason="on a GPU, pairs are assumed to be symmetric"
)
def test_update_scores_refuses_pairs_that_are_not_symmetric() -> None:
    scores, counts = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int32)
    one_way = torch.tensor([[False, True], [False, False]])
    with pytest.raises(ValueError, match="pairs: expected a symmetric matrix"):
        ops.update_scores_(scores, counts, torch.ones(2, 2), torch.arange(2), one_way)
    assert counts.sum() == 0


@given(seed=st.integers(0, 2**31), K=st.integers(1, 12))
def test_policy_against_oracle(seed: int, K: int) -> None:
    scores, counts, active, candidates = random_state(K, seed)
    g = torch.Generator().manual_seed(seed)
    clients = torch.randperm(K, generator=g)[: (K + 1) // 2]
    round_scores = torch.rand(len(clients), len(clients), generator=g, dtype=torch.float64)
    for c in (None, candidates):
        assert torch.equal(
            ops.select_friends(scores, counts, active, c),
            reference.select_friends(scores, counts, active, c),
        )
    for threshold in (0.0, 0.4, 2.0):
        ours, oracle = candidates.clone(), candidates.clone()
        ops.eliminate_(ours, scores, counts, threshold)
        reference.eliminate_(oracle, scores, counts, threshold)
        assert torch.equal(ours, oracle)
    ours_r, ours_n = scores.clone(), counts.clone()
    ops.update_scores_(ours_r, ours_n, round_scores, clients)
    reference.update_scores_(scores, counts, round_scores, clients)
    assert torch.equal(ours_r, scores) and torch.equal(ours_n, counts)


def test_select_friends_by_hand() -> None:
    scores = torch.tensor(
        [
            [0.0, 0.9, 0.5, 0.9],  # 1 is inactive, 2 and 3 are active: 3
            [0.9, 0.0, 0.7, 0.7],  # a tie: the lower id, 2
            [0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    counts = torch.ones(4, 4, dtype=torch.int32)
    active = torch.tensor([False, False, True, True])
    assert ops.select_friends(scores, counts, active).tolist() == [3, 2, 2, 3]
    counts[0, 3] = 0  # never scored with 3: its score means nothing
    assert ops.select_friends(scores, counts, active).tolist() == [2, 2, 2, 3]
    candidates = torch.ones(4, 4, dtype=torch.bool)
    candidates[0, 2] = candidates[1, 2] = False
    assert ops.select_friends(scores, counts, active, candidates).tolist() == [-1, 3, 2, 3]


def test_negative_scores_are_not_beaten_by_masked_ones() -> None:
    # Distances are negative: masking by multiplication would turn the inactive into the best.
    scores = torch.tensor([[0.0, -5.0, -2.0], [-5.0, 0.0, -3.0], [-2.0, -3.0, 0.0]])
    counts = torch.ones(3, 3, dtype=torch.int32)
    active = torch.tensor([False, True, False])
    assert ops.select_friends(scores, counts, active).tolist() == [1, 1, 1]


def test_eliminate_by_hand() -> None:
    scores = torch.tensor([[1.0, 0.9, 0.5, 0.0], [0.9, 1.0, 0.9, 0.9]] + [[0.0] * 4] * 2)
    counts = torch.ones(4, 4, dtype=torch.int32)
    counts[0, 3] = 0
    counts[2:] = 0
    candidates = torch.ones(4, 4, dtype=torch.bool)
    assert ops.eliminate_(candidates, scores, counts, 0.25) is candidates
    # Row 0: 1 is the best (not 0 itself), 2 is 0.4 behind, 3 was never scored.
    assert candidates.tolist() == [[True, True, False, True]] + [[True] * 4] * 3
    ops.eliminate_(candidates, scores, counts, 0.0)  # a gap of 0 is enough, but not for the best
    assert candidates[1].tolist() == [True, True, False, False]


@pytest.mark.parametrize("K", [64, 257])
def test_policy_is_independent_of_threads(K: int) -> None:
    scores, counts, active, candidates = random_state(K, 1)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        c = candidates.clone()
        ops.eliminate_(c, scores, counts, 0.4)
        results.append((c, ops.select_friends(scores, counts, active, c)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def awkward_state(K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random state: ties, zeros of both signs, negative scores, columns without a score."""
    scores, counts, active, candidates = random_state(K, K)
    scores -= 0.5
    scores[scores == 0.1] = -0.0
    counts[:, 2::3] = 0
    return scores, counts, active, candidates


@functools.cache  # the oracle is a loop over K rows; the instruction sets share its results
def friends_by_oracle(K: int) -> Tensor:
    return reference.select_friends(*awkward_state(K))


@functools.cache
def candidates_by_oracle(K: int) -> Tensor:
    scores, counts, _, candidates = awkward_state(K)
    return reference.eliminate_(candidates, scores, counts, 0.4)


# Rows are read in steps of 4 or 8, and searched in chunks of 256.
@pytest.mark.parametrize("K", [1, 3, 7, 8, 9, 33, 255, 300])
def test_every_form_of_state_against_oracle(isa: str, K: int) -> None:
    scores, counts, active, candidates = awkward_state(K)
    packed, short = bits.pack(candidates), counts.short()
    forms = [(n, c) for n in (counts, short) for c in (candidates, packed)]
    for n, c in forms:
        got = ops.select_friends(scores, n, active, c)
        assert torch.equal(got, friends_by_oracle(K))
    everybody = torch.ones(K, K, dtype=torch.bool)
    assert torch.equal(
        ops.select_friends(scores, short, active),
        ops.select_friends(scores, counts, active, everybody),
    )
    for n, c in forms:
        left = ops.eliminate_(c.clone(), scores, n, 0.4)
        left = left if c is candidates else bits.unpack(left, K)
        assert torch.equal(left, candidates_by_oracle(K))


def test_infinite_scores_can_be_chosen() -> None:
    # -inf is a score, lower than all others, and not the absence of one.
    scores = torch.full((40, 40), -math.inf)
    counts = torch.zeros(40, 40, dtype=torch.int16)
    active = torch.arange(40) >= 20
    counts[3, 25] = counts[3, 31] = counts[4, 10] = 1
    friends = ops.select_friends(scores, counts, active)
    assert friends[3] == 25 and friends[4] == -1


@pytest.mark.parametrize(("dtype", "most"), [(torch.int16, 2**15 - 1), (torch.int32, 2**31 - 1)])
def test_counts_stop_at_the_largest_value(dtype: torch.dtype, most: int) -> None:
    scores, counts = torch.zeros(2, 2), torch.full((2, 2), most - 1, dtype=dtype)
    for module in (ops, reference):
        scores.fill_(0.25)
        counts.fill_(most - 1)
        for _ in range(3):  # a mean that never stops moving
            module.update_scores_(scores, counts, torch.ones(2, 2), torch.tensor([0, 1]))
        assert counts.tolist() == [[most - 1, most], [most, most - 1]]
        expected = 1 - 0.75 * (1 - 1 / most) ** 3
        assert abs(scores[0, 1].item() - expected) < 4 * 2.0**-25  # one rounding per round
        assert scores[0, 0] == 0.25


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_update_scores_in_blocks(isa: str, dtype: torch.dtype) -> None:
    # 256 pairs are gathered at a time; pairs and the diagonal make the gaps.
    K, S = 700, 600
    g = torch.Generator().manual_seed(0)
    scores, clients = torch.rand(K, K, generator=g), torch.randperm(K, generator=g)[:S]
    counts = torch.randint(0, 9, (K, K), generator=g, dtype=dtype)
    fresh = torch.rand(S, S, generator=g, dtype=torch.float64)
    pairs = torch.rand(S, S, generator=g) < 0.6
    pairs = pairs | pairs.T
    old, before = scores[clients][:, clients].double(), counts[clients][:, clients]
    chosen = pairs.clone().fill_diagonal_(False)
    mean = torch.where(chosen, old + (fresh - old) / (before + 1), old).float()
    torch.set_num_threads(3)
    absent = torch.ones(K, dtype=torch.bool).index_fill(0, clients, False)
    untouched = scores[absent].clone(), scores[:, absent].clone()
    ops.update_scores_(scores, counts, fresh, clients, pairs)
    assert torch.equal(scores[clients][:, clients], mean)
    assert torch.equal(counts[clients][:, clients], before + chosen.to(dtype))
    assert torch.equal(scores[absent], untouched[0])
    assert torch.equal(scores[:, absent], untouched[1])


def test_bad_arguments() -> None:
    scores, counts, active, candidates = random_state(4, 0)
    clients, r = torch.tensor([0, 1]), torch.ones(2, 2)
    with pytest.raises(ValueError, match="gram: expected shape"):
        ops.cosine_scores(torch.ones(2, 3))
    with pytest.raises(TypeError, match="gram: expected dtype"):
        ops.distance_scores(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="counts: expected dtype Int"):
        ops.update_scores_(scores, counts.long(), r, clients)
    with pytest.raises(ValueError, match="counts: expected shape"):
        ops.update_scores_(scores, counts[:3, :3].contiguous(), r, clients)
    with pytest.raises(ValueError, match="round_scores: expected shape"):
        ops.update_scores_(scores, counts, torch.ones(3, 3), clients)
    with pytest.raises(IndexError, match=r"\[0, 4\), got 4"):
        ops.update_scores_(scores, counts, r, torch.tensor([0, 4]))
    with pytest.raises(TypeError, match="active: expected dtype Bool"):
        ops.select_friends(scores, counts, active.int())
    with pytest.raises(ValueError, match="candidates: expected shape"):
        ops.select_friends(scores, counts, active, candidates[:2])
    with pytest.raises(TypeError, match="candidates: expected dtype Bool, or Byte"):
        ops.eliminate_(candidates.int(), scores, counts, 0.1)
    with pytest.raises(ValueError, match=r"candidates: expected shape \[4, 1\]"):
        ops.select_friends(scores, counts, active, candidates.byte())
    with pytest.raises(ValueError, match="threshold"):
        ops.eliminate_(candidates, scores, counts, float("nan"))
