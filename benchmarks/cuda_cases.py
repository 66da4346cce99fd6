# SPDX-License-Identifier: Apache-2.0
"""The cases of ``benchmarks.cuda``: operands, contenders and targets."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastagg
from benchmarks.work import WORK
from fastagg import ops

_L2_BYTES = 60 << 20  # of an H200; all sets of operands together are at least four times as large
_CHUNK = 1 << 15  # columns per chunk of the careful Gram matrix; chunks are added in float64
_LR = 1e-3
_SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Way:
    """One implementation. ``call(index)`` uses set ``index`` of the operands.

    Roles are those of harness.py. ``capturable``: whether a CUDA graph can capture the call.
    """

    name: str
    call: Callable[[int], object]
    role: str = "careful"
    capturable: bool = True


@dataclass(frozen=True)
class Setup:
    """The operands and contenders of a case, created right before it is measured.

    sets: number of sets of operands.
    error: returns the error of a contender.
    """

    sets: int
    ways: list[Way]
    error: Callable[[Way], float] | None = None


@dataclass(frozen=True)
class Case:
    """A comparison and its targets.

    share: target for the share of the ceiling; 0 for none.
    speedup: target for the speedup over the fastest careful contender; 0 for none.
    """

    op: str
    S: int
    d: int
    make: Callable[[], Setup]
    ceiling: str  # "copy", "read" or "arithmetic"
    share: float = 0.0
    speedup: float = 0.0
    K: int = 0
    mode: str = ""  # "high" or "tf32", or the dtype of the rows if it is not float32

    @property
    def title(self) -> str:
        return f"{self.op} {self.mode}".strip() + f" ({self.S}, {self.d:,})"

    @property
    def num_bytes(self) -> int:
        saved = 2 * self.S * self.d if self.mode in _SHORT else 0
        return WORK[self.op](self.S, self.d).num_bytes - saved

    @property
    def products(self) -> int:
        """The number of bfloat16 products that take as long as one product in gram.

        TF32 takes twice as long as bfloat16.
        """
        return {"high": 4, "tf32": 2}.get(self.mode, 6)

    @property
    def flops(self) -> int:
        return WORK[self.op](self.S, self.d).flops


ROWS = [(20, 10_000_000), (100, 1_000_000), (100, 10_000_000), (1000, 100_000), (1000, 1_000_000)]
GRAM = [
    (20, 62_006), (20, 1_000_000), (20, 10_000_000), (64, 10_000_000), (128, 10_000_000),
    (256, 4_000_000), (1024, 1_000_000), (4096, 200_000),
]  # fmt: skip
TF32 = [(64, 10_000_000), (256, 4_000_000), (1024, 1_000_000)]
SHORT_ROWS = [(100, 10_000_000)]
FDMS = [(40, 1_000_000), (200, 1_000_000), (1000, 10_000_000), (100, 100_000_000), (4096, 100_000)]
COLUMNS = [(20, 10_000_000), (100, 1_000_000), (1000, 100_000)]
MIMIC = [(200, 1_000_000), (100, 10_000_000)]  # K, d; half active
INT8 = [(200, 1_000_000)]  # K, d; half active
SKETCHES = [(100, 1_000_000)]
MOMENTS = [10_000_000, 100_000_000]


def cases(device: str, dry: bool) -> list[Case]:
    """Return all cases, the most important first. With `dry` all sizes are tiny."""

    def size(S: int, d: int) -> tuple[int, int]:
        return (min(S, 24), 300) if dry else (S, d)

    found = []
    for S, d in (size(*shape) for shape in GRAM):
        ceiling, share = "arithmetic" if S >= 256 else "read", 0.60 if S >= 256 else 0.85
        share = 0.75 if S == 128 else share
        make = _bind(gram, S, d, device)
        found.append(
            Case("gram", S, d, make, ceiling, 0.0 if d < 10**6 and S < 256 else share, 1.7)
        )
    row_ops: list[tuple[str, Callable[..., Setup]]] = [
        ("weighted_sum_", weighted_sum),
        ("mimic_", mimic),
        ("memory_update_", memory),
    ]
    for name, build in row_ops:
        for S, d in (size(*shape) for shape in ROWS):
            found.append(Case(name, S, d, _bind(build, S, d, device), "copy", 0.90))
    for K, d in (size(*shape) for shape in FDMS):
        found.append(
            Case("step fdms", K // 2, d, _bind(fdms_step, K, d, device), "read", speedup=3.0, K=K)
        )
    for K, d in (size(*shape) for shape in MIMIC):
        found.append(
            Case("step mimic", K // 2, d, _bind(mimic_step, K, d, device), "copy", speedup=2.5, K=K)
        )
    for S, d in (size(*shape) for shape in TF32):
        ceiling = "arithmetic" if S >= 256 else "read"
        high = _bind(partial(gram, precision="high"), S, d, device)
        found.append(Case("gram", S, d, high, ceiling, mode="high"))
        found.append(Case("gram", S, d, _bind(tf32_gram, S, d, device), ceiling, mode="tf32"))
    for mode, dtype in _SHORT.items():
        for name, build in row_ops:
            for S, d in (size(*shape) for shape in SHORT_ROWS):
                make = _bind(partial(build, dtype=dtype), S, d, device)
                found.append(Case(name, S, d, make, "copy", 0.90, mode=mode))
    for name in ("median", "trimmed-mean", "meamed"):
        for S, d in (size(*shape) for shape in COLUMNS):
            make = _bind(partial(columns, name), S, d, device)
            found.append(Case(f"columns {name}", S, d, make, "read", speedup=5.0))
    for K, d in (size(*shape) for shape in INT8):
        make = _bind(int8_step, K, d, device)
        found.append(Case("step mifa, int8", K // 2, d, make, "copy", speedup=1.0, K=K))
    for S, d in (size(*shape) for shape in SKETCHES):
        found.append(Case("sketch_", S, d, _bind(sketch, S, d, device), "read", speedup=2.0))
    for d in MOMENTS:
        S, d = size(1, d)
        found.append(Case("add_adaptive_", S, d, _bind(adam, S, d, device), "copy", 0.90))
    return found


def _bind(
    build: Callable[[int, int, str], Setup], S: int, d: int, device: str
) -> Callable[[], Setup]:
    return lambda: build(S, d, device)


def _sets(num_bytes: int, device: str) -> int:
    """Return how many sets of operands of this size together are far larger than the L2 cache."""
    return max(1, -(-4 * _L2_BYTES // num_bytes)) if device == "cuda" else 2


def _correlated(S: int, d: int, device: str) -> Tensor:
    """Return rows [S, d] with a common component, as updates have."""
    return torch.randn(S, d, device=device).add_(torch.randn(d, device=device))


# --- ops ------------------------------------------------------------------------------------------


class _Grams:
    """Sets of rows, and the Gram matrices that torch computes of them."""

    def __init__(self, S: int, d: int, device: str) -> None:
        self.sets = [_correlated(S, d, device) for _ in range(_sets(4 * S * d, device))]
        self.out = torch.empty(S, S, device=device)
        self.total = torch.empty(S, S, device=device, dtype=torch.float64)
        self.exact = _exact_gram(self.sets[0])

    def ours(self, precision: str) -> Way:
        def call(index: int) -> Tensor:
            return ops.gram(self.sets[index], dtype=torch.float64, precision=precision)

        return Way("fastagg", call, "ours")

    def in_chunks(self, index: int) -> Tensor:  # as accurate as fastagg: chunks added in float64
        self.total.zero_()
        for chunk in self.sets[index].split(_CHUNK, dim=1):
            self.total.add_(torch.mm(chunk, chunk.T, out=self.out))
        return self.total

    def plain(self, index: int) -> Tensor:
        return torch.mm(self.sets[index], self.sets[index].T, out=self.out)

    def error(self, way: Way) -> float:
        result = way.call(0)
        assert isinstance(result, Tensor)
        return float((_cosine(result.double()) - _cosine(self.exact)).abs().max())


def _in_tf32(call: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    def allowed(index: int) -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return call(index)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return allowed


def gram(S: int, d: int, device: str, precision: str = "highest") -> Setup:
    grams = _Grams(S, d, device)
    ways = [
        grams.ours(precision),
        Way("torch, chunks of d in float64", grams.in_chunks),
        Way("torch X @ X.T", grams.plain, "peer"),
        Way("torch X @ X.T in TF32", _in_tf32(grams.plain), "peer"),
    ]
    return Setup(len(grams.sets), ways, grams.error)


def tf32_gram(S: int, d: int, device: str) -> Setup:
    grams = _Grams(S, d, device)
    ways = [
        grams.ours("tf32"),
        Way("torch in TF32, chunks of d in float64", _in_tf32(grams.in_chunks)),
        Way("torch X @ X.T in TF32", _in_tf32(grams.plain), "peer"),
    ]
    return Setup(len(grams.sets), ways, grams.error)


def _exact_gram(rows: Tensor) -> Tensor:
    exact = torch.zeros(len(rows), len(rows), device=rows.device, dtype=torch.float64)
    for part in rows.split(1 << 16, dim=1):
        wide = part.double()
        exact += wide @ wide.T
    return exact


def _cosine(gram: Tensor) -> Tensor:
    norms = gram.diagonal().sqrt()
    return gram / norms[:, None] / norms


def weighted_sum(S: int, d: int, device: str, dtype: torch.dtype = torch.float32) -> Setup:
    count = _sets(dtype.itemsize * S * d, device)
    sets = [_correlated(S, d, device).to(dtype) for _ in range(count)]
    out, weights = torch.randn(d, device=device), torch.rand(S, device=device)

    def careful(index: int) -> Tensor:
        if dtype == torch.float32:
            return torch.addmv(out, sets[index].T, weights, beta=0.5, out=out)
        for part, rows in zip(out.split(_CHUNK), sets[index].split(_CHUNK, dim=1), strict=True):
            torch.addmv(part, rows.float().T, weights, beta=0.5, out=part)
        return out

    ways = [
        Way("fastagg", lambda i: ops.weighted_sum_(out, sets[i], weights, 0.5), "ours"),
        Way("torch.addmv", careful),
    ]
    return Setup(len(sets), ways)


class _Memory:
    """The updates of every other client of 2 S, and the memory rows of all clients."""

    def __init__(self, S: int, d: int, device: str, dtype: torch.dtype) -> None:
        self.S = S
        self.updates = torch.randn(S, d, device=device).to(dtype)
        self.memory = torch.randn(2 * S, d, device=device)
        self.params, self.v = torch.randn(d, device=device), torch.empty(d, device=device)
        self.mean = self.memory.mean(dim=0)
        self.total = self.memory.sum(dim=0, dtype=torch.float64)
        self.scratch = torch.empty(S, d, device=device)
        self.clients = torch.arange(0, 2 * S, 2)
        self.there = self.clients.to(device)


def mimic(S: int, d: int, device: str, dtype: torch.dtype = torch.float32) -> Setup:
    sets = [_Memory(S, d, device, dtype) for _ in range(_sets(12 * S * d, device))]

    def ours(index: int) -> None:
        m = sets[index]
        ops.mimic_(m.params, m.updates, m.memory, m.clients, _LR)

    def careful(index: int) -> None:
        m = sets[index]
        torch.index_select(m.memory, 0, m.there, out=m.scratch)
        torch.mean(m.scratch.add_(m.updates), 0, out=m.v)
        m.params.add_(m.v, alpha=_LR)
        m.memory.index_copy_(0, m.there, torch.sub(m.v, m.updates, out=m.scratch))

    def naive(index: int) -> None:
        m = sets[index]
        v = (m.updates + m.memory[m.there]).mean(dim=0)
        m.params.add_(v, alpha=_LR)
        m.memory[m.there] = v - m.updates

    ways = [Way("fastagg", ours, "ours"), Way("careful eager", careful)]
    return Setup(len(sets), [*ways, Way("naive eager", naive, "naive")])


def memory(S: int, d: int, device: str, dtype: torch.dtype = torch.float32) -> Setup:
    sets = [_Memory(S, d, device, dtype) for _ in range(_sets(12 * S * d, device))]
    weights = torch.ones(S)

    def ours(index: int) -> None:
        m = sets[index]
        ops.memory_update_(m.params, m.total, m.memory, m.updates, m.clients, weights, _LR, 1 / S)

    def careful(index: int) -> None:
        m = sets[index]
        torch.index_select(m.memory, 0, m.there, out=m.scratch)
        torch.mean(torch.sub(m.updates, m.scratch, out=m.scratch), 0, out=m.v)
        kept = m.updates if dtype == torch.float32 else m.scratch.copy_(m.updates)
        m.memory.index_copy_(0, m.there, kept)
        m.params.add_(m.mean.add_(m.v), alpha=_LR)

    return Setup(len(sets), [Way("fastagg", ours, "ours"), Way("careful eager", careful)])


def columns(name: str, S: int, d: int, device: str) -> Setup:
    """The median, or a statistic that leaves values out, against torch's sort."""
    sets = [_correlated(S, d, device) for _ in range(_sets(4 * S * d, device))]
    out, peak = torch.empty(d, device=device), torch.empty(1, device=device)
    trim = (S - 1) // 2 if name == "median" else S // 5

    def ours(index: int) -> Tensor:
        if name == "meamed":
            return ops.meamed_(out, peak, sets[index], S - trim)
        return ops.trimmed_mean_(out, peak, sets[index], trim)

    def careful(index: int) -> Tensor:
        ascending = sets[index].sort(dim=0).values
        if name != "meamed":
            return torch.mean(ascending[trim : S - trim], 0, out=out)
        middle = (ascending[(S - 1) // 2] + ascending[S // 2]) / 2
        nearest = (ascending - middle).abs_().topk(S - trim, dim=0, largest=False).indices
        return torch.mean(ascending.gather(0, nearest), 0, out=out)

    return Setup(len(sets), [Way("fastagg", ours, "ours"), Way("torch.sort", careful)])


def sketch(S: int, d: int, device: str) -> Setup:
    """Sketches of 1024 numbers; contenders have their signs and positions in memory.

    The package sjlt, a CUDA kernel for the same projection, takes part if it is installed (``pip
    install --no-build-isolation sjlt``). It computes no norms and adds in float32.
    """
    sets = [_correlated(S, d, device) for _ in range(_sets(4 * S * d, device))]
    sums = torch.zeros(S, 1024, dtype=torch.float64, device=device)
    squares, signed = sums.new_zeros(S), torch.empty(d, device=device)
    buckets = torch.randint(1024, (d,), device=device)
    signs = torch.randint(2, (d,), device=device).mul_(2).sub_(1).float()

    def careful(index: int) -> Tensor:
        for row, target in zip(sets[index], sums, strict=True):
            target.index_add_(0, buckets, torch.mul(row, signs, out=signed).double())
        return sums

    ways = [
        Way("fastagg", lambda i: ops.sketch_(sums, squares, sets[i], 5), "ours"),
        Way("torch index_add_", careful),
    ]
    peer = _sjlt()
    if peer is not None:
        projection = peer.SJLTProjection(d, 1024, device=device)
        ways.append(Way("sjlt", lambda i: projection(sets[i]), "peer", capturable=False))
    return Setup(len(sets), ways)


def _sjlt() -> Any:
    """Return the module sjlt, or None if it is not installed or has no kernels for this machine."""
    if importlib.util.find_spec("sjlt") is None or not torch.cuda.is_available():
        return None
    found = importlib.import_module("sjlt")
    return found if found.EXTENSION_AVAILABLE else None


def adam(S: int, d: int, device: str) -> Setup:
    """A step of Adam along an aggregate [d]; S is 1."""
    sets = [torch.randn(d, device=device) for _ in range(_sets(4 * d, device))]
    params, m, s = torch.zeros(3, d, device=device)
    own = torch.nn.Parameter(torch.zeros(d, device=device))
    optimizer = torch.optim.Adam([own], lr=_LR, maximize=True, fused=True)

    def careful(index: int) -> None:
        own.grad = sets[index]
        optimizer.step()

    def ours(index: int) -> object:
        return ops.add_adaptive_(params, m, s, sets[index], "adam", _LR, 0.9, 0.99, 1e-3)

    ways = [Way("fastagg", ours, "ours"), Way("torch.optim.Adam, fused", careful, "careful", False)]
    return Setup(len(sets), ways)


# --- server steps ---------------------------------------------------------------------------------


def fdms_step(K: int, d: int, device: str) -> Setup:
    """Steps of FDMS with half of K clients active and known scores of all pairs.

    fastagg takes part twice, both times with all checks: as enqueued ops, which can be captured,
    and as the aggregator.
    """
    S = K // 2
    sets = [_correlated(S, d, device) for _ in range(_sets(8 * S * d, device))]
    clients = torch.arange(0, K, 2)
    there = clients.to(device)
    params = torch.zeros(d, device=device)
    agg = fastagg.make("fdms", num_clients=K, num_params=d, server_lr=_LR, device=device)
    assert isinstance(agg, fastagg.FDMS)
    scores = torch.rand(K, K)
    agg.scores.copy_((scores + scores.T) / 2).fill_diagonal_(0)
    agg.counts.fill_(1).fill_diagonal_(0)
    agg.rounds.fill_(1)
    twin = fastagg.make("fdms", **agg.options())
    assert isinstance(twin, fastagg.FDMS)
    twin.load_state_dict(agg.state_dict())
    enqueued = fastagg.EnqueuedFDMS(twin, params)
    out = torch.empty(S, S, device=device)
    total = torch.empty(S, S, device=device, dtype=torch.float64)
    place = torch.zeros(K, dtype=torch.int64, device=device)
    place[there] = torch.arange(S, device=device)
    means, joint = agg.scores.clone(), agg.counts.to(torch.float32)
    absent = torch.ones(K, dtype=torch.bool, device=device)
    absent[there] = False

    def by_ops(index: int) -> Tensor:
        enqueued.enqueue(sets[index], there)
        return params

    def careful(index: int) -> Tensor:
        rows = sets[index]
        total.zero_()
        for chunk in rows.split(_CHUNK, dim=1):
            total.add_(torch.mm(chunk, chunk.T, out=out))
        norms = total.diagonal().sqrt()
        fresh = ((total / norms[:, None] / norms + 1) / 2).float()
        best = means[:, there].masked_fill(joint[:, there] == 0, -1.0).max(dim=1)
        friend = torch.where(absent, best.indices, place)
        weights = torch.zeros(S, device=device).index_add_(
            0, friend, torch.full((K,), _LR / K, device=device)
        )
        pairs = (there[:, None], there)
        n = joint[pairs] + 1
        means[pairs] = means[pairs] + (fresh - means[pairs]) / n
        joint[pairs] = n
        return torch.addmv(params, rows.T, weights, out=params)

    ways = [
        Way("fastagg.ops", by_ops, "ours"),
        Way("fastagg.FDMS.step", lambda i: agg.step(params, sets[i], clients), "variant", False),
        Way("careful eager", careful),
    ]
    return Setup(len(sets), ways)


def mimic_step(K: int, d: int, device: str) -> Setup:
    """Steps of MimiC with half of K clients active.

    fastagg takes part twice, both times with all checks: copying the rows, and taking ownership of
    them.
    """
    S = K // 2
    setup = mimic(S, d, device)
    clients = torch.arange(0, K, 2)
    params = torch.zeros(d, device=device)
    agg = fastagg.make("mimic", num_clients=K, num_params=d, server_lr=_LR, device=device)
    keeper = fastagg.make("mimic", num_clients=K, num_params=d, server_lr=_LR, device=device)
    updates = torch.randn(S, d, device=device)
    buffer = fastagg.UpdateBuffer(K, d, device)
    for row, update in zip(buffer.rows(clients), updates, strict=True):
        row.copy_(update)
    steps = [
        Way("fastagg.MimiC.step", lambda _: agg.step(params, updates, clients), "ours", False),
        Way(
            "the same, taking ownership",
            lambda _: keeper.step(params, buffer, clients),
            "variant",
            False,
        ),
    ]
    return Setup(setup.sets, [*steps, *(way for way in setup.ways if way.role != "ours")])


def int8_step(K: int, d: int, device: str) -> Setup:
    """Steps of MIFA with a memory of int8 rows, against a memory of float32 rows in torch."""
    S = K // 2
    setup = memory(S, d, device)
    clients, params = torch.arange(0, K, 2), torch.zeros(d, device=device)
    updates = torch.randn(S, d, device=device)
    agg = fastagg.make(
        "mifa", num_clients=K, num_params=d, server_lr=_LR, memory_dtype="int8", device=device
    )
    step = Way(
        "fastagg.MIFA.step, int8", lambda _: agg.step(params, updates, clients), "ours", False
    )
    return Setup(setup.sets, [step, *(way for way in setup.ways if way.role != "ours")])
