# SPDX-License-Identifier: Apache-2.0
"""``sketch=k``: against exact similarities, by statistics, and what it promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import ops
from fastagg.ops import reference
from fastagg.ops.reference._sketch import split_mix
from fastagg.rules._similarity import Similarity, round_seed
from fastagg.updates.any_rows import StreamedRow
from fastagg.updates.columns import Columns

K, S, D = 8, 5, 3000
CLIENTS = [1, 2, 4, 6, 7]
WEIGHTS = torch.linspace(0.1, 0.5, S, dtype=torch.float64)
Check = Any


class Streamed(StreamedRow):
    """A row in memory that is read piece by piece."""

    def __init__(self, row: Tensor, budget: int) -> None:
        self.row, self.num_params, self.budget = row, len(row), budget

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        return scratch.copy_(self.row[begin:end])


def rows_of(seed: int, num_params: int = D) -> Tensor:
    """Rows of two groups of clients; their cosines are about 0.5 within a group."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(2, num_params, generator=generator)
    noise = torch.randn(S, num_params, generator=generator)
    return common[torch.tensor(CLIENTS) % 2] + noise


def read(kind: str, sketch: int | None, rows: Any, t: int = 1, segment: int = 1 << 20) -> Any:
    similarity = Similarity(kind, "high", sketch, seed=11)
    num_params = rows.shape[1] if isinstance(rows, Tensor) else rows[0].num_params
    out = torch.full((num_params,), torch.nan)
    return *similarity.read(Columns(segment), out, rows, WEIGHTS, t), out


@pytest.mark.parametrize("kind", ["cosine", "distance"])
def test_against_the_oracle(kind: str) -> None:
    rows = rows_of(0)
    scores, squares, out = read(kind, 256, rows, t=3)
    sketches, exact = torch.zeros(S, 256).double(), torch.zeros(S).double()
    reference.sketch_(sketches, exact, rows, round_seed(11, 3))
    gram = sketches @ sketches.T
    if kind == "cosine":
        gram.diagonal().copy_(exact)
        expected = reference.cosine_scores(gram)
    else:
        expected = reference.distance_scores(gram)
    # Sketches of length about 1 are rounded to float32, and so are their 256 products.
    scale = 1.0 if kind == "cosine" else exact.max().sqrt().item()
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-6 * scale)
    torch.testing.assert_close(squares, exact, rtol=1e-13, atol=0)
    assert torch.equal(out, ops.weighted_sum_(torch.empty(D), rows, WEIGHTS, 0.0))


@pytest.mark.parametrize("kind", ["cosine", "distance"])
def test_exact_if_a_row_fits_into_the_buckets(kind: str) -> None:
    rows = rows_of(1, 60)  # one block: no two columns meet
    scores, _, _ = read(kind, 64, rows)
    expected, _, _ = read(kind, None, rows)
    scale = 1.0 if kind == "cosine" else rows.norm(dim=1).max().item()
    # A short distance is the root of a difference of squares in float32.
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-3 * scale)
    if kind == "cosine":
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_noise_falls_with_the_rounds() -> None:
    rows, k, rounds = rows_of(2), 128, 400
    exact, _, _ = read("cosine", None, rows)
    cosines = 2.0 * exact[0, 1].item() - 1.0
    found = torch.tensor([read("cosine", k, rows, t=t)[0][0, 1].item() for t in range(rounds)])
    errors = 2.0 * found - 1.0 - cosines
    deviation = ((1.0 + cosines**2) / k) ** 0.5
    # D / k = 23 blocks: P(i, j) is 1/k but for pairs within a block, about 1/23 of all.
    assert errors.std().item() == pytest.approx(deviation * (22 / 23) ** 0.5, rel=0.12)  # 3.4 sigma
    assert abs(errors.mean().item()) < 4.0 * deviation / rounds**0.5


def test_same_bits_from_streams_segments_and_orders(same_bits: Check) -> None:
    rows = rows_of(3)
    for segment in (1 << 20, 1024, 1000):
        scores, squares, out = read("cosine", 64, rows, segment=segment)
        streams = [Streamed(row, budget=4 * S * 1024) for row in rows]
        pieces = read("cosine", 64, streams, segment=min(segment, 1024))
        torch.testing.assert_close(pieces[0], scores, rtol=0, atol=1e-6)
        if segment == 1024:
            same_bits(pieces[0], scores)
            same_bits(pieces[1], squares)
        same_bits(pieces[2], out)
    order = [3, 1, 0, 4, 2]
    permuted, _, _ = read("cosine", 64, rows[order])
    same_bits(permuted, read("cosine", 64, rows)[0][order][:, order])


@pytest.mark.parametrize("rule", ["fdms", "fdms-soft"])
def test_zero_and_huge_rows(rule: str) -> None:
    rows = rows_of(4)
    rows[1] = 0.0
    rows[3] *= 1e30
    agg = fastagg.make(rule, num_clients=K, num_params=D, sketch=64)
    agg.step(torch.zeros(D), rows, CLIENTS)
    scores = agg.state_dict()["scores"]
    assert (scores[2, [1, 4, 6, 7]] == 0.5).all()  # a zero row has no direction
    assert ((scores >= 0.0) & (scores <= 1.0)).all()
    assert agg.state_dict()["counts"].sum() == S * (S - 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(same_state: Check, value: float) -> None:
    agg = fastagg.make("fdms", num_clients=K, num_params=D, sketch=64, nonfinite="drop")
    twin = fastagg.make("fdms", num_clients=K, num_params=D, sketch=64, nonfinite="drop")
    rows = rows_of(5)
    good = [0, 1, 3, 4]
    params, expected = torch.zeros(D), torch.zeros(D)
    broken = rows.clone()
    broken[2, 77] = value
    report = agg.step(params, broken, CLIENTS)
    twin.step(expected, rows[good], [CLIENTS[i] for i in good])
    assert report.rejected.tolist() == [CLIENTS[2]]
    assert torch.equal(params, expected)
    same_state(agg, twin)


def test_a_new_seed_in_every_round_that_a_checkpoint_continues(
    same_state: Check, tmp_path: Any
) -> None:
    agg = fastagg.make("fdms", num_clients=K, num_params=D, sketch=128, seed=9)
    params = torch.zeros(D)
    rows = rows_of(6)
    agg.step(params, rows, CLIENTS)
    first = agg.state_dict()["scores"].clone()
    agg.save(tmp_path / "agg")
    agg.step(params, rows, CLIENTS)
    assert not torch.equal(agg.state_dict()["scores"], first)  # the mean of two estimates
    again = fastagg.load(tmp_path / "agg")
    assert again.options()["sketch"] == 128 and again.options()["seed"] == 9
    again.step(torch.zeros(D), rows, CLIENTS)
    same_state(agg, again)
    assert len({round_seed(0, t) for t in range(100)} | {round_seed(1, 0)}) == 101
    # Output 3 of SplitMix64 that starts from 0xe220a8397b1dcdaf, its first output for seed 0.
    start = torch.tensor([0xE220A8397B1DCDAF - (1 << 64)]).numpy()[0]
    third = split_mix(int(start), np.array([3])).astype(np.int64)
    assert round_seed(0, 3) == int(third[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sketch": 100}, ValueError, "sketch: expected a power of two"),
        ({"sketch": 32}, ValueError, "sketch: expected at least 64"),
        ({"sketch": 1 << 15}, ValueError, "sketch: expected at most 16384"),
        ({"sketch": "64"}, TypeError, "sketch: expected an int"),
        ({"sketch": True}, TypeError, "sketch: expected an int"),
        ({"sketch": 64, "seed": -1}, ValueError, "seed: expected at least 0"),
        ({"sketch": 64, "precision": "tf32"}, ValueError, "precision: expected 'high'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type, message: str) -> None:
    for rule in ("fdms", "fdms-soft"):
        with pytest.raises(error, match=message):
            fastagg.make(rule, num_clients=K, num_params=D, **options)


def test_enqueued_rounds_refuse_sketches() -> None:
    from fastagg.rules.enqueued_fdms import EnqueuedFDMS

    agg = fastagg.make("fdms", num_clients=K, num_params=D, sketch=64)
    with pytest.raises(ValueError, match="expected sketch=None"):
        EnqueuedFDMS(agg, torch.zeros(D))


# --- rules that judge by distances ---------------------------------------------------------------


@pytest.mark.parametrize("spread", [1.0, 1e-3])
@pytest.mark.parametrize("rule", ["krum", "multi-krum"])
def test_outliers_are_left_out(rule: str, spread: float) -> None:
    # Two of nine rows are three times as far from the mean as the others: 24 standard deviations
    # of an estimated squared distance, whose ratio is 5, for k = 512.
    generator = torch.Generator().manual_seed(7)
    common = torch.randn(D, generator=generator)
    for seed in range(10):
        noise = torch.randn(9, D, generator=generator)
        noise[[2, 6]] *= 3.0
        rows = common + spread * noise
        agg = fastagg.make(
            rule, num_clients=9, num_params=D, sketch=512, seed=seed, num_byzantine=2
        )
        weights = agg.step(torch.zeros(D), rows, range(9)).weights
        assert weights[[2, 6]].tolist() == [0.0, 0.0]
        assert weights.sum().item() == pytest.approx(1.0)
        exact = fastagg.make(rule, num_clients=9, num_params=D, num_byzantine=2)
        kept = exact.step(torch.zeros(D), rows, range(9)).weights > 0
        assert rule == "krum" or torch.equal(weights > 0, kept)


def test_huge_rows_do_not_overflow() -> None:
    rows = torch.randn(6, D, generator=torch.Generator().manual_seed(8)) * 1e35
    rows[4] = -rows[0] * 10
    agg = fastagg.make("multi-krum", num_clients=6, num_params=D, sketch=64, num_byzantine=1)
    weights = agg.step(torch.zeros(D), rows, range(6)).weights
    assert weights[4].item() == 0.0 and weights.isfinite().all()


def test_who_refuses_sketches() -> None:
    for rule in ("geometric-median", "centered-clip", "nnm", "bucketing"):
        with pytest.raises(TypeError, match="sketch: sketches keep the distances of two rows"):
            fastagg.make(rule, num_clients=K, num_params=D, sketch=64)
    for rule in ("nnm", "bucketing"):
        with pytest.raises(ValueError, match=r"rule_options: expected no .'sketch'.*of two rows"):
            fastagg.make(
                rule, num_clients=K, num_params=D, rule="krum", rule_options={"sketch": 64}
            )
    with pytest.raises(ValueError, match="sketch: expected None with reuse=True"):
        fastagg.make("krum", num_clients=K, num_params=D, sketch=64, reuse=True)
    with pytest.raises(TypeError, match="has no option"):
        fastagg.make("fedavg", num_clients=K, num_params=D, sketch=64)
