# SPDX-License-Identifier: Apache-2.0
"""Rows for the clients that answer, without one for every client that could."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.updates.allocation import allocate_rows
from fastagg.updates.buffer import UpdateBuffer

_BATCH = 16  # rows allocated at a time; their memory is not touched before they are used


class RowPool(UpdateBuffer):
    """An update buffer that gives a client a row when it is asked for, and takes it back.

    A server with K = 10,000 clients of which 100 answer in a round needs 100 rows, not 10,000.
    Rules with a memory keep the rows that they are handed and give others in exchange, which go to
    the pool. The content of a new row is undefined.

    Args:
        capacity: K; client ids are in [0, K).
        num_params: d.
        device: where the rows live.
    """

    def __init__(self, capacity: int, num_params: int, device: str | torch.device = "cpu") -> None:
        super().__init__(1, num_params, device)
        self._capacity = capacity
        self._device = device
        self._free = self._rows
        self._taken: dict[int, Tensor] = {}

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def allocated(self) -> int:
        """Rows that exist."""
        return len(self._free) + len(self._taken)

    def row(self, client: int) -> Tensor:
        """The row of a client, [d] float32, the same until :meth:`release`.

        Raises:
            IndexError: ``client`` is not in [0, capacity).
        """
        if not 0 <= client < self.capacity:
            raise IndexError(f"client: expected an id in [0, {self.capacity}), got {client}")
        if client not in self._taken:
            if not self._free:
                self._free = allocate_rows(_BATCH, self.num_params, self._device)
            self._taken[client] = self._free.pop()
        return self._taken[client]

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """As :meth:`UpdateBuffer.exchange`."""
        given = self.rows(clients)
        self._taken.update(zip(clients, rows, strict=True))
        return given

    def release(self) -> None:
        """Take all rows back: nobody's content is needed any more."""
        self._free.extend(self._taken.values())
        self._taken.clear()
