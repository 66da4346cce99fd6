# SPDX-License-Identifier: Apache-2.0
"""Conversion of arrays and tensors to rows for the kernels, and back; sums and inner products."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastagg import ops
from fastagg.robust.row_units import common_unit, divided, divisors, headroom, multiplied
from fastagg.rules.common_row import CLOSE, find_common_row, with_common_row
from fastagg.updates.columns import Columns, segment_columns

_CLOSE64 = 2.0**-20
"""``CLOSE`` for float64 rows, whose Gram matrices are more exact: 0.001 of the norm."""
_BLOCK = 1 << 14  # columns per product of float64 vectors


@dataclass(frozen=True)
class Vectors:
    """n vectors [d], with the kind, dtype and shape of the input that they were read from.

    Attributes:
        rows: n contiguous tensors [d], all float32 or all float64. Do not write to them: they are
            views of the input where possible.
        kept: the position of each row in the input.
        peaks: the largest magnitude of each row.
        shape: shape of one input vector.
        dtype: dtype of the input. If dtypes differ, the one to which torch promotes them.
        as_numpy: whether the input consisted of NumPy arrays.
    """

    rows: list[Tensor]
    kept: list[int]
    peaks: list[float]
    shape: torch.Size
    dtype: torch.dtype
    as_numpy: bool

    @classmethod
    def read(cls, vectors: object, *, drop: bool = False) -> Vectors:
        """Read the vectors of the input.

        Args:
            vectors: an array or tensor [n, ...], or a sequence of n arrays or n tensors of the same
                shape; floating-point, on the CPU. Vectors of several dtypes are converted to the
                one to which torch promotes all of them, whether or not some are then left out.
            drop: leave out vectors with NaN or Inf.

        Raises:
            TypeError: the input is of another type, or mixes arrays and tensors, or a vector is
                not floating-point or not dense.
            ValueError: there are no vectors, shapes differ, a vector is not on the CPU, or a vector
                holds NaN or Inf and ``drop`` is off.
        """
        parts, as_numpy = _parts(vectors)
        if not parts:
            raise ValueError("vectors: expected at least one, got none")
        shape = parts[0].shape
        for position, part in enumerate(parts):
            if not part.dtype.is_floating_point:
                raise TypeError(
                    f"vectors[{position}]: expected a floating-point dtype, got {part.dtype}"
                )
        dtype = reduce(torch.promote_types, [part.dtype for part in parts])
        work = torch.float64 if dtype == torch.float64 else torch.float32
        rows = []
        for position, part in enumerate(parts):
            if part.shape != shape:
                raise ValueError(
                    f"vectors[{position}]: expected shape {list(shape)}, got {list(part.shape)}"
                )
            if part.device.type != "cpu":
                raise ValueError(f"vectors[{position}]: expected device cpu, got {part.device}")
            if part.layout != torch.strided:
                raise TypeError(
                    f"vectors[{position}]: expected a dense tensor, got layout {part.layout}"
                )
            rows.append(part.detach().reshape(-1).to(work).contiguous())
        if rows[0].numel() == 0:
            raise ValueError(f"vectors: expected at least one number in each, got {list(shape)}")
        peaks = [peak_of(row) for row in rows]
        kept = [position for position, peak in enumerate(peaks) if math.isfinite(peak)]
        if len(kept) < len(rows) and not drop:
            wrong = [position for position, peak in enumerate(peaks) if not math.isfinite(peak)]
            raise ValueError(
                f"vectors: expected finite values, got NaN or Inf at {wrong}; "
                'nonfinite="drop" leaves them out'
            )
        if not kept:
            raise ValueError(
                f"vectors: expected at least one with finite values, but all {len(rows)} hold NaN "
                "or Inf"
            )
        return cls(
            [rows[position] for position in kept],
            kept,
            [peaks[position] for position in kept],
            shape,
            dtype,
            as_numpy,
        )

    def products(self) -> Products:
        """Return the products of the rows, or of rows divided as in ``row_units``."""
        unit = common_unit(self.peaks)
        return Products(divided(self.rows, divisors(self.peaks, unit)))

    def mean(self, factors: Tensor) -> Tensor:
        """Return means [m, d] of the rows with ``factors`` [m, n]; see :func:`combine`."""
        return combine(self.rows, factors, max(self.peaks))

    def pack(self, rows: Tensor) -> Any:
        """Convert vectors [m, d] to the kind, dtype and shape of the input: [m, ...]."""
        result = rows.to(self.dtype).reshape(len(rows), *self.shape)
        return result.numpy() if self.as_numpy else result


class Products:
    """Inner products of rows; each matrix is computed on first use.

    Args:
        rows: m rows [d], all float32 or all float64.
        num_vectors: n; the first n rows are vectors of the input. All if None.
    """

    def __init__(self, rows: Sequence[Tensor], num_vectors: int | None = None) -> None:
        self.rows = list(rows)
        self.num_vectors = len(rows) if num_vectors is None else num_vectors

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def gram(self) -> Tensor:
        """The Gram matrix [m, m] float64, exact in norms."""
        if self.rows[0].dtype == torch.float32:
            return ops.gram(self.rows, dtype=torch.float64)
        return _gram64(self.rows)

    @cached_property
    def translated(self) -> Tensor:
        """A Gram matrix [m, m] float64 of the rows minus one vector, exact in distances.

        If no two rows are close, it is :attr:`gram`; see ``fastagg.rules.common_row``.
        """
        exact = self.rows[0].dtype == torch.float64
        common = find_common_row(self.gram, self.num_vectors, _CLOSE64 if exact else CLOSE)
        if common is None:
            return self.gram
        if exact:
            return with_common_row(self.gram, _gram64(self.rows, self.rows[common]))
        columns = Columns(segment_columns(len(self.rows[0])))
        return with_common_row(self.gram, columns.gram_around(self.rows, common))


def _gram64(rows: Sequence[Tensor], common: Tensor | None = None) -> Tensor:
    """Compute the Gram matrix of float64 rows [d], or of the rows minus ``common`` [d]."""
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
    for start in range(0, rows[0].numel(), _BLOCK):
        block = torch.stack([row[start : start + _BLOCK] for row in rows])
        if common is not None:
            block -= common[start : start + _BLOCK]
        gram += block @ block.T
    return (gram + gram.T) / 2.0


def peak_of(row: Tensor) -> float:
    """Return the largest magnitude of a row [d]; NaN or Inf if it holds one of them."""
    low, high = torch.aminmax(row)
    return max(-float(low), float(high))


def combine(rows: Sequence[Tensor], factors: Tensor, peak: float = 0.0) -> Tensor:
    """Compute ``factors @ rows`` [m, d], in the dtype of the rows.

    Args:
        rows: n rows [d].
        factors: [m, n] float64. Rows with factor 0 are not read.
        peak: largest magnitude of float64 rows, if it may be above 2^959. The magnitudes of the
            factors must then have sums of at most 1, up to rounding.
    """
    room = headroom(peak)
    out = torch.zeros(len(factors), rows[0].numel(), dtype=rows[0].dtype, device="cpu")
    for target, weights in zip(out, factors, strict=True):
        used = weights.nonzero().flatten().tolist()
        if rows[0].dtype == torch.float32:
            ops.weighted_sum_(target, [rows[i] for i in used], weights[used], beta=0.0)
        else:
            # Divide once, at the end: a mean is then exactly the sum divided by the count.
            count = 1.0 / max(float(weights.abs().max()), sys.float_info.min)
            for i in used:
                target.add_(rows[i], alpha=float(weights[i]) * count / room)
            target.div_(count)
    return multiplied(out, room)


def _parts(vectors: object) -> tuple[list[Tensor], bool]:
    """Return the vectors as tensors, and whether they were NumPy arrays."""
    if isinstance(vectors, Tensor):
        return list(vectors.unbind(0)) if vectors.ndim else [], False
    if isinstance(vectors, np.ndarray):
        return list(_tensor(vectors).unbind(0)) if vectors.ndim else [], True
    if isinstance(vectors, Sequence) and not isinstance(vectors, str | bytes):
        if all(isinstance(vector, Tensor) for vector in vectors):
            return list(vectors), False
        if all(isinstance(vector, np.ndarray) for vector in vectors):
            return [_tensor(vector) for vector in vectors], True
    raise TypeError(
        "vectors: expected an ndarray, a tensor, or a sequence of either, "
        f"got {type(vectors).__name__}"
    )


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor with the values of an array: a view, or a copy where torch needs one."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if any(stride < 0 for stride in native.strides):
        native = native.copy()
    try:
        with warnings.catch_warnings():
            # The array may be read-only: the tensor is never written to.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(native)
    except TypeError as error:
        raise TypeError(f"vectors: expected a floating-point dtype, got {array.dtype}") from error
