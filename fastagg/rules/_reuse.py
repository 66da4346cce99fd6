# SPDX-License-Identifier: Apache-2.0
"""Remember the last row of every client, and update their Gram matrix incrementally."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg import ops
from fastagg.memory.int8 import make_memory
from fastagg.memory.overlap import refuse_shared_memory
from fastagg.memory.stores import RowStore
from fastagg.updates.any_rows import AnyRow, AnyRows, alike
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import Columns


class ReusedRows:
    """The last row of every client, and the Gram matrix of these rows.

    In a round with S active clients, S rows change, so only their inner products with all K rows
    are computed. An entry of ``ops.gram`` depends on its two rows only, so the matrix equals a full
    recomputation bit for bit, at about ``2S/K - (S/K)^2`` of the arithmetic. All K rows are still
    read once for it, and once more for the aggregate.

    Args:
        num_clients: K.
        num_params: d.
        device: where the rows live.
        store: where the rows are stored, and their dtype.

    Attributes:
        memory: [K, d], the last row of every client, zeros for clients never active.
    """

    def __init__(
        self, num_clients: int, num_params: int, device: torch.device, store: RowStore
    ) -> None:
        self.memory = make_memory(num_clients, num_params, device, store)
        self._gram = torch.zeros(num_clients, num_clients, dtype=torch.float64, device="cpu")

    def receive(self, cohort: Cohort, columns: Columns) -> Cohort:
        """Return the cohort with rows that the commit can make memory rows.

        These are the caller's rows if the rule may take ownership of them, otherwise spare rows.

        Raises:
            ValueError: a row cannot be read, or shares memory with a memory row.
        """
        if cohort.owner is None:
            refuse_shared_memory(cohort, self.memory.tensors)
        return self.memory.receive(cohort, columns, copy=True)

    def rows(self, cohort: Cohort, expired: Sequence[int] = ()) -> AnyRows:
        """Return K rows [d]: the new ones of ``cohort``, and memory rows of absent clients.

        The rows of the clients ``expired`` that are absent are zero.
        """
        rows: list[AnyRow] = list(self.memory.rows)
        if expired:
            zeros = self.memory.zeros()
            for client in expired:
                rows[client] = zeros
        for client, row in zip(cohort.ids, cohort.rows, strict=True):
            rows[client] = row
        # After `receive`, the rows of the cohort have the dtype of the memory.
        return rows if self.memory.dtype != torch.float32 else alike(cohort.rows, rows)

    def gram(
        self, rows: AnyRows, clients: list[int], columns: Columns, expired: Sequence[int] = ()
    ) -> Tensor:
        """Return the Gram matrix of n >= K rows; only those of absent clients are unchanged.

        Args:
            rows: n rows; row k < K is that of client k.
            clients: ids of the active clients. Their rows, and the rows from K on, have changed.
            columns: reads the rows.
            expired: ids of clients whose rows are zero now, unless they are active.

        Returns:
            [n, n] float64 on the CPU.
        """
        size, num_clients = len(rows), len(self._gram)
        changed = [*clients, *range(num_clients, size)]
        if len(changed) == size:
            return columns.gram(rows).cpu()
        places, known = torch.tensor(changed, device="cpu"), self._gram
        if expired:
            known = known.clone()
            known[expired] = 0.0
            known[:, expired] = 0.0
        return ops.replace_rows(known, places, columns.gram_rows(rows, places).cpu())

    def commit(self, cohort: Cohort, gram: Tensor, expired: Sequence[int] = ()) -> None:
        """Make the rows of ``cohort`` memory rows, and keep the result ``gram`` of :meth:`gram`."""
        if expired:
            active = set(cohort.ids)
            for client in expired:
                if client not in active:
                    self.memory.forget((client,))
        self.memory.exchange(cohort.ids, cohort.owner)
        num_clients = len(self._gram)
        self._gram = gram[:num_clients, :num_clients]

    def forget(self, clients: Sequence[int]) -> None:
        """Set the rows of ``clients`` to zero."""
        known = self._gram.clone()
        known[clients] = 0.0
        known[:, clients] = 0.0
        self.memory.forget(clients)
        self._gram = known

    def recompute(self, columns: Columns) -> None:
        """Recompute the Gram matrix after the memory was replaced."""
        self._gram = columns.gram(self.memory.rows).cpu()
