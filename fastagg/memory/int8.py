# SPDX-License-Identifier: Apache-2.0
"""Memory rows of int8 numbers, with one float32 scale for each block of 256 columns."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from fastagg import ops
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import RowStore, SpareRows
from fastagg.ops.scales import SCALE_BLOCK, num_scales
from fastagg.updates.any_rows import QuantizedRow, in_memory
from fastagg.updates.buffer import RowExchange
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import Columns
from fastagg.updates.scaled import scaled_when_read

SCALES = "memory_scales"
"""Name of the scales in the state of a rule, beside ``memory``, the numbers."""
COLUMN_BLOCKS: Mapping[str, int] = MappingProxyType({SCALES: SCALE_BLOCK})
"""``column_blocks`` of a rule that has such rows."""
_LARGEST = 127
_SMALLEST_SCALE = 2.0**-126
_CHECKED = 1 << 12  # blocks that are checked at a time


class Int8Memory:
    """K remembered vectors [d], zeros at first, rounded by :func:`fastagg.ops.quantize_`.

    It has the methods of :class:`RowMemory` that rules without references need. A step writes new
    numbers and scales into spare ones. Its commit exchanges rows of numbers by swapping pointers,
    and copies the scales of the S clients, 1/64 of the bytes of the numbers.

    Args:
        num_clients: K.
        num_params: d.
        device: where the rows live.
        store: where the numbers are stored, with dtype int8. Scales are in memory.

    Raises:
        ValueError, OSError: the rows cannot be stored there.

    Attributes:
        shape: [K, d].
        dtype: torch.int8.
        numbers: the numbers, K rows int8 [d].
        scales: [K, ceil(d / 256)] float32.
    """

    def __init__(
        self, num_clients: int, num_params: int, device: torch.device, store: RowStore
    ) -> None:
        self.shape = torch.Size([num_clients, num_params])
        self.dtype = torch.int8
        self.numbers = RowMemory(num_clients, num_params, device, store=store)
        self.scales = torch.zeros(
            num_clients, num_scales(num_params), device=device, dtype=torch.float32
        )
        self._spare_scales = self.scales.new_empty(0, num_scales(num_params))
        self._places: Tensor | None = None  # on a GPU: the clients that the spare scales are for

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and scales."""
        return self.numbers.nbytes + self.scales.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        """The K rows of numbers, not copied."""
        return self.numbers.rows

    @property
    def rows(self) -> list[QuantizedRow]:
        """The K rows, not copied."""
        return self.of(range(len(self)))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, client: int) -> Tensor:
        """Return the remembered vector of client ``client`` as float32 [d]."""
        return self.part(client, 0, self.shape[1])

    def part(self, client: int, begin: int, end: int) -> Tensor:
        """Return columns [begin, end) of ``self[client]``; ``begin`` is a multiple of 256."""
        numbers = self.numbers.rows[client][begin:end]
        first = begin // SCALE_BLOCK
        scales = self.scales[client][first : first + num_scales(len(numbers))]
        out = torch.empty(len(numbers), dtype=torch.float32, device=self.scales.device)
        ops.dequantize_([out], [numbers], [scales])
        return out

    def clone(self) -> Tensor:
        """Return all remembered vectors as float32: [K, d]."""
        matrix = torch.empty(self.shape, dtype=torch.float32, device=self.scales.device)
        ops.dequantize_(list(matrix), self.numbers.rows, list(self.scales))
        return matrix

    def state(self) -> dict[str, Tensor | RowMemory]:
        """Return the state of a rule that these rows are, not copied."""
        return {"memory": self.numbers, SCALES: self.scales}

    @property
    def spares(self) -> SpareRows:
        """Spare rows of numbers."""
        return self.numbers.spares

    def of(self, clients: Sequence[int], blank: Container[int] = ()) -> list[QuantizedRow]:
        """Return the rows of ``clients``, not copied; a row of zeros for those in ``blank``."""
        rows, zeros = self.numbers.rows, self.zeros() if blank else None
        return [
            zeros if zeros and client in blank else QuantizedRow(rows[client], self.scales[client])
            for client in clients
        ]

    def zeros(self) -> QuantizedRow:
        """Return a row of zeros."""
        return QuantizedRow(
            torch.zeros_like(self.numbers.rows[0]), torch.zeros_like(self.scales[0])
        )

    def references_of(self, clients: Sequence[int]) -> list[Tensor | None]:
        """Return an empty list: no row has a reference."""
        return []

    def peaks(self, columns: Columns) -> Tensor:
        """Return the largest magnitude of each row: [K] float64.

        It is 127 times the largest scale: a block that is not zero has a number of magnitude 127.
        """
        return columns.join_peaks((_LARGEST * self.scales.amax(dim=1)).cpu()).to(torch.float64)

    # --- before the commit --------------------------------------------------------------------

    def receive(self, cohort: Cohort, columns: Columns, *, copy: bool = False) -> Cohort:
        """Return the cohort with rows that :meth:`exchange` or ``ops.quantized_total_`` can take.

        Args:
            cohort: the active clients and their rows.
            columns: reads the rows.
            copy: round rows in memory, too; otherwise only those that are read piece by piece.

        Returns:
            The cohort with rows rounded into spare rows, and ``spares`` as their ``owner``; or its
            own rows, which are float32 tensors, and no owner. Before they are rounded, rows are
            multiplied by the ``scales`` of the cohort, which it then does not have any more.

        Raises:
            ValueError: a row cannot be read.
            OSError: there is no room for more spare rows.
        """
        if not copy and in_memory(cohort.rows):
            return cohort.with_rows(cohort.rows)
        numbers, scales = self.spare(cohort.ids)
        columns.quantize_(numbers, scales, scaled_when_read(cohort.rows, cohort.scales))
        rows = [QuantizedRow(*row) for row in zip(numbers, scales, strict=True)]
        return replace(cohort, rows=rows, owner=self.numbers.spares, scales=None)

    def spare(self, clients: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return spare rows for ``clients``, with undefined content.

        Returns:
            S tensors int8 [d] and their scales, float32 [S, ceil(d / 256)].

        Raises:
            OSError, MemoryError: there is no room for more rows.
        """
        numbers = self.numbers.spares.rows(clients)
        if len(self._spare_scales) < len(clients):
            self._spare_scales = self.scales.new_empty(len(clients), self.scales.shape[1])
        if self.scales.is_cuda:  # here, because a commit allocates nothing
            self._places = torch.tensor(list(clients), device=self.scales.device)
        return numbers, self._spare_scales[: len(clients)]

    # --- the commit ---------------------------------------------------------------------------

    def exchange(
        self, clients: Sequence[int], owner: RowExchange | None, reference: Tensor | None = None
    ) -> None:
        """Make the rows of the last :meth:`spare`, which were for ``clients``, memory rows.

        Args:
            clients: distinct ids.
            owner: ``numbers.spares`` or None, which mean the same.
            reference: None.
        """
        self.numbers.exchange(clients, owner)
        if self._places is not None:  # one launch
            self.scales.index_copy_(0, self._places, self._spare_scales[: len(clients)])
            return
        for client, scales in zip(clients, self._spare_scales, strict=False):
            self.scales[client].copy_(scales)

    def forget(self, clients: Sequence[int]) -> None:
        """Set the remembered vectors of ``clients`` to zero, in place. Allocates nothing."""
        self.numbers.forget(clients)
        for client in clients:
            self.scales[client].zero_()


AnyMemory = RowMemory | Int8Memory


def make_memory(
    num_clients: int, num_params: int, device: torch.device, store: RowStore
) -> AnyMemory:
    """Return K remembered vectors [d] of the dtype of ``store``, zeros at first.

    Raises:
        ValueError, OSError: the rows cannot be stored there.
    """
    if store.dtype == torch.int8:
        return Int8Memory(num_clients, num_params, device, store)
    return RowMemory(num_clients, num_params, device, store=store)


def remembered(state: Mapping[str, Tensor | RowMemory]) -> Callable[[int, int, int], Tensor]:
    """Return a function that reads the memory rows of a state.

    Args:
        state: ``memory`` and, if it is int8, its scales; as a checkpoint holds them.

    Returns:
        A function of a client k and columns begin and end (begin is a multiple of 256), which
        returns the remembered numbers of the client in these columns, exact in their dtype.
    """
    memory, scales = state["memory"], state.get(SCALES)
    rows = memory.rows if isinstance(memory, RowMemory) else memory.unbind(0)
    if scales is None:
        return lambda client, begin, end: rows[client][begin:end]
    assert isinstance(scales, Tensor)
    steps = scales.cpu().contiguous()

    def read(client: int, begin: int, end: int) -> Tensor:
        numbers = rows[client].cpu().contiguous()
        row, end = QuantizedRow(numbers, steps[client]), min(end, len(numbers))
        return row.read(begin, end, torch.empty(end - begin, dtype=torch.float32, device="cpu"))

    return read


def check_int8(state: Mapping[str, Tensor | RowMemory]) -> None:
    """Check the int8 rows of a state, if it has any.

    Rounding gives the largest element of a block the number 127 or -127, and a block of zeros the
    scale 0. So a state has nothing to choose: every row is the rounded form of one vector.

    Raises:
        ValueError: no vector is rounded to a row of the state; the message names the tensor.
    """
    memory, scales = state["memory"], state.get(SCALES)
    if scales is None:
        return
    assert isinstance(scales, Tensor)
    rows = memory.rows if isinstance(memory, RowMemory) else memory.unbind(0)
    most = torch.finfo(torch.float32).max / _LARGEST
    for client, (row, steps) in enumerate(zip(rows, scales.cpu(), strict=True)):
        if not bool(((steps == 0) | ((steps >= _SMALLEST_SCALE) & (steps <= most))).all()):
            raise ValueError(
                f"state[{SCALES!r}]: expected 0 or numbers in [{_SMALLEST_SCALE:.9g}, {most:.9g}], "
                f"got others for client {client}"
            )
        peaks = torch.cat([_peaks(part) for part in row.split(_CHECKED * SCALE_BLOCK)])
        if not torch.equal(peaks, torch.where(steps > 0, _LARGEST, 0).to(peaks)):
            raise ValueError(
                "state['memory']: expected numbers in [-127, 127], and in each block of "
                f"{SCALE_BLOCK} columns 127 or -127 if its scale is not 0, else zeros; got others "
                f"for client {client}"
            )


def _peaks(numbers: Tensor) -> Tensor:
    """Return the largest magnitude in each block of int8 numbers [n]: int16 [ceil(n / 256)]."""
    padded = torch.zeros(num_scales(len(numbers)) * SCALE_BLOCK, dtype=torch.int16, device="cpu")
    padded[: len(numbers)] = numbers
    return padded.view(-1, SCALE_BLOCK).abs().amax(dim=1)
