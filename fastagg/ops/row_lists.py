# SPDX-License-Identifier: Apache-2.0
"""The forms in which callers pass rows, and the list that the operators take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Rows = Tensor | Sequence[Tensor]
"""S rows of length d: one tensor [S, d], or a sequence of S tensors [d]."""


class RowList(list[Tensor]):
    """S rows, already validated: each is a float32 tensor [d] in memory.

    The ops do not check the type and number of dimensions of each row again. For hundreds of short
    rows, that check takes longer than a kernel.
    """


def row_list(rows: Rows, name: str) -> list[Tensor]:
    """Return rows as the list that the operators take; its items hold one row (1-D) or more (2-D).

    Args:
        rows: one tensor [S, d], or a sequence of S tensors [d].
        name: the argument's name, for error messages.

    Raises:
        ValueError: a tensor has the wrong number of dimensions.
        TypeError: ``rows`` is not a tensor or a sequence of tensors.
    """
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
