# SPDX-License-Identifier: Apache-2.0
"""The comparison of ``sketch_`` with other random projections, and with ``gram``.

``sketch_and_sum_`` computes more in its pass: the weighted sum of the rows as well.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.random_projection import SparseRandomProjection
from torch import Tensor

from benchmarks.harness import Comparison, Contender
from benchmarks.operands import normal
from fastagg import ops

BUCKETS = 1024
"""k of the comparison."""
DENSE_BUCKETS = 256
"""k of the dense projection, whose matrix has k d numbers."""


def sketch(S: int, d: int) -> Comparison:
    """Project S rows to k numbers. Only ``fastagg`` also computes squared norms."""
    x = normal(S, d)
    g = torch.Generator().manual_seed(0)
    sums, squares = torch.zeros(S, BUCKETS, dtype=torch.float64), torch.zeros(S).double()
    out, signed = torch.empty(S, BUCKETS), torch.empty(d)
    buckets = torch.randint(BUCKETS, (d,), generator=g)
    signs = torch.randint(2, (d,), generator=g).mul_(2).sub_(1).float()
    dense = torch.randn(d, DENSE_BUCKETS, generator=g).div_(DENSE_BUCKETS**0.5)
    few = torch.empty(S, DENSE_BUCKETS)
    total, weights = torch.empty(d), torch.full((S,), 1 / S)
    components = min(BUCKETS, d)  # d is small in a dry run
    sparse = SparseRandomProjection(components, random_state=0).fit(np.zeros((1, d), np.float32))

    def ours() -> Tensor:  # adds to the sums of the calls before, as by_index_add does
        return ops.sketch_(sums, squares, x, 5)

    def with_sum() -> Tensor:
        return ops.sketch_and_sum_(total, sums, squares, x, weights, 5)

    def by_index_add() -> Tensor:  # row by row: no temporary of S d
        for row, target in zip(x, out, strict=True):
            target.index_add_(0, buckets, torch.mul(row, signs, out=signed))
        return out

    contenders = [
        Contender("fastagg", ours, "ours"),
        Contender("fastagg, sketch_and_sum_", with_sum, "variant"),
        Contender("fastagg, gram", lambda: ops.gram(x), "variant"),
        Contender("torch index_add_", by_index_add),
        Contender(f"torch X @ P, k = {DENSE_BUCKETS}", lambda: torch.mm(x, dense, out=few)),
        Contender(
            "scikit-learn SparseRandomProjection", lambda: sparse.transform(x.numpy()), "peer",
            repeats=3,
        ),
    ]  # fmt: skip
    return Comparison("sketch_", S, d, contenders, (x,))
