# SPDX-License-Identifier: Apache-2.0
"""Apply ops to rows of any kind: in memory, streamed, of another dtype, or spread over ranks.

Most ops work column by column, so they can run on any part of the columns. Three results need all
columns: the Gram matrix, sketches and the largest magnitudes. Rules call a :class:`Columns` for
both kinds.
This class has all columns in this process. :mod:`fastagg.distributed` has a subclass whose columns
are spread over ranks. No other code depends on where the columns are.

Rows need not be float32 tensors in memory: others are read or converted piece by piece, see
:mod:`fastagg.updates.any_rows`.

**Segments.** A segment has 2^20 columns, or more if d is above 2^28, so that there are at most 256.
The Gram matrix is the sum of the segments' Gram matrices, in float64 and from left to right; each
of them is one call of ``ops.gram``. The bits of the result therefore depend on the segments alone:
they are the same in one process, on any number of ranks, and from a stream. So are those of
sketches, which are added in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import Rows
from fastagg.updates.any_rows import (
    MIN_PIECE,
    SCRATCH_BYTES,
    SMALL_BYTES,
    AnyRow,
    AnyRows,
    QuantizedRow,
    StreamedRow,
    alike,
    are_bfloat16,
    each_row,
    in_memory,
    known_in_memory,
    pieces,
    row_width,
    rows_at,
    scale_blocks,
)
from fastagg.updates.differences import DifferenceRow, read_together
from fastagg.updates.small import on_cpu, uninitialized, zeros

# This module is public as `fastagg.columns`. What it had before rows had modules of their own can
# be imported from here as well.
__all__ = [
    "AROUND_BLOCK",
    "MAX_SEGMENTS",
    "MIN_PIECE",
    "MIN_SEGMENT",
    "SCRATCH_BYTES",
    "SMALL_BYTES",
    "AnyRow",
    "AnyRows",
    "ColumnStatistic",
    "Columns",
    "DifferenceRow",
    "QuantizedRow",
    "StreamedRow",
    "alike",
    "each_row",
    "in_memory",
    "known_in_memory",
    "rows_at",
    "segment_columns",
]

MIN_SEGMENT = 1 << 20
MAX_SEGMENTS = 256
AROUND_BLOCK = 1 << 16
"""Columns per block, in scratch memory, when a common row is subtracted from all rows."""


@dataclass(frozen=True)
class ColumnStatistic:
    """A statistic of the S values of each column.

    Attributes:
        op: :func:`fastagg.ops.trimmed_mean_` or :func:`fastagg.ops.meamed_`.
        count: its last argument.
    """

    op: Callable[[Tensor, Tensor, Rows, int, Tensor | None], Tensor]
    count: int

    def write(self, out: Tensor, peak: Tensor, rows: Rows, scales: Tensor | None = None) -> None:
        """Compute ``out`` [d], and ``peak`` [1], the largest magnitude in the rows.

        Args:
            out, peak: changed in place.
            rows: S rows.
            scales: [S] float64, by which rows are multiplied in float32; None: ones.
        """
        self.op(out, peak, rows, self.count, scales)


def segment_columns(num_params: int) -> int:
    """Return the number of columns of a segment for d = ``num_params``, a power of two."""
    segment = MIN_SEGMENT
    while num_params > segment * MAX_SEGMENTS:
        segment *= 2
    return segment


class Columns:
    """Ops on rows of any kind, with all d columns in this process.

    Results are those of ``fastagg.ops`` on whole rows; :meth:`gram` adds those of segments.

    Args:
        segment: number of columns of a segment.

    Attributes:
        first: number of the first column, 0 if all columns are in this process.
        whole: whether all columns are in this process.
    """

    first = 0
    whole = True

    def __init__(self, segment: int) -> None:
        self.segment = segment

    # --- results that need all columns ------------------------------------------------------

    def gram(
        self, rows: AnyRows, *, pairs: Tensor | None = None, precision: str = "highest"
    ) -> Tensor:
        """:func:`fastagg.ops.gram` in float64, summed over segments: S >= 1 rows -> [S, S]."""
        options: dict[str, Any] = {
            "pairs": pairs,
            "dtype": torch.float64,
            "precision": precision,
        }
        if in_memory(rows) and self.whole and _on_gpu(rows):  # all segments at once
            return ops.gram(rows, segment=self.segment, **options)
        if in_memory(rows) and row_width(rows) <= self.segment:
            return self._fold([ops.gram(rows, **options)])
        return self._fold(ops.gram(parts, **options) for _, _, (parts,) in self._pieces([rows]))

    def gram_rows(self, rows: AnyRows, changed: Tensor) -> Tensor:
        """:func:`fastagg.ops.gram_rows`, summed over segments: S >= 1 rows, [C] -> [C, S]."""
        if in_memory(rows) and row_width(rows) <= self.segment:
            return self._add([ops.gram_rows(rows, changed)])
        return self._add(ops.gram_rows(parts, changed) for _, _, (parts,) in self._pieces([rows]))

    def gram_around(self, rows: AnyRows, common: int, scales: Tensor | None = None) -> Tensor:
        """Return the Gram matrix of the rows minus row ``common``, in float64: [S, S].

        Differences are rounded to float32; a row far from the common one may become infinite. The
        matrix is the sum of those of blocks of ``AROUND_BLOCK`` columns, in order within a segment,
        then of those of the segments. It needs scratch memory for a block, beyond any budget.

        Args:
            rows: S >= 1 rows.
            common: the position of the row that is subtracted.
            scales: [S] float64. The result then has the bits of that of the rows times ``scales``,
                rounded to float32. None: ones.
        """
        return self._fold(
            _gram_around(parts, common, scales) for _, _, (parts,) in self._pieces([rows])
        )

    def gram_and_sum_(
        self, out: Tensor, rows: AnyRows, weights: Tensor, *, precision: str = "highest"
    ) -> Tensor:
        """Return :meth:`gram`, and set ``out = weights @ rows`` [d] in the same pass."""
        differences = read_together(rows)
        if differences:  # on the CPU, where there is one precision
            return self._fold(self._difference_grams(out, differences, weights))
        if in_memory(rows) and out.shape[0] <= self.segment:
            return self._fold([_gram_and_sum_(out, rows, weights, precision)])
        if in_memory(rows) and not _one_pass(out):
            # One launch for the sum instead of one for each segment; the bits are the same.
            ops.weighted_sum_(out, rows, weights, 0.0)
            return self.gram(rows, precision=precision)
        return self._fold(
            _gram_and_sum_(out[begin:end], parts, weights, precision)
            for begin, end, (parts,) in self._pieces([rows])
        )

    def _difference_grams(
        self, out: Tensor, rows: Sequence[DifferenceRow], weights: Tensor
    ) -> Iterator[Tensor]:
        parts, base = [part for row in rows for part in row.parts], rows[0].base
        for begin in range(0, len(base), self.segment):
            gram = torch.empty(len(rows), len(rows), dtype=torch.float64, device="cpu")
            here = out[begin : begin + self.segment]
            ops.difference_gram_and_sum_(here, gram, parts, base, weights, begin)
            yield gram

    def sketch(
        self,
        rows: AnyRows,
        buckets: int,
        seed: int,
        out: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return sketches and squared norms of S >= 1 rows, which are summed over segments.

        With ``out`` and ``weights``, set ``out = weights @ rows`` in the same pass.

        Returns:
            Sketches [S, buckets] and squared norms [S], both float64; see
            :func:`fastagg.ops.sketch_`.
        """
        size = rows.shape[0] if isinstance(rows, Tensor) else len(rows)
        sums = self._add(self._sketches(rows, size, buckets, seed, out, weights))
        return sums[:-size].view(size, buckets), sums[-size:]

    def _sketches(
        self,
        rows: AnyRows,
        size: int,
        buckets: int,
        seed: int,
        out: Tensor | None,
        weights: Tensor | None,
    ) -> Iterator[Tensor]:
        """Yield the sketches of every segment's columns, then their squares: [S (buckets + 1)]."""
        part: Tensor | None = None
        for begin, end, (piece,) in self._pieces([rows]):
            if part is not None and begin % self.segment == 0:
                yield part
                part = None
            if part is None:
                device = piece.device if isinstance(piece, Tensor) else piece[0].device
                part = zeros(size * (buckets + 1), device)
            own = part[:-size].view(size, buckets)
            first = self.first + begin
            if out is None or weights is None:
                ops.sketch_(own, part[-size:], piece, seed, first)
            else:
                here = out[begin:end]
                ops.sketch_and_sum_(here, own, part[-size:], piece, weights, seed, first)
        assert part is not None  # d >= 1
        yield part

    def square_norms(self, rows: AnyRows) -> Tensor:
        """Return the diagonal of :meth:`gram`, with its bits: [S] float64 on the CPU, S >= 1."""
        if in_memory(rows) and self.whole and _on_gpu(rows):
            return _squares(rows, self.segment).cpu()
        return self._add(_squares(parts) for _, _, (parts,) in self._pieces([rows])).cpu()

    def sum_and_squares_(self, out: Tensor, rows: AnyRows, weights: Tensor) -> Tensor:
        """Set ``out = weights @ rows`` [d], and return the squared norms of the rows, in one pass.

        They have the bits of :meth:`square_norms`, except for models minus one base
        (:class:`fastagg.updates.differences.Differences`): those are added part by part in every
        segment, with a relative error of at most 1e-6.
        """
        differences = read_together(rows)
        if differences:
            return self._difference_sum_(out, differences, weights)

        def parts() -> Iterator[Tensor]:
            for begin, end, (piece,) in self._pieces([rows]):
                ops.weighted_sum_(out[begin:end], piece, weights, beta=0.0)
                yield _squares(piece)

        return self._add(parts()).cpu()

    def _difference_sum_(
        self, out: Tensor, rows: Sequence[DifferenceRow], weights: Tensor
    ) -> Tensor:
        squares = self._add(self._difference_squares(out, rows, weights))
        beyond = (~torch.isfinite(squares)).nonzero().flatten().tolist()
        if beyond:  # perhaps finite: squares of large numbers leave the range of float32
            squares[beyond] = self.square_norms([rows[s] for s in beyond])
        return squares

    def _difference_squares(
        self, out: Tensor, rows: Sequence[DifferenceRow], weights: Tensor
    ) -> Iterator[Tensor]:
        """Yield the squared norms [S] of every segment's columns, and set ``out`` on the way."""
        base = rows[0].base
        squares = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
        found = torch.empty_like(squares)
        for i, (begin, end) in enumerate(rows[0].bounds()):
            first = begin
            while first < end:
                last = min(end, (first // self.segment + 1) * self.segment)
                parts = [row.parts[i][first - begin : last - begin] for row in rows]
                ops.difference_sum_(out[first:last], found, parts, base[first:last], weights)
                squares += found
                if last % self.segment == 0 or last == len(base):
                    yield squares
                    squares = torch.zeros_like(squares)
                first = last

    def abs_max(self, rows: AnyRows) -> Tensor:
        """Return the largest magnitude of each row, :func:`fastagg.ops.abs_max`: [S] on the CPU."""
        if in_memory(rows):
            return self.join_peaks(on_cpu(ops.abs_max(rows)))
        peaks = torch.zeros(len(rows), dtype=torch.float32, device="cpu")
        for _, _, (parts,) in self._pieces([rows]):
            peaks = torch.maximum(peaks, ops.abs_max(parts).cpu())
        return self.join_peaks(peaks)

    def join_peaks(self, peaks: Tensor) -> Tensor:
        """Return the largest value over all processes: [n] float32, NaN if any process has NaN."""
        return peaks

    def join_flags(self, flags: Tensor) -> Tensor:
        """Return bool [n]: True where any process has True."""
        return flags

    def agree(self, results: Sequence[Tensor | None]) -> None:
        """Check that all processes are about to commit the same results of a step.

        Raises:
            RuntimeError: the results differ. No process has written anything.
        """

    def _fold(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the sum of the segments' symmetric matrices [S, S] float64, from left to right."""
        return self._add(parts)

    def _add(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the sum of the segments' [n] float64, from left to right."""
        total: Tensor | None = None
        for part in parts:
            total = part if total is None else total.add_(part)
        assert total is not None  # d >= 1
        return total

    # --- ops that work column by column -----------------------------------------------------

    def weighted_sum_(
        self, out: Tensor, rows: AnyRows, weights: Tensor, beta: float = 1.0
    ) -> Tensor:
        """:func:`fastagg.ops.weighted_sum_`."""
        if in_memory(rows):
            return ops.weighted_sum_(out, rows, weights, beta)
        for begin, end, (parts,) in self._pieces([rows]):
            ops.weighted_sum_(out[begin:end], parts, weights, beta)
        return out

    def statistic_(
        self, out: Tensor, rows: AnyRows, statistic: ColumnStatistic, scales: Tensor | None = None
    ) -> float:
        """Compute a statistic of S >= 1 rows into ``out`` [d].

        Args:
            out: [d] float32; changed in place.
            rows: S rows.
            statistic: the statistic.
            scales: [S] float64, by which rows are multiplied in float32; None: ones.

        Returns:
            The largest magnitude in the rows, over all processes; NaN if any value is NaN.
        """
        peak = torch.zeros(1, device=out.device, dtype=torch.float32)
        if in_memory(rows):
            statistic.write(out, peak, rows, scales)
            return float(self.join_peaks(peak.cpu()))
        largest = torch.zeros_like(peak)
        for begin, end, (parts,) in self._pieces([rows]):
            statistic.write(out[begin:end], peak, parts, scales)
            largest = torch.maximum(largest, peak)
        return float(self.join_peaks(largest.cpu()))

    def statistic_and_squares_(
        self, out: Tensor, rows: AnyRows, statistic: ColumnStatistic
    ) -> tuple[float, Tensor]:
        """Return :meth:`statistic_` and :meth:`square_norms`, in one pass over streamed rows."""
        peak = torch.zeros(1, device=out.device, dtype=torch.float32)
        largest = torch.zeros_like(peak)

        def parts() -> Iterator[Tensor]:
            nonlocal largest
            for begin, end, (piece,) in self._pieces([rows]):
                statistic.write(out[begin:end], peak, piece)
                largest = torch.maximum(largest, peak)
                yield _squares(piece)

        squares = self._add(parts()).cpu()
        return float(self.join_peaks(largest.cpu())), squares

    def copy_(self, out: Sequence[Tensor], rows: AnyRows, scales: Tensor | None = None) -> None:
        """Copy S rows into S tensors ``out`` [d], rounded to the dtype of ``out``.

        Args:
            out: S tensors [d]; changed in place.
            rows: S rows.
            scales: [S] float64, by which rows are multiplied in float32 first. None: ones.
        """
        factors: list[float] = [1.0] * len(out) if scales is None else scales.tolist()
        if in_memory(rows):
            for target, row, factor in zip(out, rows, factors, strict=True):
                _copy(target, row, factor)
            return
        for begin, end, (parts,) in self._pieces([rows]):
            for target, part, factor in zip(out, parts, factors, strict=True):
                _copy(target[begin:end], part, factor)

    def quantize_(self, numbers: Sequence[Tensor], scales: Tensor, rows: AnyRows) -> None:
        """:func:`fastagg.ops.quantize_`."""
        if in_memory(rows):
            ops.quantize_(numbers, scales, rows)
            return
        for begin, end, (parts,) in self._pieces([rows]):
            here = scale_blocks(begin, end)
            found = torch.empty_like(scales[:, here], memory_format=torch.contiguous_format)
            ops.quantize_([row[begin:end] for row in numbers], found, parts)
            scales[:, here] = found

    def mimic_mean_(
        self,
        out: Tensor,
        rounded: Tensor,
        peaks: Tensor,
        updates: AnyRows,
        corrections: AnyRows,
        clients: Tensor,
        references: Sequence[Tensor | None],
        kept: Sequence[Tensor] = (),
        copies: bool = False,
        weights: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """:func:`fastagg.ops.mimic_mean_`; ``peaks`` are of the columns in this process."""
        if in_memory(updates) and in_memory(corrections):
            return ops.mimic_mean_(
                out,
                rounded,
                peaks,
                updates,
                corrections,
                clients,
                references,
                kept,
                copies=copies,
                weights=weights,
                scales=scales,
            )
        peaks.zero_()
        found = torch.empty_like(peaks)
        for begin, end, (rows, own) in self._pieces([updates, corrections]):
            bases = [None if base is None else base[begin:end] for base in references]
            here = slice(begin, end)
            new = [row[here] for row in kept]
            ops.mimic_mean_(
                out[here],
                rounded[here],
                found,
                rows,
                own,
                clients,
                bases,
                new,
                copies=copies,
                weights=weights,
                scales=scales,
            )
            torch.maximum(peaks, found, out=peaks)
        return out

    def memory_total_(
        self,
        out: Tensor,
        peaks: Tensor,
        total: Tensor,
        memory: AnyRows,
        updates: AnyRows,
        clients: Tensor,
        weights: Tensor,
        references: Sequence[Tensor | None],
        params: Tensor | None,
        kept: Sequence[Tensor] = (),
        scales: Tensor | None = None,
        faded: Tensor | None = None,
        faded_weights: Tensor | None = None,
        fading: float = 1.0,
    ) -> Tensor:
        """:func:`fastagg.ops.memory_total_`; ``peaks`` are of the columns in this process."""
        if (in_memory(memory) and in_memory(updates)) or (
            are_bfloat16(memory) and (in_memory(updates) or are_bfloat16(updates))
        ):
            return ops.memory_total_(
                out,
                peaks,
                total,
                memory,
                updates,
                clients,
                weights,
                references,
                params,
                kept,
                scales=scales,
                faded=faded,
                faded_weights=faded_weights,
                fading=fading,
            )
        peaks.zero_()
        found = torch.empty_like(peaks)
        for begin, end, (own, rows) in self._pieces([memory, updates]):
            bases = [None if base is None else base[begin:end] for base in references]
            base = None if params is None else params[begin:end]
            here = slice(begin, end)
            new = [row[here] for row in kept]
            ops.memory_total_(
                out[here],
                found,
                total[here],
                own,
                rows,
                clients,
                weights,
                bases,
                base,
                new,
                scales=scales,
                faded=None if faded is None else faded[here],
                faded_weights=faded_weights,
                fading=fading,
            )
            torch.maximum(peaks, found, out=peaks)
        return out

    def quantized_total_(
        self,
        out: Tensor,
        peaks: Tensor,
        total: Tensor,
        memory: Sequence[QuantizedRow],
        updates: AnyRows,
        clients: Tensor,
        weights: Tensor,
        kept: Sequence[Tensor],
        kept_scales: Tensor,
        faded: Tensor | None = None,
        faded_weights: Tensor | None = None,
        fading: float = 1.0,
    ) -> Tensor:
        """:func:`fastagg.ops.quantized_total_`; ``peaks`` are of the columns in this process.

        Raises:
            TypeError: some updates are not in memory, or not float32.
        """
        if not in_memory(updates):
            raise TypeError("updates: expected float32 tensors in memory")
        return ops.quantized_total_(
            out,
            peaks,
            total,
            [row.numbers for row in memory],
            [row.scales for row in memory],
            updates,
            clients,
            weights,
            kept,
            kept_scales,
            faded=faded,
            faded_weights=faded_weights,
            fading=fading,
        )

    # --- pieces --------------------------------------------------------------------------------

    def _pieces(self, operands: Sequence[AnyRows]) -> Iterator[tuple[int, int, list[Rows]]]:
        """Yield begin, end, and columns [begin, end) of each operand as float32 tensors.

        The width of a piece is that of a segment, or d if that is less, if the rows that are read
        or converted fit into the budget with it; otherwise it is the largest power of two with
        which they fit.
        """
        return pieces(operands, self.segment)


def _gram_around(rows: Rows, common: int, scales: Tensor | None) -> Tensor:
    """Return the Gram matrix of the rows minus row ``common``, [S, S] float64."""
    listed = list(rows)
    factors = None if scales is None else scales.to(listed[common].device, torch.float32)[:, None]
    width = len(listed[common])
    scratch = torch.empty(
        len(listed) * min(width, AROUND_BLOCK), device=listed[common].device, dtype=torch.float32
    )
    total: Tensor | None = None
    for begin in range(0, width, AROUND_BLOCK):
        end = min(begin + AROUND_BLOCK, width)
        block = scratch[: len(listed) * (end - begin)].view(len(listed), end - begin)
        torch.stack([row[begin:end] for row in listed], out=block)
        if factors is not None:
            block.mul_(factors)
        base = listed[common][begin:end] if factors is None else block[common].clone()
        part = ops.gram(block.sub_(base), dtype=torch.float64)
        total = part if total is None else total.add_(part)
    assert total is not None  # d >= 1
    return total


def _squares(rows: Rows, segment: int | None = None) -> Tensor:
    """Return the diagonal of ``ops.gram``, [S] float64.

    Calls the kernel with four rows at a time, or 64 on a GPU. It also computes their other
    products, which are not used; they take no extra time, because reading the rows takes longer.
    """
    together = 64 if _on_gpu(rows) else 4
    parts = []
    for first in range(0, len(rows), together):
        few = rows[first : first + together]
        none = torch.zeros(len(few), len(few), dtype=torch.bool, device=few[0].device)
        gram = ops.gram(few, pairs=none, dtype=torch.float64, segment=segment)
        parts.append(gram.diagonal())
    return torch.cat(parts)


def _copy(target: Tensor, row: Tensor, factor: float) -> None:
    """Set ``target`` to a float32 row times a factor, rounded to float32 and then to its dtype."""
    if factor == 1.0:
        target.copy_(row)
    else:
        torch.mul(row, factor, out=target)


def _on_gpu(rows: Rows) -> bool:
    """Return whether rows are on a GPU, where each launch takes time."""
    return (rows if isinstance(rows, Tensor) else rows[0]).device.type == "cuda"


def _one_pass(out: Tensor) -> bool:
    """Return whether ``ops.gram_and_sum_`` reads rows once where ``out`` is: not on a GPU."""
    return out.device.type != "cuda"


def _gram_and_sum_(out: Tensor, rows: Rows, weights: Tensor, precision: str) -> Tensor:
    """Return the Gram matrix of S rows, [S, S] float64, and set ``out = weights @ rows``."""
    size = rows.shape[0] if isinstance(rows, Tensor) else len(rows)
    gram = uninitialized([size, size], out.device, torch.float64)
    ops.gram_and_sum_(out, gram, rows, weights, precision=precision)
    return gram
