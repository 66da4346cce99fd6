# SPDX-License-Identifier: Apache-2.0
"""apply_weighted_sum_: the bits of two ops, and parameters that keep theirs beyond a limit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

LIMIT = 1e38


def call(
    params: Tensor,
    rows: Tensor | list[Tensor],
    weights: Tensor,
    lr: float = 0.3,
    largest: float = math.inf,
    limit: float = LIMIT,
) -> tuple[bool, Tensor]:
    """Apply the op to ``params``; return what it writes besides."""
    before, applied = torch.full_like(params, 7.0), torch.zeros((), dtype=torch.bool)
    assert (
        ops.apply_weighted_sum_(params, before, applied, rows, weights, lr, largest, limit)
        is params
    )
    return bool(applied), before


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize(("S", "d"), [(1, 1), (2, 63), (9, 1_000), (10, 62_006), (33, 40_001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("listed", [False, True])
def test_bits_are_those_of_two_sums(
    isa: str, S: int, d: int, dtype: torch.dtype, listed: bool
) -> None:
    rows, weights = torch.randn(S, d).to(dtype), torch.rand(S, dtype=torch.float64)
    params = torch.randn(d)
    start, rate = params.clone(), torch.tensor([0.3], dtype=torch.float64)
    expected = params.clone()
    total = ops.weighted_sum_(torch.empty(d), rows, weights, beta=0.0)
    ops.weighted_sum_(expected, [total], rate)
    applied, before = call(params, list(rows) if listed else rows, weights)
    assert applied and torch.equal(params, expected) and torch.equal(before, start)

    oracle, flag = start.clone(), torch.zeros((), dtype=torch.bool)
    reference.apply_weighted_sum_(oracle, before, flag, rows, weights, 0.3, math.inf, LIMIT)
    # Weights and the sum are rounded to float32 once each: at most 2^-23 of the largest sum.
    assert bool(flag) and (params - oracle).abs().max() <= 2.0**-23 * (1 + total.abs().max())


@pytest.mark.parametrize("S", [1, 2, 3, 4, 9, 17])
@pytest.mark.parametrize("d", [*range(1, 80), 4_099])
def test_ties_are_rounded_alike(isa: str, S: int, d: int) -> None:
    """A product that is rounded before the sum gives another number than one that is not.

    The factor 0.7 is 4.4e-17 too small in float64. So if a row has v = 5 m, 0.7 v is at least
    5.3e-10 below 3.5 m, and is rounded to 3.5 m. ``params`` + 3.5 m is halfway between two float32
    numbers, and is rounded to the even one. If the product is not rounded, the sum is a float64
    number below (they are 9.3e-10 apart here), and is rounded down.
    """
    rows = torch.zeros(S, d)
    rows[-1] = 5.0 * torch.randint(2_400_000, 2_800_000, (d,))
    halfway = torch.randint(12_000_000, 16_000_000, (d,)).double() / 2 + 0.25
    params = (halfway - 0.7 * rows[-1].double()).float()
    assert torch.equal(params.double() + 0.7 * rows[-1].double(), halfway)
    rate = torch.tensor([0.7], dtype=torch.float64)
    weights = torch.ones(S, dtype=torch.float64)
    total = ops.weighted_sum_(torch.empty(d), rows, weights, beta=0.0)
    assert torch.equal(total, rows[-1])
    expected = ops.weighted_sum_(params.clone(), [total], rate)
    assert torch.equal(expected, (params.double() + 0.7 * total.double()).float())
    assert call(params, rows, weights, 0.7)[0] and torch.equal(params, expected)


@pytest.mark.parametrize("S", range(1, 18))
@pytest.mark.parametrize("d", [7, 23, 1_061])
def test_any_division_into_columns_gives_the_same_bits(isa: str, S: int, d: int) -> None:
    """Vectors and single columns: a compiler may fuse another product in each loop."""
    rows, weights = torch.randn(S, d), torch.rand(S, dtype=torch.float64)
    params, parts = torch.randn(d), []
    for start in range(0, d, 7):
        part = params[start : start + 7].clone()
        assert call(part, rows[:, start : start + 7].contiguous(), weights, 0.7)[0]
        parts.append(part)
    assert call(params, rows, weights, 0.7)[0]
    assert torch.equal(bits(params), bits(torch.cat(parts)))


def pairs() -> tuple[Tensor, Tensor]:
    """Return two vectors with sums of all kinds: ties and almost ties, denormals, zeros, limits."""
    anything = torch.randint(-(2**31), 2**31, (2, 300_000), dtype=torch.int64).int()
    anything = anything.view(torch.float32)
    a, b = anything[:, anything.isfinite().all(0)]
    a = torch.cat([a, a, a, torch.randn(20_000) * 1e-39])
    ulp = torch.frexp(a[: 2 * len(b)].abs())[1].sub(25)  # half of that of a
    half = torch.ldexp(torch.ones_like(ulp, dtype=torch.float32), ulp)
    near = half * (1 + torch.randint(-1, 2, half.shape) * 2.0**-23)
    b = torch.cat([b, near, torch.randn(20_000) * 1e-39])
    zeros = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 3.4028235e38])
    a, b = (torch.cat(x) for x in ((a, zeros.repeat(8)), (b, zeros.repeat_interleave(8))))
    return a, b


@pytest.mark.parametrize("offset", [0, 1, 63])
def test_a_rate_of_one_has_the_bits_of_float64(isa: str, offset: int) -> None:
    """Then floats are added, with no conversion; a sum begins with 0, so it is never -0."""
    a, b = (x[offset:].clone() for x in pairs())
    expected = (a.double() + (b.double() + 0.0)).float()
    assert expected.isinf().any() and (expected == 0.0).sum() > 4
    one = torch.ones(1, dtype=torch.float64)
    added = ops.weighted_sum_(a.clone(), [b], one)
    assert torch.equal(bits(added), bits(expected))
    params, finite = a[expected.isfinite()], expected.isfinite()
    assert call(params, [b[finite]], one, lr=1.0, limit=math.inf)[0]
    assert torch.equal(bits(params), bits(expected[finite]))


def test_worked_by_hand() -> None:
    params = torch.tensor([1.0, -2.0])
    rows = torch.tensor([[2.0, 4.0], [6.0, -4.0]])
    applied, before = call(params, rows, torch.tensor([0.5, 0.25]), lr=2.0)
    assert applied and params.tolist() == [1.0 + 2.0 * 2.5, -2.0 + 2.0 * 1.0]
    assert before.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("S", range(1, 18))
def test_two_groups_in_one_pass_have_the_bits_of_two(isa: str, S: int) -> None:
    """One pass takes two groups of float32 rows, and never two of short rows, which are widened."""
    d = 1_061
    short, weights = torch.randn(S, d).to(torch.bfloat16), torch.rand(S, dtype=torch.float64)
    rows = short.to(torch.float32)
    params = torch.randn(d)
    expected, sums = params.clone(), [torch.randn(d)] * 2
    assert call(params, rows, weights)[0] and call(expected, short, weights)[0]
    assert torch.equal(bits(params), bits(expected))
    for beta in (0.0, 0.7):
        sums = [
            ops.weighted_sum_(total.clone(), given, weights, beta=beta)
            for total, given in zip(sums, (rows, short), strict=True)
        ]
        assert torch.equal(bits(sums[0]), bits(sums[1]))


@pytest.mark.parametrize("where", [0, 20_000, 62_005])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_bad_row_leaves_the_bits(isa: str, where: int, bad: float, weight: float) -> None:
    params, rows = torch.randn(62_006), torch.randn(10, 62_006)
    rows[9, where] = bad
    weights = torch.full((10,), 0.1)
    weights[9] = weight
    start = params.clone()
    applied, before = call(params, rows, weights)
    assert not applied and torch.equal(params, start) and torch.equal(before, start)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_parameters_keep_their_bits(bad: float) -> None:
    params = torch.randn(5_000)
    params[4_321] = bad
    start = bits(params).clone()
    assert not call(params, torch.randn(3, 5_000), torch.ones(3))[0]
    assert torch.equal(bits(params), start)


def test_limits_are_inclusive() -> None:
    start, rows = torch.tensor([3.0, -5.0]), torch.tensor([[4.0, 1.0]])
    one = torch.ones(1)
    for largest, limit, expected in (
        (4.0, 7.0, True),  # 5 + 0.5 * 4
        (3.999, 7.0, False),
        (4.0, 6.999, False),
        (math.inf, LIMIT, True),
    ):
        params = start.clone()
        assert call(params, rows, one, 0.5, largest, limit)[0] == expected
        assert params.tolist() == ([5.0, -4.5] if expected else [3.0, -5.0])


def test_an_infinite_sum_is_never_applied() -> None:
    params, rows = torch.ones(3), torch.tensor([[1.0, math.inf, 1.0]])
    assert not call(params, rows, torch.ones(1), limit=math.inf)[0] and params.tolist() == [1.0] * 3


def test_no_rows_and_no_columns() -> None:
    params = torch.arange(2500.0)
    applied, before = call(params, torch.empty(0, 2500), torch.empty(0), largest=0.0)
    assert applied and torch.equal(before, torch.arange(2500.0)) and torch.equal(params, before)
    params[0] = -0.0  # and 0 more is 0, as it is with rows
    assert call(params, torch.empty(0, 2500), torch.empty(0))[0]
    assert math.copysign(1.0, params[0].item()) == 1.0
    params[2400] = math.nan
    assert not call(params, torch.empty(0, 2500), torch.empty(0))[0]
    assert call(torch.empty(0), torch.empty(2, 0), torch.ones(2))[0]


def test_any_number_of_threads_gives_the_same_bits() -> None:
    params, rows, weights = torch.randn(300_000), torch.randn(20, 300_000), torch.rand(20)
    expected = params.clone()
    call(expected, rows, weights)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            got, broken = params.clone(), rows.clone()
            assert call(got, rows, weights)[0] and torch.equal(got, expected)
            broken[3, 150_000] = math.nan
            got = params.clone()
            assert not call(got, broken, weights)[0] and torch.equal(got, params)
    finally:
        torch.set_num_threads(before)


def test_the_path_for_other_devices() -> None:
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    op = torch.ops.fastagg.apply_weighted_sum_.default
    params, rows, weights = torch.randn(5_000), torch.randn(9, 5_000), torch.rand(9)
    for limit in (LIMIT, 1.0):
        one, two = params.clone(), params.clone()
        applied, before = call(one, rows, weights, limit=limit)
        written, flag = torch.zeros(5_000), torch.zeros((), dtype=torch.bool)
        op._op_dk(key, two, written, flag, [rows], weights, 0.3, math.inf, limit)
        assert bool(flag) == applied and torch.equal(one, two) and torch.equal(written, before)


def test_bad_arguments() -> None:
    params, rows, weights = torch.zeros(4), torch.ones(2, 4), torch.ones(2)
    flag = torch.zeros((), dtype=torch.bool)
    with pytest.raises(ValueError, match="before: expected shape"):
        ops.apply_weighted_sum_(params, torch.zeros(3), flag, rows, weights, 1.0, 1.0, 1.0)
    with pytest.raises(TypeError, match="applied: expected dtype Bool"):
        ops.apply_weighted_sum_(
            params, torch.zeros(4), torch.zeros(()), rows, weights, 1.0, 1.0, 1.0
        )
    for other in (params, rows[0]):
        with pytest.raises(ValueError, match="memory"):
            ops.apply_weighted_sum_(params, other, flag, rows, weights, 1.0, 1.0, 1.0)
    assert params.tolist() == [0.0] * 4
