# SPDX-License-Identifier: Apache-2.0
"""The last row of every client, with a Gram matrix of which only what changed is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg import ops
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import RowStore
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import AnyRow, AnyRows, Columns, alike


class Bank:
    """Rows of absent clients stay as they were; so do their inner products.

    A round with S of K clients needs the inner products of S rows with K, not of K with K: entries
    of ``ops.gram`` depend on their two rows alone, so the matrix is bit for bit that of a full
    recomputation, at about ``2S/K - (S/K)^2`` of its arithmetic. All K rows are still read once
    for it, and once more for the aggregate.

    Attributes:
        memory: [K, d], the last row of every client, zeros for those never seen.
    """

    def __init__(
        self, num_clients: int, num_params: int, device: torch.device, store: RowStore
    ) -> None:
        self.memory = RowMemory(num_clients, num_params, device, store=store)
        self._gram = torch.zeros(num_clients, num_clients, dtype=torch.float64)

    def rows(self, cohort: Cohort) -> AnyRows:
        """The rows of all clients once ``cohort`` has answered: K tensors [d], nothing copied.

        Raises:
            ValueError: a row lies in the memory itself.
        """
        rows: list[AnyRow] = list(self.memory.rows)
        if cohort.buffer is None:
            refuse_shared_memory(cohort, self.memory.rows)
        for client, row in zip(cohort.ids, cohort.rows, strict=True):
            rows[client] = row
        # A float32 memory has nothing else, and is given nothing else to remember.
        return rows if self.memory.dtype != torch.float32 else alike(cohort.rows, rows)

    def gram(self, rows: AnyRows, clients: list[int], columns: Columns) -> Tensor:
        """[n, n] float64 of ``rows``, n >= K, where those of ``clients`` and past K are new."""
        size, num_clients = len(rows), len(self._gram)
        changed = [*clients, *range(num_clients, size)]
        if len(changed) == size:
            return columns.gram(rows).cpu()
        places = torch.tensor(changed)
        return ops.replace_rows(self._gram, places, columns.gram_rows(rows, places).cpu())

    def commit(self, cohort: Cohort, gram: Tensor) -> None:
        """Remember the rows of ``cohort``, and ``gram`` as :meth:`gram` gave it for them."""
        if cohort.buffer is not None:
            self.memory.adopt(cohort.ids, cohort.buffer, None)
        else:
            for kept, row in zip(self.memory.of(cohort.ids), cohort.tensors, strict=True):
                kept.copy_(row)
        num_clients = len(self._gram)
        self._gram = gram[:num_clients, :num_clients]

    def recompute(self, columns: Columns) -> None:
        """Make the Gram matrix fit a memory that was changed from outside."""
        self._gram = columns.gram(self.memory.rows).cpu()
