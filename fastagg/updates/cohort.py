# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of a step and sort the rows by client id.

All later code gets rows sorted by client id, so results are invariant to arrival order. Sorting
reorders views of rows and does not copy data.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastagg.ops import Rows
from fastagg.ops.memory import usual_cohort
from fastagg.ops.row_lists import RowList
from fastagg.options import MOST
from fastagg.report import BrokenUpdates
from fastagg.updates.any_rows import (
    SMALL_BYTES,
    AnyRows,
    StreamedRow,
    alike,
    each_row,
    in_memory,
    known_in_memory,
    rows_at,
)
from fastagg.updates.buffer import Clients, RowExchange, UpdateBuffer
from fastagg.updates.columns import Columns
from fastagg.updates.small import ids_tensor
from fastagg.updates.streams import ColumnSource
from fastagg.updates.weights import read_weights

Updates = Rows | UpdateBuffer | ColumnSource
"""The types that a step accepts as updates."""

Ages = Tensor | NDArray[np.integer[Any]] | Sequence[int]
"""Ages of S rows, in rounds: a tensor or NumPy array [S] of integers, or a sequence of ints."""


_INTEGERS = frozenset(
    {
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    }
)

_MOST_REPEATED = 1 << 20
"""Number of ids up to which the error message lists those that are repeated."""


@dataclass(frozen=True)
class Cohort:
    """The active clients of one round, by ascending id, and their rows in the same order.

    Attributes:
        ids: S ids, ascending.
        clients: the same ids, [S] int64.
        rows: [S, d] float32, or S tensors [d], or S rows that are read piece by piece.
        owner: exchanges the rows for other ones, if the rule may take ownership of them; None: the
            rule may only read the rows.
        ages: [S] int64, >= 0, not all 0: for each row, the number of rounds since the model that
            it started from. A client may have several rows, if the rule allows it; they are in the
            order of their ages. None: no row is late.
        weights: [S] float64, the weights of this round, in place of the client weights; None: the
            client weights count.
        scales: [S] float64, what the rule multiplies the rows by. Set only if it has said that it
            does (``ClippedSteps._scales_rows``). None: ones.
    """

    ids: list[int]
    clients: Tensor
    rows: AnyRows
    owner: RowExchange | None = None
    ages: Tensor | None = None
    weights: Tensor | None = None
    scales: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def scaled(self, values: Tensor) -> Tensor:
        """Return values [S], one of each row, times the scales."""
        return values if self.scales is None else values * self.scales.to(values.device)

    def with_rows(self, rows: AnyRows, owner: RowExchange | None = None) -> Cohort:
        """Return a cohort of the same clients with other rows."""
        return replace(self, rows=rows, owner=owner)

    def tensors(self) -> list[Tensor]:
        """Return the rows as S tensors [d].

        Raises:
            TypeError: some rows are not in memory, or not float32.
        """
        if isinstance(self.rows, Tensor):
            return RowList(self.rows.unbind(0))
        if not in_memory(self.rows):
            raise TypeError("rows: expected float32 tensors in memory")
        return list(self.rows)

    @property
    def streamed(self) -> bool:
        """Whether some rows are read piece by piece."""
        rows = self.rows
        return not known_in_memory(rows) and any(isinstance(row, StreamedRow) for row in rows)

    def problems(self) -> dict[int, str]:
        """Return, by position, why rows cannot be read; empty if all of them can."""
        found = {}
        for position, row in enumerate(self.rows):
            if isinstance(row, StreamedRow) and (problem := row.problem()) is not None:
                found[position] = problem
        return found

    def without(self, rejected: Container[int]) -> Cohort:
        """Return the cohort without the clients whose ids are in ``rejected``."""
        return self._at([s for s, client in enumerate(self.ids) if client not in rejected])

    def without_rows(self, positions: Container[int]) -> Cohort:
        """Return the cohort without the rows at ``positions``."""
        return self._at([s for s in range(len(self.ids)) if s not in positions])

    def _at(self, positions: list[int]) -> Cohort:
        ids, rows = [self.ids[s] for s in positions], each_row(self.rows)
        return replace(
            self,
            ids=ids,
            clients=ids_tensor(ids),
            rows=alike(self.rows, [rows[s] for s in positions]),
            ages=None if self.ages is None else _if_late(self.ages[positions].tolist()),
            weights=None if self.weights is None else self.weights[positions],
            scales=None if self.scales is None else self.scales[positions],
        )


def read_cohort(
    params: Tensor,
    updates: Updates,
    clients: Clients,
    *,
    num_clients: int,
    num_params: int,
    device: torch.device,
    gather: bool = False,
    ages: Ages | None = None,
    repeats: bool = False,
    weights: object = None,
) -> Cohort:
    """Check the arguments of ``Aggregator.step`` and sort the rows by client id, then by age.

    Args:
        params: [d] float32, contiguous.
        updates: [S, d] float32 with a contiguous last dimension, or S contiguous tensors [d], or a
            buffer (the rule may take ownership of its rows of ``clients``), or a stream of S rows.
        clients: S distinct ids in [0, K).
        num_clients: K.
        num_params: d.
        device: where all tensors must live.
        gather: copy the rows of a small matrix in the order of ids, instead of making a view of
            each: an op checks one tensor faster than S.
        ages: S ages; None: zeros.
        repeats: a client may have several rows, of different ages.
        weights: S finite numbers >= 0, not all zero; None: the round has no weights of its own.

    Returns:
        The cohort; its rows are views of ``updates``, or a copy.

    Raises:
        TypeError, ValueError, IndexError: an argument is not as described; the message names the
            argument, what was expected and what came.
    """
    if device.type == "cpu" and ages is None and weights is None:
        found = _usual_cohort(params, updates, clients, num_clients, num_params, gather)
        if found is not None:
            return found
    # Something is unusual or wrong: check one argument after the other, with messages.
    check_vector("params", params, num_params, device)
    if params.requires_grad and params.grad_fn is not None and params._base is None:
        _warn_of_a_copy(params)
    ids = read_ids(clients, num_clients, distinct=ages is None or not repeats)
    late = None if ages is None else _read_ages(ages, ids)
    buffer = updates if isinstance(updates, UpdateBuffer) else None
    if isinstance(updates, UpdateBuffer):
        _check_buffer(updates, ids, num_params)
        updates = updates.rows(ids)
    given: AnyRows
    if isinstance(updates, ColumnSource):
        given = updates.rows
        if updates.num_params != num_params and (updates.num_params or len(updates)):
            raise ValueError(
                f"updates: expected rows of {num_params} elements, got {updates.num_params}"
            )
    else:
        _check_overlap(params, _check_updates(updates, len(ids), num_params, device))
        given = updates if isinstance(updates, Tensor) else RowList(updates)
    _check_count(len(given), len(ids))
    counts = None if weights is None else read_weights("weights", weights, len(ids))
    keys: Sequence[Any] = ids if late is None else list(zip(ids, late, strict=True))
    if sorted(keys) != keys:
        order = sorted(range(len(ids)), key=keys.__getitem__)
        ids = [ids[s] for s in order]
        late = None if late is None else [late[s] for s in order]
        counts = None if counts is None else counts[order]
        if gather:
            given = rows_at(given, order)
        else:
            views = each_row(given)
            given = alike(given, [views[s] for s in order])
    row_ages = None if late is None else _if_late(late)
    return Cohort(ids, ids_tensor(ids), given, buffer, row_ages, counts)


def _usual_cohort(
    params: Tensor,
    updates: Updates,
    clients: Clients,
    num_clients: int,
    num_params: int,
    gather: bool,
) -> Cohort | None:
    """Check and sort all arguments in one call; None if one of them is wrong or unusual."""
    owner = updates if isinstance(updates, UpdateBuffer) else None
    found = usual_cohort(
        params,
        updates if owner is None else owner.every_row,
        clients,
        num_clients,
        num_params,
        owner is not None,
        SMALL_BYTES if gather else 0,
    )
    if found is None:
        return None
    ids, tensor, rows = found
    return Cohort(ids, tensor, rows if isinstance(rows, Tensor) else RowList(rows), owner)


def _if_late(ages: list[int]) -> Tensor | None:
    """Return ages as a tensor [S] int64; None if all are 0."""
    return ids_tensor(ages) if any(ages) else None


def _read_ages(value: Ages, ids: list[int]) -> list[int]:
    """Return the argument ``ages``, one for each of ``ids``, whose pairs with them are distinct."""
    ages = read_integers("ages", value, max(len(ids), _MOST_REPEATED))
    if len(ages) != len(ids):
        raise ValueError(f"ages: expected one age per client ({len(ids)}), got {len(ages)}")
    if ages and not 0 <= min(ages) <= max(ages) <= MOST:
        wrong = next(age for age in ages if not 0 <= age <= MOST)
        raise ValueError(f"ages: expected ints in [0, {MOST}], got {wrong}")
    if len(set(zip(ids, ages, strict=True))) != len(ids):
        pairs = Counter(zip(ids, ages, strict=True))
        twice = sorted(pair for pair, times in pairs.items() if times > 1)
        raise ValueError(
            f"clients, ages: expected distinct pairs of id and age, got {twice} more than once"
        )
    return ages


def check_readable(cohort: Cohort, columns: Columns) -> None:
    """Refuse streamed rows that cannot be read by this process or another rank.

    Raises:
        BrokenUpdates: such rows exist; the exception names all of them.
    """
    problems = cohort.problems()
    flags = torch.zeros(len(cohort), dtype=torch.bool, device="cpu")
    flags[list(problems)] = True
    flags = columns.join_flags(flags)
    if bool(flags.any()):
        why = {
            client: f"cannot be read: {problems.get(position, 'on another rank')}"
            for position, client in enumerate(cohort.ids)
            if flags[position]
        }
        raise BrokenUpdates(why)


def _check_tensor(name: str, value: object, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected a torch.Tensor, got {type(value).__name__}{_hint(value)}"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")
    if value.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype torch.float32, got {value.dtype}")
    if value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")
    if value.is_neg() or value._is_zerotensor():  # the ops refuse such rows; NumPy fails
        raise ValueError(f"{name}: expected a tensor without a lazy negation; call clone()")
    return value


def _hint(value: object) -> str:
    """Return how to make a flat tensor of what is often passed instead, for a message."""
    if isinstance(value, torch.nn.Module):
        return "; fastagg.FlatLayout.from_module(model).flatten(model) makes a vector of a model"
    if isinstance(value, Mapping):
        return "; fastagg.FlatLayout.from_state_dict(state).flatten(state) makes a vector of it"
    if isinstance(value, np.ndarray):
        return "; torch.from_numpy(array) makes a tensor of a NumPy array"
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], np.ndarray):
            flat = "torch.from_numpy(numpy.concatenate([a.ravel() for a in arrays]))"
            return f"; {flat} makes a vector of the arrays of a model"
        if isinstance(value[0], Tensor):
            return "; torch.cat([t.flatten() for t in tensors]) makes a vector of tensors"
    return ""


def _is_vector(value: object, num_params: int, device: torch.device) -> TypeGuard[Tensor]:
    """Return whether the value is a contiguous float32 vector [d] on ``device``."""
    try:
        return (
            isinstance(value, Tensor)
            and value.dtype == torch.float32
            and value.shape == (num_params,)
            and value.layout == torch.strided
            and value.device == device
            and value.is_contiguous()
        )
    except RuntimeError:  # a nested tensor has no shape
        return False


def check_vector(name: str, value: object, num_params: int, device: torch.device) -> int:
    """Check one vector [d] and return the address of its first element."""
    if _is_vector(value, num_params, device):
        return value.data_ptr()
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
    if len(set(ids)) != len(ids):
        raise ValueError(
            "updates: expected rows of their own, because a buffer has one row per client and a "
            "client has several here, got an UpdateBuffer"
        )


def _check_count(rows: int, ids: int) -> None:
    if ids != rows:
        raise ValueError(f"clients: expected one id per row of updates ({rows}), got {ids}")


def _check_updates(
    updates: object, count: int, num_params: int, device: torch.device
) -> Sequence[int]:
    """Check ``count`` rows and return the address of the first element of each."""
    if isinstance(updates, Tensor):
        matrix = _check_tensor("updates", updates, device)
        if matrix.ndim != 2 or matrix.shape[1] != num_params:
            raise ValueError(f"updates: expected shape [S, {num_params}], got {list(matrix.shape)}")
        if matrix.stride(1) != 1 and num_params > 1 and len(matrix) > 0:
            raise ValueError(
                f"updates: expected a contiguous last dimension, got strides {matrix.stride()}"
            )
        if matrix.untyped_storage().nbytes() < _bytes_reached(matrix):
            raise ValueError("updates: expected a tensor within its storage, which was resized")
        _check_count(len(matrix), count)  # a stride of 0 allows more rows than fit in memory
        step = matrix.stride(0) * matrix.element_size()
        first = matrix.data_ptr()
        return range(first, first + count * step, step) if step else [first] * count
    if not isinstance(updates, Sequence):
        raise TypeError(
            "updates: expected a tensor [S, d] or a sequence of tensors [d], "
            f"got {type(updates).__name__}{_hint(updates)}"
        )
    if len(updates) not in (0, count):
        _check_tensor("updates[0]", updates[0], device)  # it may be an array of one model
    _check_count(len(updates), count)
    return [
        row.data_ptr()
        if _is_vector(row, num_params, device)
        else check_vector(f"updates[{s}]", row, num_params, device)
        for s, row in enumerate(updates)
    ]


def _bytes_reached(matrix: Tensor) -> int:
    """Return the size that the storage of a matrix [S, d] needs."""
    rows, columns = matrix.shape
    if rows == 0 or columns == 0:
        return 0
    return 4 * (int(matrix.storage_offset()) + (rows - 1) * matrix.stride(0) + columns)


def read_ids(clients: object, num_clients: int, *, distinct: bool = True) -> list[int]:
    """Return the argument ``clients`` as ints in [0, K), distinct ones unless told otherwise.

    Raises:
        TypeError, ValueError, IndexError: it is not that.
    """
    ids = read_integers("clients", clients, max(num_clients, _MOST_REPEATED))
    if ids and not 0 <= min(ids) <= max(ids) < num_clients:
        wrong = next(client for client in ids if not 0 <= client < num_clients)
        raise IndexError(f"clients: expected ids in [0, {num_clients}), got {wrong}")
    if distinct and len(set(ids)) != len(ids):
        twice = sorted(client for client, times in Counter(ids).items() if times > 1)
        raise ValueError(f"clients: expected distinct ids, got {twice} more than once")
    return ids


def read_integers(name: str, value: object, most: int) -> list[int]:
    """Return an argument, a tensor or array [S] of integers or a sequence of ints, as ints.

    Args:
        name: of the argument.
        value: its value.
        most: numbers that it has at most. The view of one number, or a range, may have any number
            of them without memory.

    Raises:
        TypeError, ValueError: it is not that; the message begins with ``name``.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            raise TypeError(f"{name}: expected integers, got an array of {value.dtype}")
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected integers, got a masked array; call compressed()")
        if value.ndim != 1:
            raise ValueError(f"{name}: expected shape [S], got {list(value.shape)}")
        _check_most(name, len(value), most)
        found: list[int] = value.tolist()
        return found
    if isinstance(value, Tensor):
        if value.dtype not in _INTEGERS:
            raise TypeError(f"{name}: expected integers, got {value.dtype}")
        if value.is_nested:
            raise ValueError(f"{name}: expected a dense tensor, got a nested tensor")
        if value.ndim != 1:
            raise ValueError(f"{name}: expected shape [S], got {list(value.shape)}")
        _check_most(name, value.numel(), most)
        try:
            listed: list[int] = value.tolist()
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{name}: expected a dense tensor with data, got one on device {value.device} "
                f"of layout {value.layout}: {error}"
            ) from error
        return listed
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        _check_most(name, len(value), most)
        return [_read_integer(name, number) for number in value]
    raise TypeError(
        f"{name}: expected a tensor or array of integers or a sequence of ints, got "
        f"{type(value).__name__}"
    )


def _check_most(name: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{name}: expected at most {most} numbers, got {count}")


def _read_integer(name: str, value: object) -> int:
    if type(value) is int:  # the common case; isinstance of a protocol takes microseconds
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: expected ints, got {value!r} ({type(value).__name__})")
    try:
        return operator.index(value)
    except (TypeError, RuntimeError) as error:  # tensors that hold no integer
        raise TypeError(f"{name}: expected ints, got {type(value).__name__}: {error}") from error


def _warn_of_a_copy(params: Tensor) -> None:
    """Warn that the tensors from which ``params`` were computed will not change with them."""
    warnings.warn(
        f"params: they were computed from other tensors ({type(params.grad_fn).__name__}), as by "
        "torch.nn.utils.parameters_to_vector, so the step changes a copy and not the model. Write "
        "it back with vector_to_parameters, and pass params.detach() to say that this is meant; or "
        "let the model share the vector's memory: fastagg.FlatLayout.from_module(model).bind",
        stacklevel=5,
    )


def _check_overlap(params: Tensor, starts: Sequence[int]) -> None:
    own, length = params.data_ptr(), params.numel() * params.element_size()
    if not starts or own + length <= min(starts) or max(starts) + length <= own:
        return
    for s, start in enumerate(starts):
        if abs(start - own) < length:
            raise ValueError(
                f"params: must not share memory with updates, but does with row {s}; "
                "pass a separate tensor"
            )
