# SPDX-License-Identifier: Apache-2.0
"""Updates that are given as models: a server receives models, and sent one to all clients.

    rows = Differences([[layer0, layer1], ...], base)   # S models of two layers
    agg.step(params, rows, clients)

An update is a model minus the base. A rule that reads updates once subtracts on the way, so nothing
that is as large as the updates is written. For other uses, updates are computed in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastagg.updates.columns import MIN_PIECE, DifferenceRow
from fastagg.updates.streams import ColumnSource

_BUDGET = 16 << 20
"""Bytes of a piece of all rows: they stay in a cache until the kernels have read them."""


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
