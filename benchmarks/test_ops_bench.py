# SPDX-License-Identifier: Apache-2.0
"""Time single ops with pytest-benchmark.

    make bench-ops                                        # measure and store the times
    make bench-ops ARGS="--benchmark-compare --benchmark-compare-fail=median:10%"

Not part of the test suite. The times are absolute, so only compare runs on the same idle machine.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import memory_ops, ops, steps
from benchmarks.options import Make
from fastagg import ops as fastagg_ops

D_SIZED: list[tuple[str, Make, int, int]] = [
    *(("gram", ops.gram, S, d) for S, d in [(20, 62_006), (20, 1_000_000), (100, 1_000_000)]),
    ("gram", ops.gram, 512, 100_000),
    ("gram_rows", ops.gram_rows, 100, 62_006),
    ("gram of a list", ops.gram_of_list, 100, 1_000_000),
    ("weighted_sum_", ops.weighted_sum, 100, 1_000_000),
    ("mimic_", memory_ops.mimic, 100, 1_000_000),
    ("memory_update_", memory_ops.memory_update, 100, 1_000_000),
    ("step fedavg", steps.fedavg, 20, 62_006),
    ("step fdms", steps.fdms, 20, 62_006),
    ("step fdms", steps.fdms, 500, 10_000),
]
K = 2000


@pytest.mark.parametrize(
    ("name", "make", "S", "d"), D_SIZED, ids=[f"{name}-{S}x{d}" for name, _, S, d in D_SIZED]
)
def test_d_sized(benchmark: BenchmarkFixture, name: str, make: Make, S: int, d: int) -> None:
    comparison = make(S, d)
    assert comparison.op == name
    benchmark.extra_info["bytes"] = comparison.work.num_bytes
    benchmark.extra_info["flops"] = comparison.work.flops
    benchmark(next(c.call for c in comparison.contenders if c.role == "ours"))


@pytest.mark.parametrize("name", ["update_scores_", "select_friends", "eliminate_"])
def test_policy(benchmark: BenchmarkFixture, name: str) -> None:
    scores, counts = torch.rand(K, K), torch.ones(K, K, dtype=torch.int32)
    clients = torch.arange(0, K, 2)
    active = torch.zeros(K, dtype=torch.bool)
    active[clients] = True
    candidates = torch.ones(K, K, dtype=torch.bool)
    calls = {
        "update_scores_": lambda: fastagg_ops.update_scores_(
            scores, counts, scores[: K // 2, : K // 2].contiguous(), clients
        ),
        "select_friends": lambda: fastagg_ops.select_friends(scores, counts, active, candidates),
        "eliminate_": lambda: fastagg_ops.eliminate_(candidates, scores, counts, 0.5),
    }
    benchmark(calls[name])
