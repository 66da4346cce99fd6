# SPDX-License-Identifier: Apache-2.0
"""The matrix products of a local step, timed one by one with the libraries that could compute them.

Most of a local step is small products. The table says how fast each of them is, and how long the
step would take with the fastest library for each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_REPEATS = 25


@dataclass(frozen=True)
class Operand:
    """Sizes and strides of a factor [batch, ...] of a product."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def make(self) -> Tensor:
        """Return a random tensor of these sizes and strides; values may share memory."""
        last = sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True))
        return torch.randn(last + 1).as_strided(self.sizes, self.strides)


@dataclass(frozen=True)
class Product:
    """A batched product [batch, m, k] x [batch, k, n]."""

    left: Operand
    right: Operand

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        batch, m, k = self.left.sizes
        return 2 * batch * m * k * self.right.sizes[2]

    def __str__(self) -> str:
        batch, m, k = self.left.sizes
        turned = ", second transposed" if self.right.strides[1] == 1 else ""
        return f"{batch} of {m} x {k} x {self.right.sizes[2]}{turned}"


def time_products(
    call: Callable[[], Any], steps: int, seconds: float, bare: float, console: Console
) -> None:
    """Print the time of every batched product in `call`, with torch and with numpy.

    call: `steps` local steps.
    seconds: the time of a local step.
    bare: the time of a local step of the plain loop.
    """
    table = Table(title="Its products, alone")
    for heading in ("product (m x k x n)", "calls per step", "ms per step", "GFLOP/s", "numpy"):
        table.add_column(heading, justify="left" if heading.startswith("product") else "right")
    ours = fastest = 0.0
    found = _products_of(call)
    if not found:
        return
    for product, count in found.most_common():
        by_torch, by_numpy = (count / steps * t for t in _times(product))
        ours, fastest = ours + by_torch, fastest + min(by_torch, by_numpy)
        done = product.operations * count / steps / 1e9
        table.add_row(
            str(product),
            f"{count / steps:.1f}",
            f"{by_torch * 1e3:.3f}",
            f"{done / by_torch:.1f}",
            f"{done / by_numpy:.1f}",
        )
    console.print(table)
    best = seconds - ours + fastest
    console.print(
        f"products: {ours * 1e3:.2f} of {seconds * 1e3:.2f} ms per step; with the faster of torch "
        f"and numpy for each, the step would take {best * 1e3:.2f} ms, {bare / best:.2f} times as "
        f"fast as the plain loop"
    )


class _Counting(TorchDispatchMode):
    """Counts the batched products of what runs within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("bmm", "baddbmm"):
            left, right = (Operand(tuple(x.shape), x.stride()) for x in args[-2:])
            self.found[Product(left, right)] += 1
        return func(*args, **(kwargs or {}))


def _products_of(call: Callable[[], Any]) -> Counter[Product]:
    with _Counting() as counting:
        call()
    return counting.found


def _times(product: Product) -> tuple[float, float]:
    """Return the median seconds of the product with torch and with numpy, on one thread each."""
    left, right = product.left.make(), product.right.make()
    out = torch.empty(*left.shape[:2], right.shape[2])
    arrays = left.numpy(), right.numpy(), out.numpy()
    ways: list[Callable[[], Any]] = [
        lambda: torch.bmm(left, right, out=out),
        lambda: np.matmul(arrays[0], arrays[1], out=arrays[2]),
    ]
    taken: tuple[list[float], list[float]] = ([], [])
    with threadpool_limits(1):
        for _ in range(_REPEATS):
            for way, times in zip(ways, taken, strict=True):
                way()  # what the other one left in the cache is not counted
                start = time.perf_counter()
                way()
                times.append(time.perf_counter() - start)
    by_torch, by_numpy = (float(np.median(times)) for times in taken)
    return by_torch, by_numpy
