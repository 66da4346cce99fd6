# SPDX-License-Identifier: Apache-2.0
"""``ops``: single ops compared with libraries, careful and naive eager torch, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks import pair_ops, products
from benchmarks.harness import Comparison, Contender
from benchmarks.memory_ops import memory_update, mimic
from benchmarks.moments import adam
from benchmarks.operands import normal, zeros
from benchmarks.options import Case, Options
from benchmarks.sketches import sketch
from benchmarks.work import CHANGED, GROUPS
from fastagg import _C, ops

GRAM_SHAPES = [
    (20, 62_006), (20, 1_000_000), (20, 10_000_000), (64, 1_000_000), (100, 1_000_000),
    (256, 1_000_000), (512, 500_000), (1024, 250_000),
]  # fmt: skip
AVX2_SHAPES = {(20, 1_000_000), (64, 1_000_000), (256, 1_000_000)}
SOME_SHAPES = [(100, 62_006), (100, 1_000_000), (1000, 100_000)]
LIST_SHAPES = [(100, 1_000_000)]
PAIR_SHAPES = [(1000, 100_000)]
CLIENTS = 10_000  # half of them active
SKETCH_SHAPES = [(20, 1_000_000), (100, 1_000_000), (1000, 100_000)]
VECTORS = [62_006, 1_000_000, 10_000_000]
ROW_SHAPES = [(20, 1_000_000), (100, 1_000_000), (256, 400_000)]

# With more rows, the chunked product takes as long as X @ X.T, and ssyrk at most half as long.
_CHUNKED_ROWS = 100
_CHUNK = 1 << 15  # columns per chunk of the chunked product; 100 rows are 13 MB


def cases(options: Options) -> list[Case]:
    """Return all comparisons of this subcommand."""
    with_compile = not options.quick

    def gram_of(S: int, d: int, avx2: bool) -> Case:
        return Case("gram", S, d, lambda S, d: gram(S, d, with_avx2=avx2))

    pair_shapes = [(S, options.width(d)) for S, d in PAIR_SHAPES]
    rows = [(S, options.width(d)) for S, d in ROW_SHAPES]
    K = options.width(CLIENTS)
    return [
        *(gram_of(S, options.width(d), (S, d) in AVX2_SHAPES) for S, d in GRAM_SHAPES),
        *(Case("gram_rows", S, options.width(d), gram_rows) for S, d in SOME_SHAPES),
        *(Case("gram_and_sum_", S, d, gram_and_sum) for S, d in rows),
        *(Case("gram of a list", S, options.width(d), gram_of_list) for S, d in LIST_SHAPES),
        *(Case("gram of groups", S, d, gram_of_groups) for S, d in pair_shapes),
        *(Case("gram of all pairs", S, d, gram_of_all_pairs) for S, d in pair_shapes),
        *(Case("sketch_", S, options.width(d), sketch) for S, d in SKETCH_SHAPES),
        *(Case(op, K // 2, K, make) for op, make in pair_ops.MAKERS.items()),
        *(Case("add_adaptive_", 1, options.width(d), adam) for d in VECTORS),
        *(Case("weighted_sum_", S, d, _with(weighted_sum, with_compile)) for S, d in rows),
        *(Case("mimic_", S, d, _with(mimic, with_compile)) for S, d in rows),
        *(Case("memory_update_", S, d, _with(memory_update, with_compile)) for S, d in rows),
    ]


def _with(make: Callable[..., Comparison], with_compile: bool) -> Callable[[int, int], Comparison]:
    return lambda S, d: make(S, d, with_compile=with_compile)


def gram(S: int, d: int, *, with_avx2: bool = False) -> Comparison:
    x = normal(S, d)
    out, out_triangle = torch.empty(S, S), torch.empty(S, S)
    x_numpy, out_numpy = x.numpy(), np.empty((S, S), np.float32)
    chunks, part = x.split(_CHUNK, dim=1), torch.empty(S, S)
    total = torch.empty(S, S, dtype=torch.float64)

    def chunked() -> Tensor:  # more accurate than X @ X.T: chunks are added in float64
        total.zero_()
        for chunk in chunks:
            total.add_(torch.mm(chunk, chunk.T, out=part))
        return total

    contenders = [
        Contender("fastagg", lambda: ops.gram(x), "ours"),
        Contender("torch X @ X.T", lambda: torch.mm(x, x.T, out=out)),
        *([Contender("torch, chunks of d", chunked)] if S <= _CHUNKED_ROWS else []),
        Contender("numpy X @ X.T", lambda: np.matmul(x_numpy, x_numpy.T, out=out_numpy)),
        Contender("scipy ssyrk", lambda: products.triangle(x, out_triangle)),
    ]
    if with_avx2 and _C.isa() == "avx512":
        contenders.append(Contender("fastagg, AVX2", lambda: _gram_avx2(x), "variant", "avx2"))
    return Comparison("gram", S, d, contenders, (x,))


def _gram_avx2(x: Tensor) -> Tensor:
    _C.set_isa("avx2")
    try:
        return ops.gram(x)
    finally:
        _C.set_isa("avx512")


def gram_rows(S: int, d: int) -> Comparison:
    """The rows of a Gram matrix of all clients' last updates that change when two clients send a
    new one."""
    x, changed = normal(S, d), torch.tensor([S // 3, S // 2][:CHANGED])
    positions: list[int] = changed.tolist()
    few, out = torch.empty(CHANGED, d), torch.empty(CHANGED, S)
    x_numpy, out_numpy = x.numpy(), np.empty((CHANGED, S), np.float32)

    def by_torch() -> Tensor:
        torch.index_select(x, 0, changed, out=few)
        return torch.mm(few, x.T, out=out)

    def by_vector() -> list[Tensor]:  # reads X twice, but avoids a matrix product with two rows
        return [torch.mv(x, x[c], out=out[i]) for i, c in enumerate(positions)]

    def by_numpy() -> np.ndarray:
        return np.matmul(x_numpy[changed.numpy()], x_numpy.T, out=out_numpy)

    contenders = [
        Contender("fastagg", lambda: ops.gram_rows(x, changed), "ours"),
        Contender("fastagg, all of gram", lambda: ops.gram(x), "variant"),
        Contender("torch, rows @ X.T", by_torch),
        Contender("torch, X @ row, each", by_vector),
        Contender("numpy, rows @ X.T", by_numpy),
    ]
    return Comparison("gram_rows", S, d, contenders, (x,))


def gram_and_sum(S: int, d: int) -> Comparison:
    x, out, weights = normal(S, d), torch.randn(d), torch.rand(S)
    gram, own = torch.empty(S, S), torch.empty(S, S, dtype=torch.float64)

    def fused() -> tuple[Tensor, Tensor]:
        ops.gram_and_sum_(out, own, x, weights)
        return own, out

    def in_turn() -> tuple[Tensor, Tensor]:
        return ops.gram(x, dtype=torch.float64), ops.weighted_sum_(out, x, weights, 0.0)

    def by_torch() -> tuple[Tensor, Tensor]:
        return torch.mm(x, x.T, out=gram), torch.mv(x.T, weights, out=out)

    contenders = [
        Contender("fastagg", fused, "ours"),
        Contender("fastagg, two ops", in_turn, "variant"),
        Contender("torch X @ X.T, mv", by_torch),
    ]
    return Comparison("gram_and_sum_", S, d, contenders, (x,))


def gram_of_list(S: int, d: int) -> Comparison:
    x = normal(S, d)
    rows = [normal(1, d)[0] for _ in range(S)]  # S separate tensors
    stacked, out = zeros(S, d), torch.empty(S, S)

    def stack() -> Tensor:
        torch.stack(rows, out=stacked)
        return torch.mm(stacked, stacked.T, out=out)

    def naive() -> Tensor:
        matrix = torch.stack(rows)
        return matrix @ matrix.T

    contenders = [
        Contender("fastagg", lambda: ops.gram(rows), "ours"),
        Contender("torch.stack, X @ X.T", stack),
        Contender("the same, allocating", naive, "naive"),
    ]
    return Comparison("gram of a list", S, d, contenders, (x,))


def gram_of_groups(S: int, d: int) -> Comparison:
    """The Gram matrix of pairs within groups only, as after candidate elimination."""
    group = torch.randint(GROUPS, (S,))  # the members of a group are not adjacent
    return _gram_of_pairs("gram of groups", group[:, None] == group, d)


def gram_of_all_pairs(S: int, d: int) -> Comparison:
    """The Gram matrix with a mask that selects all pairs: the overhead of the mask."""
    return _gram_of_pairs("gram of all pairs", torch.ones(S, S, dtype=torch.bool), d)


def _gram_of_pairs(op: str, pairs: Tensor, d: int) -> Comparison:
    """Compare with the dense matrix by fastagg itself; "gram" compares that with libraries."""
    S = len(pairs)
    x, mask = normal(S, d), pairs.float()
    contenders = [
        Contender("fastagg", lambda: ops.gram(x, pairs=pairs), "ours"),
        Contender("fastagg, dense", lambda: ops.gram(x).mul_(mask)),
    ]
    return Comparison(op, S, d, contenders, (x,))


def weighted_sum(S: int, d: int, *, with_compile: bool = False) -> Comparison:
    """``out = 0.5 out + weights @ rows``. The factor keeps ``out`` bounded over many calls."""
    x, out, weights = normal(S, d), torch.randn(d), torch.rand(S)
    x_numpy, w_numpy, product = x.numpy(), weights.numpy(), np.empty(d, np.float32)
    out_numpy = out.numpy()

    def by_numpy() -> Tensor:
        np.matmul(w_numpy, x_numpy, out=product)
        np.multiply(out_numpy, 0.5, out=out_numpy)
        np.add(out_numpy, product, out=out_numpy)
        return out

    def eager() -> Tensor:
        return out.mul_(0.5).add_((weights[:, None] * x).sum(dim=0))

    contenders = [
        Contender("fastagg", lambda: ops.weighted_sum_(out, x, weights, 0.5), "ours"),
        Contender("torch.addmv", lambda: torch.addmv(out, x.T, weights, beta=0.5, out=out)),
        Contender("numpy w @ X", by_numpy),
        Contender("naive eager", eager, "naive"),
    ]
    if with_compile:
        torch.compiler.reset()
        compiled = torch.compile(eager, dynamic=False)
        contenders.append(Contender("torch.compile", compiled, "compiled"))
    return Comparison("weighted_sum_", S, d, contenders, (x,))
