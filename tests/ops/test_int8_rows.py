# SPDX-License-Identifier: Apache-2.0
"""quantize_, dequantize_ and quantized_total_: rows of int8 numbers with scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference
from fastagg.ops.scales import SCALE_BLOCK, num_scales

# Scales are those of 256 columns; steps have 64 columns, tasks up to 16,384; rows are taken in
# groups of 4 and 1.
SHAPES = [(1, 1), (2, 64), (3, 255), (4, 256), (5, 257), (9, 12_345), (2, 40_001)]
F64 = torch.float64


class Rows8:
    """S rows of int8 with scales, not yet written."""

    def __init__(self, S: int, d: int) -> None:
        self.numbers = [torch.full((d,), -128, dtype=torch.int8) for _ in range(S)]
        self.scales = torch.full((S, num_scales(d)), torch.nan)

    def values(self, module: Any = None) -> Tensor:
        """Return the rows as float32 [S, d]."""
        out = torch.full((len(self.numbers), len(self.numbers[0])), torch.nan)
        (module or ops).dequantize_(list(out), self.numbers, list(self.scales))
        return out


def quantized(rows: Tensor, module: Any = None) -> Rows8:
    found = Rows8(*rows.shape)
    (module or ops).quantize_(found.numbers, found.scales, rows)
    return found


def drawn(S: int, d: int, seed: int = 0) -> Tensor:
    """Return rows whose blocks have very different magnitudes, and a block of zeros."""
    g = torch.Generator().manual_seed(seed)
    magnitudes = 10.0 ** torch.randint(-30, 30, (S, num_scales(d)), generator=g)
    magnitudes[:, -1] *= torch.arange(S) % 3 > 0
    return torch.randn(S, d, generator=g) * magnitudes.repeat_interleave(SCALE_BLOCK, 1)[:, :d]


def same(one: Rows8, other: Rows8) -> bool:
    return torch.equal(one.scales, other.scales) and all(
        map(torch.equal, one.numbers, other.numbers)
    )


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_against_oracle(isa: str, S: int, d: int) -> None:
    rows = drawn(S, d)
    found, oracle = quantized(rows), quantized(rows, reference)
    assert same(found, oracle)  # defined bit by bit
    assert torch.equal(found.values(), oracle.values(reference))


def test_by_hand(isa: str) -> None:
    # The largest number is 127 steps; halves of a step are rounded away from zero.
    rows = torch.tensor([[127.0, 1.0, 0.5, -0.5, 0.49, -1.5, 63.6, 0.0]])
    found = quantized(rows)
    assert found.scales.tolist() == [[1.0]]
    assert found.numbers[0].tolist() == [127, 1, 1, -1, 0, -2, 64, 0]
    assert found.values().tolist() == [[127.0, 1.0, 1.0, -1.0, 0.0, -2.0, 64.0, 0.0]]
    zeros = quantized(torch.zeros(1, 300))
    assert not zeros.scales.any() and not zeros.numbers[0].any()


@given(
    values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=600),
    exponent=st.integers(-60, 1),
)
def test_the_error_is_as_small_as_stated(values: list[float], exponent: int) -> None:
    row = torch.tensor([values]) * 2.0**exponent
    found = quantized(row)
    error = (found.values().double() - row.double()).abs()
    for b, block in enumerate(row[0].double().split(SCALE_BLOCK)):
        largest = float(block.abs().max())
        # half a step, and three roundings of float32 for up to 127 steps
        bound = max((1 + 2.0**-14) * largest / 254, 2.0**-119)
        assert error[0, SCALE_BLOCK * b : SCALE_BLOCK * (b + 1)].max() <= bound
        part = found.numbers[0][SCALE_BLOCK * b : SCALE_BLOCK * (b + 1)].abs()
        assert part.max() == (127 if found.scales[0, b] > 0 else 0)  # as checkpoints are checked
        assert (found.scales[0, b] > 0) == (largest >= 2.0**-119)


def test_the_stated_error_is_tight() -> None:
    rows = torch.rand(4, 5_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    error = (quantized(rows).values() - rows).abs().max()
    assert 0.99 / 254 < error <= (1 + 2.0**-14) / 254


def test_subnormal_scales_become_zero(isa: str) -> None:
    below = 2.0**-119 * (1 - 2.0**-24)
    rows = torch.tensor([[2.0**-119, 0.0], [below, -below], [1e-44, 0.0]])
    found = quantized(rows)
    assert found.scales[:, 0].tolist() == [torch.tensor(2.0**-119).div(127).item(), 0.0, 0.0]
    assert [row.tolist() for row in found.numbers] == [[127, 0], [0, 0], [0, 0]]


def test_the_largest_floats_stay_finite(isa: str) -> None:
    largest = torch.finfo(torch.float32).max
    rows = torch.tensor([[largest, -largest, 1e38], [-largest * (1 - 2.0**-23), 0.0, 1.0]])
    found = quantized(rows)
    assert same(found, quantized(rows, reference))
    values = found.values()
    assert values.isfinite().all()
    error = (values.double() - rows.double()).abs()
    assert error.max() <= (1 + 2.0**-14) * largest / 254


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_stays_so(isa: str, bad: float) -> None:
    rows = torch.randn(2, 700)
    rows[1, 300] = bad
    found = quantized(rows)
    assert found.scales.isfinite().tolist() == [[True] * 3, [True, False, True]]
    values = found.values()
    assert not values[1, 256:512].isfinite().any()
    assert not found.numbers[1][256:512].any()
    oracle = quantized(rows, reference)
    assert all(map(torch.equal, found.numbers, oracle.numbers))
    assert values[0].isfinite().all() and values[1, :256].isfinite().all()


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_rows_in_pieces_have_the_same_blocks(S: int, d: int) -> None:
    rows = drawn(S, d, 2)
    whole, cut = quantized(rows), d // 2 // SCALE_BLOCK * SCALE_BLOCK
    left, right = quantized(rows[:, :cut]), quantized(rows[:, cut:])
    assert torch.equal(torch.cat([left.scales, right.scales], 1), whole.scales)
    for s, row in enumerate(whole.numbers):
        assert torch.equal(torch.cat([left.numbers[s], right.numbers[s]]), row)


class Round:
    """Updates of S clients, their memory rows, and what quantized_total_ writes."""

    def __init__(self, S: int, d: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.updates = torch.randn(S, d, generator=g)
        self.memory = quantized(torch.randn(S, d, generator=g))
        self.scales = list(self.memory.scales)
        self.clients = torch.randperm(S + 3, generator=g)[:S]
        self.weights = torch.rand(S, generator=g, dtype=F64)
        self.total = torch.randn(d, generator=g, dtype=F64)
        self.kept = Rows8(S, d)

    def run(self, module: Any = None) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.total, torch.nan)
        peaks = torch.full((len(self.clients),), torch.nan)
        (module or ops).quantized_total_(
            out, peaks, self.total, self.memory.numbers, self.scales, self.updates, self.clients,
            self.weights, self.kept.numbers, self.kept.scales,
        )  # fmt: skip
        return out, peaks


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_one_pass_has_the_bits_of_two(isa: str, S: int, d: int) -> None:
    round_ = Round(S, d)
    out, peaks = round_.run()
    rounded = quantized(round_.updates)
    assert same(round_.kept, rounded)
    values, expected, found = rounded.values(), torch.empty_like(out), torch.empty(S)
    ops.memory_total_(
        expected, found, round_.total, list(round_.memory.values()), values, round_.clients,
        round_.weights,
    )  # fmt: skip
    assert torch.equal(out, expected)
    assert torch.equal(peaks, found) and torch.equal(peaks, values.abs().amax(dim=1))
    oracle, wanted = round_.run(reference)
    assert (out - oracle).abs().max() <= 1e-13 * S * 16  # all of it float64
    assert torch.equal(peaks, wanted)


@given(seed=st.integers(0, 2**31), S=st.integers(1, 20), d=st.integers(1, 700))
def test_order_and_threads_do_not_matter(seed: int, S: int, d: int) -> None:
    first, second = Round(S, d, seed), Round(S, d, seed)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(seed)).tolist()
    second.updates, second.clients = second.updates[order], second.clients[order]
    second.weights = second.weights[order]
    second.memory.numbers = [second.memory.numbers[s] for s in order]
    second.scales = [second.scales[s] for s in order]
    (out, peaks), threads = first.run(), torch.get_num_threads()
    torch.set_num_threads(1 + seed % 3)
    again, shuffled = second.run()
    torch.set_num_threads(threads)
    assert torch.equal(out, again) and torch.equal(peaks[order], shuffled)
    assert torch.equal(first.kept.scales[order], second.kept.scales)
    for place, s in enumerate(order):
        assert torch.equal(first.kept.numbers[s], second.kept.numbers[place])


def test_a_bad_row_shows_in_its_peak_and_in_the_sum(isa: str) -> None:
    for bad in (math.nan, math.inf):
        round_ = Round(6, 1_000)
        round_.weights[4] = 0.0  # does not hide the bad row
        round_.updates[4, 777] = bad
        out, peaks = round_.run()
        assert peaks.isfinite().tolist() == [s != 4 for s in range(6)]
        assert out.isfinite().tolist() == [not 768 <= k < 1_000 for k in range(1_000)]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"updates": torch.ones(4, 8)}, ValueError, "updates: expected rows of d = 9"),
        ({"updates": torch.ones(4, 9).double()}, TypeError, "updates: expected dtype Float"),
        ({"scales": [torch.ones(2)] * 4}, ValueError, r"memory_scales: expected shape \[1\]"),
        ({"scales": [torch.ones(1)] * 3}, ValueError, "memory_scales: expected 4 tensors"),
        ({"memory": Rows8(4, 8)}, ValueError, r"memory: expected shape \[9\]"),
        ({"memory": Rows8(3, 9)}, ValueError, "memory: expected 4 tensors, one for each row"),
        ({"kept": Rows8(3, 9)}, ValueError, "kept: expected 4 tensors"),
        ({"clients": torch.tensor([1, 2, 1, 0])}, ValueError, "got 1 twice"),
        ({"clients": torch.tensor([1, 2, -1, 0])}, IndexError, "got -1"),
    ],
)
def test_bad_arguments(changes: dict[str, object], error: type[Exception], match: str) -> None:
    round_ = Round(4, 9)
    for name, value in changes.items():
        setattr(round_, name, value)
    with pytest.raises(error, match=match):
        round_.run()
    assert round_.kept.scales.isnan().all()
    assert all(bool((row == -128).all()) for row in round_.kept.numbers)


def test_bad_arguments_of_quantize() -> None:
    found = Rows8(2, 300)
    with pytest.raises(ValueError, match=r"scales: expected shape \[2, 2\]"):
        ops.quantize_(found.numbers, torch.zeros(2, 1), torch.randn(2, 300))
    with pytest.raises(TypeError, match="numbers: expected dtype Char"):
        ops.quantize_([torch.zeros(300)] * 2, found.scales, torch.randn(2, 300))
    with pytest.raises(ValueError, match="numbers: expected rows that share no memory"):
        ops.quantize_(found.numbers[:1] * 2, found.scales, torch.randn(2, 300))
    with pytest.raises(ValueError, match="out: expected 2 rows, got none"):
        ops.dequantize_([], found.numbers, list(found.scales))
    with pytest.raises(ValueError, match="numbers: expected 1 tensors"):
        ops.dequantize_([torch.zeros(300)], found.numbers, list(found.scales))
    assert found.scales.isnan().all()


def test_no_rows() -> None:
    for blocks in (0, 3):
        ops.quantize_([], torch.zeros(0, blocks), [])
    with pytest.raises(ValueError, match="scales: expected shape"):
        ops.quantize_([], torch.zeros(1, 3), [])
    ops.dequantize_([], [], [])
