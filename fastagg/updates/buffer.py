# SPDX-License-Identifier: Apache-2.0
"""Update buffers: a preallocated row for every client."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastagg import ops
from fastagg.ops.memory import shared_row
from fastagg.options import read_device_name, read_size
from fastagg.updates.allocation import allocate_rows

Clients = Tensor | NDArray[np.integer[Any]] | Sequence[int]
"""Ids of S clients: a tensor or NumPy array [S] of integers, or a sequence of ints."""


class RowExchange(Protocol):
    """Rows that a rule may take ownership of, in exchange for spare rows."""

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of ``clients`` and replace them by ``rows``; copies nothing."""
        ...


class UpdateBuffer:
    """Preallocated rows, one per client, in which updates are computed and read.

    Bind a client's model to its row (``layout.bind(model, buffer.row(k))``), start from the global
    parameters (``buffer.row(k).copy_(params)``), train in place, and turn local models into updates
    with :meth:`subtract_`. Nothing is flattened, stacked or copied.

    To let the rule take ownership of the active clients' rows, pass the buffer itself to
    ``Aggregator.step`` as ``updates``. A rule with a memory then keeps an update's row as its
    memory row, and the buffer gets a spare row of undefined content in exchange. So call
    :meth:`row` and bind models again in every round: a view from before such a step shows the
    server's memory. To keep the rows, pass ``buffer.rows(clients)`` instead.

    Args:
        capacity: number of rows; K if every client has a row.
        num_params: d.
        device: device of the rows.

    Raises:
        TypeError, ValueError: a size is not an int of at least 1, or there is no such device.
    """

    def __init__(self, capacity: int, num_params: int, device: str | torch.device = "cpu") -> None:
        size = read_size("capacity", capacity)
        self._num_params = read_size("num_params", num_params)
        self._rows = allocate_rows(size, self._num_params, read_device_name(device))

    @property
    def capacity(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def num_params(self) -> int:
        """d, the length of a row."""
        return self._num_params

    @property
    def every_row(self) -> list[Tensor] | None:
        """The rows by client id, not copied; None if not every client has one."""
        return self._rows

    def row(self, client: int) -> Tensor:
        """Return the row of a client.

        Returns:
            [d] float32, contiguous, aligned to a cache line; initially zeros.

        Raises:
            IndexError: ``client`` is not in [0, capacity).
            TypeError: ``client`` is no integer.
        """
        return self._rows[self._index(client)]

    def _index(self, client: int) -> int:
        """Return a client's id as an int in [0, capacity); raise as :meth:`row`."""
        if isinstance(client, bool):  # of a mask, which is no list of ids
            raise TypeError(f"client: expected an integer, got {client}")
        try:
            index = operator.index(client)
        except TypeError as error:
            raise TypeError(f"client: expected an integer, got {client!r}") from error
        if not 0 <= index < self.capacity:
            raise IndexError(f"client: expected an id in [0, {self.capacity}), got {client}")
        return index

    def rows(self, clients: Clients) -> list[Tensor]:
        """Return the rows of several clients, tensors [d], in the order given."""
        ids = clients.tolist() if isinstance(clients, Tensor) else clients
        return [self.row(client) for client in ids]

    def exchange(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of ``clients`` and replace them by ``rows``; copies nothing.

        Args:
            clients: distinct ids.
            rows: one contiguous tensor [d] float32 for each client; they must not share memory.

        Returns:
            The previous rows of ``clients``.
        """
        given = self.rows(clients)
        for client, row in zip(clients, rows, strict=True):
            self._rows[client] = row
        return given

    def subtract_(self, params: Tensor, clients: Clients) -> list[Tensor]:
        """Turn the local models of some clients into updates, in place: ``row -= params``.

        Args:
            params: [d] float32, the global parameters that the clients started from.
            clients: ids of the clients.

        Returns:
            The rows of ``clients``, in the order given.

        Raises:
            TypeError, ValueError, IndexError: an argument is not as described, or an id comes
                twice. No row has changed.
        """
        rows = self.rows(clients)
        if len({row.data_ptr() for row in rows}) < len(rows):
            raise ValueError(f"clients: expected distinct ids, got {clients}")
        if not isinstance(params, Tensor):
            raise TypeError(f"params: expected a torch.Tensor, got {type(params).__name__}")
        if params.dtype != torch.float32 or params.shape != (self._num_params,):
            raise ValueError(
                f"params: expected [{self._num_params}] float32, got {[*params.shape]} "
                f"{params.dtype}"
            )
        if not params.is_contiguous() or shared_row(rows, [params]) >= 0:
            raise ValueError("params: expected a contiguous vector apart from the rows")
        minus_one = torch.tensor([-1.0], dtype=torch.float32, device="cpu")
        with torch.no_grad():
            for row in rows:
                ops.weighted_sum_(row, [params], minus_one)
        return rows

    def __repr__(self) -> str:
        return f"UpdateBuffer(capacity={self.capacity}, num_params={self.num_params})"
