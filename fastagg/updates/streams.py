# SPDX-License-Identifier: Apache-2.0
"""Streamed updates: rows that are not in memory and are read in pieces of columns.

    paths = [f"{k}.safetensors" for k in clients]
    files = ClientFiles(paths, layout, budget=1 << 28)
    agg.step(params, files, clients)

Most rules that weight rows read a source once or twice in a step: once for the sum and, if needed,
once for the Gram matrix. A rule that remembers rows reads it once, into spare rows. Nearly equal
rows of a robust rule, and ``clip_norm``, take a pass more (docs/distributed.md has all numbers).
The source's ``budget`` bounds how much is in memory at a time.

Results equal those of the same rows in memory. They are bit-identical if the budget covers a
segment of all rows (4 S x 2^20 bytes for d up to 2^28, more for larger d) or all d columns of them.
With a smaller budget the Gram matrix is summed over smaller pieces, which changes its float64
rounding.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fastagg.options import MOST, read_count, read_size
from fastagg.updates.any_rows import StreamedRow

BUDGET = 1 << 28
"""Default budget of a source: 256 MiB."""


class ColumnSource(ABC):
    """S rows that a step reads in pieces: the base class of all streamed updates.

    Attributes:
        rows: one row for each client, in the order of ``clients``.
        num_params: d.
    """

    rows: Sequence[StreamedRow]
    num_params: int

    def __len__(self) -> int:
        return len(self.rows)


class TensorRows(ColumnSource):
    """Tensors of any floating-point dtype, for instance memory-mapped, converted in pieces.

    Args:
        rows: S tensors [d], or one tensor [S, d].
        budget: bytes of scratch memory for the rows' pieces.

    Attributes:
        num_params: d; 0 for an empty sequence, which a step takes as no rows.
    """

    def __init__(self, rows: Tensor | Sequence[Tensor], *, budget: int = BUDGET) -> None:
        is_matrix = isinstance(rows, Tensor) and rows.ndim == 2
        if not is_matrix and (isinstance(rows, Tensor | str) or not isinstance(rows, Sequence)):
            found = f"shape {[*rows.shape]}" if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(
                f"rows: expected a tensor [S, d] or a sequence of tensors [d], got {found}"
            )
        self.num_params = rows.shape[1] if isinstance(rows, Tensor) else 0
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
    """Blocks of columns from an iterator, which is started once for each pass of a step.

    Every pass must yield the same numbers. If all columns fit into one piece, the piece is kept and
    a second pass does not start the iterator again. Blocks may have any widths, which may differ
    between passes; they are copied into pieces of the size that the budget allows. A block is not
    used any more when the next one is requested, so all blocks may be the same tensor.

    A step raises ValueError and changes nothing if a block has another number of rows, or if the
    blocks have fewer or more than d columns in total.

    Args:
        blocks: function without arguments, called at the beginning of a pass; returns an iterable
            of blocks [S, n] of a floating-point dtype, d columns in total.
        num_rows: S; with 0, the iterator is never started.
        num_params: d.
        budget: bytes of scratch memory for the pieces. One block of the caller is held in addition.
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
                "blocks: expected a function that starts an iterator, because a step may need two "
                f"passes, got {type(blocks).__name__}"
            )
        self._blocks = blocks
        self.num_params = read_size("num_params", num_params)
        self.rows = [
            _BlockRow(self, s, read_size("budget", budget))
            for s in range(read_count("num_rows", num_rows, least=0, most=MOST))
        ]
        self._iterator: Iterator[Tensor] = iter(())
        self._none = torch.empty(num_rows, 0, dtype=torch.float32, device="cpu")
        self._rest = self._none  # columns of the last block that are not in a piece yet
        self._piece = self._none  # the last piece
        self._held = (0, 0)  # columns [begin, end) in the last piece

    def restart(self) -> None:
        """Discard what an earlier step read."""
        self._held = (0, 0)

    def piece(self, begin: int, end: int) -> Tensor:
        """Return columns [begin, end) of all rows, [S, end - begin] float32.

        Pieces must be requested in order. The same piece may be requested again.
        """
        if self._held == (begin, end):
            return self._piece[:, : end - begin]
        if begin == 0:
            self._iterator, self._rest = iter(self._blocks()), self._none
        elif begin != self._held[1]:
            raise ValueError(
                f"updates: expected a piece that begins at column {self._held[1]} or at 0, got one "
                f"that begins at {begin}"
            )
        self._held = (0, 0)  # remains if the next line raises
        piece = self._take(begin, end)
        if end == self.num_params and (self._rest.shape[1] or any(map(_wide, self._iterator))):
            raise ValueError(f"updates: expected {self.num_params} columns, got more")
        self._held = (begin, end)
        return piece

    def _take(self, begin: int, end: int) -> Tensor:
        """Copy the next columns from as many blocks as they need."""
        at = begin
        while at < end:
            if not self._rest.shape[1]:
                self._rest = self._none  # frees the last block before the next one is requested
                block = next(self._iterator, None)
                if block is None:
                    raise ValueError(f"updates: expected {self.num_params} columns, got {at}")
                self._rest = self._check(block)
                del block
            if self._piece.shape[1] < end - begin or self._piece.device != self._rest.device:
                self._piece = self._none  # frees the old piece before a new one is allocated
                self._piece = torch.empty(
                    len(self), end - begin, device=self._rest.device, dtype=torch.float32
                )
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
        """Note that a step begins. Blocks are checked when they are read."""
        self._source.restart()

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        return self._source.piece(begin, end)[self._index]
