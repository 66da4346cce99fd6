# SPDX-License-Identifier: Apache-2.0
"""Make small CPU tensors in one call of the extension each, or through NumPy.

PyTorch's functions take two to four times as long, and a step of a small model makes about ten such
tensors. Values have the same bits either way. If memory runs out, these functions raise, where
torch.from_numpy ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fastagg.ops import memory
from fastagg.ops.memory import tensor_of


def ids_tensor(ids: Sequence[int]) -> Tensor:
    """Return ids as an int64 tensor [n]."""
    return memory.int_tensor(ids)


def factors_tensor(factors: Sequence[float]) -> Tensor:
    """Return factors as a float64 tensor [n]."""
    return memory.float_tensor(factors)


def flags_of(ids: Sequence[int], count: int) -> Tensor:
    """Return bool [count] with True at ``ids``."""
    return memory.flags(ids, count)


def zeros(count: int, device: torch.device) -> Tensor:
    """Return float64 zeros [count].

    On a CPU no thread of PyTorch takes part: its threads would spin afterwards, on the cores that
    the threads of the next op need. The memory begins at a cache line, which NumPy's does not.
    """
    if device.type != "cpu":
        return torch.zeros(count, dtype=torch.float64, device=device)
    out = uninitialized((count,), device, torch.float64)
    out.numpy().fill(0.0)
    return out


def uninitialized(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a tensor with undefined content."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return memory.uninitialized(shape, dtype)


def on_cpu(tensor: Tensor) -> Tensor:
    """Return ``tensor.cpu()``. Where it is on the CPU already, this takes no call of PyTorch."""
    return tensor if tensor.is_cpu else tensor.cpu()


def on(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU on another device; see :func:`on_cpu`."""
    return tensor if device.type == "cpu" else tensor.to(device)


def diagonal(matrix: Tensor) -> Tensor:
    """Return the diagonal [n] of a float64 matrix [n, n], on its device; it may be a view."""
    return memory.diagonal(matrix) if matrix.is_cpu else matrix.diagonal()


def rounded(factors: Tensor) -> Tensor:
    """Return a copy of float64 ``factors`` [n] rounded to float32, on their device."""
    if not factors.is_cpu:
        return factors.to(torch.float32)
    return memory.rounded(factors)


def quotients(matrix: Tensor, divisor: Tensor) -> Tensor:
    """Return ``matrix / divisor`` rounded to float32, of float64 numbers [n, k].

    ``divisor`` is [n, 1] or has no dimensions. On a CPU, torch would start threads for large
    matrices; see :func:`zeros`.
    """
    if not matrix.is_cpu:
        return (matrix / divisor).float()
    out = uninitialized(matrix.shape, matrix.device)
    with np.errstate(all="ignore"):  # torch does not warn of NaN or Inf
        numbers, divisors = matrix.numpy(), divisor.numpy()
        np.divide(numbers, divisors, out=out.numpy(), dtype=np.float64, casting="same_kind")
    return out


def rows_in_order(matrix: Tensor, order: Sequence[int]) -> Tensor:
    """Return a copy of the rows ``order`` of a matrix [n, d]: [len(order), d]."""
    if matrix.device.type != "cpu":
        return matrix.index_select(0, ids_tensor(order).to(matrix.device))
    return memory.take_rows(matrix, order)


_PIECE = 1 << 14  # torch divides operations on 2^15 numbers or more among threads


def pieces(vector: Tensor) -> tuple[Tensor, ...]:
    """Return views of a vector [d] that are so short that torch takes one thread for each.

    Torch's threads are OpenMP's: an operation waits for all of them, on a busy machine for
    milliseconds. On a GPU there is one piece.
    """
    if len(vector) <= _PIECE or vector.device.type != "cpu":
        return (vector,)
    return vector.split(_PIECE)


def row_pieces(matrix: Tensor) -> list[slice]:
    """Return slices of the rows of a matrix [n, k], so short that torch takes one thread for each.

    Rows of 2^15 numbers or more are in one slice, because torch would divide each of them. See
    :func:`pieces`.
    """
    step = (2 * _PIECE - 1) // max(1, matrix.shape[1])
    if len(matrix) <= step or step == 0 or not matrix.is_cpu:
        return [slice(None)]
    return [slice(begin, begin + step) for begin in range(0, len(matrix), step)]


def by_row_pieces(matrix: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``compute(matrix)``, computed for one of :func:`row_pieces` at a time.

    ``compute`` maps rows [m, k] to [m, ...]; a result depends on its own row alone.
    """
    slices = row_pieces(matrix)
    if len(slices) == 1:
        return compute(matrix)
    return torch.cat([compute(matrix[some]) for some in slices])


def copy_in_pieces_(to: Tensor, vector: Tensor) -> None:
    """Set ``to`` [d] to ``vector`` [d], of any dtype, in :func:`pieces`."""
    for part, source in zip(pieces(to), pieces(vector), strict=True):
        part.copy_(source)


def scale_in_pieces_(to: Tensor, vector: Tensor, factor: float) -> None:
    """Set ``to`` [d] to ``factor * vector`` [d] in the dtype of ``vector``, in :func:`pieces`."""
    for part, source in zip(pieces(to), pieces(vector), strict=True):
        torch.mul(source, factor, out=part)


def root(x: Tensor) -> Tensor:
    """Return the square roots of float numbers.

    On a CPU, torch leaves roots and rounding to MKL, which starts OpenMP's threads for 100 numbers.
    """
    return tensor_of(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def scale_pairs_(matrix: Tensor, factors: Tensor) -> None:
    """Multiply entry (i, j) of a matrix [n, n] in place by ``factors[i] * factors[j]``, float64."""
    products = matrix.numpy() if matrix.is_cpu else matrix
    numbers = factors.numpy() if matrix.is_cpu else factors
    with np.errstate(all="ignore"):  # torch does not warn of NaN or Inf
        products *= numbers[:, None] * numbers


def equal_pairs(x: Tensor) -> Tensor:
    """Return bool [n, n]: which of n numbers are equal, except to themselves; see :func:`zeros`."""
    if not x.is_cpu:
        return (x[:, None] == x).fill_diagonal_(False)
    numbers = x.numpy()
    equal = np.equal.outer(numbers, numbers)
    np.fill_diagonal(equal, False)
    return tensor_of(equal)


def both(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x & y`` of two bool tensors; see :func:`zeros`."""
    return tensor_of(x.numpy() & y.numpy()) if x.is_cpu else x & y


def either_way(matrix: Tensor) -> Tensor:
    """Return ``matrix | matrix.T`` of a bool matrix [n, n]; see :func:`zeros`."""
    if not matrix.is_cpu:
        return matrix | matrix.T
    flags = matrix.numpy()
    return tensor_of(flags | flags.T)


def count_true(x: Tensor) -> int:
    """Return the number of True in a bool tensor; see :func:`zeros`."""
    return int(np.count_nonzero(x.numpy())) if x.is_cpu else int(x.count_nonzero())


def lowest(x: Tensor) -> float:
    """Return the least of float numbers, NaN if one is NaN; see :func:`zeros`."""
    if x.device.type != "cpu":
        return float(x.min())
    with np.errstate(all="ignore"):
        return float(np.min(x.numpy()))


def clamped_(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp float numbers in place to the range from ``low`` to ``high``; see :func:`zeros`."""
    if x.device.type != "cpu":
        return x.clamp_(low, high)
    with np.errstate(all="ignore"):
        np.clip(x.numpy(), low, high, out=x.numpy())
    return x


def rounded_(x: Tensor) -> Tensor:
    """Round float numbers in place to whole ones, halves to even ones; see :func:`root`."""
    if x.device.type != "cpu":
        return x.round_()
    np.rint(x.numpy(), out=x.numpy())
    return x
