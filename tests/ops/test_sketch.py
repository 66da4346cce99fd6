# SPDX-License-Identifier: Apache-2.0
"""sketch_: against the oracle and by hand, its statistics against the theory, and its promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import _C, ops
from fastagg.ops import reference
from tests.ops.conftest import available

F64 = torch.float64


def sketched(
    rows: Tensor | list[Tensor], k: int, seed: int, begin: int = 0, module: Any = None
) -> tuple[Tensor, Tensor]:
    out, squares = torch.zeros(len(rows), k, dtype=F64), torch.zeros(len(rows), dtype=F64)
    (module or ops).sketch_(out, squares, rows, seed, begin)
    return out, squares


@pytest.fixture(name="settings")
def _settings() -> Iterator[list[tuple[str, int]]]:
    """Instruction sets of this processor, each with some numbers of threads; both are reset."""
    best, threads = _C.isa(), torch.get_num_threads()
    yield [(name, n) for name in available() if name != "cuda" for n in (1, 2, 5)]
    _C.set_isa(best)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("S", "d", "k", "begin"),
    [
        (1, 1, 64, 0), (2, 64, 64, 0), (3, 65, 64, 63), (2, 5000, 256, 100), (2, 5000, 1024, 1023),
        (4, 12_345, 512, 511), (1, 40_000, 4096, 5), (2, 40_000, 16_384, 2**62 - 3), (3, 0, 64, 9),
        (2, 150_007, 128, 60_001),  # a GPU divides it into four parts
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_oracle(isa: str, S: int, d: int, k: int, begin: int, dtype: torch.dtype) -> None:
    rows = torch.randn(S, d, generator=torch.Generator().manual_seed(d)).to(dtype)
    for seed in (0, -1, 2**63 - 1):
        out, squares = sketched(rows, k, seed, begin)
        expected, norms = sketched(rows, k, seed, begin, reference)
        # Sums of float64 in another order: each has at most d / k + 1 terms.
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-15 * (d / k + 1) * 8)
        torch.testing.assert_close(squares, norms, rtol=1e-13, atol=0)
        rounded = torch.zeros(S, k)
        ops.sketch_(rounded, torch.zeros(S, dtype=F64), rows, seed, begin)
        assert torch.equal(rounded, out.float())


def test_by_hand(isa: str) -> None:
    # The first outputs of SplitMix64 with seed 0 are 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, ...
    # So block 0 is rotated by 0xe2 >> 2 = 56: column 0 goes to bucket 56, column 8 to bucket 0.
    # Bucket 0 has bit 31 of word 0 = 0xa1b965f4, which is set: a negative sign. Bucket 56 (3 * 16
    # + 8) has bit 28 of word 8, the lower half of output 5 = 0x53cb9f0c747ea2ea: 0x7 = 0b0111, set.
    row = torch.zeros(1, 64)
    row[0, 0], row[0, 8] = 3.0, 0.5
    out, squares = sketched(row, 64, seed=0)
    assert {i: out[0, i].item() for i in out[0].nonzero().flatten().tolist()} == {56: -3.0, 0: -0.5}
    assert squares.tolist() == [9.25]


@given(st.data())
def test_same_bits_for_any_split_and_order(data: st.DataObject) -> None:
    k = data.draw(st.sampled_from([64, 128, 1024]))
    d = data.draw(st.integers(1, 6000))
    begin = data.draw(st.integers(0, 3000))
    cuts = sorted(data.draw(st.lists(st.integers(0, d), max_size=4)))
    order = data.draw(st.permutations(range(3)))
    rows = torch.randn(3, d, generator=torch.Generator().manual_seed(d)).exp()
    whole, squares = sketched(rows, k, 5, begin)
    parts, norms = torch.zeros_like(whole), torch.zeros_like(squares)
    for first, last in zip([0, *cuts], [*cuts, d], strict=True):
        ops.sketch_(parts, norms, rows[:, first:last], 5, begin + first)
    assert torch.equal(whole, parts)
    torch.testing.assert_close(squares, norms, rtol=1e-14, atol=0)
    permuted, _ = sketched(rows[order], k, 5, begin)
    assert torch.equal(whole[order], permuted)
    apart, _ = sketched(rows[1:2], k, 5, begin)
    assert torch.equal(whole[1:2], apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_with_any_instruction_set_and_threads(
    settings: list[tuple[str, int]], dtype: torch.dtype
) -> None:
    for S, d, k, begin in ((1, 300_001, 1024, 77), (9, 70_003, 64, 5), (40, 20_000, 4096, 4095)):
        rows = torch.randn(S, d, generator=torch.Generator().manual_seed(S)).to(dtype)
        found = []
        for name, threads in settings:
            _C.set_isa(name)
            torch.set_num_threads(threads)
            found.append(sketched(rows, k, 5, begin))
        for out, squares in found[1:]:
            assert torch.equal(out, found[0][0]) and torch.equal(squares, found[0][1])


def test_rows_of_other_layouts(isa: str) -> None:
    rows = torch.randn(4, 700)
    expected, _ = sketched(rows, 64, 3)
    wide = torch.zeros(4, 1001)
    wide[:, 301:] = rows  # at an odd address
    for layout in (wide[:, 301:], list(rows), wide[:, 301:].unbind()):
        out, squares = torch.zeros(4, 64, dtype=F64), torch.zeros(4, dtype=F64)
        ops.sketch_(out, squares, layout, 3)
        assert torch.equal(out, expected)


def test_adds_to_what_is_there(isa: str) -> None:
    rows = torch.randn(2, 300)
    out, squares = sketched(rows, 64, 3)
    again, doubled = out.clone(), squares.clone()
    ops.sketch_(again, doubled, rows, 3)
    torch.testing.assert_close(again, 2 * out, rtol=0, atol=1e-14)
    assert torch.equal(doubled, 2 * squares)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 63, 64, 499])
def test_squares_show_rows_that_are_not_finite(isa: str, value: float, place: int) -> None:
    rows = torch.full((3, 500), 3e38)
    rows[1, place] = value
    _, squares = sketched(rows, 128, 1)
    assert squares.isfinite().tolist() == [True, False, True]


# --- statistics ---------------------------------------------------------------------------------

K, D = 64, 1024


def rows_of_kind(kind: str) -> Tensor:
    """Two rows [2, D]."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(2, D, generator=g)
    if kind == "positive":
        return rows.abs()
    if kind == "correlated":
        return rows + 3 * torch.randn(D, generator=g)
    if kind == "few columns":  # which a projection with one nonzero a column finds hardest
        rows[:, torch.randperm(D, generator=g)[: D - 8]] = 0.0
    if kind == "equal columns k apart":  # all meet in one bucket if two blocks are rotated alike
        rows = rows[:, :K].repeat(1, D // K)
    if kind == "one block":
        rows[:, K:] = 0.0
    return rows


def theory(x: Tensor, y: Tensor, k: int) -> float:
    """Return the variance of sketch(x) @ sketch(y)."""
    blocks = (x.view(-1, k), y.view(-1, k))
    same = (blocks[0].square().sum(1) @ blocks[1].square().sum(1)) + (
        (blocks[0] * blocks[1]).sum(1).square().sum()
    )
    return max(((x @ x * (y @ y) + (x @ y) ** 2 - same) / k).item(), 0.0)


@pytest.mark.parametrize(
    "kind",
    [
        "few columns",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("random", "positive", "correlated", "equal columns k apart", "one block")
        ),
    ],
)
def test_mean_and_variance(kind: str) -> None:
    rows, runs = rows_of_kind(kind), 4000
    products = torch.empty(runs, dtype=F64)
    for run in range(runs):
        out, _ = sketched(rows, K, run)
        products[run] = out[0] @ out[1]
    x, y = rows.double()
    expected, variance = (x @ y).item(), theory(x, y, K)
    # Five standard errors: of the mean, and of the variance by the sample's fourth moment.
    errors = products - expected
    assert abs(errors.mean()) <= 5 * (variance / runs) ** 0.5 + 1e-12 * abs(expected)
    spread = (errors.square().var() / runs).sqrt()
    assert abs(errors.square().mean() - variance) <= 5 * spread + 1e-9
    if kind == "one block":  # its columns never meet
        assert variance == pytest.approx(0.0, abs=1e-9)
    else:
        assert variance > 0.2 * (x @ x * (y @ y) + (x @ y) ** 2).item() / K


def test_error_of_cosines_falls_with_k() -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 20_000, generator=g)
    i, j = torch.triu_indices(40, 40, 1)
    for k in (64, 256, 1024):
        out, squares = sketched(rows, k, 11)
        cosines = (out @ out.T) / torch.outer(squares, squares).sqrt()
        true = torch.corrcoef(rows)  # means are near 0
        error = (cosines - true)[i, j].square().mean().sqrt().item() * k**0.5
        assert 0.9 < error < 1.1  # 780 pairs; theory: 1


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 63, 65, 96, 32, 32_768])
def test_number_of_buckets(k: int) -> None:
    out, squares = torch.zeros(2, k, dtype=F64), torch.zeros(2, dtype=F64)
    with pytest.raises(ValueError, match=r"out: expected shape \[S, k\] with k a power of two"):
        ops.sketch_(out, squares, torch.ones(2, 100), 0)


def test_bad_arguments_change_nothing() -> None:
    out, squares, rows = torch.zeros(2, 64, dtype=F64), torch.zeros(2, dtype=F64), torch.ones(2, 9)
    bad = [
        (out.half(), squares, rows, 0, 0, TypeError, "out: expected dtype Double or Float"),
        (out[0], squares, rows, 0, 0, ValueError, "out: expected shape"),
        (out, squares.float(), rows, 0, 0, TypeError, "squares: expected dtype Double"),
        (out, squares[:1], rows, 0, 0, ValueError, "squares: expected shape"),
        (out, squares, rows.double(), 0, 0, TypeError, "rows: expected dtype Float, BFloat16"),
        (out, squares, rows[:1], 0, 0, ValueError, "rows: expected 2 rows, as in out, got 1"),
        (out, squares, rows, 0, -1, ValueError, "begin: expected a column in"),
        (out, squares, rows, 0, 2**63 - 1, ValueError, "begin: expected a column in"),
        (out, out[0, :2], rows, 0, 0, ValueError, "squares: shares memory with out"),
    ]
    for a, b, c, seed, begin, error, message in bad:
        with pytest.raises(error, match=message):
            ops.sketch_(a, b, c, seed, begin)
    same = torch.zeros(4, 64)
    with pytest.raises(ValueError, match="rows: a row shares memory with out"):
        ops.sketch_(same[:2], squares, same[1:3], 0)
    assert not out.any()
    assert not squares.any()


# --- sketch_and_sum_ ----------------------------------------------------------------------------


@pytest.mark.parametrize("S", [1, 2, 3, 7, 8, 9, 31, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_in_one_pass_have_the_bits_of_two(isa: str, S: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(S)
    sizes = [(1, 64, 5), (700, 64, 0), (9001, 1024, 3000), (40_000, 256, 4095)]
    for d, k, begin in sizes if isa != "cuda" else sizes[:3]:  # the last is long in the emulator
        rows = torch.randn(S, d, generator=generator).to(dtype)
        weights = torch.rand(S, generator=generator, dtype=torch.float64)
        expected, norms = sketched(rows, k, 5, begin)
        for threads in (1, 2, 64) if isa != "cuda" else (1,):
            old = torch.get_num_threads()
            torch.set_num_threads(threads)
            out, squares = torch.zeros(S, k, dtype=F64), torch.zeros(S, dtype=F64)
            total = torch.full((d,), torch.nan)
            found = ops.sketch_and_sum_(total, out, squares, list(rows), weights, 5, begin)
            torch.set_num_threads(old)
            assert found is total
            assert torch.equal(out, expected) and torch.equal(squares, norms)
            summed = ops.weighted_sum_(torch.zeros(d), rows, weights, 0.0)
            assert torch.equal(total, summed)


def test_both_of_more_rows_than_a_batch_and_more_columns(isa: str) -> None:
    # A batch is 128 rows; batches take 2^20 columns in turn.
    S, d = (150, 1_100_000) if isa != "cuda" else (9, 3_000)
    three = torch.randn(3, d, generator=torch.Generator().manual_seed(3))
    rows = [three[s % 3] for s in range(S)]
    weights = torch.rand(S, dtype=torch.float64)
    sketches, squares = sketched(rows, 256, 5, 77)
    out, norms, total = torch.zeros_like(sketches), torch.zeros_like(squares), torch.zeros(d)
    ops.sketch_and_sum_(total, out, norms, rows, weights, 5, 77)
    assert torch.equal(out, sketches) and torch.equal(norms, squares)
    assert torch.equal(total, ops.weighted_sum_(torch.zeros(d), rows, weights, 0.0))


def test_both_against_the_oracle(isa: str) -> None:
    rows, weights = torch.randn(20, 5000), torch.rand(20)
    results = []
    for module in (ops, reference):
        arguments = torch.zeros(5000), torch.zeros(20, 64).double(), torch.zeros(20).double()
        module.sketch_and_sum_(*arguments, rows, weights, 3, 100)  # type: ignore[attr-defined]
        results.append(arguments)
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-5)


def test_both_without_rows(isa: str) -> None:
    out, squares = torch.zeros(0, 64).double(), torch.zeros(0).double()
    total = torch.full((5,), torch.nan)
    ops.sketch_and_sum_(total, out, squares, [], torch.zeros(0), 1)
    assert total.tolist() == [0.0] * 5


def test_wrong_arguments_of_both_change_nothing() -> None:
    rows, weights = torch.randn(3, 70), torch.rand(3)
    total, out, squares = torch.ones(70), torch.ones(3, 64).double(), torch.ones(3).double()
    good: dict[str, Any] = {
        "sum": total, "out": out, "squares": squares, "rows": rows, "weights": weights, "seed": 1
    }  # fmt: skip
    for name, wrong in (
        ("sum", torch.ones(69)), ("sum", rows[0]), ("sum", total.double()), ("out", out.float()),
        ("out", torch.ones(3, 96).double()), ("squares", torch.ones(2).double()),
        ("sum", torch.ones(71)), ("weights", weights[:2]), ("begin", -1),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError, RuntimeError), match=name):
            ops.sketch_and_sum_(**{**good, name: wrong})
    for tensor in (total, out, squares):
        assert (tensor == 1.0).all()
