# SPDX-License-Identifier: Apache-2.0
"""The rows that a rule remembers, and how a step exchanges them for new ones.

A step never writes a memory row. It writes new rows into spare rows, or finds them in a buffer
whose rows it may take, and its commit exchanges the two: pointers move, numbers do not.

Some rules remember a vector that follows from the update and from a vector that all clients of the
round share: MimiC's correction is v - update, a local model is params + update. If the rule takes
the update itself, it keeps the shared vector beside it as a *reference*. The remembered vector is
then reconstructed when it is needed, in float32, with the bits that storing it would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg import ops
from fastagg.memory.stores import RowStore, SpareRows
from fastagg.ops.row_lists import RowList
from fastagg.updates.allocation import allocate_rows
from fastagg.updates.buffer import RowExchange
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import Columns


class RowMemory:
    """K remembered vectors [d], zeros at first.

    The vector of client k is ``rows[k]``, or ``references[k] + sign * rows[k]`` if it has a
    reference. To checkpoints the memory looks like a tensor [K, d]: it has ``shape``, ``dtype``,
    ``nbytes``, :meth:`clone` and :meth:`copy_`.

    Args:
        num_clients: K.
        num_params: d.
        device: where the rows live.
        sign: +1.0 or -1.0.
        store: where rows are stored, and their dtype. Only float32 rows can have references.

    Attributes:
        rows: K tensors [d] that do not overlap.
        references: K entries, each a tensor [d] that clients may share, or None.
        spares: rows to write new memory rows into.
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
        self.spares = SpareRows(store, num_params, device)
        self._device = device
        self._referring = False  # whether some client may have a reference
        self._unused: Tensor | None = None  # a reference that no client has any more

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of all distinct references."""
        distinct = len({id(reference) for reference in self.references if reference is not None})
        return (self.shape[0] + distinct) * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, client: int) -> Tensor:
        """Return a copy [d] of the remembered vector of a client."""
        value = self.rows[client].clone()
        _settle_(value, self.references[client], self.sign)
        return value

    def clone(self) -> Tensor:
        """Return a copy of all remembered vectors: [K, d]."""
        matrix = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        for client, row in enumerate(self.rows):
            matrix[client].copy_(row)
            _settle_(matrix[client], self.references[client], self.sign)
        return matrix

    def copy_(self, values: Tensor) -> None:
        """Remember copies of ``values`` [K, d]."""
        self.references, self._referring = [None] * len(self), False
        for row, value in zip(self.rows, values, strict=True):
            row.copy_(value)

    def of(self, clients: Sequence[int]) -> list[Tensor]:
        """Return the rows of ``clients``."""
        return [self.rows[client] for client in clients]

    def references_of(self, clients: Sequence[int]) -> list[Tensor | None]:
        """Return the references of ``clients``; none at all if no client has one."""
        return [self.references[client] for client in clients] if self._referring else []

    # --- before the commit --------------------------------------------------------------------

    def receive(self, cohort: Cohort, columns: Columns, *, copy: bool = False) -> Cohort:
        """Return the cohort with rows that the commit can exchange for memory rows, if need be.

        Streamed rows, and all rows if the memory has another dtype than float32, are copied into
        spare rows. Rows of a caller's buffer are taken only into a memory that is plain itself.

        Args:
            cohort: the active clients and their rows.
            columns: reads the rows.
            copy: copy all rows whose ownership the rule may not take.

        Raises:
            ValueError: a row cannot be read.
            OSError: there is no room for more rows.
        """
        fitting = not cohort.streamed and self.dtype == torch.float32
        if fitting and not self.store.plain:
            cohort = cohort.with_rows(cohort.rows)
        if fitting and (cohort.owner is not None or not copy):
            return cohort
        rows = self.spares.rows(cohort.ids)
        columns.copy_(rows, cohort.rows)
        known = RowList(rows) if self.dtype == torch.float32 else rows
        return cohort.with_rows(known, owner=self.spares)

    def settle_(self) -> None:
        """Store every remembered vector in its row, without a reference; no vector changes."""
        for row, reference in zip(self.rows, self.references, strict=True):
            _settle_(row, reference, self.sign)
        self.references, self._referring = [None] * len(self), False

    def new_reference(self) -> Tensor:
        """Return a vector [d] of any content that no client refers to."""
        if self._unused is None:
            self._unused = allocate_rows(1, self.shape[1], self._device)[0]
        return self._unused

    # --- the commit ---------------------------------------------------------------------------

    def exchange(
        self, clients: Sequence[int], owner: RowExchange | None, reference: Tensor | None = None
    ) -> None:
        """Exchange the memory rows of ``clients`` for new ones. Copies nothing.

        Args:
            clients: distinct ids.
            owner: has the new rows of ``clients`` and receives the old ones; None: ``spares``.
            reference: [d], shared by the new rows, which the caller must not change afterwards;
                None: the new rows are the remembered vectors themselves.
        """
        new = (owner or self.spares).exchange(clients, self.of(clients))
        for client, row in zip(clients, new, strict=True):
            self.rows[client] = row
        if reference is not None or self._referring:
            self._refer(clients, reference)

    def _refer(self, clients: Sequence[int], reference: Tensor | None) -> None:
        """Set the reference of ``clients``, and keep an old one that no client has any more."""
        self._referring = True
        left = {id(r): r for r in self.references_of(clients) if r is not None}
        for client in clients:
            self.references[client] = reference
        if reference is self._unused:
            self._unused = None
        for key in {id(r) for r in self.references} & left.keys():
            del left[key]
        self._unused = next(iter(left.values()), self._unused)


def _settle_(row: Tensor, reference: Tensor | None, sign: float) -> None:
    """Set ``row = reference + sign * row``, if there is a reference.

    The op adds in float64 and rounds once to float32. That equals a float32 sum: float64 has more
    than twice its digits.
    """
    if reference is not None:
        ops.weighted_sum_(row, [reference], torch.ones(1), beta=sign)
