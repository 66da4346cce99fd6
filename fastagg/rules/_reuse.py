# SPDX-License-Identifier: Apache-2.0
"""The last row of every client, and a Gram matrix of which only what changed is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg import ops
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import RowStore
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import AnyRow, AnyRows, Columns, alike


class ReusedRows:
    """The rows of absent clients stay the same, and so do their inner products.

    A round with S of K clients needs the inner products of S rows with K, not of K with K. Entries
    of ``ops.gram`` depend on their two rows alone, so the matrix is bit for bit that of a full
    recomputation, at about ``2S/K - (S/K)^2`` of its arithmetic. All K rows are still read once for
    it, and once more for the aggregate.

    Attributes:
        memory: [K, d], the last row of every client, zeros for those never seen.
    """

    def __init__(
        self, num_clients: int, num_params: int, device: torch.device, store: RowStore
    ) -> None:
        self.memory = RowMemory(num_clients, num_params, device, store=store)
        self._gram = torch.zeros(num_clients, num_clients, dtype=torch.float64)

    def receive(self, cohort: Cohort, columns: Columns) -> Cohort:
        """Return the cohort with rows that become memory rows: the caller's, or spare rows.

        Raises:
            ValueError: a row cannot be read, or lies in the memory itself.
        """
        if cohort.owner is None:
            refuse_shared_memory(cohort, self.memory.rows)
        return self.memory.receive(cohort, columns, copy=True)

    def rows(self, cohort: Cohort) -> AnyRows:
        """Return the rows of all clients, the new ones of ``cohort`` included: K tensors [d]."""
        rows: list[AnyRow] = list(self.memory.rows)
        for client, row in zip(cohort.ids, cohort.rows, strict=True):
            rows[client] = row
        # A float32 memory has only float32 rows, and is given no others to remember.
        return rows if self.memory.dtype != torch.float32 else alike(cohort.rows, rows)

    def gram(self, rows: AnyRows, clients: list[int], columns: Columns) -> Tensor:
        """Return [n, n] float64 of ``rows``, n >= K; rows of ``clients`` and from K on are new."""
        size, num_clients = len(rows), len(self._gram)
        changed = [*clients, *range(num_clients, size)]
        if len(changed) == size:
            return columns.gram(rows).cpu()
        places = torch.tensor(changed)
        return ops.replace_rows(self._gram, places, columns.gram_rows(rows, places).cpu())

    def commit(self, cohort: Cohort, gram: Tensor) -> None:
        """Remember the rows of ``cohort``, and the ``gram`` that :meth:`gram` returned for them."""
        self.memory.exchange(cohort.ids, cohort.owner)
        num_clients = len(self._gram)
        self._gram = gram[:num_clients, :num_clients]

    def recompute(self, columns: Columns) -> None:
        """Recompute the Gram matrix of a memory that was replaced."""
        self._gram = columns.gram(self.memory.rows).cpu()
