# SPDX-License-Identifier: Apache-2.0
"""mimic_mean_, memory_total_ and add_total_: rounds whose received rows become memory rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import _C, ops
from fastagg.ops import reference
from fastagg.updates.allocation import allocate_rows

# Blocks are 1,024 columns for a small d and 16,384 for a large one, in steps of 64; rows are taken
# in groups of 8, 4, 2 and 1.
SHAPES = [
    (1, 1), (2, 5), (3, 64), (4, 4096), (5, 4099), (9, 12_345), (23, 2_049), (2, 600_001),
]  # fmt: skip
F64 = torch.float64


class Server:
    """Updates of S of K clients and their memory rows, two thirds with a reference."""

    def __init__(self, S: int, d: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.updates = torch.randn(S, d, generator=g) + torch.randn(d, generator=g)
        self.clients = torch.randperm(S + 3, generator=g)[:S]
        self.weights = torch.rand(S, generator=g, dtype=F64)
        self.params = torch.randn(d, generator=g)
        self.total = torch.randn(d, generator=g, dtype=F64)
        self.rows = list(torch.randn(S, d, generator=g).unbind())
        shared = torch.randn(2, d, generator=g)
        which = torch.randint(0, 3, (S,), generator=g).tolist()
        self.references = [None if w == 2 else shared[w] for w in which]
        self.kept: list[Tensor] | None = None
        self.scales: Tensor | None = None

    def keep(self) -> None:
        """Have the new memory rows written to separate tensors."""
        self.kept = list(torch.full((len(self.updates), len(self.params)), torch.nan).unbind())

    def stored(self, sign: float) -> list[Tensor]:
        """Return the same memory rows without references, rounded to float32."""
        return [
            row.clone() if r is None else r + sign * row
            for row, r in zip(self.rows, self.references, strict=True)
        ]

    def permuted(self, order: Tensor) -> None:
        self.updates, self.clients = self.updates[order], self.clients[order]
        self.scales = None if self.scales is None else self.scales[order]
        self.weights = self.weights[order]
        self.rows = [self.rows[s] for s in order.tolist()]
        self.references = [self.references[s] for s in order.tolist()]

    def mean(self, module: object, copies: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        d = len(self.params)
        out, rounded = torch.full((d,), torch.nan, dtype=F64), torch.full((d,), torch.nan)
        peaks = torch.full((len(self.updates),), torch.nan)
        module.mimic_mean_(  # type: ignore[attr-defined]
            out,
            rounded,
            peaks,
            self.updates,
            self.rows,
            self.clients,
            self.references,
            self.kept,
            copies=copies,
            scales=self.scales,
        )
        return out, rounded, peaks

    def sum(self, module: object, models: bool) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.total, torch.nan)
        peaks = torch.full((len(self.updates),), torch.nan)
        module.memory_total_(  # type: ignore[attr-defined]
            out, peaks, self.total, self.rows, self.updates, self.clients, self.weights,
            self.references, self.params if models else None, self.kept, scales=self.scales,
        )  # fmt: skip
        return out, peaks


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_a_round_of_mimic_in_two_halves_has_the_bits_of_mimic(isa: str, S: int, d: int) -> None:
    server = Server(S, d)
    params, corrections = server.params.clone(), server.stored(-1.0)
    ops.mimic_(params, server.updates, corrections, server.clients, 0.7)
    out, rounded, peaks = server.mean(ops)
    ops.add_total_(server.params, out, 0.7, 1.0)
    assert torch.equal(server.params, params)
    assert torch.equal(torch.stack(corrections), rounded - server.updates)
    assert torch.equal(peaks, ops.abs_max(server.updates))
    before = [row.clone() for row in server.rows]
    server.keep()
    again = server.mean(ops)
    assert all(map(torch.equal, again, (out, rounded, peaks)))
    assert server.kept is not None and all(map(torch.equal, server.kept, corrections))
    assert all(map(torch.equal, server.mean(ops, copies=True), (out, rounded, peaks)))
    assert torch.equal(torch.stack(server.kept), server.updates)
    assert all(map(torch.equal, server.rows, before))


@pytest.mark.parametrize(("S", "d"), SHAPES)
@pytest.mark.parametrize("models", [False, True])
def test_a_memory_update_in_two_halves_has_the_bits_of_memory_update(
    isa: str, S: int, d: int, models: bool
) -> None:
    server = Server(S, d)
    before = server.params.clone()
    params, total, memory = server.params.clone(), server.total.clone(), server.stored(1.0)
    ops.memory_update_(
        params, total, memory, server.updates, server.clients, server.weights, 0.7, 0.1, models
    )
    out, peaks = server.sum(ops, models)
    rows = server.updates + server.params if models else server.updates
    ops.add_total_(server.params, out, 0.7, 0.1, models)
    assert torch.equal(out, total)
    assert torch.equal(server.params, params)
    assert torch.equal(torch.stack(memory), rows)
    assert torch.equal(peaks, ops.abs_max(server.updates))
    server.params.copy_(before)
    server.keep()
    assert all(map(torch.equal, server.sum(ops, models), (out, peaks)))
    assert server.kept is not None and torch.equal(torch.stack(server.kept), rows)


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_against_oracle(isa: str, S: int, d: int) -> None:
    server = Server(S, d)
    (out, rounded, peaks), expected = server.mean(ops), server.mean(reference)
    # float32 in groups of at most 8 rows with magnitudes up to 16, as in test_rows.py
    assert (out - expected[0]).abs().max() <= 11 * 2.0**-24 * 16
    assert torch.equal(rounded, out.float())
    assert torch.equal(peaks, expected[2])
    for models in (False, True):
        (total, peaks), wanted = server.sum(ops, models), server.sum(reference, models)
        assert (total - wanted[0]).abs().max() <= 1e-13 * S * 16  # all of it float64
        assert torch.equal(peaks, wanted[1])
        moved, oracle = server.params.clone(), server.params.clone()
        ops.add_total_(moved, total, 0.7, 0.1, models)
        reference.add_total_(oracle, total, 0.7, 0.1, models)
        assert (moved - oracle).abs().max() <= 2.0**-24 * oracle.abs().max()  # one rounding


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_scales_have_the_bits_of_rows_that_were_scaled_before(isa: str, S: int, d: int) -> None:
    server, scaled = Server(S, d), Server(S, d)
    server.scales = torch.linspace(0.1, 1.0, S, dtype=F64).flip(0)  # the first one is 1
    scaled.updates = scaled.updates * server.scales.float()[:, None]
    for one in (server, scaled):
        one.keep()
    for run in (
        lambda one: one.mean(ops),
        lambda one: one.mean(ops, copies=True),
        lambda one: one.sum(ops, models=False),
        lambda one: one.sum(ops, models=True),
    ):
        assert all(map(torch.equal, run(server), run(scaled)))
        assert server.kept is not None and scaled.kept is not None
        assert all(map(torch.equal, server.kept, scaled.kept))


@pytest.mark.parametrize(("S", "d"), SHAPES)
def test_scales_against_oracle(isa: str, S: int, d: int) -> None:
    server = Server(S, d)
    server.scales = torch.linspace(0.1, 1.0, S)
    (out, _, peaks), expected = server.mean(ops), server.mean(reference)
    assert (out - expected[0]).abs().max() <= 11 * 2.0**-24 * 16  # as in test_against_oracle
    assert torch.equal(peaks, expected[2])
    for models in (False, True):
        (total, peaks), wanted = server.sum(ops, models), server.sum(reference, models)
        assert (total - wanted[0]).abs().max() <= 1e-13 * S * 16
        assert torch.equal(peaks, wanted[1])


def test_scales_by_hand() -> None:
    updates, memory = torch.tensor([[6.0, 8.0], [1.0, 0.0]]), torch.tensor([[1.0, 1.0]] * 2)
    scales, clients = torch.tensor([0.5, 1.0]), torch.tensor([0, 1])
    out, peaks, kept = torch.zeros(2, dtype=F64), torch.zeros(2), torch.zeros(2, 2)
    total, weights = torch.zeros(2, dtype=F64), torch.tensor([0.5, 0.5])
    ops.memory_total_(
        out, peaks, total, memory, updates, clients, weights, kept=list(kept), scales=scales
    )
    assert kept.tolist() == [[3.0, 4.0], [1.0, 0.0]]
    assert out.tolist() == [1.0, 1.0]  # 0.5 * (3 - 1) + 0.5 * (1 - 1), and so on
    assert peaks.tolist() == [4.0, 1.0]


@given(seed=st.integers(0, 2**31), S=st.integers(1, 20), d=st.integers(1, 300))
def test_order_and_threads_do_not_matter(seed: int, S: int, d: int) -> None:
    server, shuffled = Server(S, d, seed), Server(S, d, seed)
    for one in (server, shuffled):
        one.scales = server.weights.clone() if seed % 2 else None
    order = torch.randperm(S, generator=torch.Generator().manual_seed(seed))
    shuffled.permuted(order)
    torch.set_num_threads(1 + seed % 3)
    for a, b in (
        (server.mean(ops), shuffled.mean(ops)),
        (server.sum(ops, True), shuffled.sum(ops, True)),
    ):
        assert all(torch.equal(x, y) for x, y in zip(a[:-1], b[:-1], strict=True))
        assert torch.equal(a[-1][order], b[-1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_shows_in_its_peak_and_in_the_sum(isa: str, bad: float) -> None:
    server = Server(11, 1_000)
    server.weights[4] = 0.0  # does not hide the bad row
    server.updates[4, 777] = bad
    for outputs in (server.mean(ops), server.sum(ops, False), server.sum(ops, True)):
        assert outputs[-1].isfinite().tolist() == [s != 4 for s in range(11)]
        assert outputs[0].isfinite().sum() == 999
    assert torch.equal(server.mean(ops)[-1].isnan(), ops.abs_max(server.updates).isnan())


def test_memory_in_one_tensor(isa: str) -> None:
    server = Server(6, 999)
    expected = *server.mean(ops), *server.sum(ops, True)
    matrix = torch.full((9, 999), torch.nan)  # [K, d]
    matrix[server.clients] = torch.stack(server.rows)
    server.rows = matrix  # type: ignore[assignment]
    got = *server.mean(ops), *server.sum(ops, True)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"references": [None]}, ValueError, "references: expected one entry for each of 4"),
        ({"references": [torch.ones(8)] * 4}, ValueError, "references: expected shape"),
        ({"rows": [torch.ones(9)] * 3}, ValueError, r"expected one tensor \[K, d\] or a row for"),
        ({"rows": [torch.ones(8)] * 4}, ValueError, "expected shape"),
        ({"rows": [torch.ones(9).double()] * 4}, TypeError, "expected dtype Float"),
        ({"clients": torch.tensor([1, 2, 1, 0])}, ValueError, "got 1 twice"),
        ({"clients": torch.tensor([1, 2, -1, 0])}, IndexError, "got -1"),
        ({"updates": torch.ones(4, 8)}, ValueError, "updates: expected rows of d = 9"),
        ({"scales": torch.ones(3)}, ValueError, "scales: expected"),
        ({"scales": torch.ones(4, dtype=torch.int64)}, TypeError, "scales: expected"),
    ],
)
def test_bad_arguments(changes: dict[str, object], error: type[Exception], match: str) -> None:
    server = Server(4, 9)
    for name, value in changes.items():
        setattr(server, name, value)
    peaks, out = torch.zeros(4), torch.zeros(9, dtype=F64)
    common = (server.updates, server.rows, server.clients, server.references)
    with pytest.raises(error, match=match):
        ops.mimic_mean_(out, torch.zeros(9), peaks, *common, scales=server.scales)
    updates, rows, clients, references = common
    with pytest.raises(error, match=match):
        ops.memory_total_(
            out, peaks, server.total, rows, updates, clients, server.weights, references,
            scales=server.scales,
        )  # fmt: skip
    assert not out.any() and not peaks.any()


def test_rows_that_are_written_must_be_separate() -> None:
    server = Server(3, 9)
    memory = [server.rows[0], server.rows[1], server.rows[0]]
    with pytest.raises(ValueError, match="corrections: expected rows that share no memory"):
        ops.mimic_(server.params, server.updates, memory, server.clients, 1.0)
    with pytest.raises(ValueError, match="updates: a row shares memory with memory"):
        ops.memory_update_(
            server.params, server.total, list(server.updates.unbind()), server.updates,
            server.clients, server.weights, 1.0, 1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="total: shares memory with out"):
        ops.memory_total_(
            server.total, torch.zeros(3), server.total, server.rows, server.updates,
            server.clients, server.weights,
        )  # fmt: skip


def test_kept_rows_share_no_memory_with_what_is_read() -> None:
    server = Server(3, 9)
    for shared in (server.updates[1], server.rows[2]):
        server.kept = [torch.zeros(9), shared, torch.zeros(9)]
        with pytest.raises(ValueError, match="shares memory with kept"):
            server.mean(ops)
        with pytest.raises(ValueError, match="shares memory with kept"):
            server.sum(ops, models=False)
    same = torch.zeros(9)
    server.kept = [same, torch.zeros(9), same]
    with pytest.raises(ValueError, match="kept: expected rows that share no memory"):
        server.mean(ops)
    server.kept = [same]
    with pytest.raises(ValueError, match="kept: expected one row for each of 3 updates, got 1"):
        server.sum(ops, models=False)


@pytest.mark.parametrize("S, d", [(1, 1), (3, 64), (9, 12_345), (70, 2_049), (2, 60_001)])
def test_scaffold_against_oracle(isa: str, S: int, d: int) -> None:
    K = S + 3
    g = torch.Generator().manual_seed(S)
    mean, updates = torch.randn(d, generator=g), torch.randn(S, d, generator=g)
    controls, clients = torch.randn(K, d, generator=g), torch.randperm(K, generator=g)[:S]
    weights = torch.rand(S, generator=g, dtype=torch.float64)
    steps = -10.0 * torch.rand(S, generator=g, dtype=torch.float64)
    found = []
    for module, order in [
        (ops, torch.arange(S)),
        (ops, torch.randperm(S, generator=g)),
        (reference, torch.arange(S)),
    ]:
        out, new = torch.empty(d, dtype=torch.float64), torch.empty(d)
        peaks, kept = torch.empty(S), torch.empty(S, d)
        module.scaffold_mean_(  # type: ignore[attr-defined]
            out, new, peaks, mean, updates[order], controls, clients[order], weights[order],
            steps[order], 1 / K, list(kept),
        )  # fmt: skip
        back = order.argsort()
        found.append((out, new, peaks[back], kept[back]))
    ours, permuted, oracle = found
    for one, other, exact in zip(ours, permuted, oracle, strict=True):
        assert torch.equal(one, other)
        # float64 arithmetic; float32 results are rounded once
        bound = (1e-14 if exact.dtype == torch.float64 else 2.0**-24) * exact.abs().max()
        assert (one - exact).abs().max() <= bound


def test_rows_past_the_caches(isa: str) -> None:
    """Kept rows that do not fit the last cache are stored past it, and others fetched ahead."""
    cache = _C.own_l3_bytes()
    if cache > 128 << 20:
        pytest.skip("the last cache is too large for a quick test")
    S = 5
    d = cache // (12 * S) + 77
    updates, memory = torch.randn(S, d), torch.randn(S, d)
    params, rounded, clients = torch.randn(d), torch.empty(d), torch.arange(S)
    out, peaks = torch.empty(d, dtype=torch.float64), torch.empty(S)
    weights = torch.full((S,), 0.2, dtype=torch.float64)
    kept = allocate_rows(S, d, "cpu")
    total = torch.zeros_like(out)
    ops.memory_total_(out, peaks, total, memory, updates, clients, weights, kept=kept)
    assert all(torch.equal(row, update) for row, update in zip(kept, updates, strict=True))
    ops.memory_total_(out, peaks, total, memory, updates, clients, weights, None, params, kept)
    for row, update in zip(kept, updates, strict=True):
        assert torch.equal(row, params + update)
    for copies in (False, True):
        ops.mimic_mean_(out, rounded, peaks, updates, memory, clients, None, kept, copies=copies)
        for row, update in zip(kept, updates, strict=True):
            assert torch.equal(row, update if copies else rounded - update)
    ops.scaffold_mean_(
        out, rounded, peaks, params, updates, memory, clients, weights, weights, 0.1, kept
    )
    for row, update, old in zip(kept, updates, memory, strict=True):
        exact = (old.double() - params) + 0.2 * update.double()
        assert (row - exact).abs().max() <= 2.0**-24 * exact.abs().max()  # one rounding
