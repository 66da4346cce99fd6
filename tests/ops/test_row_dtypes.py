# SPDX-License-Identifier: Apache-2.0
"""bfloat16 and float16 rows give the same bits as float32 rows with the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

F64 = torch.float64
SHORT = [torch.bfloat16, torch.float16]
# Steps are 64 columns, blocks 1,024 and more, groups 8, 4, 2 and 1 rows.
SHAPES = [(1, 1), (2, 65), (4, 1_030), (15, 2_049), (70, 333)]


class Server:
    """Rows of some dtype, S of K = S + 2 clients, and the state of a server."""

    def __init__(self, S: int, d: int, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(S * d)
        self.updates = (torch.randn(S, d, generator=g) + torch.randn(d, generator=g)).to(dtype)
        self.clients = torch.randperm(S + 2, generator=g)[:S]
        self.weights = torch.rand(S, generator=g)
        self.params = torch.randn(d, generator=g)
        self.memory = torch.randn(S + 2, d, generator=g)
        self.owned = torch.randn(S + 2, d, generator=g).to(dtype)
        self.references = [self.params.clone() if s % 3 else None for s in range(S)]
        self.total, self.wide = self.memory.double().sum(dim=0), torch.zeros(d, dtype=F64)
        self.rounded, self.peaks = torch.zeros(d), torch.zeros(S)

    def widened(self) -> Server:
        """Convert the rows to float32 without changing their values."""
        self.updates, self.owned = self.updates.float(), self.owned.float()
        return self

    def changed(self) -> list[Tensor]:
        return [self.params, self.memory, self.total, self.wide, self.rounded, self.peaks]


def weighted_sum(m: object, s: Server) -> None:
    m.weighted_sum_(s.params, s.updates, s.weights, 0.7)  # type: ignore[attr-defined]


def mimic(m: object, s: Server) -> None:
    m.mimic_(s.params, s.updates, s.memory, s.clients, 0.7)  # type: ignore[attr-defined]


def remember_updates(m: object, s: Server) -> None:
    m.memory_update_(  # type: ignore[attr-defined]
        s.params, s.total, s.memory, s.updates, s.clients, s.weights, 0.7, 0.1
    )


def remember_models(m: object, s: Server) -> None:
    m.memory_update_(  # type: ignore[attr-defined]
        s.params, s.total, s.memory, s.updates, s.clients, s.weights, 0.7, 0.1, models=True
    )


def mimic_mean(m: object, s: Server) -> None:
    m.mimic_mean_(  # type: ignore[attr-defined]
        s.wide, s.rounded, s.peaks, s.updates, s.owned, s.clients, s.references
    )


def memory_total(m: object, s: Server) -> None:
    m.memory_total_(  # type: ignore[attr-defined]
        s.wide, s.peaks, s.total, s.owned, s.updates, s.clients, s.weights, s.references, s.params
    )


CALLS = [weighted_sum, mimic, remember_updates, remember_models, mimic_mean, memory_total]
Call = Callable[[object, Server], None]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("S", "d"), SHAPES)
@pytest.mark.parametrize("call", CALLS)
def test_the_bits_of_float32_rows(isa: str, call: Call, S: int, d: int, dtype: torch.dtype) -> None:
    short, wide = Server(S, d, dtype), Server(S, d, dtype).widened()
    call(ops, short)
    call(ops, wide)
    for got, expected in zip(short.changed(), wide.changed(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("call", CALLS)
def test_against_the_oracle(isa: str, call: Call, dtype: torch.dtype) -> None:
    ours, oracle = Server(13, 777, dtype), Server(13, 777, dtype)
    call(ops, ours)
    call(reference, oracle)
    for got, expected in zip(ours.changed(), oracle.changed(), strict=True):
        # 11 roundings of 2**-24 (see test_rows.py) of at most 13 rows, their memory, and a
        # reference, each below 10 here.
        assert (got.double() - expected.double()).abs().max() <= 11 * 2.0**-24 * 3 * 13 * 10


@pytest.mark.parametrize("dtype", SHORT)
def test_every_number_of_the_type(isa: str, dtype: torch.dtype) -> None:
    """All 65,536 patterns: subnormals, infinities and NaN too."""
    row = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    out = torch.full((1 << 16,), 5.0)
    ops.weighted_sum_(out, row[None], torch.ones(1), beta=0.0)
    torch.testing.assert_close(out, row.float(), rtol=0, atol=0, equal_nan=True)
    memory = torch.zeros(1, 1 << 16)
    ops.mimic_(torch.zeros(1 << 16), row[None], memory, torch.arange(1), 1.0)
    finite = row.isfinite()
    assert torch.equal(memory[0, finite], torch.zeros(int(finite.sum())))  # v - u with v = u
    assert memory[0, ~finite].isnan().all()


@pytest.mark.parametrize("dtype", SHORT)
def test_by_hand(isa: str, dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, -0.5]], dtype=dtype)
    out = torch.tensor([10.0, 20.0])
    ops.weighted_sum_(out, rows, torch.tensor([2.0, 1.0]), beta=0.5)
    assert out.tolist() == [5.0 + 2.0 + 3.0, 10.0 + 4.0 - 0.5]
    # v = ((1 + 1) + (3 - 1)) / 2 = 2 and ((2 + 0) + (-0.5 + 0.5)) / 2 = 1
    params, corrections = torch.zeros(2), torch.tensor([[1.0, 0.0], [-1.0, 0.5]])
    ops.mimic_(params, rows, corrections, torch.tensor([0, 1]), 0.5)
    assert params.tolist() == [1.0, 0.5]
    assert corrections.tolist() == [[1.0, -1.0], [-1.0, 1.5]]
    # The total of what is remembered goes from 0 to 2 * (1, 2) + (3, -0.5).
    params, total = torch.zeros(2), torch.zeros(2, dtype=F64)
    memory = torch.zeros(2, 2)
    weights = torch.tensor([2.0, 1.0])
    ops.memory_update_(params, total, memory, rows, torch.tensor([0, 1]), weights, 1.0, 0.5)
    assert (total.tolist(), params.tolist()) == ([5.0, 3.5], [2.5, 1.75])
    assert torch.equal(memory, rows.float())


@pytest.mark.parametrize("dtype", SHORT)
def test_sums_are_not_rounded_to_the_type_of_rows(isa: str, dtype: torch.dtype) -> None:
    # 256 + 1 + ... + 1: a sum in bfloat16 would stay at 256, one in float16 at 2048.
    rows = torch.ones(3_000, 3, dtype=dtype)
    rows[0] = 256.0
    out = ops.weighted_sum_(torch.zeros(3), rows, torch.ones(3_000))
    assert out.tolist() == [3_255.0] * 3


def test_views_at_any_distance_are_read_where_they_are(isa: str) -> None:
    bank = torch.randn(8, 3, 131).bfloat16()
    rows = bank[:, 1]  # 2-byte aligned, 393 numbers apart
    weights = torch.rand(8)
    expected = ops.weighted_sum_(torch.zeros(131), rows.float(), weights)
    assert torch.equal(ops.weighted_sum_(torch.zeros(131), rows, weights), expected)
    assert torch.equal(ops.weighted_sum_(torch.zeros(131), list(rows), weights), expected)


def test_wrong_dtypes_are_refused(isa: str) -> None:
    rows, vector = torch.ones(2, 9), torch.ones(9)
    mixed = [rows[0], rows[1].bfloat16()]
    with pytest.raises(TypeError, match="rows: expected rows of one dtype, got Float and BFloat16"):
        ops.weighted_sum_(vector, mixed, torch.ones(2))
    with pytest.raises(TypeError, match="rows: expected dtype Float, BFloat16 or Half, got Double"):
        ops.weighted_sum_(vector, rows.double(), torch.ones(2))
    with pytest.raises(TypeError, match="updates: expected dtype Float, got BFloat16"):
        ops.gram(rows.bfloat16())
    with pytest.raises(TypeError, match="corrections: expected dtype Float, got BFloat16"):
        ops.mimic_(vector, rows.bfloat16(), rows.bfloat16(), torch.arange(2), 1.0)
    with pytest.raises(TypeError, match="memory: expected dtype BFloat16, got Float"):
        ops.memory_total_(
            torch.zeros(9, dtype=F64), torch.zeros(2), torch.zeros(9, dtype=F64),
            torch.ones(2, 9), rows.bfloat16(), torch.arange(2), torch.ones(2),
        )  # fmt: skip
    assert torch.equal(vector, torch.ones(9))


def test_overlap_is_counted_in_bytes() -> None:
    bank = torch.zeros(40)  # floats; rows of 10 numbers take 5 of them
    short = bank.view(torch.float16)
    ops.weighted_sum_(bank[:10], [short[20:30]], torch.ones(1))
    with pytest.raises(ValueError, match="shares memory with out"):
        ops.weighted_sum_(bank[:10], [short[19:29]], torch.ones(1))
    memory = bank.view(4, 10)
    ops.mimic_(torch.ones(10), [short[20:30]], [memory[0]], torch.arange(1), 1.0)
    with pytest.raises(ValueError, match="shares memory with corrections"):
        ops.mimic_(torch.ones(10), [short[11:21]], [memory[1]], torch.arange(1), 1.0)
