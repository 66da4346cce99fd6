# SPDX-License-Identifier: Apache-2.0
"""``columns``: statistics of sorted columns, compared with torch, numpy and ByzFL.

``torch.median`` returns the lower one of the two middle values of an even number of rows, which is
less work than their mean. Contenders that take seconds are timed three times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Comparison, Contender
from benchmarks.operands import normal
from benchmarks.options import Case, Options
from fastagg import ops

SHAPES = [(10, 1_000_000), (20, 1_000_000), (100, 1_000_000), (500, 200_000), (1000, 100_000)]
SOME_SHAPES = [(20, 1_000_000), (100, 1_000_000), (1000, 100_000)]
_REPEATS = 3  # of the slow contenders


def cases(options: Options) -> list[Case]:
    """Return all comparisons of this subcommand."""
    return [
        *(Case("columns median", S, options.width(d), median) for S, d in SHAPES),
        *(Case("columns trimmed-mean", S, options.width(d), trimmed_mean) for S, d in SOME_SHAPES),
        *(Case("columns meamed", S, options.width(d), meamed) for S, d in SOME_SHAPES),
    ]


class _Rows:
    """S rows, of which a tenth may be Byzantine."""

    def __init__(self, S: int, d: int) -> None:
        self.S, self.d, self.f = S, d, max(1, S // 10)
        self.x = normal(S, d)
        self.x_numpy = self.x.numpy()
        self.out, self.peak = torch.empty(d), torch.empty(1)

    def sorted(self) -> Tensor:
        return self.x.sort(dim=0).values

    def partitioned(self, *places: int) -> np.ndarray:
        return np.partition(self.x_numpy, sorted(set(places)), axis=0)

    def comparison(
        self, name: str, ours: Callable[[], Tensor], others: dict[str, Callable[[], object]],
        byzfl: str, *arguments: int,
    ) -> Comparison:  # fmt: skip
        contenders = [Contender("fastagg", ours, "ours")]
        contenders += [Contender(n, call, repeats=_REPEATS) for n, call in others.items()]
        if module := peers.byzfl_aggregators():
            rule = getattr(module, byzfl)(*arguments)
            call = lambda: rule(self.x)  # noqa: E731
            contenders.append(Contender(f"ByzFL {byzfl}", call, "peer", repeats=_REPEATS))
        return Comparison(f"columns {name}", self.S, self.d, contenders, (self.x,))


def median(S: int, d: int) -> Comparison:
    r = _Rows(S, d)
    low, high = (S - 1) // 2, S // 2

    def by_sort() -> Tensor:
        ascending = r.sorted()
        return (ascending[low] + ascending[high]) / 2

    def by_partition() -> np.ndarray:
        parts = r.partitioned(low, high)
        return (parts[low] + parts[high]) / 2

    return r.comparison(
        "median",
        lambda: ops.trimmed_mean_(r.out, r.peak, r.x, low),
        {
            "torch.median": lambda: r.x.median(dim=0).values,
            "torch.sort": by_sort,
            "numpy median": lambda: np.median(r.x_numpy, axis=0),
            "numpy partition": by_partition,
        },
        "Median",
    )


def trimmed_mean(S: int, d: int) -> Comparison:
    r = _Rows(S, d)
    kept = slice(r.f, S - r.f)
    return r.comparison(
        "trimmed-mean",
        lambda: ops.trimmed_mean_(r.out, r.peak, r.x, r.f),
        {
            "torch.sort": lambda: r.sorted()[kept].mean(dim=0),
            "numpy partition": lambda: r.partitioned(r.f, S - r.f - 1)[kept].mean(axis=0),
        },
        "TrMean",
        r.f,
    )


def meamed(S: int, d: int) -> Comparison:
    """ByzFL's definition of the nearest values differs in ties only."""
    r = _Rows(S, d)

    def by_sort() -> Tensor:
        ascending = r.sorted()
        middle = (ascending[(S - 1) // 2] + ascending[S // 2]) / 2
        nearest = (ascending - middle).abs_().topk(S - r.f, dim=0, largest=False).indices
        return ascending.gather(0, nearest).mean(dim=0)

    return r.comparison(
        "meamed",
        lambda: ops.meamed_(r.out, r.peak, r.x, S - r.f),
        {"torch.sort": by_sort},
        "Meamed",
        r.f,
    )
