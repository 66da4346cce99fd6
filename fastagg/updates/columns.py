# SPDX-License-Identifier: Apache-2.0
"""Apply ops to rows of any kind: in memory, streamed, of another dtype, or spread over ranks.

Most ops work column by column, so they can run on any part of the columns. Three results need all
columns: the Gram matrix, sketches and the largest magnitudes. Rules call a :class:`Columns` for
both kinds.
This class has all columns in this process. :mod:`fastagg.distributed` has a subclass whose columns
are spread over ranks. No other code depends on where the columns are.

Rows need not be float32 tensors in memory. A :class:`StreamedRow` is read piece by piece, and a row
of another dtype is converted piece by piece.

**Segments.** A segment has 2^20 columns, or more if d is above 2^28, so that there are at most 256.
The Gram matrix is the sum of the segments' Gram matrices, in float64 and from left to right; each
of them is one call of ``ops.gram``. The bits of the result therefore depend on the segments alone:
they are the same in one process, on any number of ranks, and from a stream. So are those of
sketches, which are added in the same way.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import Rows
from fastagg.ops.row_lists import RowList
from fastagg.ops.scales import SCALE_BLOCK, num_scales
from fastagg.updates.small import rows_in_order, zeros

MIN_SEGMENT = 1 << 20
MAX_SEGMENTS = 256
SCRATCH_BYTES = 64 << 20
"""Budget in bytes for converting rows of another dtype, if no streamed row sets a budget."""
SMALL_BYTES = 256 << 10
"""Bytes of a matrix up to which copying it takes less time than views of its rows."""
AROUND_BLOCK = 1 << 16
"""Columns per block, in scratch memory, when a common row is subtracted from all rows."""
_SHORT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of rows that ops of one pass read."""
MIN_PIECE = 1024
"""Minimum number of columns per piece; the budget must cover this many columns of every row."""


class StreamedRow(ABC):
    """A row [d] that is not in memory.

    Attributes:
        num_params: d.
        budget: maximum number of bytes for one piece of all rows that are read together.
        device: where pieces are read to.
    """

    num_params: int
    budget: int
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


class DifferenceRow(StreamedRow):
    """A row that is a model minus a base; see :class:`fastagg.updates.differences.Differences`.

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


class QuantizedRow(StreamedRow):
    """A row of int8 numbers with scales, read as float32; see :func:`fastagg.ops.quantize_`.

    Args:
        numbers: [d] int8.
        scales: [ceil(d / 256)] float32.
    """

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.num_params, self.budget = numbers.shape[0], SCRATCH_BYTES
        self.numbers, self.scales = numbers, scales
        self.device = numbers.device

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        """Return columns [begin, end) in ``scratch``; ``begin`` is a multiple of 256."""
        ops.dequantize_([scratch], [self.numbers[begin:end]], [self.scales[_blocks(begin, end)]])
        return scratch


_IN_MEMORY = (Tensor, RowList)  # a union would be made anew in every call

AnyRow = Tensor | StreamedRow
AnyRows = Tensor | Sequence[AnyRow]
"""S rows: [S, d] float32, or S items, each a tensor [d] of any dtype or a streamed row."""


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


def _blocks(begin: int, end: int) -> slice:
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


def _are_bfloat16(rows: AnyRows) -> TypeGuard[Rows]:
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


def _differences(rows: AnyRows) -> Sequence[DifferenceRow]:
    """Return rows that ``ops.difference_sum_`` can read together; none if there are others."""
    first = None if isinstance(rows, Tensor) else rows[0]
    if not isinstance(first, DifferenceRow):
        return []
    if any(part.dtype not in _SHORT for part in first.parts):
        return []
    found = [row for row in rows if isinstance(row, DifferenceRow) and row.fits(first)]
    return found if len(found) == len(rows) else []


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
        if in_memory(rows) and _width(rows) <= self.segment:
            return self._fold([ops.gram(rows, **options)])
        return self._fold(ops.gram(parts, **options) for _, _, (parts,) in self._pieces([rows]))

    def gram_rows(self, rows: AnyRows, changed: Tensor) -> Tensor:
        """:func:`fastagg.ops.gram_rows`, summed over segments: S >= 1 rows, [C] -> [C, S]."""
        if in_memory(rows) and _width(rows) <= self.segment:
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
        differences = _differences(rows)
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
        """Set ``out = weights @ rows`` [d], and return :meth:`square_norms`, in one pass."""

        differences = _differences(rows)
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
        squares = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
        found = torch.empty_like(squares)
        for i, (begin, end) in enumerate(rows[0].bounds()):
            parts, base = [row.parts[i] for row in rows], rows[0].base[begin:end]
            ops.difference_sum_(out[begin:end], found, parts, base, weights)
            squares += found
        squares = self._add([squares])
        beyond = (~torch.isfinite(squares)).nonzero().flatten().tolist()
        if beyond:  # perhaps finite: squares of large numbers leave the range of float32
            squares[beyond] = self.square_norms([rows[s] for s in beyond])
        return squares

    def abs_max(self, rows: AnyRows) -> Tensor:
        """Return the largest magnitude of each row, :func:`fastagg.ops.abs_max`: [S] on the CPU."""
        if in_memory(rows):
            return self.join_peaks(ops.abs_max(rows).cpu())
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
            here = _blocks(begin, end)
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
    ) -> Tensor:
        """:func:`fastagg.ops.memory_total_`; ``peaks`` are of the columns in this process."""
        if (in_memory(memory) and in_memory(updates)) or (
            _are_bfloat16(memory) and (in_memory(updates) or _are_bfloat16(updates))
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
        )

    # --- pieces --------------------------------------------------------------------------------

    def _pieces(self, operands: Sequence[AnyRows]) -> Iterator[tuple[int, int, list[Rows]]]:
        """Yield begin, end, and columns [begin, end) of each operand as float32 tensors.

        The width of a piece is that of a segment, or the largest power of two for which the rows
        that are read or converted fit into the budget.
        """
        num_params = _width(operands[0])
        readers = [_Reader(rows) for rows in operands]
        piece = min([self.segment, *(reader.widest() for reader in readers)])
        scratch = [reader.scratch(min(piece, num_params)) for reader in readers]
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
        budgets = [row.budget for row in listed if isinstance(row, StreamedRow)]
        self.budget = min(budgets, default=SCRATCH_BYTES)

    def widest(self) -> int:
        """Return the largest power of two of columns that fits into the budget.

        Raises:
            ValueError: the budget is too small for a piece of ``MIN_PIECE`` columns.
        """
        if not self.copied:
            return 1 << 62
        columns = self.budget // (4 * self.copied)
        if columns < MIN_PIECE:
            raise ValueError(
                f"budget: expected at least {4 * self.copied * MIN_PIECE} bytes, for "
                f"{MIN_PIECE} columns of {self.copied} rows, got {self.budget}"
            )
        return 1 << (columns.bit_length() - 1)

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
    gram = torch.empty((size, size), dtype=torch.float64, device=out.device)
    ops.gram_and_sum_(out, gram, rows, weights, precision=precision)
    return gram


def _width(rows: AnyRows) -> int:
    if isinstance(rows, Tensor):
        return rows.shape[1]
    first = rows[0]
    return first.num_params if isinstance(first, StreamedRow) else len(first)
