# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import _C, ops
from fastagg.ops import reference

# Tiles are 5 or 3 rows, vectors 16, 8 or 4 columns, blocks 16 to 768 columns.
SHAPES = [
    (1, 1),
    (1, 513),
    (2, 3),
    (3, 16),
    (5, 512),
    (6, 1025),
    (7, 31),
    (20, 62_006),
    (20, 4_096),  # rows 16 KB apart: packed although few
    (9, 300_003),  # the longest blocks, and a rest
    (35, 3_000),
    (36, 3_000),  # the smallest number of rows that is packed
    (41, 40_000),
    (23, 5_000),
    (101, 2_047),
    (128, 100),
]
# Roundings of 2**-24 that a product goes through in float32: its lane adds at most 768 / W of a
# block, and W lanes are added in log2(W) steps. Relative to sum |x_i x_j| this is a strict bound,
# 3.1e-6 to 1.2e-5. The worst seen over the tests below is 2e-7, 8e-7 for
# denormal rows, and 1.8e-6 (at d = 1e6, portable) for rows of one magnitude.
ROUNDINGS = {
    "portable": 768 / 4 + 2,
    "avx2": 768 / 8 + 3,
    "avx512": 768 / 16 + 4,
    "neon": 768 / 4 + 2,
}
# On a GPU an element is two bfloat16, so a product is off by 2**-16. A chain of products is 8 sums
# of 8 and of what was before, each of these cut off at 2**-24 of the largest and their sum at
# 2**-23 (an sm_80; an sm_90 loses half as much); a block is 32 chains.
ROUNDINGS |= {"cuda": 2**8 + 8 * (9 + 2) + 512 / 16}


def magnitudes(rows: Tensor) -> Tensor:
    x = rows.double().abs()
    return x @ x.T


def check(got: Tensor, rows: Tensor) -> None:
    expected = reference.gram(rows, dtype=torch.float64)
    assert torch.equal(got, got.T)
    bound = ROUNDINGS[getattr(ops, "device", _C.isa())] * 2.0**-24
    assert ((got - expected).abs() <= bound * magnitudes(rows)).all()


@pytest.mark.parametrize(("S", "d"), SHAPES)
@pytest.mark.parametrize("kind", ["normal", "positive", "correlated", "signs"])
def test_against_oracle(isa: str, S: int, d: int, kind: str) -> None:
    rows = torch.randn(S, d)
    if kind == "positive":
        rows = rows.abs()
    if kind == "correlated":
        rows = 0.01 * rows + torch.randn(d)
    if kind == "signs":  # every block makes the same roundings
        rows = 0.0017 * rows.sign()
    check(ops.gram(rows, dtype=torch.float64), rows)
    assert torch.equal(ops.gram(rows), ops.gram(rows, dtype=torch.float64).float())


def test_by_hand(isa: str) -> None:
    rows = torch.tensor([[1.0, 2.0, 2.0], [0.0, 3.0, -1.0]])
    assert ops.gram(rows).tolist() == [[9.0, 4.0], [4.0, 10.0]]


def test_no_rows() -> None:
    assert ops.gram(torch.empty(0, 7)).shape == (0, 0)
    assert ops.gram([]).shape == (0, 0)
    assert ops.gram(torch.empty(3, 0)).tolist() == [[0.0] * 3] * 3


def test_rows_are_read_where_they_are(isa: str) -> None:
    bank = torch.randn(9, 2, 777)
    strided = bank[:, 1]  # rows 1,554 floats apart
    expected = ops.gram(strided.contiguous())
    assert torch.equal(ops.gram(strided), expected)
    assert torch.equal(ops.gram(list(strided)), expected)
    shifted = torch.empty(9 * 778 + 1)[1:].view(9, 778)[:, :777]  # 4-byte aligned only
    shifted.copy_(strided)
    assert torch.equal(ops.gram(shifted), expected)


def test_independent_of_threads(isa: str) -> None:
    rows = torch.randn(37, 70_001)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        results.append(ops.gram(rows, dtype=torch.float64))
    assert all(torch.equal(results[0], result) for result in results)


@given(seed=st.integers(0, 2**31), S=st.integers(1, 24), d=st.integers(1, 2_000))
def test_entry_depends_on_its_two_rows_alone(seed: int, S: int, d: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(S, d, generator=g)
    full = ops.gram(rows, dtype=torch.float64)
    order = torch.randperm(S, generator=g)
    assert torch.equal(ops.gram(rows[order], dtype=torch.float64), full[order][:, order])
    some = order[: S // 2 + 1]
    assert torch.equal(ops.gram(rows[some], dtype=torch.float64), full[some][:, some])
    pairs = torch.rand(S, S, generator=g) < 0.3
    pairs = pairs | pairs.T
    masked = ops.gram(rows, pairs=pairs, dtype=torch.float64)
    assert torch.equal(masked, torch.where(pairs | torch.eye(S, dtype=torch.bool), full, 0.0))


@pytest.mark.parametrize(
    ("S", "d"),
    [(241, 600), (1000, 600), (2045, 20)]
    + [pytest.param(S, 600, marks=pytest.mark.slow) for S in (2045, 4096)],
)  # more than L2 holds, than one task takes
def test_many_rows(S: int, d: int) -> None:
    rows = torch.randn(S, d)
    got = ops.gram(rows, dtype=torch.float64)
    check(got, rows)
    assert torch.equal(ops.gram(rows[:13], dtype=torch.float64), got[:13, :13])


@pytest.mark.slow
def test_many_rows_on_many_threads() -> None:
    """The memory limit holds the partial sums of two chunks, so workers wait for each other."""
    rows = torch.randn(2045, 1000)
    torch.set_num_threads(1)
    expected = ops.gram(rows, dtype=torch.float64)
    for threads in (3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(ops.gram(rows, dtype=torch.float64), expected)


@pytest.mark.parametrize("groups", [2, 10])
def test_masked_clusters(isa: str, groups: int) -> None:
    S = 120
    group = torch.arange(S) % groups  # interleaved: rows of a group are far apart
    pairs = group[:, None] == group[None, :]
    rows = torch.randn(S, 3_000)
    expected = torch.where(pairs, ops.gram(rows), 0.0)
    assert torch.equal(ops.gram(rows, pairs=pairs), expected)


@pytest.mark.parametrize("sizes", [[1] * 60, [47, 1, 48, 3], [100, 2, 2], [5, 90], [60, 60, 7]])
def test_components_of_all_sizes(sizes: list[int]) -> None:
    """Rows that share no pair are computed separately; small sets are computed together."""
    S = sum(sizes)
    component = torch.repeat_interleave(torch.tensor(sizes))[torch.randperm(S)]
    inside = component[:, None] == component
    # In the largest component a third of the pairs, in the others all.
    holes = (torch.rand(S, S) < 0.6).triu(1)
    pairs = inside & ~((holes | holes.T) & (component == torch.tensor(sizes).argmax()))
    rows = torch.randn(S, 1_300)
    expected = torch.where(pairs, ops.gram(rows, dtype=torch.float64), 0.0)
    expected.diagonal().copy_(ops.gram(rows, dtype=torch.float64).diagonal())
    assert torch.equal(ops.gram(rows, pairs=pairs, dtype=torch.float64), expected)


def test_a_set_without_gaps_is_the_dense_matrix() -> None:
    rows = torch.randn(70, 900)
    pairs = ~torch.eye(70, dtype=torch.bool)  # the diagonal is always computed
    assert torch.equal(ops.gram(rows, pairs=pairs), ops.gram(rows))


@pytest.mark.parametrize("exponent", [-42, -30, -20, 10, 18, 30, 37])
def test_magnitudes(isa: str, exponent: int) -> None:
    # Squares of 1e-42 .. 1e37 leave the range of float32, those of 1e-42 even as denormals hold 7
    # bits: rows are compared after rounding, so the bound is the same for all.
    rows = (torch.randn(7, 3_000).double() * 10.0**exponent).float()
    check(ops.gram(rows, dtype=torch.float64), rows)


def test_magnitudes_side_by_side(isa: str) -> None:
    rows = torch.randn(6, 2_000)
    scaled = rows * torch.tensor([1e-30, 1.0, 1e25, 0.0, 1e-12, 1.0])[:, None]
    check(ops.gram(scaled, dtype=torch.float64), scaled)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_only_bad_rows_have_bad_diagonals(isa: str, bad: float) -> None:
    rows = torch.randn(11, 1_000) * 1e18
    rows[4, 333] = bad
    finite = ops.gram(rows, dtype=torch.float64).diagonal().isfinite()
    assert finite.tolist() == [s != 4 for s in range(11)]


@pytest.mark.slow
def test_cosines_of_large_models_are_right() -> None:
    # The case that blocks are for: all-positive rows, similar to updates with a common drift. The
    # error of a plain float32 product is about 1e-4 here.
    rows = torch.rand(3, 4_000_000)
    exact = reference.cosine_scores(reference.gram(rows, dtype=torch.float64))
    got = ops.cosine_scores(ops.gram(rows, dtype=torch.float64))
    assert (got - exact).abs().max() < 1e-8


@pytest.mark.parametrize(("S", "d"), [(3, 70), (20, 62_006), (70, 900)])
def test_tf32_is_a_lower_bound_on_the_precision(isa: str, S: int, d: int) -> None:
    rows = torch.randn(S, d) + torch.randn(d)
    got = ops.gram(rows, dtype=torch.float64, precision="tf32")
    highest = ops.gram(rows, dtype=torch.float64)
    exact = reference.gram(rows, dtype=torch.float64)
    assert torch.equal(got, got.T)
    # The elements of a product are each off by 2**-11; sums as in the other mode.
    assert ((got - exact).abs() <= (2.0**-10 + 2.0**-18) * magnitudes(rows)).all()
    if isa == "cuda":  # it does round
        assert (got - exact).abs().max() > 10 * (highest - exact).abs().max()
    else:
        assert torch.equal(got, highest)
    both = torch.zeros(S, S, dtype=torch.float64)
    ops.gram_and_sum_(torch.zeros(d), both, rows, torch.ones(S), precision="tf32")
    assert torch.equal(both, got)


@pytest.mark.parametrize(
    ("updates", "options", "error", "message"),
    [
        (torch.ones(2, 3, dtype=torch.float64), {}, TypeError, "updates: expected dtype Float"),
        (torch.ones(3), {}, ValueError, r"updates: expected \[S, d\]"),
        (torch.ones(4, 3).T, {}, ValueError, "contiguous last dimension"),
        ([torch.ones(3), torch.ones(4)], {}, ValueError, "rows of d = 3"),
        ([torch.ones(1, 3)], {}, ValueError, r"expected tensors \[d\]"),
        ([[1.0]], {}, TypeError, "sequence of tensors"),
        (torch.ones(2, 3), {"pairs": torch.ones(3, 3, dtype=torch.bool)}, ValueError, "pairs"),
        (torch.ones(2, 3), {"pairs": torch.ones(2, 2)}, TypeError, "pairs: expected dtype Bool"),
        (
            torch.ones(2, 3),
            {"pairs": torch.tensor([[True, True], [False, True]])},
            ValueError,
            "symmetric",
        ),
        (torch.ones(2, 3), {"dtype": torch.float16}, TypeError, "dtype"),
        (
            torch.ones(2, 3),
            {"precision": "medium"},
            ValueError,
            'precision: expected "highest", "high" or "tf32", got "medium"',
        ),
        (torch.ones(2, 3), {"segment": 0}, ValueError, "segment: expected at least one column"),
    ],
)
def test_bad_arguments(
    updates: Tensor, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ops.gram(updates, **options)  # type: ignore[arg-type]
