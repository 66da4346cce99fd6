# SPDX-License-Identifier: Apache-2.0
"""``max_share`` of the FDMS rules: hand-worked rounds, an oracle with fractions, and properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import FDMS, EnqueuedFDMS, FDMSSoft, StepReport


def scored(agg: FDMS, pairs: dict[tuple[int, int], float]) -> FDMS:
    """Return ``agg`` after it was told the scores of pairs of clients."""
    for (a, b), score in pairs.items():
        agg.scores[a, b] = agg.scores[b, a] = score
        agg.counts[a, b] = agg.counts[b, a] = 1
    agg.rounds += 1
    return agg


PAIRS = {(2, 0): 0.9, (2, 1): 0.8, (3, 0): 0.7, (3, 1): 0.6, (4, 0): 0.95, (4, 1): 0.1}


@pytest.mark.parametrize("rule", [FDMS, lambda **o: FDMSSoft(friends=1, **o)])
@pytest.mark.parametrize(
    ("max_share", "weights", "friends"),
    [
        (None, [0.8, 0.2], [0, 1, 0, 0, 0]),
        (1.0, [0.8, 0.2], [0, 1, 0, 0, 0]),
        # 0 has room for 0.4: all of 4 and of 2, whose scores are the highest; 1 takes 3
        (0.6, [0.6, 0.4], [0, 1, 0, 1, 0]),
        # 0 has room for 0.3: all of 4 and half of 2; 1 takes the other half and 3
        (0.5, [0.5, 0.5], [0, 1, 0, 1, 0]),
        # with two active clients no cap below 1/2 can be kept: it is 1/2
        (0.2, [0.5, 0.5], [0, 1, 0, 1, 0]),
    ],
)
def test_worked_by_hand(
    rule: Callable[..., FDMS], max_share: float | None, weights: list[float], friends: list[int]
) -> None:
    agg = scored(rule(num_clients=5, num_params=3, max_share=max_share), PAIRS)
    report = agg.step(torch.zeros(3), torch.randn(2, 3), [0, 1])
    torch.testing.assert_close(report.weights, torch.tensor(weights), rtol=1e-6, atol=0)
    assert report.friends is not None and report.friends.tolist() == friends


def test_the_mean_takes_what_no_friend_has_room_for() -> None:
    # 2 and 3 know 0 only, which has room for 0.15 of their 0.4; 1 was never scored with anybody,
    # so that the mean takes its 0.2 and the other 0.25. Row 0 is full; 4 has room for 0.15.
    agg = scored(FDMS(num_clients=5, num_params=3, max_share=0.35), {(2, 0): 0.9, (3, 0): 0.8})
    agg_three = agg.step(torch.zeros(3), torch.randn(3, 3), [0, 4, 1])
    # S = 3: weights of 0.35 for 0, then 0.25 in equal parts of 0.125 for 1 and 4
    torch.testing.assert_close(
        agg_three.weights, torch.tensor([0.35, 0.325, 0.325]), rtol=1e-6, atol=0
    )
    assert agg_three.friends is not None and agg_three.friends.tolist() == [0, 1, 0, -1, 4]


def test_roundings_are_no_room() -> None:
    """0.35 - 7 * 0.05 is 1.4e-17: a seventh client does not have row 0 as its friend."""
    scores = {(k, 0): 0.99 - 0.01 * k for k in range(3, 20)}  # the friend of all, in this order
    scores |= {(k, 1): 0.5 for k in range(3, 20)} | {(k, 2): 0.1 for k in range(3, 20)}
    agg = scored(FDMS(num_clients=20, num_params=3, max_share=0.35), scores)
    report = agg.step(torch.zeros(3), torch.randn(3, 3), [0, 1, 2])
    assert report.friends is not None
    assert report.friends.tolist() == [0, 1, 2] + [0] * 6 + [1] * 6 + [2] * 5
    torch.testing.assert_close(report.weights, torch.tensor([0.35, 0.35, 0.3]))


def test_a_share_above_the_cap_counts_in_full() -> None:
    agg = scored(
        FDMS(num_clients=4, num_params=3, max_share=0.3, client_weights=[6, 1, 1, 2]),
        {(3, 0): 0.9, (3, 1): 0.5},
    )
    report = agg.step(torch.zeros(3), torch.randn(3, 3), [0, 1, 2])
    # the cap is 1/3; row 0 stands for 0.6 already; 1 takes all 0.2 of client 3
    torch.testing.assert_close(report.weights, torch.tensor([0.6, 0.3, 0.1]), rtol=1e-6, atol=0)
    assert report.friends is not None and report.friends.tolist() == [0, 1, 2, 1]


def oracle(agg: FDMS, active: list[int], cap: Fraction) -> dict[int, Fraction]:
    """Compute weights with fractions, proposal by proposal, from the text of the docstrings."""
    whole = sum(map(Fraction, agg.client_weights.tolist()))
    share = [Fraction(w) / whole for w in agg.client_weights.tolist()]
    weight = {s: share[s] for s in active}
    left = {k: share[k] for k in range(agg.num_clients) if k not in weight}
    cap = max(cap, Fraction(1, len(active)))
    mean = Fraction(0)
    while left:
        free = [s for s in active if weight[s] < cap]
        offers: list[tuple[float, int, int, Fraction]] = []
        for k in sorted(left):
            known = [s for s in free if agg.counts[k, s] > 0]
            known.sort(key=lambda s: (-float(agg.scores[k, s]), s))
            if not known:
                mean += left.pop(k)
                continue
            many = agg.friends if isinstance(agg, FDMSSoft) else 1
            heat = agg.temperature if isinstance(agg, FDMSSoft) else 1.0
            best = known[:many]
            parts = [Fraction(math.exp(float(agg.scores[k, s]) / heat)) for s in best]
            for s, part in zip(best, parts, strict=True):
                offers.append((-float(agg.scores[k, s]), k, s, left[k] * part / sum(parts)))
            left[k] = Fraction(0)
        for _, k, s, amount in sorted(offers):
            taken = max(Fraction(0), min(amount, cap - weight[s]))
            weight[s] += taken
            left[k] += amount - taken
        left = {k: amount for k, amount in left.items() if amount > 0}
    while mean > 0:  # raise all rows together until the next one is full
        free = [s for s in active if weight[s] < cap]
        step = min([mean / len(free), *(cap - weight[s] for s in free)])
        for s in free:
            weight[s] += step
        mean -= step * len(free)
    return weight


def servers(seed: int) -> list[FDMS]:
    g = torch.Generator().manual_seed(seed)
    weights = (0.5 + torch.rand(11, generator=g)).tolist()
    common: dict[str, Any] = {"num_clients": 11, "num_params": 20}
    return [
        FDMS(**common),
        FDMS(**common, client_weights=weights, similarity="distance"),
        FDMSSoft(**common, friends=2, client_weights=weights),
        FDMSSoft(**common, friends=4, temperature=0.5),
    ]


@pytest.mark.parametrize("max_share", [1 / 11, 0.15, 0.3, 0.6])
def test_follows_the_oracle(
    random_rounds: Callable[..., list[tuple[Tensor, Tensor]]], max_share: float
) -> None:
    capped = 0
    for seed in range(3):
        for agg in servers(seed):
            agg.max_share = max_share
            params = torch.zeros(20)
            for updates, clients in random_rounds(11, 20, 20, seed=seed):
                if not len(clients):
                    continue
                expected = oracle(agg, sorted(clients.tolist()), Fraction(max_share))
                report = agg.step(params, updates, clients)
                listed = [float(expected[k]) for k in report.active.tolist()]
                torch.testing.assert_close(
                    report.weights, torch.tensor(listed), rtol=1e-6, atol=1e-9
                )
                cap = max(max_share, 1 / len(clients))
                capped += int((report.weights >= cap * (1 - 1e-6)).sum())
    assert capped > 10


def rounds_of(agg: FDMS, seed: int, shuffled: bool) -> list[StepReport]:
    g, params = torch.Generator().manual_seed(seed), torch.zeros(20)
    reports = []
    for _ in range(15):
        clients = torch.randperm(11, generator=g)[:4]
        updates = torch.randn(4, 20, generator=g) + torch.randn(2, 20, generator=g)[clients % 2]
        order = torch.tensor([2, 0, 3, 1]) if shuffled else torch.arange(4)
        reports.append(agg.step(params, updates[order], clients[order]))
    return reports


@pytest.mark.parametrize("rule", [FDMS, FDMSSoft])
def test_weights_keep_the_cap_and_any_order_gives_the_same_bits(
    same_report: Callable[..., None], rule: type[FDMS]
) -> None:
    common: dict[str, Any] = {"num_clients": 11, "num_params": 20}
    plain = rounds_of(rule(**common), 4, False)
    first = rounds_of(rule(**common, max_share=0.3), 4, False)
    second = rounds_of(rule(**common, max_share=0.3), 4, True)
    assert max(float(report.weights.max()) for report in plain) > 0.4
    for one, two in zip(first, second, strict=True):
        same_report(one, two)
        assert float(one.weights.max()) <= 0.3 + 1e-6
        assert float(one.weights.sum()) == pytest.approx(1.0, abs=1e-6)


def test_a_cap_that_nothing_reaches_changes_no_friend() -> None:
    common: dict[str, Any] = {"num_clients": 11, "num_params": 20}
    for one, two in zip(
        rounds_of(FDMS(**common), 4, False),
        rounds_of(FDMS(**common, max_share=1.0), 4, False),
        strict=True,
    ):
        assert one.friends is not None and two.friends is not None
        assert one.friends.tolist() == two.friends.tolist()
        torch.testing.assert_close(one.weights, two.weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("elimination", [None, lambda t: 0.3 / t])
@pytest.mark.parametrize("max_share", [0.12, 0.25, 0.4])
def test_enqueued_rounds_have_the_same_weights(elimination: Any, max_share: float) -> None:
    def server() -> FDMS:
        return FDMS(
            num_clients=9,
            num_params=40,
            client_weights=range(1, 10),
            elimination=elimination,
            max_share=max_share,
        )

    one, two = server(), server()
    params, twin = torch.zeros(40), torch.zeros(40)
    rounds, g = EnqueuedFDMS(one, params), torch.Generator().manual_seed(3)
    for _ in range(12):
        clients = torch.randperm(9, generator=g)[:5].sort().values
        rows = torch.randn(5, 40, generator=g) + torch.randn(40, generator=g)
        assert bool(rounds.enqueue(rows, clients))
        two.step(twin, rows, clients)
        torch.testing.assert_close(params, twin, rtol=1e-6, atol=1e-6)
    assert params.abs().min() > 0


def test_a_checkpoint_keeps_the_cap_and_an_older_one_has_none(tmp_path: Path) -> None:
    for name in ("fdms", "fdms-soft"):
        agg = fastagg.make(name, num_clients=4, num_params=3, max_share=0.5)
        agg.save(tmp_path / "a")
        assert fastagg.load(tmp_path / "a").max_share == 0.5  # type: ignore[attr-defined]
        assert fastagg.load(tmp_path / "a", max_share=None).max_share is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "error"),
    [(0.0, ValueError), (0.2, ValueError), (1.1, ValueError), (math.nan, ValueError),
     ("1", TypeError), (True, TypeError)],
)  # fmt: skip
def test_bad_caps(value: Any, error: type[Exception]) -> None:
    for name in ("fdms", "fdms-soft"):
        with pytest.raises(error, match=r"max_share: expected a (finite )?number"):
            fastagg.make(name, num_clients=4, num_params=1, max_share=value)
