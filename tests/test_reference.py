# SPDX-License-Identifier: Apache-2.0
"""The oracle, on cases small enough to compute by hand."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from fastagg.ops import reference
from fastagg.ops._dispatch import TABLE


def test_it_has_the_signatures_of_ops() -> None:
    for name, op in TABLE.items():
        assert inspect.signature(getattr(reference, name)) == inspect.signature(op.wrapper), name


def test_gram() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.0, 0.5]])
    expected = [[5.0, 1.0, 1.0], [1.0, 10.0, -0.5], [1.0, -0.5, 0.25]]
    assert reference.gram(x).tolist() == expected
    assert reference.gram(list(x)).dtype == torch.float32
    pairs = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    some = reference.gram(x, pairs=pairs, dtype=torch.float64)
    assert some.tolist() == [[5.0, 1.0, 0.0], [1.0, 10.0, 0.0], [0.0, 0.0, 0.25]]
    assert some.dtype == torch.float64
    assert reference.gram([]).shape == (0, 0)


def test_cosine_scores() -> None:
    # (1, 0), (0, 2), (-3, 0) and the zero vector
    gram = torch.tensor([[1.0, 0, -3, 0], [0, 4, 0, 0], [-3, 0, 9, 0], [0, 0, 0, 0]])
    assert reference.cosine_scores(gram).tolist() == [
        [1.0, 0.5, 0.0, 0.5],
        [0.5, 1.0, 0.5, 0.5],
        [0.0, 0.5, 1.0, 0.5],
        [0.5, 0.5, 0.5, 0.5],
    ]


def test_cosine_scores_stay_in_range_when_the_gram_is_rounded() -> None:
    gram = torch.tensor([[1.0, 1.0 + 2.0**-20], [1.0 + 2.0**-20, 1.0]])
    assert reference.cosine_scores(gram).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_distance_scores() -> None:
    # (3, 0) and (0, 4): 5 apart
    gram = torch.tensor([[9.0, 0.0], [0.0, 16.0]], dtype=torch.float64)
    scores = reference.distance_scores(gram)
    assert scores.tolist() == [[0.0, -5.0], [-5.0, 0.0]]
    assert math.copysign(1.0, scores[0, 0]) == 1.0


def test_update_scores() -> None:
    scores, counts = torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int32)
    clients = torch.tensor([2, 0])
    reference.update_scores_(scores, counts, torch.tensor([[1.0, 0.6], [0.6, 1.0]]), clients)
    reference.update_scores_(scores, counts, torch.tensor([[1.0, 0.2], [0.2, 1.0]]), clients)
    assert counts.tolist() == [[0, 0, 2], [0, 0, 0], [2, 0, 0]]
    assert scores[0, 2].item() == scores[2, 0].item() == pytest.approx(0.4)  # (.6 + .2) / 2
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    reference.update_scores_(scores, counts, torch.ones(2, 2), clients, nothing)
    assert counts.tolist() == [[0, 0, 2], [0, 0, 0], [2, 0, 0]]


def test_select_friends() -> None:
    scores = torch.tensor(
        [[0.0, 0.9, 0.3, 0.3], [0.9, 0.0, 0.5, 0.5], [0.3, 0.5, 0.0, 0.1], [0.3, 0.5, 0.1, 0.0]]
    )
    counts = torch.ones(4, 4, dtype=torch.int32)
    active = torch.tensor([False, False, True, True])
    # 0 and 1 see 2 and 3 tied: the lower id
    assert reference.select_friends(scores, counts, active).tolist() == [2, 2, 2, 3]
    counts[0, 2] = 0
    assert reference.select_friends(scores, counts, active).tolist() == [3, 2, 2, 3]
    candidates = torch.ones(4, 4, dtype=torch.bool)
    candidates[1, 2] = candidates[0, 3] = False
    friends = reference.select_friends(scores, counts, active, candidates)
    assert friends.tolist() == [-1, 3, 2, 3]
    negative = reference.select_friends(-scores, counts, active)
    assert negative.tolist() == [3, 2, 2, 3]  # a negative score is preferred to no score


def test_eliminate() -> None:
    scores = torch.tensor([[0.0, 0.75, 0.5, 0.25]] + [[0.0] * 4] * 3)
    counts = torch.zeros(4, 4, dtype=torch.int32)
    counts[0] = 1
    candidates = torch.ones(4, 4, dtype=torch.bool)
    reference.eliminate_(candidates, scores, counts, 0.5)  # gaps 0, .25, .5
    assert candidates.tolist() == [[True, True, True, False], *[[True] * 4] * 3]
    counts[0, 2] = 0
    reference.eliminate_(candidates, scores, counts, 0.0)  # 2 was never scored, 1 is the best
    assert candidates[0].tolist() == [True, True, True, False]


def test_eliminate_keeps_the_first_of_equals() -> None:
    scores, counts = torch.full((3, 3), 0.5), torch.ones(3, 3, dtype=torch.int32)
    candidates = torch.ones(3, 3, dtype=torch.bool)
    reference.eliminate_(candidates, scores, counts, 0.0)
    assert candidates.tolist() == [[True, True, False], [True, True, False], [True, False, True]]


def test_weighted_sum() -> None:
    out = torch.tensor([1.0, 2.0])
    rows = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
    assert reference.weighted_sum_(out, rows, torch.tensor([2.0, 3.0])) is out
    assert out.tolist() == [3.0, 32.0]
    reference.weighted_sum_(out, list(rows), torch.tensor([1.0, 1.0]), beta=0.5)
    assert out.tolist() == [2.5, 26.0]
    out[0] = math.nan
    reference.weighted_sum_(out, [], torch.zeros(0), beta=0.0)
    assert out.tolist() == [0.0, 0.0]


def test_mimic() -> None:
    params, corrections = torch.tensor([1.0]), torch.tensor([[1.0], [5.0], [0.0]])
    # v = mean(2 + 0, 4 + 1) = 3.5; params = 1 + 2 * 3.5; c_2 = 3.5 - 2, c_0 = 3.5 - 4
    updates, clients = torch.tensor([[2.0], [4.0]]), torch.tensor([2, 0])
    reference.mimic_(params, updates, corrections, clients, 2.0)
    assert params.tolist() == [8.0]
    assert corrections.tolist() == [[-0.5], [5.0], [1.5]]
    reference.mimic_(params, [], corrections, torch.zeros(0, dtype=torch.int64), 2.0)
    assert params.tolist() == [8.0]


def test_memory_update() -> None:
    params, total = torch.tensor([1.0]), torch.tensor([4.0], dtype=torch.float64)
    memory = torch.tensor([[2.0], [6.0]])  # with weights 1/2: total 4
    args = (torch.tensor([[10.0]]), torch.tensor([0]), torch.tensor([0.5]))
    # memory 10, 6: total 8; params = 1 + .5 * 1 * 8
    reference.memory_update_(params, total, memory, *args, 0.5, 1.0)
    assert (params.item(), total.item()) == (5.0, 8.0)
    assert memory.tolist() == [[10.0], [6.0]]
    # models: memory 5 + 10 = 15, 6: total 10.5; params = 5 + .5 * (2 * 10.5 - 5)
    reference.memory_update_(params, total, memory, *args, 0.5, 2.0, True)
    assert (params.item(), total.item()) == (13.0, 10.5)
    assert memory.tolist() == [[15.0], [6.0]]


def test_abs_max() -> None:
    x = torch.tensor([[1.0, -3.0], [math.nan, math.inf], [-math.inf, 0.0]])
    largest = reference.abs_max(x)
    assert largest[0] == 3.0 and math.isnan(largest[1]) and largest[2] == math.inf
    assert reference.abs_max([]).shape == (0,)
