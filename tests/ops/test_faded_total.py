# SPDX-License-Identifier: Apache-2.0
"""The second sum of memory_total_ and quantized_total_, for every kind of memory rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

KINDS = ["float32", "bfloat16", "float16", "rounded", "int8"]
# Steps are 64 columns, blocks 1,024 and more; rows are taken in groups of 4, 2 and 1.
SHAPES = [(1, 1), (3, 63), (4, 64), (7, 129), (9, 12_345)]
CASES = [(kind, S, d) for kind in KINDS for S, d in SHAPES]
# These exceed the last-level cache of most processors: new rows are stored past the caches.
CASES += [("float32", 25, 400_003), ("rounded", 25, 400_003)]
F64, BF16 = torch.float64, torch.bfloat16


class Round:
    """Updates of S of S + 3 clients, memory rows of one kind, and what a call writes."""

    def __init__(self, kind: str, S: int, d: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.kind = kind
        self.updates = torch.randn(S, d, generator=g)
        self.memory = list(torch.randn(S, d, generator=g))
        self.clients = torch.randperm(S + 3, generator=g)[:S]
        self.weights = torch.rand(S, generator=g, dtype=F64)
        self.faded_weights = torch.randn(S, generator=g, dtype=F64)
        self.fading = 0.3
        self.total = torch.randn(d, generator=g, dtype=F64)
        self.kept = list(torch.full((S, d), torch.nan))
        self.scales = self.kept_scales = torch.empty(0)
        self.factors: Tensor | None = None
        if kind in ("bfloat16", "float16"):
            dtype = getattr(torch, kind)
            self.updates = self.updates.to(dtype)
            self.memory = [row.to(dtype) for row in self.memory]
        elif kind == "rounded":
            self.memory = [row.to(BF16) for row in self.memory]
            self.kept = [row.to(BF16) for row in self.kept]
        elif kind == "int8":
            blocks, rows = -(-d // 256), self.memory
            self.scales, self.kept_scales = torch.empty(S, blocks), torch.empty(S, blocks)
            self.memory = [torch.empty(d, dtype=torch.int8) for _ in range(S)]
            self.kept = [torch.empty(d, dtype=torch.int8) for _ in range(S)]
            ops.quantize_(self.memory, self.scales, rows)

    def permuted(self, order: list[int]) -> None:
        for name in ("updates", "clients", "weights", "faded_weights"):
            setattr(self, name, getattr(self, name)[order])
        self.memory = [self.memory[s] for s in order]
        if self.kind == "int8":
            self.scales = self.scales[order]

    def run(self, module: Any = None, *, faded: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return out, faded (NaN if it was not asked for) and peaks."""
        module = module or ops
        out, other = (torch.full_like(self.total, torch.nan) for _ in range(2))
        peaks = torch.full((len(self.clients),), torch.nan)
        second: dict[str, Any] = {}
        if faded:
            second = {"faded": other, "faded_weights": self.faded_weights, "fading": self.fading}
        common = out, peaks, self.total, self.memory
        rows = self.updates, self.clients, self.weights
        if self.kind == "int8":
            scales = list(self.scales)
            module.quantized_total_(*common, scales, *rows, self.kept, self.kept_scales, **second)
        else:
            kept = self.kept if self.kind in ("float32", "rounded") else None
            module.memory_total_(*common, *rows, kept=kept, scales=self.factors, **second)
        return out, other, peaks


def skip_without_rounding(kind: str, isa: str) -> None:
    if (kind, isa) == ("rounded", "cuda"):
        pytest.skip("not on a GPU, where rules copy rows")


def test_hand_worked(isa: str) -> None:
    out, faded, peaks = torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64), torch.zeros(2)
    ops.memory_total_(
        out,
        peaks,
        torch.tensor([10.0, 20.0], dtype=F64),
        [torch.tensor([4.0, 8.0]), torch.tensor([0.0, 16.0])],
        [torch.tensor([1.0, 2.0]), torch.tensor([5.0, -6.0])],
        torch.tensor([0, 1]),
        torch.tensor([1.0, 2.0]),
        faded=faded,
        faded_weights=torch.tensor([3.0, 0.5]),
        fading=0.25,
    )
    # 10 + (1 - 4) + 2 (5 - 0), 20 + (2 - 8) + 2 (-6 - 16)
    assert out.tolist() == [17.0, -30.0]
    # 10 / 4 + 3 (1 - 1) + (5 - 0) / 2, 20 / 4 + 3 (2 - 2) + (-6 - 4) / 2
    assert faded.tolist() == [5.0, 0.0]
    assert peaks.tolist() == [2.0, 6.0]


@pytest.mark.parametrize(("kind", "S", "d"), CASES)
def test_against_the_oracle(isa: str, kind: str, S: int, d: int) -> None:
    skip_without_rounding(kind, isa)
    ours = Round(kind, S, d)
    out, faded, peaks = ours.run()
    kept, scales = [row.clone() for row in ours.kept], ours.kept_scales.clone()
    expected, wanted, _ = ours.run(reference)
    # All of it is float64, on numbers below 8: a term, of at most 8 (8 + 0.3 * 8) = 84, is rounded
    # up to three times, and a sum of at most 84 S + 8 once for each row.
    bound = 2.0**-53 * (3 + S + 1) * (84 * S + 8)
    assert (out - expected).abs().max() <= bound
    assert (faded - wanted).abs().max() <= bound
    # The first sum, the rows and the peaks are those of a call without the second one.
    alone, _, same = ours.run(faded=False)
    assert torch.equal(alone, out) and torch.equal(same, peaks)
    both = zip(ours.kept, kept, strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in both)
    assert torch.equal(ours.kept_scales, scales)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_same_weights_and_without_fading_both_sums_have_the_same_bits(
    isa: str, kind: str
) -> None:
    skip_without_rounding(kind, isa)
    ours = Round(kind, 9, 1_031)
    ours.faded_weights, ours.fading = ours.weights, 1.0
    out, faded, _ = ours.run()
    assert torch.equal(faded, out)


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31),
    S=st.integers(0, 20),
    d=st.integers(0, 700),
)
def test_order_and_threads_do_not_matter(kind: str, seed: int, S: int, d: int) -> None:
    if S == 0 and kind != "int8":
        kind = "float32"  # no row tells another dtype
    first, second = Round(kind, S, d, seed), Round(kind, S, d, seed)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(seed)).tolist()
    second.permuted(order)
    (out, faded, _), threads = first.run(), torch.get_num_threads()
    torch.set_num_threads(1 + seed % 3)
    again, shuffled, _ = second.run()
    torch.set_num_threads(threads)
    assert torch.equal(out, again) and torch.equal(faded, shuffled)


@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_give_the_same_bits(kind: str) -> None:
    ours, threads = Round(kind, 25, 60_001), torch.get_num_threads()  # 2 MB for each of 3 threads
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            results.append(ours.run())
        finally:
            torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", ["float32", "rounded"])
def test_both_sums_are_those_of_scaled_rows(isa: str, kind: str) -> None:
    skip_without_rounding(kind, isa)
    ours, scaled = Round(kind, 7, 1_031), Round(kind, 7, 1_031)
    ours.factors = torch.rand(7)
    scaled.updates = ours.updates * ours.factors[:, None]
    assert all(map(torch.equal, ours.run(), scaled.run()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_show(isa: str, kind: str, bad: float) -> None:
    skip_without_rounding(kind, isa)
    ours = Round(kind, 5, 300)
    ours.updates[2, 299] = bad
    _, faded, peaks = ours.run()
    assert not faded[299].isfinite() and not peaks[2].isfinite()
    assert faded[:256].isfinite().all()  # int8 rows share a scale in blocks of 256


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_wrong_arguments_change_nothing(isa: str, kind: str) -> None:
    ours = Round(kind, 2, 9)

    def refuse(error: type[Exception], match: str, **arguments: Any) -> None:
        out = torch.full((9,), 7.0, dtype=F64)
        peaks = torch.full((2,), 7.0)
        rows = ours.updates, ours.clients, ours.weights
        with pytest.raises(error, match=re.escape(match)):
            if kind == "int8":
                ops.quantized_total_(
                    out, peaks, ours.total, ours.memory, list(ours.scales), *rows, ours.kept,
                    ours.kept_scales, **arguments,
                )  # fmt: skip
            else:
                ops.memory_total_(out, peaks, ours.total, ours.memory, *rows, **arguments)
        assert (out == 7.0).all() and (peaks == 7.0).all() and (faded == 0.0).all()

    faded, weights = torch.zeros(9, dtype=F64), ours.faded_weights
    together = "faded_weights: expected with faded, and only then"
    refuse(ValueError, together, faded=faded)
    refuse(ValueError, together, faded_weights=weights)
    refuse(TypeError, "faded: expected dtype Double", faded=faded.float(), faded_weights=weights)
    refuse(ValueError, "faded: expected shape [9]", faded=faded[:8], faded_weights=weights)
    refuse(ValueError, "faded_weights: expected shape [2]", faded=faded, faded_weights=weights[:1])
    refuse(
        ValueError,
        "total: shares memory with faded, which this call changes",
        faded=ours.total,
        faded_weights=weights,
    )
    if kind == "float32":
        more = {"faded": faded, "faded_weights": weights}
        refuse(ValueError, "params: expected None with faded", params=torch.zeros(9), **more)
        refuse(
            ValueError,
            "references: expected none with faded",
            references=[torch.zeros(9), None],
            **more,
        )
