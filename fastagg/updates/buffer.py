# SPDX-License-Identifier: Apache-2.0
"""Where updates live: a preallocated row for every client."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastagg import ops
from fastagg.updates.allocation import allocate_rows

Clients = Tensor | Sequence[int]
"""Ids of S clients: an int64 tensor [S] or a sequence of ints."""


class RowExchange(Protocol):
    """Rows that a rule may keep, if it gives others in exchange."""

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Give the rows of ``clients`` away and take ``rows`` in their place; nothing is copied."""
        ...


class UpdateBuffer:
    """A preallocated bank of rows, one per client, where updates are made and read.

    A client's model is bound to its row (``layout.bind(model, buffer.row(k))``), starts from
    the global parameters (``buffer.row(k).copy_(params)``), trains in place, and
    :meth:`subtract_` turns local models into updates. Nothing is flattened, stacked or copied.

    The buffer itself can be given to ``Aggregator.step`` as ``updates``, which hands the rows of
    the active clients over: a rule with a memory keeps the received row as its memory, and the
    buffer gets another one, of undefined content, in exchange. Ask for rows again (:meth:`row`) and
    bind models again in every round; a view from before such a step is the server's. To keep the
    rows, give ``buffer.rows(clients)`` instead.

    Args:
        capacity: number of rows, K if every client gets its own.
        num_params: d.
        device: where the rows live.
    """

    def __init__(self, capacity: int, num_params: int, device: str | torch.device = "cpu") -> None:
        if capacity < 1 or num_params < 1:
            raise ValueError(
                f"capacity, num_params: expected at least 1, got {capacity} and {num_params}"
            )
        self._num_params = num_params
        self._rows = allocate_rows(capacity, num_params, device)

    @property
    def capacity(self) -> int:
        return len(self._rows)

    @property
    def num_params(self) -> int:
        return self._num_params

    def row(self, client: int) -> Tensor:
        """The row of a client, [d] float32, zeros at first; contiguous, starting on a cache line.

        Raises:
            IndexError: ``client`` is not in [0, capacity).
        """
        index = operator.index(client)
        if not 0 <= index < self.capacity:
            raise IndexError(f"client: expected an id in [0, {self.capacity}), got {client}")
        return self._rows[index]

    def rows(self, clients: Clients) -> list[Tensor]:
        """The rows of several clients, in the order given: tensors [d]."""
        ids = clients.tolist() if isinstance(clients, Tensor) else clients
        return [self.row(client) for client in ids]

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Give the rows of ``clients`` away and take ``rows`` in their place; nothing is copied.

        Args:
            clients: distinct ids.
            rows: as many contiguous tensors [d] float32, each in memory of its own.

        Returns:
            The rows that were theirs.
        """
        given = self.rows(clients)
        after = list(self._rows)
        for client, row in zip(clients, rows, strict=True):
            after[client] = row
        self._rows = after
        return given

    def subtract_(self, params: Tensor, clients: Clients) -> list[Tensor]:
        """Turn the local models of some clients into updates, in place.

        Args:
            params: [d] float32, the global parameters that they started from.
            clients: ids; ``row -= params`` for each.

        Returns:
            The rows of ``clients``.
        """
        rows = self.rows(clients)
        minus_one = torch.tensor([-1.0])
        with torch.no_grad():
            for row in rows:
                ops.weighted_sum_(row, [params], minus_one)
        return rows

    def __repr__(self) -> str:
        return f"UpdateBuffer(capacity={self.capacity}, num_params={self.num_params})"
