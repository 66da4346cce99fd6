# SPDX-License-Identifier: Apache-2.0
"""The arguments of one server step, checked, and brought into the order of client ids.

Everything downstream sees rows sorted by client id, so no result can depend on the order in
which updates arrived. Sorting moves row views, never row data.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from fastagg.buffer import Clients, RowExchange, UpdateBuffer
from fastagg.columns import AnyRow, AnyRows, StreamedRow, in_memory
from fastagg.ops import Rows
from fastagg.streaming import ColumnSource

Updates = Rows | UpdateBuffer | ColumnSource
"""What a step takes as updates."""


@dataclass(frozen=True)
class Cohort:
    """The active clients of one round, by ascending id, and their rows in the same order."""

    clients: Tensor  # [S] int64, ascending
    rows: AnyRows  # [S, d] float32, or S tensors [d], or S rows that are read piece by piece
    buffer: RowExchange | None = None
    """Where the rows live, if they are handed over: the rule may exchange them."""

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def streamed(self) -> bool:
        """Whether rows are not in memory."""
        return not isinstance(self.rows, Tensor) and any(
            isinstance(row, StreamedRow) for row in self.rows
        )

    @property
    def tensors(self) -> Rows:
        """The rows, of a cohort that has them in memory."""
        if not in_memory(self.rows):
            raise TypeError("rows: expected float32 tensors in memory")
        return self.rows

    def problems(self) -> dict[int, str]:
        """Position -> why a streamed row cannot be read."""
        found = {}
        for position, row in enumerate(self.rows):
            if isinstance(row, StreamedRow) and (problem := row.problem()) is not None:
                found[position] = problem
        return found

    def without(self, rejected: Container[int]) -> Cohort:
        """The same cohort less the clients whose ids are in ``rejected``."""
        keep = [client not in rejected for client in self.clients.tolist()]
        rows = [row for row, kept in zip(self.rows, keep, strict=True) if kept]
        return Cohort(self.clients[torch.tensor(keep)], rows, self.buffer)


def read_cohort(
    params: Tensor,
    updates: Updates,
    clients: Clients,
    *,
    num_clients: int,
    num_params: int,
    device: torch.device,
) -> Cohort:
    """Check the arguments of ``Aggregator.step`` and sort the rows by client id.

    Args:
        params: [d] float32, contiguous.
        updates: [S, d] float32 with a contiguous last dimension, or S contiguous tensors [d], or a
            buffer whose rows of ``clients`` are handed over, or a source to read S rows from.
        clients: S distinct ids in [0, K).
        num_clients: K.
        num_params: d.
        device: where all tensors must live.

    Returns:
        The cohort; its rows are views of ``updates``.

    Raises:
        TypeError, ValueError, IndexError: naming the argument, what was expected and what came.
    """
    _check_vector("params", params, num_params, device)
    ids = _read_ids(clients, num_clients)
    buffer = updates if isinstance(updates, UpdateBuffer) else None
    if isinstance(updates, UpdateBuffer):
        _check_buffer(updates, ids, num_params)
        updates = updates.rows(ids)
    given: AnyRows
    if isinstance(updates, ColumnSource):
        given = updates.rows
        if updates.num_params != num_params:
            raise ValueError(
                f"updates: expected rows of {num_params} elements, got {updates.num_params}"
            )
    else:
        given = updates
        _check_overlap(params, _check_updates(updates, num_params, device))
    if len(ids) != len(given):
        raise ValueError(
            f"clients: expected one id per row of updates ({len(given)}), got {len(ids)}"
        )
    ascending = sorted(ids)
    sorted_ids = torch.tensor(ascending, dtype=torch.int64)
    if ascending == ids:
        return Cohort(sorted_ids, given, buffer)
    rows: Sequence[AnyRow] = given.unbind(0) if isinstance(given, Tensor) else given
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return Cohort(sorted_ids, [rows[s] for s in order], buffer)


def _check_tensor(name: str, value: object, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")
    if value.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype torch.float32, got {value.dtype}")
    if value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")
    return value


def _check_vector(name: str, value: object, num_params: int, device: torch.device) -> int:
    """Check one vector [d]; return the address of its first element."""
    vector = _check_tensor(name, value, device)
    if vector.shape != (num_params,):
        raise ValueError(f"{name}: expected shape [{num_params}], got {list(vector.shape)}")
    if not vector.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {vector.stride()}")
    return vector.data_ptr()


def _check_buffer(buffer: UpdateBuffer, ids: list[int], num_params: int) -> None:
    if buffer.num_params != num_params:
        raise ValueError(
            f"updates: expected a buffer with rows of {num_params} elements, got {buffer}"
        )
    if ids and max(ids) >= buffer.capacity:
        raise ValueError(
            f"updates: expected a buffer with a row for client {max(ids)}, got {buffer}"
        )


def _check_updates(updates: object, num_params: int, device: torch.device) -> list[int]:
    """Check the rows; return the address of the first element of each."""
    if isinstance(updates, Tensor):
        matrix = _check_tensor("updates", updates, device)
        if matrix.ndim != 2 or matrix.shape[1] != num_params:
            raise ValueError(f"updates: expected shape [S, {num_params}], got {list(matrix.shape)}")
        if matrix.stride(1) != 1 and num_params > 1:
            raise ValueError(
                f"updates: expected a contiguous last dimension, got strides {matrix.stride()}"
            )
        step = matrix.stride(0) * matrix.element_size()
        return [matrix.data_ptr() + s * step for s in range(len(matrix))]
    if not isinstance(updates, Sequence):
        raise TypeError(
            "updates: expected a tensor [S, d] or a sequence of tensors [d], "
            f"got {type(updates).__name__}"
        )
    return [_check_vector(f"updates[{s}]", r, num_params, device) for s, r in enumerate(updates)]


def _read_ids(clients: object, num_clients: int) -> list[int]:
    if isinstance(clients, Tensor):
        if clients.dtype != torch.int64:
            raise TypeError(f"clients: expected dtype torch.int64, got {clients.dtype}")
        if clients.ndim != 1:
            raise ValueError(f"clients: expected shape [S], got {list(clients.shape)}")
        if clients.device.type == "meta":
            raise ValueError("clients: expected a tensor with data, got one on device meta")
        ids = clients.tolist()
    elif isinstance(clients, Sequence) and not isinstance(clients, str | bytes):
        ids = [_read_id(client) for client in clients]
    else:
        raise TypeError(
            f"clients: expected an int64 tensor or a sequence of ints, got {type(clients).__name__}"
        )
    if ids and not (min(ids) >= 0 and max(ids) < num_clients):
        wrong = next(client for client in ids if not 0 <= client < num_clients)
        raise IndexError(f"clients: expected ids in [0, {num_clients}), got {wrong}")
    if len(set(ids)) != len(ids):
        twice = sorted({client for client in ids if ids.count(client) > 1})
        raise ValueError(f"clients: expected distinct ids, got {twice} more than once")
    return ids


def _read_id(client: object) -> int:
    if isinstance(client, bool) or not isinstance(client, SupportsIndex):
        raise TypeError(f"clients: expected ints, got {client!r} ({type(client).__name__})")
    return operator.index(client)


def _check_overlap(params: Tensor, starts: list[int]) -> None:
    own, length = params.data_ptr(), params.numel() * params.element_size()
    for s, start in enumerate(starts):
        if abs(start - own) < length:
            raise ValueError(
                f"params: must not share memory with updates, but does with row {s}; "
                "pass a separate tensor"
            )
