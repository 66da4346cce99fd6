# SPDX-License-Identifier: Apache-2.0
"""Updates that are given as models: a server receives models, and sent one to all clients.

    rows = Differences([[layer0, layer1], ...], base)   # S models of two layers
    agg.step(params, rows, clients)

An update is a model minus the base. A rule that reads updates once subtracts on the way, so nothing
that is as large as the updates is written. For other uses, updates are computed in pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.updates.any_rows import MIN_PIECE, AnyRows, StreamedRow
from fastagg.updates.streams import ColumnSource

_BUDGET = 16 << 20
"""Bytes of a piece of all rows: they stay in a cache until the kernels have read them."""
_SHORT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parts of models that ``ops.difference_sum_`` reads."""


class DifferenceRow(StreamedRow):
    """A row that is a model minus a base; see :class:`Differences`.

    Args:
        model: tensors on the CPU whose elements, in order, are those of the model, [d] in total.
        base: [d] float32.
        budget: see :class:`StreamedRow`.

    Raises:
        TypeError, ValueError: the model does not have d numbers, or is not contiguous.

    Attributes:
        parts: the tensors of the model, flat.
        base: the base.
    """

    def __init__(self, model: Sequence[Tensor], base: Tensor, budget: int) -> None:
        self.num_params, self.budget = len(base), budget
        self.parts = [part.view(-1) for part in model]
        self.base = base
        count = sum(part.numel() for part in self.parts)
        if count != len(base):
            raise ValueError(f"models: expected {len(base)} numbers, as in the base, got {count}")
        if not all(part.is_floating_point() for part in self.parts):
            raise TypeError("models: expected floating-point tensors")

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        start = 0
        for part in self.parts:
            first, last = max(start, begin), min(start + part.numel(), end)
            if first < last:
                values, place = (
                    part[first - start : last - start],
                    slice(first - begin, last - begin),
                )
                torch.sub(values, self.base[first:last], out=scratch[place])
            start += part.numel()
        return scratch

    def bounds(self) -> list[tuple[int, int]]:
        """Return the columns [begin, end) of every part."""
        ends = [0, *itertools.accumulate(part.numel() for part in self.parts)]
        return list(itertools.pairwise(ends))

    def fits(self, other: DifferenceRow) -> bool:
        """Return whether both have the same base, and parts of the same lengths and dtypes."""
        return self.base is other.base and all(
            one.numel() == two.numel() and one.dtype == two.dtype
            for one, two in zip(self.parts, other.parts, strict=True)
        )


class Differences(ColumnSource):
    """S models minus a base.

    Args:
        models: S models. Each is a sequence of tensors on the CPU, of any floating-point dtype and
            contiguous, whose elements in order are the columns; all models have the same shapes.
            They must not change before the step has returned.
        base: [d] float32, contiguous; or S such tensors, one for each model. Only models with the
            same base, the same tensor, are read without a copy.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    def __init__(self, models: Sequence[Sequence[Tensor]], base: Tensor | Sequence[Tensor]) -> None:
        bases = [base] * len(models) if isinstance(base, Tensor) else base
        self.num_params = len(base if isinstance(base, Tensor) else base[0])
        budget = max(_BUDGET, 4 * len(models) * MIN_PIECE)
        self.rows = [DifferenceRow(*pair, budget) for pair in zip(models, bases, strict=True)]


def read_together(rows: AnyRows) -> Sequence[DifferenceRow]:
    """Return rows that ``ops.difference_sum_`` can read together; none if there are others."""
    first = None if isinstance(rows, Tensor) else rows[0]
    if not isinstance(first, DifferenceRow):
        return []
    if any(part.dtype not in _SHORT for part in first.parts):
        return []
    found = [row for row in rows if isinstance(row, DifferenceRow) and row.fits(first)]
    return found if len(found) == len(rows) else []
