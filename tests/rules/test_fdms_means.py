# SPDX-License-Identifier: Apache-2.0
"""Friends by mean directions: by hand, against exact means, the search, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import FDMSMeans
from fastagg.rules._mean_sketches import Means, Rows, _smallest, inverse_norms

K, D, GROUPS = 40, 2_000, 4


def grouped_rounds(count: int, size: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Rounds of ``size`` active clients; client k is in group k % 4. Cosines are about 0.3."""
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(GROUPS, D, generator=g)
    rounds = []
    for _ in range(count):
        clients = torch.randperm(K, generator=g)[:size]
        noise = 1.5 * torch.randn(size, D, generator=g)
        rounds.append((common[clients % GROUPS] + noise, clients))
    return rounds


@pytest.mark.parametrize("rest", [1e-40, 1e-42, 3e-43, 1e-44])
def test_a_mean_with_a_denormal_scale_is_zero(rest: float, tmp_path: Path) -> None:
    agg = FDMSMeans(num_clients=2, num_params=2, sketch=64, min_weight=0.0)
    for first in (1.0, -1.0):  # their mean is the rest
        agg.step(torch.zeros(2), torch.tensor([[first, rest]]), [0])
    assert agg.scales.tolist() == [0.0, 0.0] and not agg.means.any()
    agg.save(tmp_path / "run")
    assert fastagg.load(tmp_path / "run").counts.tolist() == [2, 0]


def test_by_hand() -> None:
    # Two columns fit into 64 buckets: a sketch is a row with some signs changed. int8 numbers are
    # multiples of 1/127 of the largest one.
    agg = FDMSMeans(num_clients=4, num_params=2)
    agg.step(torch.zeros(2), torch.tensor([[3.0, 0.0], [0.0, 5.0]]), [0, 1])
    assert agg.counts.tolist() == [1, 1, 0, 0]
    assert agg.scales.tolist() == pytest.approx([1 / 127, 1 / 127, 0, 0])
    # Client 2 is new, and client 3 was never active. The direction of client 2 is (0.6, 0.8), so
    # its cosines with those of clients 0 and 1 are 0.6 and 0.8.
    params = torch.zeros(2)
    report = agg.step(params, torch.tensor([[6.0, 8.0]]), [2])
    assert report.friends is not None and report.friends.tolist() == [2, 2, 2, -1]
    assert report.weights.tolist() == [1.0]
    # Now 2 and 0 are active. The mean of 0 is that of (1, 0) and (0.6, -0.8): (0.8, -0.4).
    report = agg.step(params, torch.tensor([[3.0, -4.0], [12.0, 16.0]]), [0, 2])
    assert report.friends is not None and report.friends.tolist() == [0, 2, 2, -1]
    # 2 counts for itself, for 1, and for half of 3, which is divided among the two rows.
    assert report.weights.tolist() == [0.375, 0.625]
    mean = agg.scales[0] * agg.means[0]
    assert sorted(mean.abs().tolist())[-2:] == pytest.approx([0.4, 0.8], abs=0.5 / 127)
    assert report.pairs == 0


@pytest.mark.parametrize("min_weight", [0.0, 0.2, 1.0])
def test_friends_are_those_of_exact_means(min_weight: float) -> None:
    d = 60  # fits into the buckets, so that cosines of sketches are those of rows
    g = torch.Generator().manual_seed(1)
    common = torch.randn(3, d, generator=g)
    agg = FDMSMeans(num_clients=12, num_params=d, sketch=64, min_weight=min_weight)
    means, counts = torch.zeros(12, d).double(), torch.zeros(12)
    compared = 0
    for _ in range(15):
        clients = torch.randperm(12, generator=g)[:5].sort().values
        rows = common[clients % 3] + torch.randn(5, d, generator=g)
        report = agg.step(torch.zeros(d), rows, clients)
        counts[clients] += 1
        weights = (1.0 / counts[clients]).clamp(min=min_weight)[:, None]
        directions = rows.double() / rows.double().norm(dim=1, keepdim=True)
        means[clients] += weights * (directions - means[clients])
        cosines = torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=2)
        assert report.friends is not None
        for k, friend in enumerate(report.friends.tolist()):
            if k in clients:
                assert friend == k
            elif counts[k] == 0:
                assert friend == -1
            else:
                # int8 numbers err by at most half of 1/127 of the largest number (about 0.3) in
                # each of some rounds: 0.2 % of the length.
                assert cosines[k, friend] >= cosines[k, clients].max() - 0.01
                compared += 1
    assert compared > 70


def test_fewer_wrong_friends_than_pairs() -> None:
    def wrong(rule: str) -> float:
        agg, count = fastagg.make(rule, num_clients=K, num_params=D, seed=5), 0
        for rows, clients in grouped_rounds(12, 8):
            friends = agg.step(torch.zeros(D), rows, clients).friends
            assert friends is not None
            known = friends >= 0
            count += int((friends[known] % GROUPS != torch.arange(K)[known] % GROUPS).sum())
        return count

    # Of 384 stand-ins. Most pairs were not yet active together.
    assert wrong("fdms-means") < 0.3 * wrong("fdms")


def test_zero_rows_have_no_direction() -> None:
    agg = FDMSMeans(num_clients=3, num_params=4)
    agg.step(torch.zeros(4), torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0]]), [0, 1])
    assert agg.counts.tolist() == [1, 0, 0]
    report = agg.step(torch.zeros(4), torch.zeros(1, 4), [1])
    assert report.friends is not None and report.friends.tolist() == [-1, 1, -1]
    assert report.weights.tolist() == [1.0]
    before = agg.means.clone()
    agg.step(torch.zeros(4), torch.zeros(1, 4), [0])  # keeps its mean
    assert torch.equal(agg.means, before) and agg.counts.tolist() == [1, 0, 0]


def test_large_and_small_rows_have_the_same_directions() -> None:
    (rows, clients), *_ = grouped_rounds(1, 8)
    found = []
    for factor in (1.0, 2.0**-120, 2.0**90):
        agg = FDMSMeans(num_clients=K, num_params=D)
        agg.step(torch.zeros(D), rows * factor, clients)
        found.append(agg.means.clone())
    # Rows near the end of float32's normal numbers lose their last bits.
    assert torch.equal(found[2], found[0])
    assert int((found[1].int() - found[0].int()).abs().max()) <= 1


def test_the_largest_factor_is_limited() -> None:
    agg = FDMSMeans(num_clients=K, num_params=D, max_share=0.2)
    free = FDMSMeans(num_clients=K, num_params=D)
    for rows, clients in grouped_rounds(6, 8):
        report = agg.step(torch.zeros(D), rows, clients)
        without = free.step(torch.zeros(D), rows, clients)
        assert float(report.weights.max()) <= 0.2 + 1e-6
        assert float(report.weights.sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(without.weights.max()) > 0.2  # in the last round
    assert report.friends is not None and without.friends is not None
    assert float((report.friends == without.friends).float().mean()) > 0.5


def means_of(size: int, groups: int, k: int, seed: int) -> Means:
    base = torch.randn(groups, k, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(size, k, generator=torch.Generator().manual_seed(seed))
    sketches = base[torch.arange(size) % groups] + 0.7 * noise
    return Means.zeros(size, k, torch.device("cpu")).renewed(
        torch.arange(size), sketches.double(), 0.2
    )


def test_clusters_find_the_same_groups() -> None:
    rows, queries = means_of(2_100, 50, 64, 1), means_of(3_000, 50, 64, 2)
    ids, every = torch.arange(0, 3_000, 3), torch.arange(2_100)
    found, similarity = Rows(rows.numbers, True).nearest(queries.numbers, ids, every)
    exact, best = Rows(rows.numbers, False).nearest(queries.numbers, ids, every)
    assert torch.equal(found % 50, ids % 50)
    assert torch.equal(exact % 50, ids % 50)
    assert float((similarity >= 0.98 * best).float().mean()) > 0.99
    dots = (queries.numbers[ids].double() * rows.numbers[found].double()).sum(dim=1)
    expected = dots / rows.numbers[found].double().norm(dim=1)
    torch.testing.assert_close(similarity.double(), expected, rtol=1e-6, atol=0)


def test_clusters_miss_no_group_of_five_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more groups than clusters, so some groups are far from all centers."""
    groups, every = 1_200, torch.arange(6_000)
    rows, queries = means_of(6_000, groups, 128, 1), means_of(6_000, groups, 128, 2)

    def wrong() -> int:
        found, _ = Rows(rows.numbers, True).nearest(queries.numbers, ids, every)
        return int((found % groups != ids % groups).sum())

    ids = torch.arange(6_000)
    assert wrong() == 0
    monkeypatch.setattr("fastagg.rules._mean_sketches.DOUBTFUL", len(ids))
    assert wrong() > 0  # with one query compared with all rows


def test_the_smallest_values() -> None:
    values = torch.tensor([3.0, 1.0, 2.0, 1.0, -0.0, 0.0, 1.0])
    for count in range(8):
        expected = values.sort(stable=True).indices[:count].sort().values
        assert torch.equal(_smallest(values, count).sort().values, expected)


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_few_rows_are_all_compared(size: int) -> None:
    rows, queries = means_of(200, 3, 64, 1), means_of(50, 3, 64, 2)
    some = torch.arange(3, 3 + size)
    found, values = (
        Rows(rows.numbers, clustered).nearest(queries.numbers, torch.arange(50), some)
        for clustered in (False, True)
    )
    assert torch.equal(found[0], values[0]) and torch.equal(found[1], values[1])


def test_equal_rows_make_empty_clusters() -> None:
    numbers = means_of(1, 1, 64, 0).numbers.expand(300, 64).contiguous()
    found, _ = Rows(numbers, True).nearest(numbers, torch.arange(9), torch.arange(300))
    assert found.tolist() == [0] * 9  # ties: the lowest


def test_means_stay_close_to_exact_ones() -> None:
    means, exact = Means.zeros(3, 256, torch.device("cpu")), torch.zeros(3, 256).double()
    common = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    for n in range(1, 60):
        noise = torch.randn(3, 256, generator=torch.Generator().manual_seed(n))
        sketches = (common + noise).double()
        renewed = means.renewed(torch.arange(3), sketches, 0.2)
        means.put_(torch.arange(3), renewed)
        directions = sketches / sketches.norm(dim=1, keepdim=True)
        exact += max(1 / n, 0.2) * (directions - exact)
        # A rounding errs by at most half a scale, and loses a fifth with every later direction.
        error = (means.scales[:, None] * means.numbers - exact).abs().amax(dim=1)
        assert bool((error <= 2.5 * means.scales).all())
    assert means.counts.tolist() == [59] * 3
    torch.testing.assert_close(
        inverse_norms(means.numbers).double(), 1 / means.numbers.double().norm(dim=1)
    )


def test_counts_stop() -> None:
    most = (1 << 31) - 1
    means = Means.zeros(1, 64, torch.device("cpu"))
    means.counts[0] = most
    assert means.renewed(torch.tensor([0]), torch.ones(1, 64).double(), 0.0).counts[0] == most


def test_seeds_give_other_sketches(same_bits: Callable[..., None]) -> None:
    def means(**options: Any) -> Tensor:
        agg = FDMSMeans(num_clients=K, num_params=D, **options)
        for rows, clients in grouped_rounds(2, 8):
            agg.step(torch.zeros(D), rows, clients)
        return agg.means

    same_bits(means(), means(seed=0))
    assert not torch.equal(means(), means(seed=1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sketch": 2048}, ValueError, "sketch: expected a power of two from 64 to 1024, got 2048"),
        ({"sketch": None}, ValueError, "sketch: expected a power of two from 64 to 1024"),
        ({"sketch": 100}, ValueError, "sketch: expected a power of two"),
        ({"sketch": "many"}, TypeError, "sketch: expected an int"),
        ({"seed": -1}, ValueError, "seed: expected at least 0"),
        ({"min_weight": 1.5}, ValueError, r"min_weight: expected a number in \[0, 1\], got 1\.5"),
        ({"min_weight": float("nan")}, ValueError, "min_weight: expected a number"),
        ({"min_weight": "1"}, TypeError, "min_weight: expected a number"),
        (
            {"search": "fast"},
            ValueError,
            "search: expected one of",
        ),
        ({"elimination": "theorem2"}, TypeError, "candidate sets are sets of pairs"),
        ({"similarity": "distance"}, TypeError, "it is always the cosine"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fastagg.make("fdms-means", num_clients=4, num_params=3, **options)  # type: ignore[call-overload]


def test_cosines_of_sketches_have_the_stated_noise() -> None:
    g = torch.Generator().manual_seed(2)
    first, other = torch.randn(2, 4096, generator=g)
    for c in (0.0, 0.5, 0.9):
        second = c * first + (1 - c * c) ** 0.5 * other
        cosines = []
        for seed in range(300):
            agg = FDMSMeans(num_clients=2, num_params=4096, seed=seed)
            agg.step(torch.zeros(4096), torch.stack([first, second]), [0, 1])
            cosines.append(torch.cosine_similarity(*agg.means.double(), dim=0))
        found = torch.stack(cosines)
        # 300 draws: the standard deviation errs by 4 %, its mean by 6 % of it; four times that.
        expected = (1 - c * c) / 256**0.5
        assert float(found.std()) == pytest.approx(expected, rel=0.17)
        truth = float(torch.cosine_similarity(first, second, dim=0))
        assert abs(float(found.mean()) - truth) < 0.24 * expected + 0.005
