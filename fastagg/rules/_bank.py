# SPDX-License-Identifier: Apache-2.0
"""The last row of every client, with a Gram matrix of which only what changed is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.cohort import Cohort
from fastagg.columns import AnyRow, Columns
from fastagg.row_memory import RowMemory
from fastagg.row_store import RowStore
from fastagg.rules._rows import refuse_shared_memory


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
        self._device = device
        self._gram = torch.zeros(num_clients, num_clients, dtype=torch.float64)

    def rows(self, cohort: Cohort) -> list[AnyRow]:
        """The rows of all clients once ``cohort`` has answered: K tensors [d], nothing copied.

        Raises:
            ValueError: a row lies in the memory itself.
        """
        rows: list[AnyRow] = list(self.memory.rows)
        refuse_shared_memory(cohort, self.memory.rows)
        for client, row in zip(cohort.clients.tolist(), cohort.rows, strict=True):
            rows[client] = row
        return rows

    def gram(self, rows: Sequence[AnyRow], clients: Tensor, columns: Columns) -> Tensor:
        """[n, n] float64 of ``rows``, n >= K, where those of ``clients`` and past K are new."""
        num_clients = len(self._gram)
        changed = torch.ones(len(rows), dtype=torch.bool)
        changed[:num_clients] = False
        changed[clients] = True
        if bool(changed.all()):
            return columns.gram(rows).cpu()
        # Changed rows first: then the pairs needed fill whole tiles of the kernel.
        order = torch.cat([changed.nonzero().flatten(), (~changed).nonzero().flatten()])
        needed = changed[order][:, None] | changed[order]
        ordered = [rows[i] for i in order.tolist()]
        computed = columns.gram(ordered, pairs=needed.to(self._device)).cpu()
        gram = torch.empty_like(computed)
        gram[order[:, None], order] = computed
        kept = ~(changed[:, None] | changed)[:num_clients, :num_clients]
        gram[:num_clients, :num_clients][kept] = self._gram[kept]
        return gram

    def commit(self, cohort: Cohort, gram: Tensor) -> None:
        """Remember the rows of ``cohort``, and ``gram`` as :meth:`gram` gave it for them."""
        ids = cohort.clients.tolist()
        if cohort.buffer is not None:
            self.memory.adopt(ids, cohort.buffer, None)
        else:
            for kept, row in zip(self.memory.of(ids), cohort.tensors, strict=True):
                kept.copy_(row)
        num_clients = len(self._gram)
        self._gram = gram[:num_clients, :num_clients]

    def recompute(self, columns: Columns) -> None:
        """Make the Gram matrix fit a memory that was changed from outside."""
        self._gram = columns.gram(self.memory.rows).cpu()
