# SPDX-License-Identifier: Apache-2.0
"""``scaling``: time over S, d, K and threads, compared with one careful implementation each."""

from __future__ import annotations

import os

from benchmarks import ops, steps
from benchmarks.harness import Comparison, Contender
from benchmarks.options import Case, Make, Options

ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]  # at d = 200,000
PARAMETERS = [10_000, 100_000, 1_000_000, 10_000_000]  # at S = 16
CLIENTS = [10, 30, 100, 300, 1000, 3000]  # half of them active, at d = 10,000


def cases(options: Options) -> list[Case]:
    """Return all comparisons of this subcommand."""
    d = options.width(200_000)
    columns = [options.width(n) for n in PARAMETERS]
    threads = sorted({1, *(2**i for i in range(1, 9) if 2**i <= _cores()), _cores()})
    swept: list[tuple[str, Make]] = [
        ("gram", fewer(ops.gram, "torch X @ X.T")),
        ("weighted_sum_", fewer(ops.weighted_sum, "torch.addmv")),
        ("mimic_", fewer(ops.mimic, "careful eager, scratch")),
        ("memory_update_", fewer(ops.memory_update, "careful eager, scratch")),
    ]
    fdms = fewer(steps.fdms, "careful eager")
    return [
        *(Case(op, S, d, make) for op, make in swept for S in ROWS),
        *(Case(op, 16, n, make) for op, make in swept for n in columns),
        *(Case("step fdms", K // 2, options.width(10_000), fdms) for K in CLIENTS),
        *(Case(op, 64, 5 * d, make, threads=t) for op, make in swept for t in threads),
    ]


def _cores() -> int:
    return os.cpu_count() or 1


def fewer(make: Make, careful: str) -> Make:
    """Restrict a comparison to fastagg and the contender named `careful`."""

    def made(S: int, d: int) -> Comparison:
        full = make(S, d)
        kept: list[Contender] = [
            c for c in full.contenders if c.role == "ours" or c.name == careful
        ]
        return Comparison(full.op, S, d, kept, full.operands, full.K)

    return made
