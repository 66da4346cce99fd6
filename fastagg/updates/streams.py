# SPDX-License-Identifier: Apache-2.0
"""Updates that are not in memory: read column by column, as often as a step has passes.

    files = ClientFiles([f"{k}.safetensors" for k in clients], layout, budget=1 << 28)
    agg.step(params, files, clients)

A step reads a source twice at most where the rule weighs rows (once for the Gram matrix, once for
the sum), and once where the rule remembers them (into rows of its own). What is read at a time is
bounded by the source's ``budget``. Results are those of the same rows in memory: bit-identical if
the budget holds a segment of all rows (4 S x 2^20 bytes), or all of d; with less, the Gram matrix
is added up in smaller parts, which changes it by float64 roundings.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fastagg.options import read_size
from fastagg.updates.columns import StreamedRow

BUDGET = 1 << 28


class ColumnSource(ABC):
    """S rows that a step reads in pieces.

    Attributes:
        rows: one for each client, in the order of ``clients``.
        num_params: d.
    """

    rows: Sequence[StreamedRow]
    num_params: int

    def __len__(self) -> int:
        return len(self.rows)


class TensorRows(ColumnSource):
    """Rows in any floating-point dtype, for instance memory-mapped: converted piece by piece.

    Args:
        rows: S tensors [d], or [S, d].
        budget: bytes for the pieces.
    """

    def __init__(self, rows: Tensor | Sequence[Tensor], *, budget: int = BUDGET) -> None:
        self.num_params = 0
        budget = read_size("budget", budget)
        for s, row in enumerate(rows):
            if not isinstance(row, Tensor) or not row.is_floating_point() or row.ndim != 1:
                raise TypeError(f"rows[{s}]: expected a floating-point tensor [d], got {row!r}")
            if s > 0 and len(row) != self.num_params:
                raise ValueError(f"rows[{s}]: expected {self.num_params} columns, got {len(row)}")
            self.num_params = len(row)
        self.rows = [_TensorRow(row, budget) for row in rows]


class _TensorRow(StreamedRow):
    def __init__(self, tensor: Tensor, budget: int) -> None:
        self.num_params, self.budget = len(tensor), budget
        self._tensor = tensor

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        return scratch.copy_(self._tensor[begin:end])


class ColumnBlocks(ColumnSource):
    """Blocks of columns from an iterator, which is started once a pass.

    Every pass of a step must give the same numbers. (If all columns are one piece, it is kept for
    the second pass of the step.) Blocks may have any widths, also different ones in
    different passes; they are copied into pieces as the budget allows. A block is done with before
    the next one is asked for, so they may all be the same tensor.

    Args:
        blocks: called with nothing at the beginning of a pass; returns an iterable of blocks, each
            [S, n] of a floating-point dtype, that have d columns together.
        num_rows: S.
        num_params: d.
        budget: bytes for the pieces; one block of the caller's comes on top.

    A step raises ValueError, and changes nothing, if a block has another number of rows, or if
    there are fewer or more than d columns.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterable[Tensor]],
        *,
        num_rows: int,
        num_params: int,
        budget: int = BUDGET,
    ) -> None:
        if not callable(blocks):
            raise TypeError(
                "blocks: expected a function that starts an iterator, since a step may need two "
                f"passes, got {type(blocks).__name__}"
            )
        self._blocks = blocks
        self.num_params = read_size("num_params", num_params)
        self.rows = [
            _BlockRow(self, s, read_size("budget", budget))
            for s in range(read_size("num_rows", num_rows))
        ]
        self._iterator: Iterator[Tensor] = iter(())
        self._none = torch.empty(num_rows, 0)
        self._rest = self._none  # columns of the last block that nobody asked for yet
        self._piece = self._none  # the last piece
        self._held = (0, 0)  # its columns

    def restart(self) -> None:
        """Forget what an earlier step read."""
        self._held = (0, 0)

    def piece(self, begin: int, end: int) -> Tensor:
        """Columns [begin, end) of all rows, [S, end - begin] float32."""
        if self._held == (begin, end):
            return self._piece[:, : end - begin]
        if begin == 0:
            self._iterator, self._rest = iter(self._blocks()), self._none
        elif begin != self._held[1]:
            raise ValueError(f"updates: columns {begin} cannot come after {self._held}")
        self._held = (0, 0)  # nothing, should this fail
        piece = self._take(begin, end)
        if end == self.num_params and (self._rest.shape[1] or any(map(_wide, self._iterator))):
            raise ValueError(f"updates: expected {self.num_params} columns, got more")
        self._held = (begin, end)
        return piece

    def _take(self, begin: int, end: int) -> Tensor:
        """The next columns, copied together."""
        at = begin
        while at < end:
            if not self._rest.shape[1]:
                self._rest = self._none  # lets the last block go before the next one comes
                block = next(self._iterator, None)
                if block is None:
                    raise ValueError(f"updates: expected {self.num_params} columns, got {at}")
                self._rest = self._check(block)
                del block
            if self._piece.shape[1] < end - begin or self._piece.device != self._rest.device:
                self._piece = self._none  # before there is another one
                self._piece = torch.empty(len(self), end - begin, device=self._rest.device)
            width = min(end - at, self._rest.shape[1])
            self._piece[:, at - begin : at - begin + width] = self._rest[:, :width]
            at, self._rest = at + width, self._rest[:, width:]
        return self._piece[:, : end - begin]

    def _check(self, block: object) -> Tensor:
        if not isinstance(block, Tensor) or not block.is_floating_point():
            raise TypeError(f"updates: expected blocks of floating-point tensors, got {block!r}")
        if block.ndim != 2 or len(block) != len(self):
            raise ValueError(f"updates: expected blocks [{len(self)}, n], got {[*block.shape]}")
        return block


def _wide(block: Tensor) -> bool:
    return block.shape[1] > 0


class _BlockRow(StreamedRow):
    def __init__(self, source: ColumnBlocks, index: int, budget: int) -> None:
        self.num_params, self.budget = source.num_params, budget
        self._source, self._index = source, index

    def problem(self) -> None:
        """Nothing, but a step begins."""
        self._source.restart()

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        return self._source.piece(begin, end)[self._index]
