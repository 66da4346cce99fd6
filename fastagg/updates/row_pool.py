# SPDX-License-Identifier: Apache-2.0
"""An update buffer with rows for the clients of the current round only."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.options import read_device_name, read_size
from fastagg.updates.allocation import allocate_rows
from fastagg.updates.buffer import UpdateBuffer

_BATCH = 16  # rows per allocation; the system provides their memory only when they are written


class RowPool(UpdateBuffer):
    """An update buffer that assigns rows to clients on demand and takes them back after a round.

    If 100 of K = 10,000 clients answer in a round, the pool needs 100 rows, not 10,000. A rule with
    a memory may take ownership of rows during a step; the spare rows that it gives in exchange
    belong to the pool. The content of a newly assigned row is undefined.

    Args:
        capacity: K; client ids are in [0, K).
        num_params: d.
        device: device of the rows.
    """

    def __init__(self, capacity: int, num_params: int, device: str | torch.device = "cpu") -> None:
        super().__init__(1, num_params, device)
        self._capacity = read_size("capacity", capacity)
        self._device = read_device_name(device)
        self._free = self._rows
        self._taken: dict[int, Tensor] = {}

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def every_row(self) -> None:
        return None

    @property
    def allocated(self) -> int:
        """Number of allocated rows, assigned or free."""
        return len(self._free) + len(self._taken)

    def row(self, client: int) -> Tensor:
        """Return the row of a client, [d] float32: the same one until :meth:`release`.

        Raises:
            IndexError: ``client`` is not in [0, capacity).
            TypeError: ``client`` is no integer.
        """
        index = self._index(client)
        if index not in self._taken:
            if not self._free:
                self._free = allocate_rows(_BATCH, self.num_params, self._device)
            self._taken[index] = self._free.pop()
        return self._taken[index]

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of ``clients`` and replace them by ``rows``; copies nothing."""
        given = self.rows(clients)
        self._taken.update(zip(map(operator.index, clients), rows, strict=True))
        return given

    def release(self) -> None:
        """Take all rows back. Their content is no longer needed."""
        self._free.extend(self._taken.values())
        self._taken.clear()
