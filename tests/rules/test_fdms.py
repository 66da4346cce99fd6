# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS: hand-worked rounds, an independent oracle, elimination, and pairs not to be scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastagg import FDMS, FedAvg, Theorem2Threshold, ops
from fastagg.ops import bits


class Oracle:
    """Compute FL-FDMS with dictionaries, one pair at a time, following section 5 of its paper."""

    def __init__(
        self,
        num_clients: int,
        similarity: str = "cosine",
        threshold: Callable[[int], float] | None = None,
        weights: list[float] | None = None,
    ) -> None:
        self.num_clients = num_clients
        self.similarity = similarity
        self.threshold = threshold
        self.w = np.array(weights or [1.0] * num_clients) / sum(weights or [1.0] * num_clients)
        self.scores: dict[tuple[int, int], list[float]] = {}
        self.candidates = {k: set(range(num_clients)) - {k} for k in range(num_clients)}
        self.t = 0
        self.friends: list[int] = []
        self.pairs = 0

    def mean_score(self, k: int, i: int) -> float:
        return float(np.mean(self.scores[k, i]))

    def score(self, a: np.ndarray, b: np.ndarray) -> float:
        if self.similarity == "distance":
            return -float(np.linalg.norm(a - b))
        return (float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b)) + 1) / 2

    def __call__(self, params: np.ndarray, updates: dict[int, np.ndarray]) -> np.ndarray:
        self.t += 1
        active = sorted(updates)
        ordered = [(i, j) for i in active for j in active if j in self.candidates[i]]
        self.pairs = len(ordered)
        for i, j in {tuple(sorted(pair)) for pair in ordered}:
            r = self.score(updates[i], updates[j])
            self.scores.setdefault((i, j), []).append(r)
            self.scores.setdefault((j, i), []).append(r)
        self.friends = []
        change = np.zeros_like(params)
        for k in range(self.num_clients):
            if k in updates:
                self.friends.append(k)
                change += self.w[k] * updates[k]
                continue
            known = {
                i: self.mean_score(k, i)
                for i in active
                if i in self.candidates[k] and (k, i) in self.scores
            }
            friend = max(known, key=lambda i: known[i], default=-1)
            self.friends.append(friend)
            mean = np.mean([updates[i] for i in active], axis=0)
            change += self.w[k] * (updates[friend] if friend >= 0 else mean)
        self.eliminate()
        return params + change

    def eliminate(self) -> None:
        if self.threshold is None:
            return
        for k, candidates in self.candidates.items():
            known = {i: self.mean_score(k, i) for i in candidates if (k, i) in self.scores}
            best = max(known, key=lambda i: known[i], default=None)
            for i, value in known.items():
                if i != best and known[best] - value >= self.threshold(self.t):
                    candidates.discard(i)


EARLY = Theorem2Threshold(8, rounds=1, beta=1.0, p=0.99, b_max=1, delta_f=0.0, factor=0.12)
"""Small enough to eliminate within twenty rounds: .37 / sqrt(t)."""


@pytest.mark.parametrize(
    ("similarity", "elimination", "weights"),
    [
        ("cosine", None, None),
        ("distance", None, None),
        ("cosine", None, [1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 0.25, 2.0]),
        ("cosine", EARLY, None),
        ("distance", lambda t: 40.0 / t, None),
    ],
)
def test_follows_the_oracle(
    random_rounds: Callable[..., list[tuple[Tensor, Tensor]]],
    similarity: str,
    elimination: Callable[[int], float] | None,
    weights: list[float] | None,
) -> None:
    agg = FDMS(
        num_clients=8,
        num_params=40,
        similarity=similarity,
        elimination=elimination,
        client_weights=weights,
    )
    oracle = Oracle(8, similarity, elimination, weights)
    params = torch.randn(40)
    needed = 0
    for updates, clients in random_rounds(8, 40, 25, seed=3):
        given = {int(k): u.double().numpy() for k, u in zip(clients, updates, strict=True)}
        before = params.double().numpy()
        report = agg.step(params, updates, clients)
        if not given:
            oracle.t += 1
            assert report.skipped
            continue
        expected = oracle(before, given)
        assert report.friends.tolist() == oracle.friends
        assert report.pairs == oracle.pairs
        needed += report.pairs
        error = np.abs(params.double().numpy() - expected).max() / np.abs(expected).max()
        assert error <= 4 * 2.0**-24  # aggregate and parameters are each rounded to float32
    for (k, i), scores in oracle.scores.items():
        # a running mean in float32: a rounding per joint round, of numbers up to the largest
        assert (
            abs(float(agg.scores[k, i]) - np.mean(scores)) <= 25 * 2.0**-24 * np.abs(scores).max()
        )
        assert int(agg.counts[k, i]) == len(scores)
    if elimination is not None:
        rows = [set(torch.nonzero(row).flatten().tolist()) - {k} for k, row in
                enumerate(bits.unpack(agg.candidates, 8))]  # fmt: skip
        assert rows == list(oracle.candidates.values())
        assert min(map(len, rows)) < 7, "nothing was eliminated: this test tests nothing"


def test_hand_worked_substitution() -> None:
    agg = FDMS(num_clients=3, num_params=2)
    params = torch.zeros(2)
    # all active: r(0,1) = (cos 0 + 1) / 2 = 1, r(0,2) = r(1,2) = (cos 90 + 1) / 2 = .5
    report = agg.step(params, torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]), [0, 1, 2])
    assert params.tolist() == [1.0, 1.0]  # the mean
    assert report.friends.tolist() == [0, 1, 2]
    assert agg.scores[0].tolist() == [0.0, 1.0, 0.5]
    assert report.pairs == 6
    # client 0 absent, its best friend is 1: (2 * (3, 0) + (0, 3)) / 3 is added
    report = agg.step(params, torch.tensor([[0.0, 3.0], [3.0, 0.0]]), [2, 1])
    assert report.friends.tolist() == [1, 1, 2]
    assert report.active.tolist() == [1, 2]
    assert params.tolist() == [3.0, 2.0]
    assert report.weights.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert agg.counts.tolist() == [[0, 1, 1], [1, 0, 2], [1, 2, 0]]


def test_without_a_scored_friend_the_mean_is_substituted(same_bits: Callable[..., None]) -> None:
    """FL-FDMS eq. 5: substitution by the mean of the active is plain dropout."""
    updates = torch.randn(4, 30)
    params = torch.randn(30)
    twin = params.clone()
    report = FDMS(num_clients=16, num_params=30).step(params, updates, [1, 2, 3, 5])
    FedAvg(num_clients=16, num_params=30).step(twin, updates, [1, 2, 3, 5])
    assert report.friends.tolist() == [-1, 1, 2, 3, -1, 5] + [-1] * 10
    same_bits(params, twin)  # 1/16 + 12/16/4 is exactly 1/4


def test_negative_scores_are_not_beaten_by_absent_clients() -> None:
    """Multiplying by a 0 mask would prefer an absent client to a negative (distance) score."""
    agg = FDMS(num_clients=3, num_params=1, similarity="distance")
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[0.0], [1.0], [5.0]]), [0, 1, 2])
    assert agg.scores.tolist() == [[0.0, -1.0, -5.0], [-1.0, 0.0, -4.0], [-5.0, -4.0, 0.0]]
    assert agg.step(params, torch.tensor([[5.0]]), [2]).friends.tolist() == [2, 2, 2]


def test_a_tie_goes_to_the_lowest_id() -> None:
    agg = FDMS(num_clients=4, num_params=2)
    params = torch.zeros(2)
    agg.step(params, torch.tensor([[1.0, 0.0]] * 4), [0, 1, 2, 3])
    assert agg.step(params, torch.ones(2, 2), [2, 1]).friends.tolist() == [1, 1, 2, 1]


def test_a_zero_update_scores_one_half() -> None:
    agg = FDMS(num_clients=3, num_params=2)
    agg.step(torch.zeros(2), torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0]]), [0, 1, 2])
    assert agg.scores[0].tolist() == [0.0, 0.5, 0.5]
    assert agg.scores[1].tolist() == pytest.approx([0.5, 0.0, 0.0], abs=1e-15)  # opposite


# --- elimination ------------------------------------------------------------------------------

GROUPS = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])  # {0, 1} and {2, 3}


def test_hand_worked_elimination() -> None:
    # scores within groups .998, across at most .598: gaps above .399
    agg = FDMS(num_clients=4, num_params=2, elimination=lambda t: 0.3)
    params = torch.zeros(2)
    assert agg.step(params, GROUPS, [0, 1, 2, 3]).pairs == 12
    assert bits.unpack(agg.candidates, 4).tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
    counts = agg.counts.clone()
    # now only the pairs within groups are needed, and only these are counted
    assert agg.step(params, GROUPS, [0, 1, 2, 3]).pairs == 4
    grown = agg.counts - counts
    assert grown.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    # group {0, 1} is absent: no client of the other group is a candidate, so the mean is used
    assert agg.step(params, GROUPS[2:], [2, 3]).friends.tolist() == [-1, -1, 2, 3]
    assert agg.step(params, GROUPS[:1], [0]).friends.tolist() == [0, 0, -1, -1]


def test_a_client_eliminated_in_this_round_can_still_be_its_friend() -> None:
    # Section 5.3: round t chooses from C_t, and C_(t+1) is C_t without the eliminated clients.
    agg = FDMS(num_clients=3, num_params=2, elimination=lambda t: 9.0 if t == 1 else 0.2)
    x = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)], [1.0, 0.0]])  # 0, 60 and 0 degrees
    params = torch.zeros(2)
    agg.step(params, x, [0, 1, 2])  # R[2, 0] = 1, R[2, 1] = .75; no gap reaches 9
    assert agg.step(params, x[1:2], [1]).friends.tolist() == [1, 1, 1]
    assert not bits.unpack(agg.candidates, 3)[2, 1]
    assert agg.step(params, x[1:2], [1]).friends.tolist() == [-1, 1, -1]


def test_pairs_that_no_client_needs_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    agg = FDMS(num_clients=4, num_params=2, elimination=lambda t: 0.3)
    params = torch.zeros(2)
    agg.step(params, GROUPS, [0, 1, 2, 3])
    asked: list[Tensor] = []
    gram = ops.gram

    def spy(updates: Tensor, *, pairs: Tensor, **options: Any) -> Tensor:
        asked.append(pairs)
        return gram(updates, pairs=pairs, **options)

    monkeypatch.setattr(ops, "gram", spy)
    agg.step(params, GROUPS[[0, 1, 3]], [0, 1, 3])
    assert asked[0].tolist() == [[False, True, False], [True, False, False], [False] * 3]


def test_a_pair_is_scored_while_one_side_needs_it() -> None:
    # row 0: best 1 (1.0), 2 lies .25 below; row 2: 1 and 0 within .25 of each other
    agg = FDMS(num_clients=3, num_params=2, elimination=lambda t: 0.2)
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]])  # 0, 0 and 60 degrees
    params = torch.zeros(2)
    agg.step(params, x, [0, 1, 2])
    candidates = bits.unpack(agg.candidates, 3)
    assert not candidates[0, 2] and candidates[2, 0]
    report = agg.step(params, x, [0, 1, 2])
    assert report.pairs == 4  # (0,1), (1,0), (2,0), (2,1)
    assert agg.counts.tolist() == [[0, 2, 2], [2, 0, 2], [2, 2, 0]]  # symmetric


def test_skipped_rounds_count_in_t() -> None:
    seen: list[int] = []

    def threshold(t: int) -> float:
        seen.append(t)
        return 1.0

    agg = FDMS(num_clients=2, num_params=1, elimination=threshold)
    params = torch.zeros(1)
    agg.step(params, torch.ones(1, 1), [0])
    report = agg.step(params, [], [])
    assert report.skipped and report.friends.tolist() == [-1, -1]
    agg.step(params, torch.ones(1, 1), [1])
    assert seen == [1, 3]
    assert int(agg.rounds) == 3


@pytest.mark.parametrize(
    ("elimination", "error"),
    [
        (lambda t: math.nan, ValueError),
        (lambda t: "much", TypeError),
        (lambda t: 1 / 0, ZeroDivisionError),
    ],
)
def test_a_bad_threshold_changes_nothing(
    same_bits: Callable[..., None],
    elimination: Callable[[int], float],
    error: type[Exception],
) -> None:
    agg = FDMS(num_clients=3, num_params=2, elimination=elimination)
    params = torch.randn(2)
    old, state = params.clone(), agg.state_dict()
    with pytest.raises(error):
        agg.step(params, torch.randn(2, 2), [0, 1])
    same_bits(params, old)
    for name, tensor in agg.state_dict().items():
        same_bits(tensor, state[name])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"similarity": "cosin"}, ValueError, "similarity"),
        ({"precision": "medium"}, ValueError, "precision: expected one of"),
        ({"similarity": "distance", "precision": "tf32"}, ValueError, "precision.*distance"),
        ({"elimination": "theorem1"}, ValueError, "elimination.*theorem2"),
        ({"elimination": 0.5}, TypeError, "elimination"),
        ({"client_weights": [0.0, 0.0]}, ValueError, "client_weights.*zero"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        FDMS(num_clients=2, num_params=1, **options)


@pytest.mark.parametrize("elimination", [None, "theorem2"])
def test_precision_reaches_the_op(monkeypatch: pytest.MonkeyPatch, elimination: str | None) -> None:
    asked = []
    name = "gram" if elimination else "gram_and_sum_"
    op = getattr(ops, name)

    def spy(*args: object, precision: str, **kwargs: object) -> Tensor:
        asked.append(precision)
        return op(*args, precision=precision, **kwargs)

    monkeypatch.setattr(ops, name, spy)
    for precision in ("highest", "high", "tf32"):
        agg = FDMS(num_clients=3, num_params=4, precision=precision, elimination=elimination)
        agg.step(torch.zeros(4), torch.randn(2, 4), [0, 2])
        assert agg.options()["precision"] == precision
    assert asked == ["highest", "high", "tf32"]


@pytest.mark.parametrize("scale", [1e-20, 1e-12, 1.0, 1e12, 1e18, 1e37])
def test_any_magnitude_is_compared(scale: float) -> None:
    """Squares of such numbers exceed float32's range; they must neither become 0 nor non-finite."""
    agg = FDMS(num_clients=3, num_params=2)
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]) * scale
    agg.step(torch.zeros(2), x, [0, 1, 2])
    assert agg.scores[0].tolist() == pytest.approx([0.0, 1.0, 0.5], abs=1e-6)


def test_distances_beyond_float32_are_refused() -> None:
    agg = FDMS(num_clients=2, num_params=2, similarity="distance")
    with pytest.raises(ValueError, match=r"distances.*float32"):
        agg.step(torch.zeros(2), torch.tensor([[3e38, 0.0], [-3e38, 0.0]]), [0, 1])
    assert not agg.scores.any()
