# SPDX-License-Identifier: Apache-2.0
"""``columns``: statistics of sorted columns, compared with torch, numpy and ByzFL.

``torch.median`` returns the lower one of the two middle values of an even number of rows, which is
less work than their mean. Contenders that take seconds are timed three times.

numpy sorts with the vector instructions of the processor, but with one thread. "numpy sort" and
"numpy sort, transposed" divide the columns among as many threads as torch has: numpy releases the
interpreter's lock while it sorts. The first sorts a copy of the rows along the columns. The second
copies blocks of columns into contiguous memory that stays in L2, sorts them there, and computes the
statistic from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

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
_BLOCK_BYTES = 1 << 19  # of the sorted columns of a block
Statistic = Callable[[np.ndarray], np.ndarray]
"""Sorted columns [S, columns] -> one number of each, [columns]. It may not change them."""


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

    def numpy_sorts(self, statistic: Statistic) -> list[Contender]:
        """Return the contenders that sort with numpy."""
        threads, width = torch.get_num_threads(), max(1, _BLOCK_BYTES // (4 * self.S))
        bounds = [self.d * i // threads for i in range(threads + 1)]
        shares = [*pairwise(bounds)]
        whole, out = np.empty_like(self.x_numpy), np.empty(self.d, np.float32)
        blocks = [np.empty((width, self.S), np.float32) for _ in shares]
        pool = ThreadPoolExecutor(max(1, threads - 1))

        def columns(start: int, end: int) -> None:
            part = whole[:, start:end]
            np.copyto(part, self.x_numpy[:, start:end])
            part.sort(axis=0)
            out[start:end] = statistic(part)

        def transposed(start: int, end: int, block: np.ndarray) -> None:
            for first in range(start, end, width):
                last = min(first + width, end)
                part = block[: last - first]
                np.copyto(part, self.x_numpy[:, first:last].T)
                part.sort(axis=1)
                out[first:last] = statistic(part.T)

        def on_all_threads(tasks: list[Callable[[], None]]) -> np.ndarray:
            others = [pool.submit(task) for task in tasks[1:]]
            tasks[0]()
            for other in others:
                other.result()
            return out

        by_columns = [functools.partial(columns, *share) for share in shares]
        by_blocks = [
            functools.partial(transposed, *share, block)
            for share, block in zip(shares, blocks, strict=True)
        ]
        return [
            Contender("numpy sort", lambda: on_all_threads([*by_columns])),
            Contender("numpy sort, transposed", lambda: on_all_threads([*by_blocks])),
        ]

    def comparison(
        self, name: str, ours: Callable[[], Tensor], others: dict[str, Callable[[], object]],
        statistic: Statistic, byzfl: str, *arguments: int,
    ) -> Comparison:  # fmt: skip
        contenders = [Contender("fastagg", ours, "ours")]
        contenders += [Contender(n, call, repeats=_REPEATS) for n, call in others.items()]
        contenders += self.numpy_sorts(statistic)
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
        lambda ascending: (ascending[low] + ascending[high]) / 2,
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
        lambda ascending: ascending[kept].mean(axis=0),
        "TrMean",
        r.f,
    )


def meamed(S: int, d: int) -> Comparison:
    """ByzFL's definition of the nearest values differs in ties only."""
    r = _Rows(S, d)
    near = S - r.f

    def of_sorted(ascending: np.ndarray) -> np.ndarray:
        # The nearest values are a run. Of two values `near` places apart, the nearer one is in it;
        # the values between are in every run.
        middle = (ascending[(S - 1) // 2] + ascending[S // 2]) / 2
        low, high = ascending[: r.f], ascending[near:]
        ends = np.where(high - middle < middle - low, high, low)
        return (ends.sum(axis=0) + ascending[r.f : near].sum(axis=0)) / np.float32(near)

    def by_sort() -> Tensor:
        ascending = r.sorted()
        middle = (ascending[(S - 1) // 2] + ascending[S // 2]) / 2
        nearest = (ascending - middle).abs_().topk(near, dim=0, largest=False).indices
        return ascending.gather(0, nearest).mean(dim=0)

    return r.comparison(
        "meamed",
        lambda: ops.meamed_(r.out, r.peak, r.x, near),
        {"torch.sort": by_sort},
        of_sorted,
        "Meamed",
        r.f,
    )
