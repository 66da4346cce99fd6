# SPDX-License-Identifier: Apache-2.0
"""What a server remembers of every client, in rows that it can take over instead of copying.

An update that is handed over becomes the client's remembered row as it is. Some rules remember
something else, which follows from the update and from a vector that all clients of the round
share: MimiC's correction is v - update, a local model is params + update. Then the update is kept
beside a reference to that vector, and the remembered value is computed when it is needed, in
float32 as if it had been stored: results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg import ops
from fastagg.memory.stores import Inbox, RowStore
from fastagg.updates.allocation import allocate_rows
from fastagg.updates.buffer import RowExchange
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import Columns


class RowMemory:
    """K remembered vectors [d], zeros at first.

    The vector of client k is ``rows[k]``, or ``references[k] + sign * rows[k]`` where that is set.
    It looks like a tensor [K, d] to checkpoints: ``shape``, ``dtype``, ``nbytes``, :meth:`clone`,
    :meth:`copy_`.

    Args:
        num_clients: K.
        num_params: d.
        device: where the rows live.
        sign: +1.0 or -1.0.
        store: where rows are, and their dtype; with another than float32 there are no references.

    Attributes:
        rows: K tensors [d] that do not overlap.
        references: K times a tensor [d], shared by clients, or None.
    """

    def __init__(
        self,
        num_clients: int,
        num_params: int,
        device: torch.device,
        sign: float = 1.0,
        store: RowStore = RowStore(),  # noqa: B008 (immutable)
    ) -> None:
        self.shape = torch.Size([num_clients, num_params])
        self.sign = sign
        self.store = store
        self.dtype = store.dtype
        self.rows = store.allocate(num_clients, num_params, device)
        self.references: list[Tensor | None] = [None] * num_clients
        self._device = device
        self._spare: Tensor | None = None  # a reference that nobody uses any more
        self._inbox = Inbox(store, num_params, device)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of all distinct references."""
        distinct = len({id(reference) for reference in self.references if reference is not None})
        return (self.shape[0] + distinct) * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, client: int) -> Tensor:
        """A copy [d] of what is remembered of a client."""
        value = self.rows[client].clone()
        _settle_(value, self.references[client], self.sign)
        return value

    def clone(self) -> Tensor:
        """A copy of everything: [K, d]."""
        matrix = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        for client, row in enumerate(self.rows):
            matrix[client].copy_(row)
            _settle_(matrix[client], self.references[client], self.sign)
        return matrix

    def copy_(self, values: Tensor) -> None:
        """Remember ``values`` [K, d] instead."""
        self.references = [None] * len(self)
        for row, value in zip(self.rows, values, strict=True):
            row.copy_(value)

    def receive(self, cohort: Cohort, columns: Columns) -> Cohort:
        """The cohort with rows that can be remembered.

        Rows that are streamed, and all rows where the memory has another dtype, are copied into
        rows of the memory's store, which are handed over. Rows of a caller's buffer are adopted
        only by a memory that is plain itself.

        Raises:
            ValueError: a row cannot be read.
            OSError: there is no room for more rows.
        """
        if not cohort.streamed and self.dtype == torch.float32:
            return cohort if self.store.plain else Cohort(cohort.clients, cohort.rows)
        rows = self._inbox.rows(cohort.ids)
        columns.copy_(rows, cohort.rows)
        return Cohort(cohort.clients, rows, self._inbox)

    def of(self, clients: Sequence[int]) -> list[Tensor]:
        """The rows of ``clients``."""
        return [self.rows[client] for client in clients]

    def references_of(self, clients: Sequence[int]) -> list[Tensor | None]:
        return [self.references[client] for client in clients]

    def settle_(self, clients: Sequence[int]) -> None:
        """Store what is remembered of ``clients`` in their rows; it does not change."""
        for client in clients:
            _settle_(self.rows[client], self.references[client], self.sign)
            self.references[client] = None

    def new_reference(self) -> Tensor:
        """A vector [d] of any content that no client refers to."""
        if self._spare is None:
            self._spare = allocate_rows(1, self.shape[1], self._device)[0]
        return self._spare

    def adopt(self, clients: Sequence[int], buffer: RowExchange, reference: Tensor | None) -> None:
        """Take the rows of ``clients`` over from a buffer, which gets the old ones.

        Args:
            clients: distinct ids.
            buffer: has the updates of ``clients``.
            reference: [d], to be kept and not changed any more; None: the updates themselves are
                remembered.
        """
        rows, references = list(self.rows), list(self.references)
        taken = buffer.exchange(clients, self.of(clients))
        for client, row in zip(clients, taken, strict=True):
            rows[client], references[client] = row, reference
        left = {id(r): r for r in self.references_of(clients) if r is not None}
        self.rows, self.references = rows, references
        if reference is not None and reference is self._spare:
            self._spare = None
        if left:
            for key in {id(r) for r in references} & left.keys():
                del left[key]
        self._spare = next(iter(left.values()), self._spare)


def _settle_(row: Tensor, reference: Tensor | None, sign: float) -> None:
    """``row = reference + sign * row``. The sum in float64 is rounded to float32 as it would be in
    float32 itself: twice the digits, and two more, are enough for that."""
    if reference is not None:
        ops.weighted_sum_(row, [reference], torch.ones(1), beta=sign)
