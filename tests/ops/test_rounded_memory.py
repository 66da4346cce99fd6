# SPDX-License-Identifier: Apache-2.0
"""memory_total_ with bfloat16 memory rows and float32 updates, which it rounds. CPU only."""

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

# Steps are 64 columns, blocks 1,024 and more; rows are taken in groups of 4 and 1. The last shape
# exceeds the last-level cache of most processors: its rows are stored past the caches.
SHAPES = [(1, 1), (3, 63), (4, 64), (5, 129), (9, 12_345), (41, 400_003)]
F64, BF16 = torch.float64, torch.bfloat16


class Round:
    """Updates of S of S + 3 clients, their memory rows, and what memory_total_ writes."""

    def __init__(self, S: int, d: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.updates = torch.randn(S, d, generator=g)
        self.memory = [torch.randn(d, generator=g).to(BF16) for _ in range(S)]
        self.clients = torch.randperm(S + 3, generator=g)[:S]
        self.weights = torch.rand(S, generator=g, dtype=F64)
        self.total = torch.randn(d, generator=g, dtype=F64)
        self.kept = [torch.full((d,), -7.0, dtype=BF16) for _ in range(S)]
        self.references: list[Tensor | None] | None = None
        self.params: Tensor | None = None
        self.scales: Tensor | None = None

    def run(self, module: Any = None) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.total, torch.nan)
        peaks = torch.full((len(self.clients),), torch.nan)
        (module or ops).memory_total_(
            out, peaks, self.total, self.memory, self.updates, self.clients, self.weights,
            self.references, self.params, self.kept, scales=self.scales,
        )  # fmt: skip
        return out, peaks


@pytest.fixture
def cpu(isa: str) -> str:
    """An instruction set."""
    if isa == "cuda":
        pytest.skip("not on a GPU, where rules copy rows")
    return isa


def test_a_gpu_refuses_it(isa: str) -> None:
    if isa != "cuda":
        pytest.skip("needs CUDA kernels")
    with pytest.raises(TypeError, match="memory: expected dtype Float, got BFloat16"):
        Round(2, 9).run()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_the_bits_of_float32_rows_with_rounded_values(
    cpu: str, S: int, d: int, scaled: bool
) -> None:
    ours = Round(S, d)
    rows = ours.updates
    if scaled:
        ours.scales = torch.rand(S)
        rows = rows * ours.scales[:, None]
    out, peaks = ours.run()
    rounded = rows.to(BF16)
    assert all(map(torch.equal, ours.kept, rounded))
    wide, kept = torch.empty_like(out), [torch.zeros(d) for _ in range(S)]
    found = torch.empty(S)
    ops.memory_total_(
        wide, found, ours.total, [row.float() for row in ours.memory], rounded.float(),
        ours.clients, ours.weights, kept=kept,
    )  # fmt: skip
    assert torch.equal(out, wide)
    assert torch.equal(peaks, found) and torch.equal(peaks, rounded.float().abs().amax(dim=1))
    assert all(torch.equal(one.float(), other) for one, other in zip(ours.kept, kept, strict=True))


@pytest.mark.parametrize(("S", "d"), SHAPES[:-1])
def test_against_the_oracle(cpu: str, S: int, d: int) -> None:
    ours, oracle = Round(S, d), Round(S, d)
    out, peaks = ours.run()
    expected, wanted = oracle.run(reference)
    # S products and sums in float64, of numbers below 10
    assert (out - expected).abs().max() <= 2 * S * 2.0**-53 * 10 * S
    assert torch.equal(peaks, wanted)
    assert all(map(torch.equal, ours.kept, oracle.kept))


def test_by_hand(cpu: str) -> None:
    # bfloat16 has 8 significant bits: between 1 and 2 the step is 1/128, and ties go to even.
    tie, above = 1.0 + 1 / 256, 1.0 + 1 / 256 + 2.0**-20
    updates = torch.tensor([[tie, above, 1.0 + 3 / 256, -tie]])
    total, out, peaks = torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64), torch.zeros(1)
    memory, kept = [torch.tensor([1.0, 0.0, 0.0, 2.0]).to(BF16)], [torch.zeros(4).to(BF16)]
    ops.memory_total_(
        out, peaks, total, memory, updates, torch.tensor([0]), torch.tensor([2.0]), kept=kept
    )
    assert kept[0].tolist() == [1.0, 1.0 + 1 / 128, 1.0 + 1 / 64, -1.0]
    assert out.tolist() == [0.0, 2 * (1.0 + 1 / 128), 2 * (1.0 + 1 / 64), -6.0]
    assert peaks.tolist() == [1.0 + 1 / 64]


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    edge=st.lists(st.sampled_from([0x7F7FFFFF, 0x7F7F8000, 0x7F800001, 0x7FFFFFFF, 1, 0x8000])),
)
def test_any_bits_are_rounded_as_torch_does(bits: list[int], edge: list[int]) -> None:
    numbers = torch.tensor([*bits, *edge], dtype=torch.int64).to(torch.int32)
    row = numbers.view(torch.float32)
    kept, zeros = torch.zeros(len(row), dtype=BF16), torch.zeros(len(row), dtype=F64)
    peaks = torch.zeros(1)
    ops.memory_total_(
        zeros.clone(), peaks, zeros, [torch.zeros_like(kept)], [row], torch.tensor([0]),
        torch.ones(1), kept=[kept],
    )  # fmt: skip
    expected = row.to(BF16)
    nan = expected.isnan()
    assert torch.equal(kept.isnan(), nan)
    assert torch.equal(kept[~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert torch.equal(peaks.isnan(), nan.any(dim=0, keepdim=True))
    if not nan.any():
        assert peaks == expected.float().abs().max()


@given(seed=st.integers(0, 2**31), S=st.integers(1, 20), d=st.integers(1, 700))
def test_order_and_threads_do_not_matter(seed: int, S: int, d: int) -> None:
    first, second = Round(S, d, seed), Round(S, d, seed)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(seed)).tolist()
    second.updates, second.clients = second.updates[order], second.clients[order]
    second.weights = second.weights[order]
    second.memory = [second.memory[s] for s in order]
    (out, peaks), threads = first.run(), torch.get_num_threads()
    torch.set_num_threads(1 + seed % 3)
    again, shuffled = second.run()
    torch.set_num_threads(threads)
    assert torch.equal(out, again) and torch.equal(peaks[order], shuffled)
    for place, s in enumerate(order):
        assert torch.equal(first.kept[s], second.kept[place])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3.4e38])  # the last one rounds to infinity
def test_a_bad_row_shows_in_its_peak_and_in_the_sum(cpu: str, bad: float) -> None:
    round_ = Round(6, 1_000)
    round_.weights[4] = 0.0  # does not hide the bad row
    round_.updates[4, 777] = bad
    out, peaks = round_.run()
    assert peaks.isfinite().tolist() == [s != 4 for s in range(6)]
    assert out.isfinite().tolist() == [k != 777 for k in range(1_000)]


def test_no_updates(cpu: str) -> None:
    total, out = torch.randn(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    memory, nobody = torch.zeros(3, 5, dtype=BF16), torch.empty(0, dtype=torch.int64)
    for updates in ([], torch.empty(0, 5)):
        peaks, weights = torch.empty(0), torch.empty(0, dtype=torch.float64)
        ops.memory_total_(out.zero_(), peaks, total, memory, updates, nobody, weights, [], None, [])
        assert torch.equal(out, total)


def test_a_matrix_of_memory_rows_and_nothing_kept(cpu: str) -> None:
    round_ = Round(4, 500)
    expected, peaks = round_.run()
    matrix = torch.zeros(7, 500, dtype=BF16)
    for client, row in zip(round_.clients.tolist(), round_.memory, strict=True):
        matrix[client] = row
    round_.memory, round_.kept = matrix, []  # type: ignore[assignment]
    out, found = round_.run()
    assert torch.equal(out, expected) and torch.equal(found, peaks)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"params": torch.ones(9)}, ValueError, "params: expected None with bfloat16 memory rows"),
        ({"references": [None] * 4}, ValueError, "references: expected none with bfloat16 memory"),
        ({"kept": [torch.ones(9)] * 4}, TypeError, "kept: expected dtype BFloat16, got Float"),
        ({"kept": [torch.ones(8).to(BF16)] * 4}, ValueError, r"kept: expected shape \[9\]"),
        ({"updates": torch.ones(4, 9).half()}, TypeError, "memory: expected dtype Half"),
        (
            {"memory": [torch.ones(9).to(BF16)] * 3 + [torch.ones(9)]},
            TypeError,
            "memory: expected dtype BFloat16, got Float",
        ),
        (
            {"memory": [torch.ones(9)] + [torch.ones(9).to(BF16)] * 3},
            TypeError,
            "memory: expected dtype Float, got BFloat16",
        ),
        ({"clients": torch.tensor([1, 2, 1, 0])}, ValueError, "got 1 twice"),
    ],
)
def test_bad_arguments(changes: dict[str, object], error: type[Exception], match: str) -> None:
    round_ = Round(4, 9)
    written = round_.kept
    for name, value in changes.items():
        setattr(round_, name, value)
    with pytest.raises(error, match=match):
        round_.run()
    assert all(bool((row == -7.0).all()) for row in written)


def test_overlap_is_counted_in_bytes() -> None:
    round_ = Round(1, 10)
    bank = torch.zeros(40, dtype=BF16)
    round_.memory, round_.kept = [bank[:10]], [bank[10:20]]
    round_.run()
    round_.kept = [bank[9:19]]
    with pytest.raises(ValueError, match="shares memory with kept"):
        round_.run()
