# SPDX-License-Identifier: Apache-2.0
"""trimmed_mean_ and meamed_: against the oracle and by hand, and what they promise of bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

# Every network of few rows; then whole, short and single last runs of 16 and 32 rows, and merges.
SIZES = [*range(1, 34), 47, 48, 63, 64, 65, 97, 128, 129, 160, 255, 257, 500, 1000, 1025]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND = 1.5 * 2.0**-24
"""Of the relative error: the mean is rounded to float32; float64 sums have 2e-16 for each value."""


def computed(
    name: str, rows: Any, count: int, module: Any = None, scales: Tensor | None = None
) -> tuple[Tensor, float]:
    d = rows.shape[1] if isinstance(rows, Tensor) else len(rows[0])
    out, peak = torch.full((d,), math.nan), torch.full((1,), math.nan)
    assert getattr(module or ops, name)(out, peak, rows, count, scales) is out
    return out, peak.item()


def median(rows: Any, module: Any = None) -> tuple[Tensor, float]:
    return computed("trimmed_mean_", rows, (len(rows) - 1) // 2, module)


def columns(S: int, d: int, seed: int = 0) -> Tensor:
    """Normal numbers with zeros of both signs, repeated numbers, and tiny and huge columns."""
    x = torch.randn(S, d, generator=torch.Generator().manual_seed(seed))
    x[:, 1::5] = x[:, 1::5].round()
    x[:, 2::7] *= 1e-40
    x[:, 3::7] *= 1e37
    return x


@pytest.mark.parametrize("S", SIZES)
def test_oracle(isa: str, S: int) -> None:
    x = columns(S, 37)
    half = (S - 1) // 2
    calls = [("trimmed_mean_", trim) for trim in {0, min(1, half), half // 2, half}]
    calls += [("meamed_", keep) for keep in {1, 1 + S // 4, 1 + S // 2, S - S // 5, S}]
    for name, count in calls:
        out, peak = computed(name, x, count)
        expected, largest = computed(name, x, count, reference)
        # Sums in which terms cancel: the terms' errors, relative to the largest one. Subnormal
        # numbers are rounded to multiples of 2^-149.
        scale = x.double().abs().amax(dim=0) * S * 2.0**-53
        error = (out.double() - expected.double()).abs()
        assert (error <= 2 * BOUND * expected.double().abs() + scale + 2.0**-149).all(), name
        assert peak == largest


@pytest.mark.parametrize("S", [1, 7, 16, 20, 33, 70, 300, 1024, 1025])
def test_bits_are_those_of_float64_sums_in_ascending_order(isa: str, S: int) -> None:
    """On a GPU as on the CPU; from 1025 rows on, torch sorts there."""
    x = columns(S, 67)
    ascending = x.double().numpy() + 0.0  # one zero
    ascending.sort(axis=0)
    median = (ascending[(S - 1) // 2] + ascending[S // 2]) / 2.0
    for name, count in (("trimmed_mean_", (S - 1) // 3), ("meamed_", 1 + S // 2)):
        number = S - 2 * count if name == "trimmed_mean_" else count
        begin = np.full(67, count)
        if name == "meamed_":
            leaving, entering = ascending[: S - number], ascending[number:]
            begin = (median - leaving > entering - median).sum(axis=0)
        window = np.take_along_axis(ascending, begin + np.arange(number)[:, None], axis=0)
        total = np.add.accumulate(window, axis=0)[-1]  # one after the other
        expected = torch.from_numpy((total / number).astype(np.float32))
        out, peak = computed(name, x, count)
        assert torch.equal(out, expected), name
        assert peak == x.abs().max().item()


@pytest.mark.parametrize("S", [1, 2, 9, 32, 33, 200])
def test_the_median_is_the_middle_value_or_the_mean_of_two(isa: str, S: int) -> None:
    x = columns(S, 50)
    ascending = x.sort(dim=0).values
    out, _ = median(x)
    if S % 2:
        assert torch.equal(out, ascending[S // 2])
    else:
        pair = ascending[S // 2 - 1 : S // 2 + 1].double()
        assert torch.equal(out, (pair.sum(dim=0) / 2).float())


def test_by_hand(isa: str) -> None:
    x = torch.tensor([[5.0, -1.0], [1.0, 4.0], [100.0, 0.0], [3.0, 1.0]])
    assert median(x)[0].tolist() == [4.0, 0.5]
    assert computed("trimmed_mean_", x, 0)[0].tolist() == [27.25, 1.0]
    # medians 4 and 0.5: 3 and 5; then 1, at 3. And 0 and 1; then -1, at 1.5, before 4.
    assert computed("meamed_", x, 2)[0].tolist() == [4.0, 0.5]
    assert computed("meamed_", x, 3)[0].tolist() == [3.0, 0.0]
    assert computed("meamed_", x, 1)[0].tolist() == [3.0, 0.0]  # the smaller of two at a distance
    assert computed("meamed_", x, 3)[1] == 100.0


def test_ties_at_the_median_go_to_the_smaller_value(isa: str) -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    assert computed("meamed_", x, 2)[0].item() == 1.5
    assert computed("meamed_", x, 4)[0].item() == 1.5
    # All values that are equal count, however few are kept.
    x = torch.tensor([[1.0], [1.0], [1.0], [5.0], [5.0], [5.0], [5.0]])
    assert computed("meamed_", x, 2)[0].item() == 5.0


@given(st.data())
def test_the_same_bits_in_any_order_form_and_thread_count(data: st.DataObject) -> None:
    S = data.draw(st.sampled_from([2, 3, 10, 31, 33, 70, 130]))
    d = data.draw(st.sampled_from([1, 15, 16, 100, 5000]))
    x = columns(S, d, data.draw(st.integers(0, 2**31)))
    x[torch.rand(S, d) < 0.2] = -0.0
    order = data.draw(st.permutations(range(S)))
    strided = torch.full((S, d + 3), math.nan)
    strided[:, :d] = x
    for name, least, most in (("trimmed_mean_", 0, (S - 1) // 2), ("meamed_", 1, S)):
        count = data.draw(st.integers(least, most))
        torch.set_num_threads(1)
        first, peak = computed(name, x, count)
        torch.set_num_threads(3)
        for rows in (x[order], [x[s] for s in order], strided[:, :d]):
            again, largest = computed(name, rows, count)
            assert first.numpy().tobytes() == again.numpy().tobytes()
            assert peak == largest
        cut = data.draw(st.integers(0, d))
        for part in (slice(0, cut), slice(cut, d)):
            if part.start < part.stop:
                again, _ = computed(name, x[:, part], count)
                assert first[part].numpy().tobytes() == again.numpy().tobytes()


@pytest.mark.parametrize("S", [3, 16, 33, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_every_instruction_set_and_for_short_rows(
    isa: str, dtype: torch.dtype, S: int
) -> None:
    x = columns(S, 1100).clamp(-6e4, 6e4).to(dtype)
    for name, count in (("trimmed_mean_", 1), ("meamed_", S - 1)):
        out, peak = computed(name, x, count)
        wide, largest = computed(name, x.float(), count)
        assert out.numpy().tobytes() == wide.numpy().tobytes()
        assert peak == largest
        # The oracle adds in another order; its float64 sums differ in 2e-16 for each value.
        expected, _ = computed(name, x, count, reference)
        torch.testing.assert_close(out, expected, rtol=2.0**-23, atol=1e-13 * peak)


@pytest.mark.parametrize("S", [1, 3, 16, 33, 150, 1025])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_have_the_bits_of_rows_that_were_scaled_before(
    isa: str, dtype: torch.dtype, S: int
) -> None:
    x = columns(S, 101).clamp(-6e4, 6e4).to(dtype)
    scales = torch.linspace(1.0, 0.1, S, dtype=torch.float64)  # the first one is 1
    scaled = torch.stack([row.float().mul(f) for row, f in zip(x, scales.tolist(), strict=True)])
    for name, count in (("trimmed_mean_", (S - 1) // 3), ("meamed_", 1 + S // 2)):
        expected, largest = computed(name, scaled, count)
        for rows in (x, list(x)):
            for factors in (scales, scales.float()):
                out, peak = computed(name, rows, count, scales=factors)
                assert out.numpy().tobytes() == expected.numpy().tobytes()
                assert peak == largest
        oracle, peak = computed(name, x, count, reference, scales)
        torch.testing.assert_close(out, oracle, rtol=2.0**-23, atol=1e-13 * peak)
        assert peak == largest


def test_scales_by_hand(isa: str) -> None:
    x = torch.tensor([[6.0, 8.0], [0.0, 50.0], [3.0, 4.0]])
    scales = torch.tensor([0.5, 0.1, 1.0])
    out, peak = computed("trimmed_mean_", x, 1, scales=scales)
    assert out.tolist() == [3.0, 4.0] and peak == 5.0
    assert computed("meamed_", x, 2, scales=scales)[0].tolist() == [3.0, 4.0]


def test_bits_do_not_depend_on_the_instruction_set() -> None:
    from fastagg import _C

    x = columns(77, 333)
    results, best = [], _C.isa()
    for isa in ("portable", "avx2", "avx512", "neon"):
        try:
            _C.set_isa(isa)
        except ValueError:
            continue
        scales = torch.rand(77, generator=torch.Generator().manual_seed(1))
        results.append(
            [
                computed(name, x, count, scales=factors)[0]
                for name, count in (("trimmed_mean_", 7), ("meamed_", 60))
                for factors in (None, scales)
            ]
        )
    _C.set_isa(best)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("S", [3, 40])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_the_peak_shows_what_trimming_hides(isa: str, value: float, S: int) -> None:
    x = torch.ones(S, 20)
    x[1, 17] = value
    out, peak = median(x)
    assert math.isnan(peak) if math.isnan(value) else peak == math.inf
    assert torch.equal(out, torch.ones(20))
    _, peak = computed("meamed_", x, 2)
    assert not math.isfinite(peak)


def test_no_columns(isa: str) -> None:
    out, peak = median(torch.zeros(3, 0))
    assert out.shape == (0,) and peak == 0.0


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("trimmed_mean_", {"count": 2}, ValueError, r"trim: expected a number in \[0, 1\]"),
        ("trimmed_mean_", {"count": -1}, ValueError, "trim: expected"),
        ("meamed_", {"count": 0}, ValueError, r"keep: expected a number in \[1, 4\]"),
        ("meamed_", {"count": 5}, ValueError, "keep: expected"),
        ("meamed_", {"rows": []}, ValueError, "rows: expected at least one row"),
        ("meamed_", {"rows": torch.zeros(4, 6)}, ValueError, "rows: expected rows of d = 5"),
        ("meamed_", {"rows": torch.zeros(4, 5).double()}, TypeError, "rows: expected dtype"),
        ("trimmed_mean_", {"out": torch.zeros(5).double()}, TypeError, "out: expected dtype"),
        ("trimmed_mean_", {"peak": torch.zeros(2)}, ValueError, "peak: expected shape"),
        ("trimmed_mean_", {"peak": torch.zeros(1).int()}, TypeError, "peak: expected dtype"),
        ("trimmed_mean_", {"scales": torch.ones(3)}, ValueError, "scales: expected"),
        ("meamed_", {"scales": torch.ones(4, dtype=torch.int64)}, TypeError, "scales: expected"),
    ],
)
def test_what_is_refused(
    isa: str, name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {
        "out": torch.zeros(5), "peak": torch.zeros(1), "rows": torch.ones(4, 5), "count": 1
    }  # fmt: skip
    given |= changes
    with pytest.raises(error, match=message):
        getattr(ops, name)(*given.values())
    assert not given["out"].any() and not given["peak"].any()


def test_outputs_must_not_overlap_rows(isa: str) -> None:
    x = torch.ones(4, 5)
    with pytest.raises(ValueError, match="out"):
        ops.trimmed_mean_(x[0], torch.zeros(1), x, 1)
    with pytest.raises(ValueError, match="peak"):
        ops.meamed_(torch.zeros(5), x[1, :1], x, 1)
