# SPDX-License-Identifier: Apache-2.0
"""Conversion between models on the wire, named arrays in .npy format, and flat vectors [d].

A client's arrays are not copied: one pass over the received bytes subtracts the global model and
writes the client's row. Nothing is unpickled, and shapes and dtypes in a header are used only after
they were found equal to those that the server expects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastagg.integrations._npy import NpyHeader, npy_header, read_header, view
from fastagg.options import LARGEST_ROW
from fastagg.tensor_file import fits
from fastagg.updates.roles import ROLES, Roles, assign_roles, is_variance, read_roles

Arrays = Mapping[str, bytes]
"""Names -> the bytes of a .npy file."""

Values = np.ndarray[Any, Any] | Tensor
"""An array of an answer; a contiguous tensor on the CPU if it has bfloat16, which NumPy lacks."""

Received = Mapping[str, bytes | Values]
"""An answer: names -> the bytes of a .npy file, or an array in the memory of this process."""

_FLOATS = ("float16", "float32", "float64")  # the narrowest first
_HOLD_BFLOAT16 = ("float32", "float64")  # floats that represent each bfloat16 exactly


class WireError(ValueError):
    """Arrays do not match the server's model. The message names the array and what was expected."""


@dataclass(frozen=True)
class WireSlot:
    """One array of a model.

    Attributes:
        name: name of the array on the wire.
        shape: shape of the array.
        dtype: NumPy's name of its dtype, in native byte order.
        role: what the server does with it, see :mod:`fastagg.updates.roles`.
        start: first column of the array in the flat vector of its role, "rule" or "mean"; None for
            other roles.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    start: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class WireLayout:
    """The arrays of a model, their roles, and their places in two flat float32 vectors.

    Arrays with the role "rule" are placed one after another in the vector [d], those with the role
    "mean" in the vector of statistics [m], both in the order of the model. The server computes in
    float32: float16 is represented exactly, float64 is rounded.

    Answers of clients may have narrower floats than the model, also bfloat16. They may lack arrays
    with the roles "server" and "local", which the server does not use. Those with the role "server"
    are checked if they come, "local" ones are not read.

    Attributes:
        slots: the arrays, in order.
        sent: the arrays that the server sends: all but "local" ones.
        num_params: d.
        num_statistics: m.
    """

    def __init__(self, slots: Sequence[WireSlot]) -> None:
        self.slots = tuple(slots)
        self.sent = tuple(slot for slot in slots if slot.role != "local")
        self._vectors = {
            role: tuple(slot for slot in slots if slot.role == role) for role in ("rule", "mean")
        }
        self.num_params, self.num_statistics = (
            sum(slot.size for slot in placed) for placed in self._vectors.values()
        )

    @classmethod
    def of(cls, arrays: Arrays, roles: Roles = "auto") -> WireLayout:
        """Make the layout of a model.

        Args:
            arrays: the model.
            roles: patterns of names and their roles, see :mod:`fastagg.updates.roles`.

        Raises:
            WireError: an array cannot be read or has an unsupported dtype, or the model has no
                array of floats for the rule.
            TypeError, ValueError: ``roles`` is not as described, or a pattern matches no array.
        """
        kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, data in arrays.items():
            header = _read_header(name, data)
            if not fits(list(header.shape)):
                raise WireError(
                    f"array {name!r}: expected at most 2^48 numbers, got {str(header.shape)[:200]}"
                )
            kind = _kind(header.dtype)
            if kind not in _FLOATS and header.dtype.kind not in "biu":
                raise WireError(f"array {name!r}: expected floats, integers or bools, got {kind}")
            kinds[name] = header.shape, kind
        is_float = {name: kind in _FLOATS for name, (_, kind) in kinds.items()}
        assigned = assign_roles(is_float, read_roles(roles))
        layout = cls(_placed([(name, *kinds[name], assigned[name]) for name in kinds]))
        if layout.num_params == 0:
            raise WireError(
                f"arrays: expected at least one array of {', '.join(_FLOATS)} with the role "
                f"'rule', got {assigned}"
            )
        return layout

    def flatten(self, arrays: Arrays) -> Tensor:
        """Convert a model to one vector, [d] float32; statistics are left out.

        Raises:
            WireError: the model does not have this layout, or holds NaN or Inf.
        """
        vector = torch.zeros(self.num_params, dtype=torch.float32, device="cpu")
        self.subtract(arrays, torch.zeros_like(vector), vector)
        if not bool(torch.isfinite(vector).all()):
            raise WireError("arrays: expected finite values, got NaN or Inf (as float32)")
        return vector

    def check(self, arrays: Received) -> None:
        """Check all of an answer but its values.

        Raises:
            WireError: names, shapes, dtypes or lengths differ from those of the layout.
        """
        self._check_names(arrays)
        for slot in self.sent:
            if slot.name in arrays:
                _values(slot, arrays[slot.name])

    def subtract(self, arrays: Received, params: Tensor | None, row: Tensor) -> None:
        """Compute ``row = arrays - params``, a client's update from its weights, in one pass.

        Args:
            arrays: a model of this layout, with any values; not changed.
            params: [d] float32, contiguous: the model that the client started from. None: the
                arrays are an update already, and are copied.
            row: [d] float32, contiguous; overwritten, in part also if a WireError is raised.

        Raises:
            WireError: names, shapes, dtypes or lengths differ from those of the layout.
        """
        self.subtract_values(self.values(arrays), params, row)

    def subtract_values(self, models: Sequence[Values], params: Tensor | None, row: Tensor) -> None:
        """Do what :meth:`subtract` does, for the result of :meth:`values`."""
        start = None if params is None else params.numpy()
        out = row.numpy()
        for slot, values in zip(self._vectors["rule"], models, strict=True):
            assert slot.start is not None  # the slot is in a vector
            place = slice(slot.start, slot.start + slot.size)
            if isinstance(values, Tensor):
                if params is None:
                    row[place] = values.view(-1)
                else:
                    torch.sub(values.view(-1), params[place], out=row[place])
                continue
            target = out[place].reshape(slot.shape)
            with np.errstate(all="ignore"):  # the rule handles NaN and Inf
                if start is None:
                    np.copyto(target, values, casting="same_kind")
                else:
                    before = start[place].reshape(slot.shape)
                    np.subtract(values, before, out=target, casting="same_kind")

    def values(self, arrays: Received) -> list[Values]:
        """Check a model, and return views of its arrays with the role "rule", in order.

        Raises:
            WireError: names, shapes, dtypes or lengths differ from those of the layout.
        """
        self._check_names(arrays)
        found = {}
        for slot in self.sent:
            if slot.role != "mean" and slot.name in arrays:
                found[slot.name] = _values(slot, arrays[slot.name])
        return [found[slot.name] for slot in self._vectors["rule"]]

    def split(self, row: Tensor) -> list[Tensor]:
        """Return views of a vector [d]: the arrays with the role "rule", in order, flat."""
        return list(row.split([slot.size for slot in self._vectors["rule"]]))

    def copy_statistics(self, arrays: Received, row: Tensor) -> None:
        """Copy a model's statistics, the arrays with the role "mean", to a vector.

        Args:
            arrays: a model with the names of this layout; not changed.
            row: [m] float32, contiguous; overwritten, in part also if a WireError is raised.

        Raises:
            WireError: shapes, dtypes or lengths differ from those of the layout, or there are NaN,
                Inf, numbers near the end of float32, or negative variances.
        """
        out = row.numpy()
        for slot in self._vectors["mean"]:
            values = _values(slot, arrays[slot.name])
            if isinstance(values, Tensor):
                values = values.float().numpy()
            assert slot.start is not None  # the slot is in a vector
            place = out[slot.start : slot.start + slot.size].reshape(slot.shape)
            with np.errstate(all="ignore"):  # what overflows is refused below
                np.copyto(place, values, casting="same_kind")
            # One comparison for NaN, Inf and numbers whose mean could overflow.
            if not (np.abs(place) <= LARGEST_ROW).all():
                raise WireError(
                    f"array {slot.name!r}: expected finite statistics of at most "
                    f"{LARGEST_ROW:.0e}, got {np.abs(place).max():.6g}"
                )
            if is_variance(slot.name) and (place < 0.0).any():
                raise WireError(
                    f"array {slot.name!r}: expected variances >= 0, got {place.min():.6g}"
                )

    def variances(self, statistics: Tensor) -> dict[str, Tensor]:
        """Return views of the parts of statistics [m] that must not be negative, by name."""
        return {
            slot.name: statistics[slot.start : slot.start + slot.size]
            for slot in self._vectors["mean"]
            if slot.start is not None and is_variance(slot.name) and slot.size
        }

    def carried(self, arrays: Arrays) -> dict[str, bytes]:
        """Return the arrays with the role "server" that ``arrays`` has, unchanged."""
        names = [slot.name for slot in self.slots if slot.role == "server"]
        return {name: arrays[name] for name in names if name in arrays}

    def unflatten(self, params: Tensor, statistics: Tensor, carried: Arrays) -> dict[str, bytes]:
        """Convert vectors to a model to send, with the dtypes and shapes of this layout.

        Args:
            params: [d] float32, contiguous, finite.
            statistics: [m] float32, contiguous, finite.
            carried: the arrays with the role "server", from :meth:`carried`.

        Raises:
            WireError: a value is too large for float16.
        """
        vectors = {"rule": params.numpy(), "mean": statistics.numpy()}
        arrays = {}
        for slot in self.sent:
            if slot.start is None:
                arrays[slot.name] = carried[slot.name]
                continue
            values = _converted(slot, vectors[slot.role])
            arrays[slot.name] = npy_header(slot.dtype, slot.shape) + values.tobytes()
        return arrays

    @property
    def is_narrow(self) -> bool:
        """Whether parameters may be too large for their arrays, see :meth:`check_range`."""
        return any(slot.dtype == "float16" for slot in self._vectors["rule"])

    def check_range(self, params: Tensor, base: Tensor | None = None) -> None:
        """Check that parameters can be sent with the dtypes of this layout.

        Args:
            params: [d] float32, contiguous, finite.
            base: [d] float32, contiguous, like ``params`` those of a model that can be sent: the
                difference from it is checked, too. None: it is not sent.

        Raises:
            WireError: a value is too large for float16.
        """
        after, before = params.numpy(), None if base is None else base.numpy()
        for slot in self._vectors["rule"]:
            if slot.dtype != "float16":
                continue
            values = _converted(slot, after)
            if before is not None:
                with np.errstate(over="ignore"):
                    _check_finite(slot, values - _converted(slot, before))

    def to_json(self) -> list[list[Any]]:
        """Return the layout as values that JSON represents, for :meth:`from_json`."""
        return [[slot.name, list(slot.shape), slot.dtype, slot.role] for slot in self.slots]

    @classmethod
    def from_json(cls, listed: object) -> WireLayout:
        """Make the layout that :meth:`to_json` returned.

        A layout without roles, of an older version, has all floats for the rule.

        Raises:
            WireError: ``listed`` is not from :meth:`to_json`.
        """
        if not isinstance(listed, list) or not all(map(_is_slot, listed)):
            raise WireError("layout: expected a list of names, shapes, dtypes and roles")
        if len({slot[0] for slot in listed}) != len(listed):
            raise WireError("layout: expected distinct names")
        arrays = []
        for name, shape, dtype, *role in listed:
            before = "rule" if dtype in _FLOATS else "server"
            arrays.append((name, tuple(shape), dtype, role[0] if role else before))
        return cls(_placed(arrays))

    def check_roles(self, roles: Roles) -> None:
        """Check that the arrays have the roles that they would have with the option ``roles``.

        Raises:
            TypeError, ValueError: ``roles`` is not as described, a pattern matches no array, or the
                roles differ.
        """
        is_float = {slot.name: slot.dtype in _FLOATS for slot in self.slots}
        wanted = assign_roles(is_float, read_roles(roles))
        differing = [slot for slot in self.slots if slot.role != wanted[slot.name]]
        if differing:
            listed = [f"{s.name!r} was {s.role!r}, is {wanted[s.name]!r}" for s in differing[:5]]
            raise ValueError(
                f"roles: expected those of the run before, but {'; '.join(listed)}"
                f"{' ...' if len(differing) > 5 else ''}; to go on as before, pass roles with "
                "patterns that give the former roles first"
            )

    def _check_names(self, arrays: Received) -> None:
        """Check that the arrays are of the layout, and none is missing that the server uses."""
        known = {slot.name for slot in self.slots}
        needed = {slot.name for placed in self._vectors.values() for slot in placed}
        missing, unknown = sorted(needed - set(arrays)), sorted(set(arrays) - known)
        if missing or unknown:
            raise WireError(
                f"arrays: expected the {len(known)} arrays of the model, got {len(arrays)}: "
                f"missing {missing[:5]}, unknown {unknown[:5]}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WireLayout) and self.slots == other.slots

    def __hash__(self) -> int:
        return hash(self.slots)

    def __repr__(self) -> str:
        return f"WireLayout(num_params={self.num_params}, arrays={len(self.slots)})"


def _is_slot(value: object) -> bool:
    """Return whether a value from JSON is a name, a shape, a dtype and perhaps a role."""
    if not isinstance(value, list) or len(value) not in (3, 4):
        return False
    name, shape, dtype, *role = value
    return (
        isinstance(name, str)
        and fits(shape)
        and isinstance(dtype, str)
        and all(one in (ROLES if dtype in _FLOATS else ("server", "local")) for one in role)
    )


def _placed(arrays: Sequence[tuple[str, tuple[int, ...], str, str]]) -> list[WireSlot]:
    """Return arrays (name, shape, dtype, role) with their places in the vectors."""
    ends = {"rule": 0, "mean": 0}
    slots = []
    for name, shape, dtype, role in arrays:
        slots.append(WireSlot(name, shape, dtype, role, ends.get(role)))
        if role in ends:
            ends[role] += slots[-1].size
    return slots


def _converted(slot: WireSlot, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values of an array, flat, with its dtype, from the float32 vector of its role.

    Raises:
        WireError: a value is too large for float16.
    """
    assert slot.start is not None  # the slot is in a vector
    part = vector[slot.start : slot.start + slot.size]
    with np.errstate(over="ignore"):
        values = part.astype(slot.dtype, copy=False)
    _check_finite(slot, values)
    return values


def _check_finite(slot: WireSlot, values: np.ndarray[Any, Any]) -> None:
    if slot.dtype == "float16" and not np.isfinite(values).all():
        raise WireError(
            f"array {slot.name!r}: expected values in the range of float16, got larger ones; use "
            "a float32 model"
        )


def _read_header(name: str, data: object) -> NpyHeader:
    try:
        return read_header(data)
    except ValueError as error:
        raise WireError(f"array {name!r}: {error}") from error


@functools.lru_cache(maxsize=64)  # NumPy makes the name anew each time
def _kind(dtype: np.dtype[Any]) -> str:
    """Return NumPy's name of a dtype in native byte order."""
    return str(dtype.newbyteorder("=").name)


def _values(slot: WireSlot, data: object) -> Values:
    """Return the values of an array as a view of ``data``, checked to match the slot."""
    if isinstance(data, Tensor):
        _check_kind(slot, tuple(data.shape), str(data.dtype).removeprefix("torch."))
        return data
    if isinstance(data, np.ndarray):
        _check_kind(slot, data.shape, _kind(data.dtype))
        return data
    header = _read_header(slot.name, data)
    assert isinstance(data, bytes)  # _read_header checked it
    _check_kind(slot, header.shape, _kind(header.dtype))
    try:
        return view(data, header)
    except ValueError as error:
        raise WireError(f"array {slot.name!r}: {error}") from error


def _fits(kind: str, wanted: str) -> bool:
    """Return whether values of a dtype may come in the place of another: narrower floats may."""
    if kind == "bfloat16":
        return wanted in _HOLD_BFLOAT16
    if kind not in _FLOATS or wanted not in _FLOATS:
        return kind == wanted
    return _FLOATS.index(kind) <= _FLOATS.index(wanted)


def _check_kind(slot: WireSlot, shape: tuple[int, ...], kind: str) -> None:
    if shape != slot.shape:
        raise WireError(
            f"array {slot.name!r}: expected shape {list(slot.shape)}, got {list(shape)}"
        )
    if not _fits(kind, slot.dtype):
        raise WireError(f"array {slot.name!r}: expected dtype {slot.dtype}, got {kind}")
