# SPDX-License-Identifier: Apache-2.0
"""Every op against the float64 oracle, on random data, in about two seconds a device.

What ``python -m fastagg`` runs on a user's machine. The test suite checks far more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import reference

# Errors are relative to the largest magnitude of the oracle's result. float32 results are rounded
# once or twice (6e-8 each); Gram products are summed in float32 inside blocks, and those errors
# average out over the 391 blocks (measured: 1e-8); scores are float64 throughout.
_ROUNDED = 2e-7
_ON_FLOAT64 = (
    "cosine_scores",
    "distance_scores",
    "replace_rows",
    "bucketed_gram",
    "weiszfeld",
    "clip_towards",
)
_BOUNDS = {"gram": 1e-7, "gram_rows": 1e-7} | dict.fromkeys(_ON_FLOAT64, 1e-12)
_CUDA_BOUNDS = _BOUNDS | {"gram": 1e-5, "gram_rows": 1e-5, "gram_and_sum_": 1e-5}
"""There a product is off by up to 2^-16, which averages out, and sums of 16 are truncated."""


class OnDevice:
    """The ops as one calls them with tensors on the CPU, computed on another device.

    Arguments go there, with their strides, and what changed comes back. Client ids (int64, 1-D)
    stay on the CPU, where they are checked.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            pairs: list[tuple[Tensor, Tensor]] = []  # here, there

            def moved(value: Any) -> Any:
                if isinstance(value, list | tuple):
                    return [moved(item) for item in value]
                if not isinstance(value, Tensor):
                    return value
                if value.dtype == torch.int64 and value.dim() == 1:
                    return value
                there = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=self.device
                )
                pairs.append((value, there.copy_(value)))
                return there

            result = op(*map(moved, args), **{key: moved(v) for key, v in kwargs.items()})
            if not name.endswith("_"):
                return result.cpu()
            for here, there in pairs:
                here.copy_(there)
            return args[0]

        return call


@dataclass(frozen=True)
class Check:
    """The outcome of one op: its largest relative error and the bound that it had to meet."""

    op: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def _error(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        scale = max(b.double().abs().max().item(), 1e-300)
        worst = max(worst, (a.double() - b.double()).abs().max().item() / scale)
    return worst


def run(
    K: int = 40, S: int = 23, d: int = 100_003, seed: int = 0, device: str = "cpu"
) -> list[Check]:
    """Run all checks on a device and return them, one per op."""
    ours: Any = ops if device == "cpu" else OnDevice(device)
    bounds = _BOUNDS if device == "cpu" else _CUDA_BOUNDS
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(d, generator=g)
    updates = torch.randn(S, d, generator=g) + common  # correlated, as real updates are
    clients = torch.randperm(K, generator=g)[:S]
    active = torch.zeros(K, dtype=torch.bool)
    active[clients] = True
    params = torch.randn(d, generator=g)
    memory = torch.randn(K, d, generator=g)
    weights = torch.rand(S, generator=g, dtype=torch.float64)
    scores = torch.rand(K, K, generator=g)
    counts = torch.randint(0, 4, (K, K), generator=g, dtype=torch.int32)
    total = memory.double().sum(dim=0)
    gram = reference.gram(updates, dtype=torch.float64)
    round_scores = reference.cosine_scores(gram)
    shares = weights[1:] / weights[1:].sum()
    order = torch.randperm(S - 1, generator=g)
    some = torch.randperm(S, generator=g)[: S // 4]
    new = torch.arange(S - 1, S - 1 - len(some), -1)
    everyone = torch.ones(K, K, dtype=torch.bool)

    # name -> call(implementation) -> the tensors it returned or changed
    def changed(call: Callable[..., Tensor], *arguments: object) -> tuple[Tensor, ...]:
        copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        call(*copies)
        listed = [item for c in copies for item in (c if isinstance(c, list) else [c])]
        return tuple(item for item in listed if isinstance(item, Tensor))

    def blank(*shapes_and_dtypes: tuple[int, torch.dtype]) -> list[Tensor]:
        return [torch.zeros(size, dtype=dtype) for size, dtype in shapes_and_dtypes]

    vector, wide, row_peaks = (d, torch.float32), (d, torch.float64), (S, torch.float32)
    references = [params if s % 3 else None for s in range(S)]  # some rows were adopted

    calls: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        "gram": lambda m: (m.gram(updates, dtype=torch.float64),),
        "gram_rows": lambda m: (m.gram_rows(updates, some),),
        "replace_rows": lambda m: (m.replace_rows(gram[:-1, :-1], new, gram.flip(0)[: len(new)]),),
        "bucketed_gram": lambda m: m.bucketed_gram(gram, order, weights[: S - 1], 3),
        "weiszfeld": lambda m: (m.weiszfeld(gram, weights, weights, 1.0, 3),),
        "clip_towards": lambda m: (m.clip_towards(gram, shares, 300.0, 3),),
        "abs_max": lambda m: (m.abs_max(updates),),
        "cosine_scores": lambda m: (m.cosine_scores(gram),),
        "distance_scores": lambda m: (m.distance_scores(gram),),
        "update_scores_": lambda m: changed(
            m.update_scores_, scores, counts, round_scores, clients
        ),
        "select_friends": lambda m: (m.select_friends(scores, counts, active, everyone),),
        "eliminate_": lambda m: changed(m.eliminate_, everyone, scores, counts, 0.4),
        "weighted_sum_": lambda m: changed(m.weighted_sum_, params, updates, weights, 0.5),
        "gram_and_sum_": lambda m: changed(m.gram_and_sum_, params, gram, updates, weights),
        "mimic_": lambda m: changed(m.mimic_, params, updates, memory, clients, 0.7),
        "memory_update_": lambda m: changed(
            m.memory_update_, params, total, memory, updates, clients, torch.ones(S), 0.7, 1 / K
        ),
        "mimic_mean_": lambda m: changed(
            m.mimic_mean_,
            *blank(wide, vector, row_peaks),
            updates,
            memory,
            clients,
            references,
            list(torch.zeros(S, d)),
        ),
        "memory_total_": lambda m: changed(
            m.memory_total_,
            *blank(wide, row_peaks),
            total,
            memory,
            updates,
            clients,
            weights,
            references,
            params,
            list(torch.zeros(S, d)),
        ),
        "add_total_": lambda m: changed(m.add_total_, params, total, 0.7, 1 / K, True),
    }
    return [
        Check(name, _error(call(ours), call(reference)), bounds.get(name, _ROUNDED))
        for name, call in calls.items()
    ]
