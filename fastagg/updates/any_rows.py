# SPDX-License-Identifier: Apache-2.0
"""Rows of any kind: float32 tensors in memory, tensors of another dtype, or streamed.

Ops take float32 tensors in memory. A :class:`StreamedRow` is read piece by piece, and a row of
another dtype is converted piece by piece (:func:`pieces`). A budget limits how much is in memory at
a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import Rows
from fastagg.ops.row_lists import RowList
from fastagg.ops.scales import SCALE_BLOCK, num_scales
from fastagg.updates.small import rows_in_order

SCRATCH_BYTES = 64 << 20
"""Budget in bytes for converting rows of another dtype, if no streamed row sets a budget. A piece
of ``MIN_PIECE`` columns may take more."""
SMALL_BYTES = 256 << 10
"""Bytes of a matrix up to which copying it takes less time than views of its rows."""
MIN_PIECE = 1024
"""Minimum number of columns per piece, if the rows or a segment do not have less; the caller's
budget must cover this many columns of every row."""


class StreamedRow(ABC):
    """A row [d] that is not in memory.

    Attributes:
        num_params: d.
        budget: the caller's maximum number of bytes for one piece of all rows that are read
            together; None for rows of the library, whose pieces follow ``SCRATCH_BYTES``.
        device: where pieces are read to.
    """

    num_params: int
    budget: int | None
    device = torch.device("cpu")

    def problem(self) -> str | None:
        """Return why the row cannot be read, or None. A step calls this once, before it reads."""
        return None

    @abstractmethod
    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        """Return columns [begin, end) as float32: ``scratch`` [end - begin], or another tensor.

        A pass begins at column 0. Each further piece begins where the last one ended.

        Raises:
            ValueError: the columns cannot be read; the message names the client's source.
        """


class QuantizedRow(StreamedRow):
    """A row of int8 numbers with scales, read as float32; see :func:`fastagg.ops.quantize_`.

    Args:
        numbers: [d] int8.
        scales: [ceil(d / 256)] float32.
    """

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.num_params, self.budget = numbers.shape[0], None
        self.numbers, self.scales = numbers, scales
        self.device = numbers.device

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        """Return columns [begin, end) in ``scratch``; ``begin`` is a multiple of 256."""
        scales = self.scales[scale_blocks(begin, end)]
        ops.dequantize_([scratch], [self.numbers[begin:end]], [scales])
        return scratch


_IN_MEMORY = (Tensor, RowList)  # a union would be made anew in every call

AnyRow = Tensor | StreamedRow
AnyRows = Tensor | Sequence[AnyRow]
"""S rows: [S, d] float32, or S items, each a tensor [d] of any dtype or a streamed row."""


def scale_blocks(begin: int, end: int) -> slice:
    """Return where the scales of columns [begin, end) are; ``begin`` is a multiple of 256."""
    return slice(begin // SCALE_BLOCK, num_scales(end))


def known_in_memory(rows: AnyRows) -> TypeGuard[Rows]:
    """Return whether the type of ``rows`` says that all of them are float32 tensors in memory."""
    return isinstance(rows, _IN_MEMORY)


def in_memory(rows: AnyRows) -> TypeGuard[Rows]:
    """Return whether all rows are float32 tensors, which can be passed to any op."""
    if known_in_memory(rows):
        return True
    for row in rows:  # noqa: SIM110 (all() takes twice as long for some hundred rows)
        if not isinstance(row, Tensor) or row.dtype != torch.float32:
            return False
    return True


def are_bfloat16(rows: AnyRows) -> TypeGuard[Rows]:
    """Return whether all rows are bfloat16 tensors."""
    return not known_in_memory(rows) and all(
        isinstance(row, Tensor) and row.dtype == torch.bfloat16 for row in rows
    )


def each_row(rows: AnyRows) -> Sequence[AnyRow]:
    """Return the rows one by one; those of a matrix as views."""
    return rows.unbind(0) if isinstance(rows, Tensor) else rows


def alike(rows: AnyRows, some: list[AnyRow]) -> AnyRows:
    """Return ``some``, as a :class:`RowList` (known to be in memory) if all ``rows`` are."""
    return RowList(cast("list[Tensor]", some)) if in_memory(rows) else some


def rows_at(rows: AnyRows, positions: list[int]) -> AnyRows:
    """Return the rows at ``positions``, to be read only; those of a small matrix are copied."""
    if isinstance(rows, Tensor) and rows.nbytes <= SMALL_BYTES:
        return rows_in_order(rows, positions)
    listed = each_row(rows)
    return alike(rows, [listed[i] for i in positions])


def row_width(rows: AnyRows) -> int:
    """Return the number of columns of S >= 1 rows."""
    if isinstance(rows, Tensor):
        return rows.shape[1]
    first = rows[0]
    return first.num_params if isinstance(first, StreamedRow) else len(first)


def piece_columns(budget: int, rows: int, widest: int) -> int:
    """Return the number of columns of a piece of ``rows`` >= 1 float32 rows.

    It is ``widest`` if that fits into the budget, otherwise the largest power of two that fits, but
    not less than the smaller one of ``MIN_PIECE`` and ``widest``.
    """
    columns = max(budget // (4 * rows), MIN_PIECE)
    return widest if columns >= widest else 1 << (columns.bit_length() - 1)


def pieces(operands: Sequence[AnyRows], widest: int) -> Iterator[tuple[int, int, list[Rows]]]:
    """Yield begin, end, and columns [begin, end) of each operand as float32 tensors, in order.

    The width of a piece is ``widest``, or d if that is less, if the rows that are read or converted
    fit into the budget with it; otherwise it is the largest power of two with which they fit. All
    pieces of such rows are in the same scratch memory: a piece is overwritten when the next one is
    requested.

    Args:
        operands: for each, S >= 1 rows [d]; S may differ.
        widest: largest number of columns of a piece.

    Raises:
        ValueError: a caller's budget is too small for ``MIN_PIECE`` columns, or a row cannot be
            read.
    """
    num_params = row_width(operands[0])
    readers = [_Reader(rows) for rows in operands]
    piece = min(reader.columns(min(widest, num_params)) for reader in readers)
    scratch = [reader.scratch(piece) for reader in readers]
    for begin in range(0, num_params, piece):
        end = min(begin + piece, num_params)
        yield (
            begin,
            end,
            [r.piece(begin, end, s) for r, s in zip(readers, scratch, strict=True)],
        )


class _Reader:
    """Read S rows piece by piece; streamed and converted rows are copied into scratch."""

    def __init__(self, rows: AnyRows) -> None:
        self.rows = rows
        listed: Sequence[AnyRow] = () if isinstance(rows, Tensor) else rows
        self.copied = sum(not in_memory([row]) for row in listed)
        copied = (row.device for row in listed if not in_memory([row]))
        self.device = next(copied, torch.device("cpu"))
        self.budgets = {row.budget for row in listed if isinstance(row, StreamedRow)}

    def columns(self, widest: int) -> int:
        """Return the number of columns of a piece: :func:`piece_columns`.

        Raises:
            ValueError: a caller's budget is too small for the smallest piece.
        """
        if not self.copied:
            return widest
        given = [budget for budget in self.budgets if budget is not None]
        least = min(MIN_PIECE, widest)
        size = 4 * self.copied * least
        if given and min(given) < size:
            raise ValueError(
                f"budget: expected at least {size} bytes, for {least} columns of {self.copied} "
                f"rows, got {min(given)}"
            )
        if not given or None in self.budgets:
            given.append(SCRATCH_BYTES)
        return piece_columns(min(given), self.copied, widest)

    def scratch(self, columns: int) -> Tensor:
        return torch.empty(self.copied, columns, device=self.device, dtype=torch.float32)

    def piece(self, begin: int, end: int, scratch: Tensor) -> Rows:
        if isinstance(self.rows, Tensor):
            return self.rows[:, begin:end]
        copies = iter(scratch[:, : end - begin])
        parts = []
        for row in self.rows:
            if isinstance(row, StreamedRow):
                part = row.read(begin, end, next(copies))
            else:
                part = row[begin:end]
                if part.dtype != torch.float32:
                    part = next(copies).copy_(part)
            parts.append(part)
        return parts
