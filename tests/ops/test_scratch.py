# SPDX-License-Identifier: Apache-2.0
"""Temporary memory of the CPU kernels: how much they need, and how much they keep."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastagg import _C, bits, build_info, ops

F64 = torch.float64

pytestmark = pytest.mark.skipif(
    build_info()["torch"] == "emulated", reason="the CPU kernels are not in this build"
)


def peak_of(call: object) -> int:
    """Return the peak temporary memory of a call."""
    _C.scratch(reset_peak=True)
    call()  # type: ignore[operator]
    use = _C.scratch()
    assert use["used"] == 0
    assert use["kept"] <= use["limit"]
    return use["peak"]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("S", "d"), [(1, 1), (7, 610), (100, 610), (61, 30_011), (400, 4_099)])
def test_gram_needs_as_much_as_gram_scratch_returns(isa: str, S: int, d: int, threads: int) -> None:
    if isa == "cuda":
        pytest.skip("of the CPU kernels")
    torch.set_num_threads(threads)
    rows, weights = torch.randn(S, d), torch.ones(S)
    expected = _C.gram_scratch(S, d, threads)
    out, gram = torch.empty(d), torch.empty(S, S, dtype=F64)
    # Each block is at least one byte.
    assert expected <= peak_of(lambda: ops.gram(rows)) <= expected + 3
    assert expected <= peak_of(lambda: ops.gram_and_sum_(out, gram, rows, weights)) <= expected + 3
    pairs = torch.rand(S, S) < 0.1
    for chosen in (pairs | pairs.T, torch.arange(S)[:, None] % 9 == torch.arange(S) % 9):
        assert peak_of(lambda flags=chosen: ops.gram(rows, pairs=flags)) <= expected + 18 * S * S


def test_other_ops_need_little() -> None:
    torch.set_num_threads(2)
    S, d, K = 50, 70_000, 60
    rows, clients, weights = torch.randn(S, d), torch.randperm(K)[:S], torch.ones(S)
    out, rounded, peaks = torch.empty(d, dtype=F64), torch.empty(d), torch.empty(S)
    memory, total = torch.zeros(K, d), torch.zeros(d, dtype=F64)
    scores, counts = torch.rand(K, K), torch.ones(K, K, dtype=torch.int32)
    active, candidates = torch.zeros(K, dtype=torch.bool), bits.ones(K, K)
    gram = torch.eye(S, dtype=F64)
    assert peak_of(lambda: ops.abs_max(rows)) == 4 * S * 2  # of each 65,536 columns
    assert peak_of(lambda: ops.cosine_scores(gram)) == 8 * S
    assert peak_of(lambda: ops.mimic_mean_(out, rounded, peaks, rows, memory, clients)) == 8 * S
    assert (
        peak_of(lambda: ops.memory_total_(out, peaks, total, memory, rows, clients, weights))
        == 8 * S
    )
    assert peak_of(lambda: ops.select_friends(scores, counts, active)) == 8 + 8  # one thread
    assert peak_of(lambda: ops.eliminate_(candidates, scores, counts, 0.1)) == 8
    params = torch.zeros(d)
    block = 8768  # an eighth of d. Stacks may be small, so the sums of a block are on the heap.
    assert peak_of(lambda: ops.weighted_sum_(params, rows, weights)) == 2 * 8 * block
    block = 2560  # their updates and corrections are 1 MB
    assert peak_of(lambda: ops.mimic_(params, rows, memory, clients, 0.1)) == 2 * 12 * block
    assert peak_of(lambda: ops.add_total_(params, total, 0.1, 0.1)) == 0
    flag = torch.zeros((), dtype=torch.bool)
    assert peak_of(lambda: ops.apply_aggregate_(params, flag, total, 0.1, 0.1, 1.0, 1e38)) == 4 * 2
    m, s = torch.zeros(d), torch.zeros(d)
    adam = ("adam", 0.1, 0.9, 0.99, 1e-3)
    assert peak_of(lambda: ops.add_adaptive_(params, m, s, total, *adam)) == 0


@pytest.mark.slow
def test_what_is_kept_is_bounded() -> None:
    limit = _C.scratch()["limit"]
    rows = torch.randn(3_800, 20)
    expected = _C.gram_scratch(*rows.shape, torch.get_num_threads())
    assert expected > limit
    assert expected <= peak_of(lambda: ops.gram(rows)) <= expected + 3


def test_threads_share_what_is_kept() -> None:
    def grams(seed: int) -> None:
        rows = torch.randn(300, 40, generator=torch.Generator().manual_seed(seed))
        for S in (300, 10, 150):
            torch.testing.assert_close(ops.gram(rows[:S]), rows[:S] @ rows[:S].T)

    torch.set_num_threads(1)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(grams, range(10)))
    use = _C.scratch()
    assert use["used"] == 0
    assert 0 < use["kept"] <= use["limit"]


def test_sizes_of_gram_are_checked() -> None:
    assert ops.gram_scratch(0, 0) == 0
    for sizes, message in (
        ((-1, 5), "num_rows: expected 0 or more, got -1"),
        ((2**24 + 1, 5), "num_rows: expected at most 16777216, got 16777217"),
        ((3, -1), "num_params: expected 0 or more, got -1"),
        ((3, 5, 0), "threads: expected 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.gram_scratch(*sizes)
