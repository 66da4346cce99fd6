# SPDX-License-Identifier: Apache-2.0
"""Models minus a base as updates: read in place by rules that read them once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg.distributed import shard_bounds
from fastagg.distributed.ranks import ShardedColumns
from fastagg.updates.columns import Columns
from fastagg.updates.differences import DifferenceRow, Differences

S, D, K = 5, 3_000, 6
CLIENTS = [4, 0, 3, 1, 5]


def models(dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[list[Tensor]], Tensor]:
    """Return the base, models of three layers, and the updates [S, D]."""
    g = torch.Generator().manual_seed(3)
    base = torch.randn(D, generator=g)
    whole = (base + 0.1 * torch.randn(S, D, generator=g)).to(dtype)
    layers = [[row[:1_000].view(10, 100), row[1_000:1_001], row[1_001:]] for row in whole]
    updates = (whole.double() - base.double()).float() if dtype == torch.float64 else whole - base
    return base, layers, updates.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", ["fedavg", "amplified", "fedau", "fdms", "mifa", "mimic", "krum"])
def test_parameters_have_the_bits_of_updates_in_memory(rule: str, dtype: torch.dtype) -> None:
    base, layers, updates = models(dtype)
    ends = []
    for given in (Differences(layers, base), updates):
        agg = fastagg.make(rule, num_clients=K, num_params=D, nonfinite="drop")
        params = base.clone()
        for _ in range(2):
            report = agg.step(params, given, CLIENTS)
        ends.append((params, report.weights, agg.state_dict()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    for name, value in ends[0][2].items():
        # Norms are summed in another order.
        bound = 1e-6 if name == "norms" else 0.0
        assert torch.allclose(value.double(), ends[1][2][name].double(), rtol=bound, atol=0.0), name


@pytest.mark.parametrize("rule", ["fedavg", "fdms", "mifa"])
def test_bad_models_are_dropped(rule: str) -> None:
    base, layers, updates = models()
    layers[1][0][3, 7] = updates[1, 307] = torch.nan
    layers[3][2][5] = updates[3, 1_006] = 2e19  # finite; its square is not, in float32
    ends = []
    for given in (Differences(layers, base), updates):
        agg = fastagg.make(rule, num_clients=K, num_params=D, nonfinite="drop")
        params = base.clone()
        agg.step(params, updates[[0, 2, 4]], [4, 3, 5])  # so that norms are known
        ends.append((params, agg.step(params, given, CLIENTS)))
    for _, report in ends:
        assert report.rejected.tolist() == [0, 1]
        assert "NaN or Inf" in report.reasons[0]
        assert report.reasons[1].startswith("norm 2e+19, but the adaptive max_norm is")
    assert torch.equal(ends[0][0], ends[1][0])


def test_a_sum_reads_rows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: DifferenceRow, begin: int, end: int, scratch: Tensor) -> Tensor:
        raise AssertionError("the updates are written into scratch")

    monkeypatch.setattr(DifferenceRow, "read", read)
    base, layers, updates = models()
    out, weights = torch.empty(D), torch.rand(S, dtype=torch.float64)
    squares = Columns(1 << 20).sum_and_squares_(out, Differences(layers, base).rows, weights)
    assert torch.allclose(squares, updates.double().square().sum(dim=1), rtol=1e-6)
    for segment in (1 << 10, 1 << 20):
        got, expected = torch.empty(D), torch.empty(D)
        gram = Columns(segment).gram_and_sum_(got, Differences(layers, base).rows, weights)
        assert torch.equal(gram, Columns(segment).gram_and_sum_(expected, updates, weights))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("elimination", [None, "theorem2"])
def test_fdms_has_the_bits_of_updates_in_memory(elimination: str | None) -> None:
    base, layers, updates = models()
    ends = []
    for given in (Differences(layers, base), updates):
        agg = fastagg.make("fdms", num_clients=K, num_params=D, elimination=elimination)
        assert agg.reads_streams_once == (elimination is None)
        params = base.clone()
        for _ in range(3):
            agg.step(params, given, CLIENTS)
        agg.step(params, updates[:2], CLIENTS[:2])  # four clients need friends
        ends.append((params, agg.scores))
    assert all(map(torch.equal, *ends))


def test_rows_of_several_kinds_are_read_in_pieces() -> None:
    base, layers, updates = models()
    rows = [*Differences(layers[:3], base).rows, *Differences(layers[3:], base.clone()).rows]
    out, weights = torch.empty(D), torch.rand(S, dtype=torch.float64)
    squares = Columns(1 << 20).sum_and_squares_(out, rows, weights)
    # Pieces are squared by gram, whose bound is 1e-7 of the largest entry.
    wanted = updates.double().square().sum(dim=1)
    assert (squares - wanted).abs().max() <= 1e-7 * wanted.max()
    assert torch.equal(out, fastagg.ops.weighted_sum_(torch.zeros(D), updates, weights, beta=0.0))


class InTurn:
    """Ranks that add their parts one after the other, in one process."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def add_in_order(self, parts: list[Tensor]) -> Tensor:
        self.parts += [part.clone() for part in parts]
        total = self.parts[0].clone()
        for part in self.parts[1:]:
            total += part
        return total


@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_have_the_same_bits_on_any_number_of_ranks(ranks: int) -> None:
    base, layers, _ = models()
    segment, weights = 512, torch.rand(S, dtype=torch.float64)
    expected = torch.empty(D)
    alone = Columns(segment).sum_and_squares_(expected, Differences(layers, base).rows, weights)
    turns: Any = InTurn()
    for begin, end in shard_bounds(D, ranks, segment):
        here = []  # the parts of layers in the columns of this rank
        for model in layers:
            starts = itertools.accumulate([0, *(layer.numel() for layer in model[:-1])])
            both = zip(model, starts, strict=True)
            cut = [layer.view(-1)[max(begin - at, 0) : max(end - at, 0)] for layer, at in both]
            here.append([part for part in cut if len(part)])
        out, rows = torch.empty(end - begin), Differences(here, base[begin:end].clone()).rows
        squares = ShardedColumns(segment, begin, turns).sum_and_squares_(out, rows, weights)
        assert torch.equal(out, expected[begin:end])
    assert torch.equal(squares, alone)


def test_wrong_models() -> None:
    base, layers, _ = models()
    with pytest.raises(ValueError, match="models: expected 3000 numbers, as in the base, got 2999"):
        Differences([[layers[0][0], layers[0][2]]], base)
    with pytest.raises(TypeError, match="models: expected floating-point tensors"):
        Differences([[torch.zeros(D, dtype=torch.int32)]], base)


def test_models_with_bases_of_their_own() -> None:
    base, layers, updates = models()
    bases = [base, torch.zeros(D), base, base.clone(), base]
    given = [*layers]
    given[1] = [updates[1]]
    agg, params = fastagg.make("fedavg", num_clients=K, num_params=D), base.clone()
    agg.step(params, Differences(given, bases), CLIENTS)
    expected = base.clone()
    fastagg.make("fedavg", num_clients=K, num_params=D).step(expected, updates, CLIENTS)
    assert torch.equal(params, expected)
