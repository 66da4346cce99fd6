# SPDX-License-Identifier: Apache-2.0
"""Checks of the emulated ``fastagg``: ``checks.py NAME...``; test_emulated.py runs them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import bits, reference, selfcheck

F64 = torch.float64


PRECISIONS = ("highest", "high", "tf32")


def gram(rows: Tensor, pairs: Tensor | None = None, precision: str = "highest") -> Tensor:
    return ops.gram(rows, pairs=pairs, dtype=F64, precision=precision)


def every_op() -> None:
    for K, S, d in ((9, 5, 1_003), (60, 50, 530), (150, 135, 301)):
        for check in selfcheck.run(K, S, d):
            bound = 1e-5 if "gram" in check.op else check.bound  # see selfcheck
            assert check.error <= bound, check


def entries_depend_on_their_rows_alone() -> None:
    """In either kernel, in any part of a tile, on and off the diagonal, with any other rows.

    A chunk of 600 columns has two blocks, which two warps of the kernel for few rows take.
    """
    for precision in PRECISIONS:
        rows = torch.randn(140, 600)
        full = gram(rows, precision=precision)
        assert torch.equal(full, full.T)
        order = torch.randperm(140)
        for count in (1, 16, 17, 40, 64, 65, 140):
            some = order[:count]
            assert torch.equal(gram(rows[some], precision=precision), full[some][:, some])
        group = torch.arange(140) // 50
        pairs = group[:, None] == group
        assert torch.equal(gram(rows, pairs, precision), torch.where(pairs, full, 0.0))


def groups_of_chunks() -> None:
    """From 512 rows on, a thread block adds up eight chunks, in the order of the reduction."""
    rows = torch.randn(520, 4_106)  # nine chunks
    some = torch.tensor([0, 17, 40, 127, 128, 200, 519])
    pairs = torch.zeros(520, 520, dtype=torch.bool)
    pairs[some[:, None], some] = True
    assert torch.equal(gram(rows, pairs, "tf32")[some][:, some], gram(rows[some], None, "tf32"))


def mixed_rows(S: int, d: int) -> Tensor:
    """Return rows in [-1, 1) that follow from integers, and thus are the same in every version."""
    x = (torch.arange(S * d) * 2654435761 + 12345) & 0xFFFFFFFF
    x = (x ^ x >> 15) * 2246822519 & 0xFFFFFFFF
    x = (x ^ x >> 13) * 3266489917 & 0xFFFFFFFF
    return (x.double() / 2**31 - 1.0).float().view(S, d)


# SHA-256 of Gram matrices of S x d, before row groups were shared by chunks: 1 to 65 rows of two or
# three chunks; few rows of more chunks than share a row group; and chunks of two blocks of columns.
BITS = {
    "highest": ["b5d4fa1ea4a41c84", "c52fd9b1f44ed650", "4aff72cddcdad480"],
    "high": ["02154f7ce63a84ab", "e4515f0e84dd3c1c", "9376b510502a6e67"],
    "tf32": ["05719305eb263f29", "bdeb87cbf7b3b0dc", "be0d6baba2a033e0"],
}
SHAPES = [
    [(S, 531) for S in range(1, 66)],
    [(1, 8_200), (1, 9_000), (2, 2_561), (3, 1_043), (4, 1_537), (7, 1_043)],
    [(3, 263_000)],
]


def committed_bits() -> None:
    """The emulated kernels compute the bits of the version that these digests are from."""
    for precision, expected in BITS.items():
        found = []
        for shapes in SHAPES:
            digest = hashlib.sha256()
            for S, d in shapes:
                digest.update(gram(mixed_rows(S, d), precision=precision).numpy().tobytes())
            found.append(digest.hexdigest()[:16])
        assert found == expected, (precision, found)


def segments() -> None:
    """Gram matrices of segments have the bits of separate calls, and share launches."""
    for count, d, segment, windows in (
        (1, 9_999, 1_024, 1), (3, 2_700, 1_300, 1), (7, 1_043, 106, 1), (20, 1_043, 521, 1),
        (33, 100, 33, 1), (64, 640, 16, 4), (70, 600, 250, 1),
    ):  # fmt: skip
        rows = torch.randn(count, d)
        if count == 7:
            rows[2, :530] *= 1e-30  # out of range in some segments, alone
            rows[4] *= 1e25
        pairs = torch.rand(count, count) < 0.5
        for wanted in (None, pairs | pairs.T):
            parts = [gram(part, wanted) for part in rows.split(segment, dim=1)]
            expected = parts[0]
            for part in parts[1:]:
                expected = expected.add_(part)
            call = functools.partial(ops.gram, rows, pairs=wanted, dtype=F64, segment=segment)
            launches, got = launched(call)
            assert torch.equal(got, expected)
            # 64 rows: the partial sums of 12 segments at a time fit into the emulator's workspace.
            names = {"gram_few, kernel": windows, "gram, reduce_kernel<true>": windows}
            if count > 64:
                names = {"gram_many, kernel": len(parts), "gram, reduce_kernel<false>": len(parts)}
                names |= {} if wanted is None else {"gram, needed_kernel": 1}
            names |= {"gram, rescue_kernel": windows, "gram, sum_kernel": windows}
            assert launches == names | {"words, store_words_kernel": 1}, (count, launches)


def launched(call: Callable[[], Tensor]) -> tuple[dict[str, int], Tensor]:
    """Return how often the call launches each kernel, and its result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "launches")
        os.environ["FASTAGG_EMULATED_LAUNCHES"] = str(path)
        result = call()
        del os.environ["FASTAGG_EMULATED_LAUNCHES"]
        names = path.read_text(encoding="utf-8").split("\n")[:-1]
    return dict(Counter(names)), result


def small_shared_memory() -> None:
    """GPUs whose thread blocks have 99 KB of shared memory compute the same bits."""
    for count, d in ((60, 1_300), (140, 600), (520, 601)):
        rows = torch.randn(count, d)
        pairs = torch.zeros(count, count, dtype=torch.bool)
        pairs[:30, :30] = True
        for precision in PRECISIONS:
            results = []
            for kib in ("163", "99"):
                os.environ["FASTAGG_EMULATED_SHARED"] = kib
                results.append(gram(rows, pairs, precision))
            assert torch.equal(*results)
    del os.environ["FASTAGG_EMULATED_SHARED"]


def precisions() -> None:
    """Each precision is within its bound, and more exact than the next one.

    The bound of "highest" is that of sums alone: 12 truncated sums in a chain of 16 products (six
    products of matrices, each summed in two parts), and 32 roundings in the chains of a block.
    """
    bounds = {"highest": 2.0**-17, "high": 2.0**-16 + 2.0**-18, "tf32": 2.0**-10 + 2.0**-18}
    for count, d in ((3, 1_040), (40, 530), (70, 530), (140, 301)):
        rows = torch.randn(count, d) + torch.randn(d)
        magnitudes = rows.double().abs() @ rows.double().abs().T
        exact = reference.gram(rows, dtype=F64)
        worst = []
        for precision, bound in bounds.items():
            error = (gram(rows, precision=precision) - exact).abs() / magnitudes
            assert error.max() <= bound, (precision, error.max())
            worst.append(error.max())
        assert worst[0] < worst[1] < worst[2] / 10, worst
    # Three bfloat16 hold every float32: with one column there is one sum, of six products.
    x = torch.randn(64, 1)
    assert ((gram(x) - reference.gram(x, dtype=F64)).abs() <= 2.0**-21 * (x @ x.T).abs()).all()
    third = torch.tensor([[1 + 2.0**-9 + 2.0**-18]])  # three parts, of which "high" drops the last
    off = [gram(third, precision=p).item() - third.double().item() ** 2 for p in PRECISIONS]
    assert abs(off[0]) < 2.0**-22 and 2.0**-18 < abs(off[1]) < 2.0**-16, off


def any_alignment() -> None:
    rows = torch.randn(20, 531)
    for offset in (1, 2, 4):
        shifted = torch.zeros(20 * 536 + offset)[offset:].view(20, 536)[:, :531]
        shifted.copy_(rows)
        assert torch.equal(gram(shifted), gram(rows))
        assert torch.equal(ops.abs_max(shifted), ops.abs_max(rows))


def rows_out_of_range() -> None:
    for count in (4, 70):
        scale = torch.tensor([1e-30, 1.0, 1e25, 0.0])[torch.arange(count) % 4]
        rows = torch.randn(count, 530) * scale[:, None]
        x = rows.double().abs()
        error = (gram(rows) - reference.gram(rows, dtype=F64)).abs()
        assert (error <= 1.05e-5 * (x @ x.T)).all()  # see test_gram.py
        rows[2, 77] = torch.nan
        assert gram(rows).diagonal().isfinite().tolist() == [s != 2 for s in range(count)]


def in_any_order() -> None:
    """Results are bitwise identical for any execution order of blocks and threads."""
    K, S, d = 30, 21, 1_100
    g = torch.Generator().manual_seed(1)
    rows, memory = torch.randn(S, d, generator=g), torch.randn(S, d, generator=g)
    many, clients = torch.randn(130, 600, generator=g), torch.randperm(K, generator=g)[:S]
    wide = torch.randn(700, 37, generator=g)
    rows[3] *= 1e-30
    results = []
    for order in range(4):
        os.environ["FASTAGG_EMULATED_ORDER"] = str(order)
        params, own, total = torch.zeros(d), memory.clone(), torch.zeros(d, dtype=F64)
        scores, counts = torch.zeros(K, K), torch.zeros(K, K, dtype=torch.int16)
        candidates, active = bits.ones(K, K), torch.zeros(K, dtype=torch.bool)
        active[clients] = True
        fresh = ops.cosine_scores(gram(rows))
        ops.update_scores_(scores, counts, fresh, clients)
        ops.eliminate_(candidates, scores, counts, 0.01)
        friends = ops.select_friends(scores, counts, active, candidates=candidates)
        ops.mimic_(params, rows, own, torch.arange(S), 0.3)
        ops.memory_update_(params, total, own, rows, torch.arange(S), torch.ones(S), 0.1, 0.2)
        ops.weighted_sum_(params, rows, torch.ones(S), 0.5)
        sums = ops.weighted_sum_(torch.zeros(37), wide, torch.ones(700), 0.0)
        median, kept, peak = torch.zeros(37), torch.zeros(d), torch.zeros(1)
        out, faded, peaks = total.clone(), total.clone(), torch.zeros(S)
        ops.memory_total_(
            out, peaks, total, own, rows, torch.arange(S), torch.ones(S), faded=faded,
            faded_weights=torch.arange(S) / S, fading=0.3,
        )  # fmt: skip
        ops.trimmed_mean_(median, peak, wide, 349)
        ops.meamed_(kept, peak, rows, 13)
        results.append([
            fresh, gram(many), ops.abs_max(wide), scores, counts, candidates, friends,
            params, own, total, sums, median, kept, peak, out, faded, peaks,
        ])  # fmt: skip
    del os.environ["FASTAGG_EMULATED_ORDER"]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def accuracy() -> None:
    """Cosines of all-positive, correlated and constant rows on both emulated tensor cores.

    In a constant row every chain of products has the same truncation error.
    """
    d = 1 << 17
    common = torch.randn(d)
    rows = [torch.randn(d).abs() for _ in range(3)]
    rows += [torch.rand(d) for _ in range(3)]
    rows += [common + 0.1 * torch.randn(d) for _ in range(3)]
    rows += [1.0 + 0.01 * torch.randn(d) for _ in range(3)]
    rows += [scale * torch.randn(d).sign() for scale in (1.0, 0.0123, 1.2345)]  # one bit each
    rows = torch.stack(rows)
    exact = reference.gram(rows, dtype=F64)
    cosines = ops.cosine_scores(exact)
    constant = (1.0 + torch.rand(64))[:, None].expand(64, 512).contiguous()
    for core, precision in itertools.product(("sm_80", "sm_90"), ("highest", "high")):
        os.environ["FASTAGG_EMULATED_TENSOR_CORE"] = core
        got = gram(rows, precision=precision)
        error = (ops.cosine_scores(got) - cosines).abs().max().item()
        same = gram(constant, precision=precision)
        worst = (ops.cosine_scores(same) - 1.0).abs().max().item()
        print(f"{core}, {precision}: {error:.2g}, constant rows {worst:.2g}")
        assert error < 1e-7, (core, precision, error)  # the documented accuracy
        # a chain of 16 columns has four or six sums, each truncated by about 2^-22
        assert worst < 2e-6, (core, precision, worst)
    del os.environ["FASTAGG_EMULATED_TENSOR_CORE"]


def rounds_in_two_halves() -> None:
    for S, d in ((1, 1), (9, 70), (40, 999), (700, 37)):  # 700: more than a thread holds
        updates, memory = torch.randn(S, d), torch.randn(S, d)
        params, clients = torch.randn(d), torch.randperm(S)
        one, own = params.clone(), list(memory.clone())
        ops.mimic_(one, updates, own, clients, 0.7)
        out, rounded, peaks = torch.empty(d, dtype=F64), torch.empty(d), torch.empty(S)
        ops.mimic_mean_(out, rounded, peaks, updates, list(memory), clients)
        two = ops.add_total_(params.clone(), out, 0.7, 1.0)
        assert torch.equal(one, two) and torch.equal(peaks, ops.abs_max(updates))
        assert torch.equal(torch.stack(own), rounded - updates)
        flag = torch.zeros((), dtype=torch.bool)
        for aggregate, plain in ((out, two), (rounded, None)):
            if plain is None:
                plain = ops.weighted_sum_(params.clone(), [rounded], torch.tensor([0.7], dtype=F64))
            moved = params.clone()
            ops.apply_aggregate_(moved, flag, aggregate, 0.7, 1.0, 1e30, 1e38)
            assert bool(flag) and torch.equal(moved, plain)
            ops.apply_aggregate_(moved, flag, aggregate, 0.7, 1.0, 1e30, 0.0)
            assert not flag and torch.equal(moved, plain)


def second_sums() -> None:
    """Both sums of memory_total_, also of more rows than a thread or a table holds."""
    for S, d in ((1, 1), (40, 999), (700, 37), (1_100, 37)):
        updates, memory, clients = torch.randn(S, d), torch.randn(S, d), torch.randperm(S)
        total, weights = torch.randn(d, dtype=F64), torch.randn(S, dtype=F64)
        results = []
        for module in (ops, reference):
            out, faded, peaks = total.clone(), total.clone(), torch.zeros(S)
            module.memory_total_(
                out, peaks, total, list(memory), updates, clients, weights, faded=faded,
                faded_weights=-weights, fading=0.3,
            )  # fmt: skip
            results.append((out, faded, peaks))
        (out, faded, peaks), (expected, wanted, largest) = results
        bound = 2.0**-53 * (S + 4) * (84 * S + 8)  # see test_faded_total.py
        assert (out - expected).abs().max() <= bound
        assert (faded - wanted).abs().max() <= bound and torch.equal(peaks, largest)


def tf32() -> None:
    """The error is within the bound of ops.gram; the result is that of rounded operands."""
    for count, d in ((3, 1_040), (40, 530), (64, 70), (70, 530), (140, 301)):
        rows = torch.randn(count, d) + torch.randn(d)
        got = ops.gram(rows, dtype=F64, precision="tf32")
        assert torch.equal(got, got.T)
        magnitudes = rows.double().abs() @ rows.double().abs().T
        exact = reference.gram(rows, dtype=F64)
        assert ((got - exact).abs() <= (2.0**-10 + 2.0**-18) * magnitudes).all()
        assert (got - exact).abs().max() > 10 * (gram(rows) - exact).abs().max()
        # cvt.rna.tf32 drops 13 bits and rounds ties away from zero. The remaining error is 52
        # roundings in float32 (16 in a chain of 16 products, 32 in the chains of a block, and
        # fewer than 4 others).
        rounded = ((rows.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        assert ((got - reference.gram(rounded, dtype=F64)).abs() <= 2.0**-18 * magnitudes).all()
        # In TF32, too, an entry depends only on its two rows.
        assert torch.equal(ops.gram(rows[:2], dtype=F64, precision="tf32"), got[:2, :2])
        out, both = torch.zeros(d), torch.zeros(count, count, dtype=F64)
        ops.gram_and_sum_(out, both, rows, torch.ones(count), precision="tf32")
        assert torch.equal(both, got)
    by_hand = torch.tensor([[1 + 2.0**-11, 3.0], [1 - 2.0**-12, 1.0]])  # a tie; nearest
    got = ops.gram(by_hand, dtype=F64, precision="tf32")
    assert got[0, 0] == (1 + 2.0**-10) ** 2 + 9 and got[1, 1] == 2.0 and got[0, 1] == 4 + 2.0**-10
    for pattern in (0x7FFFFFFF, 0x7FC00000, 0x7F800000):  # rounding must keep these
        bad = torch.ones(3, 40)
        bad[1, 7] = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
        finite = ops.gram(bad, dtype=F64, precision="tf32").diagonal().isfinite()
        assert finite.tolist() == [True, False, True]


def short_rows() -> None:
    """bfloat16 and float16 rows at any alignment give the same bits as equal float32 rows."""
    for dtype in (torch.bfloat16, torch.float16):
        for S, d, offset in ((1, 1, 0), (5, 1_031, 1), (20, 530, 2), (13, 99, 4), (9, 4_097, 8)):
            place = torch.zeros(S * 4_104 + offset, dtype=dtype)[offset:].view(S, 4_104)
            rows = place[:, :d].copy_(torch.randn(S, d))
            old = torch.randn(S, d).to(dtype)
            memory, params, clients = torch.randn(S, d), torch.randn(d), torch.randperm(S)
            weights, total = torch.rand(S), torch.randn(d, dtype=F64)
            references = [params.clone() if s % 3 else None for s in range(S)]
            results = []
            for x, y in ((rows, old), (rows.float(), old.float())):
                out, own, theirs = params.clone(), memory.clone(), memory.clone()
                wide, sums, single = total.clone(), torch.zeros(d, dtype=F64), torch.zeros(d)
                peaks, more = torch.zeros(S), torch.zeros(d, dtype=F64)
                first, second = torch.zeros(d, dtype=F64), torch.zeros(d, dtype=F64)
                ops.weighted_sum_(out, x, weights, 0.5)
                ops.mimic_(out, x, own, clients, 0.7)
                ops.memory_update_(out, wide, theirs, x, clients, weights, 0.7, 0.1, models=True)
                ops.mimic_mean_(sums, single, peaks, x, y, clients, references)
                ops.memory_total_(more, peaks, wide, y, x, clients, weights, references, params)
                fading = {"faded": second, "faded_weights": -weights, "fading": 0.5}
                ops.memory_total_(first, peaks, total, y, x, clients, weights, **fading)
                results.append([out, own, theirs, wide, sums, single, peaks, more, first, second])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            expected = reference.weighted_sum_(params.clone(), rows, weights, 0.5)
            got = ops.weighted_sum_(params.clone(), rows, weights, 0.5)
            scale = params.abs().max() + S * rows.float().abs().max()
            assert (got - expected).abs().max() <= 11 * 2.0**-24 * scale  # see test_rows.py
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
        out = ops.weighted_sum_(torch.zeros(1 << 16), every[None], torch.ones(1), beta=0.0)
        torch.testing.assert_close(out, every.float(), rtol=0, atol=0, equal_nan=True)


def called_off() -> None:
    """With ``when``, a round commits all of its changes or none."""
    K, S, d = 21, 9, 333
    clients, rows = torch.randperm(K)[:S], torch.randn(S, d)
    fresh, weights = torch.rand(S, S), torch.rand(S)
    for counts_dtype in (torch.int16, torch.int32):
        start = [torch.randn(d), torch.rand(K, K), torch.ones(K, K, dtype=counts_dtype)]
        start.append(bits.ones(K, K))
        results = []
        for when in (None, torch.tensor(True), torch.tensor(False)):
            params, scores, counts, candidates = changed = [t.clone() for t in start]
            ops.weighted_sum_(params, rows, weights, 0.0, when=when)
            ops.update_scores_(scores, counts, fresh, clients, when=when)
            ops.eliminate_(candidates, scores, counts, 0.2, when=when)
            results.append(changed)
        plain, yes, no = results
        assert all(torch.equal(a, b) for a, b in zip(plain, yes, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(no, start, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(plain, no, strict=True))


def wrong_ids() -> None:
    """With ``when``, kernels check the ids: an id outside [0, K) or twice changes nothing."""
    K, S = 300, 280
    good, fresh = torch.randperm(K)[:S], torch.rand(S, S)
    yes = torch.tensor(True)
    for counts_dtype in (torch.int16, torch.int32):
        start = [torch.rand(K, K), torch.ones(K, K, dtype=counts_dtype)]
        for position in (0, 1, 255, 256, S - 1):
            for wrong in (-1, K, 1 << 62, -(1 << 62), int(good[(position + 7) % S])):
                clients = good.clone()
                clients[position] = wrong
                scores, counts = changed = [t.clone() for t in start]
                ops.update_scores_(scores, counts, fresh, clients, when=yes)
                assert all(torch.equal(a, b) for a, b in zip(changed, start, strict=True))
                try:
                    ops.update_scores_(scores, counts, fresh, clients)
                except (IndexError, ValueError) as error:
                    assert "clients: expected " in str(error)
                else:
                    raise AssertionError("without when, wrong ids must raise an error")
                assert all(torch.equal(a, b) for a, b in zip(changed, start, strict=True))
        ops.update_scores_(scores, counts, fresh, good, when=yes)
        assert not any(torch.equal(a, b) for a, b in zip(changed, start, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(name, flush=True)
        torch.manual_seed(0)
        globals()[name]()
