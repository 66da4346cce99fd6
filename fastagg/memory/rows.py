# SPDX-License-Identifier: Apache-2.0
"""Memory rows, and how a commit exchanges them for new rows.

The read phase of a step never writes a memory row. New rows are spare rows that it has written, or
rows of the caller's buffer whose ownership the rule may take. The commit exchanges memory rows and
new rows by swapping pointers; it copies no numbers.

Some rules remember a vector that is computed from the update and a vector shared by all clients of
the round: MimiC's correction is v - update, a local model is params + update. If such a rule takes
ownership of the update, it keeps the shared vector as the *reference* of the memory row. The
remembered vector is reconstructed when it is needed, in float32, with the same bits as if it had
been stored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.memory.overlap import refuse_shared_memory
from fastagg.memory.stores import AddressRange, RowStore, SpareRows
from fastagg.ops.memory import shared_row
from fastagg.ops.row_lists import RowList
from fastagg.signals import SignalsDeferred
from fastagg.updates.any_rows import MIN_PIECE, SCRATCH_BYTES, in_memory
from fastagg.updates.buffer import RowExchange
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import Columns

_GROUP = SCRATCH_BYTES // (4 * MIN_PIECE)
"""Rows of another dtype than float32 that can be read together."""


@dataclass(eq=False)
class Reference:
    """A vector of one round, and the clients whose rows are relative to it."""

    vector: Tensor  # [d]
    clients: set[int]  # not empty


class RowMemory:
    """K remembered vectors [d], zeros at first.

    The vector of client k is ``rows[k]``, or ``references[k].vector + sign * rows[k]`` if it has a
    reference. Checkpoints use the memory like a tensor [K, d]: it has ``shape``, ``dtype``,
    ``nbytes`` and :meth:`clone`.

    Args:
        num_clients: K.
        num_params: d.
        device: where the rows live.
        sign: +1.0 or -1.0, the factor of a row that has a reference.
        store: where rows are stored, and their dtype. Only float32 rows can have references.

    Raises:
        ValueError, OSError: the store cannot allocate the rows; see :meth:`RowStore.allocate`.

    Attributes:
        rows: K tensors [d] that do not overlap.
        references: K entries, each a reference that clients may share, or None.
        spares: spare rows, into which a step writes new memory rows.
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
        self._addresses = AddressRange(self.rows)
        self.references: list[Reference | None] = [None] * num_clients
        self.spares = SpareRows(store, num_params, device)
        self._process = os.getpid()
        self._device = device
        self._live: list[Reference] = []  # the references that clients have, the oldest first
        self._unused: Tensor | None = None  # the vector of a former reference

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of all distinct references."""
        return (self.shape[0] + len(self._live)) * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, client: int) -> Tensor:
        """Return a copy [d] of the remembered vector of client ``client``."""
        value = self.rows[client].clone()
        self._add_reference_(value, client)
        return value

    def part(self, client: int, begin: int, end: int) -> Tensor:
        """Return a copy of columns [begin, end) of ``self[client]``, with the same bits."""
        value, reference = self.rows[client][begin:end].clone(), self.references[client]
        if reference is not None:
            add_to_each_([value], reference.vector[begin:end], self.sign)
        return value

    def clone(self) -> Tensor:
        """Return a copy of all remembered vectors: [K, d]."""
        matrix = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        for client, row in enumerate(self.rows):
            matrix[client].copy_(row)
            self._add_reference_(matrix[client], client)
        return matrix

    def replace(self, values: Tensor) -> Callable[[], None]:
        """Replace the remembered vectors by copies of ``values`` [K, d], in newly allocated rows.

        Returns:
            A function that takes the replacement back.

        Raises:
            OSError, MemoryError: there is no room for K more rows. Nothing has changed.
        """
        before = self.rows, self.references, self._live
        rows = self.store.allocate(self.shape[0], self.shape[1], self._device)
        for row, value in zip(rows, values, strict=True):
            row.copy_(value)

        def undo() -> None:
            self.rows, self.references, self._live = before

        self._addresses.add(rows)
        self.rows, self.references, self._live = rows, [None] * len(self), []
        return undo

    def share(self, other: RowMemory) -> None:
        """Make the rows of a memory with fewer rows the first ones of this new one. Copies nothing.

        References of ``other`` are settled before. Afterwards only one of the two may be used.
        """
        other.settle_()
        self._addresses.add(other.rows)
        self.rows[: len(other)] = other.rows

    @property
    def tensors(self) -> list[Tensor]:
        """The K rows, not copied."""
        return self.rows

    def overlaps(self, vector: Tensor) -> bool:
        """Return whether a vector shares memory with a row or a spare row.

        Rows of which the rule has taken ownership may have views elsewhere. Only a vector between
        the first and the last address of all rows so far is compared with each of them.
        """
        if self._addresses.meets(vector) or self.spares.addresses.meets(vector):
            return shared_row([*self.rows, *self.spares.every_row], [vector]) >= 0
        return False

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # rows of a copy are at other addresses, in this process
        self._process = os.getpid()
        self._addresses = AddressRange([*self.rows, *self.spares.every_row])

    def check_process(self, call: str) -> None:
        """Check that a call of this name may use the rows: a mapped file is shared after a fork.

        Raises:
            RuntimeError: the rows are in a file that another process has mapped.
        """
        if self.store.folder is not None and self._process != os.getpid():
            raise RuntimeError(
                f"{call}: this process was forked from process {self._process}, and both have the "
                f"same memory rows, in a file in {self.store.folder}; make or load the aggregator "
                "in this process, or use a copy (copy.deepcopy) that was made before a further step"
            )

    def state(self) -> dict[str, Tensor | RowMemory]:
        """Return the state of a rule that these rows are, not copied."""
        return {"memory": self}

    def zeros(self) -> Tensor:
        """Return a row of zeros."""
        return torch.zeros_like(self.rows[0])

    def peaks(self, columns: Columns) -> Tensor:
        """Return the largest magnitude of each row: [K] float64."""
        groups = range(0, len(self.rows), _GROUP)
        found = [columns.abs_max(self.rows[first : first + _GROUP]) for first in groups]
        return torch.cat(found).to(torch.float64)

    def of(self, clients: Sequence[int], blank: Container[int] = ()) -> list[Tensor]:
        """Return the rows of ``clients``, not copied; a row of zeros for those in ``blank``."""
        rows = [self.rows[client] for client in clients]
        if blank:
            zeros = self.zeros()
            both = zip(clients, rows, strict=True)
            rows = [zeros if client in blank else row for client, row in both]
        return RowList(rows) if self.dtype == torch.float32 else rows

    def references_of(self, clients: Sequence[int]) -> list[Tensor | None]:
        """Return the references [d] of ``clients``; an empty list if no client has one."""
        if not self._live:
            return []
        found = (self.references[client] for client in clients)
        return [None if reference is None else reference.vector for reference in found]

    # --- before the commit --------------------------------------------------------------------

    def receive(self, cohort: Cohort, columns: Columns, *, copy: bool = False) -> Cohort:
        """Return the cohort with rows in memory that ``ops.memory_total_`` can take.

        Streamed rows are copied into spare rows. If memory rows are bfloat16, so are all rows, but
        float32 rows on the CPU: ``ops.memory_total_`` rounds them as it reads them. The rule may
        take ownership of rows of a buffer only if the store is plain.

        Args:
            cohort: the active clients and their rows.
            columns: reads the rows.
            copy: also copy the rows whose ownership the rule may not take.

        Returns:
            The cohort. Its ``owner`` is the buffer, ``spares``, or None if rows were not copied and
            the rule may not take ownership. Copies are multiplied by the ``scales`` of the cohort,
            which it then does not have any more.

        Raises:
            ValueError: a row cannot be read.
            OSError: there is no room for more spare rows.
        """
        fitting = not cohort.streamed and (
            self.dtype == torch.float32 or (self._device.type == "cpu" and in_memory(cohort.rows))
        )
        if fitting and not self.store.plain:
            cohort = cohort.with_rows(cohort.rows)
        if fitting and (cohort.owner is not None or not copy):
            return cohort
        rows = self.spares.rows(cohort.ids)
        # A row may be a view of a row of a buffer that an earlier step took ownership of.
        refuse_shared_memory(cohort, rows)
        columns.copy_(rows, cohort.rows, cohort.scales)
        known = RowList(rows) if self.dtype == torch.float32 else rows
        return replace(cohort, rows=known, owner=self.spares, scales=None)

    def settle_(self, most: int = 0) -> None:
        """Drop all but ``most`` references; no remembered vector changes.

        The vectors of their clients are written into the rows, those with the oldest reference
        first. A row is settled at most once for each round in which its client was active.
        """
        if len(self._live) <= most:
            return
        with SignalsDeferred():
            while len(self._live) > most:
                oldest = self._live[0]
                for client in sorted(oldest.clients):
                    self._add_reference_(self.rows[client], client)
                    self._drop_reference(client)

    def new_reference(self) -> Tensor:
        """Return a vector [d] with undefined content, for use as a new reference."""
        if self._unused is None:
            self._unused = self.store.allocate(1, self.shape[1], self._device)[0]
        return self._unused

    # --- the commit ---------------------------------------------------------------------------

    def exchange(
        self,
        clients: Sequence[int],
        owner: RowExchange | None,
        reference: Tensor | None = None,
        without: Container[int] = (),
    ) -> None:
        """Exchange the memory rows of ``clients`` for new ones. Copies nothing.

        Args:
            clients: distinct ids.
            owner: gives the new rows of ``clients`` and receives the old ones; None: ``spares``.
                Rows that require gradients, as clients may train them, are detached.
            reference: [d], the reference of the new rows; the caller must not change it afterwards.
                None: the new rows are the remembered vectors.
            without: those of ``clients`` whose new rows are the remembered vectors anyway.
        """
        source = owner or self.spares
        given = source.exchange(clients, self.of(clients))
        if source is not self.spares:
            given = [row.detach() if row.requires_grad else row for row in given]
            self._addresses.add(given)
        for client, row in zip(clients, given, strict=True):
            self.rows[client] = row
        if reference is None and not self._live:
            return
        relative = {client for client in clients if client not in without}
        new = None if reference is None or not relative else Reference(reference, relative)
        if new is not None and reference is self._unused:
            self._unused = None
        references = self.references
        for client in clients:
            old, references[client] = references[client], new if client in relative else None
            if old is not None:
                self._release(old, client)
        if new is not None:
            self._live.append(new)

    def forget(self, clients: Sequence[int]) -> None:
        """Set the remembered vectors of ``clients`` to zero, in place. Allocates nothing."""
        for client in clients:
            self.rows[client].zero_()
            self._drop_reference(client)

    def kept(self, clients: Sequence[int]) -> Callable[[], None]:
        """Return a function that sets the remembered vectors of ``clients`` to those of now.

        Their references are settled: a step may use the vector of a reference that nobody has.
        """
        for client in clients:
            self._add_reference_(self.rows[client], client)
            self._drop_reference(client)
        saved = [(client, self.rows[client].clone()) for client in clients]

        def restore() -> None:
            for client, row in saved:
                self.rows[client].copy_(row)

        return restore

    def _drop_reference(self, client: int) -> None:
        old, self.references[client] = self.references[client], None
        if old is not None:
            self._release(old, client)

    def _release(self, old: Reference, client: int) -> None:
        """Note that ``client`` left a reference. When all have, its vector is free for reuse."""
        old.clients.discard(client)
        if not old.clients:
            self._live.remove(old)
            self._unused = old.vector

    def _add_reference_(self, row: Tensor, client: int) -> None:
        """Set ``row = reference + sign * row`` in place, if ``client`` has a reference.

        The result has the bits of a float32 sum.
        """
        reference = self.references[client]
        if reference is not None:
            add_to_each_([row], reference.vector, self.sign)


def add_to_each_(rows: Iterable[Tensor], vector: Tensor, sign: float = 1.0) -> None:
    """Set each row [d] to ``vector + sign * row``, in place.

    The op adds in float64 and then rounds to float32. The result equals a float32 sum, because
    float64 has more than twice the precision of float32.
    """
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    for row in rows:
        ops.weighted_sum_(row, [vector], one, beta=sign)


def check_apart(params: Tensor, state: Iterable[Tensor | RowMemory | None]) -> None:
    """Raise ValueError if ``params`` shares memory with the state of a rule."""
    begin, end = params.data_ptr(), params.data_ptr() + params.nbytes
    for value in state:
        if isinstance(value, RowMemory):
            if value.overlaps(params):
                raise ValueError(
                    "params: must not share memory with a remembered row, as a row of an "
                    "UpdateBuffer from before a step may; pass a separate tensor, and call "
                    "buffer.row again in every round"
                )
        elif value is not None and value.nbytes and value.device == params.device:
            start = value.data_ptr()
            if start < end and begin < start + value.nbytes:
                raise ValueError(
                    "params: must not share memory with the state of the rule; pass a "
                    "separate tensor"
                )


def sink_of(value: Tensor | RowMemory) -> Iterator[Tensor]:
    """Yield the memory of a tensor or row memory in order, to be filled."""
    for part in value.rows if isinstance(value, RowMemory) else [value]:
        if part.device.type == "cpu":
            yield part
        else:
            staging = torch.empty_like(part, device="cpu")
            yield staging
            part.copy_(staging)
