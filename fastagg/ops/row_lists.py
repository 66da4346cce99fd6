# SPDX-License-Identifier: Apache-2.0
"""Rows for the operators, in whatever form they come."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Rows = Tensor | Sequence[Tensor]


class RowList(list[Tensor]):
    """S rows, of which somebody has made sure that each is a float32 tensor [d] in memory. Nobody
    looks at each of them again: for hundreds of short rows, looking takes longer than a kernel."""


def row_list(rows: Rows, name: str) -> list[Tensor]:
    """The operators take a list whose items have one row (1-D) or many (2-D)."""
    if isinstance(rows, RowList):
        return rows
    if isinstance(rows, Tensor):
        if rows.dim() != 2:
            raise ValueError(
                f"{name}: expected [S, d] or a sequence of tensors [d], got shape {[*rows.shape]}"
            )
        return [rows]
    if not isinstance(rows, Sequence):
        raise TypeError(f"{name}: expected a tensor or a sequence of tensors, got {type(rows)}")
    for row in rows:
        if not isinstance(row, Tensor):
            raise TypeError(f"{name}: expected a tensor or a sequence of tensors, got {type(rows)}")
        if row.dim() != 1:
            raise ValueError(f"{name}: expected tensors [d] in the sequence, got {[*row.shape]}")
    return list(rows)
