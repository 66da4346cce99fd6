# SPDX-License-Identifier: Apache-2.0
"""Conversion between a model's named tensors and one flat vector [d]."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastagg.updates.roles import Roles, assign_roles, norm_statistics, read_roles

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the flat vector: elements [start, stop)."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class FlatLayout:
    """The order of a model's tensors in one flat float32 vector [d].

    The floating-point tensors of the state dict (parameters and persistent buffers such as running
    means) are placed in the order of the state dict, without gaps. Integer and bool tensors, such
    as BatchNorm's ``num_batches_tracked``, cannot be averaged and are never in the vector:
    ``integers="error"`` refuses a model that has them, ``"exclude"`` leaves them out and lists them
    in ``excluded``. Tied tensors (one tensor under several names) have one place.

    A rule with a memory must not aggregate running statistics as if they were weights: a running
    variance may become negative. ``roles="auto"`` takes them out of the vector and puts them into
    another one, [m], whose mean the server takes as it is::

        layout = FlatLayout.from_module(model, roles="auto")
        row = layout.flatten_statistics(model)  # [m], of one client
        model.load_state_dict(layout.unflatten_statistics(mean), strict=False)

    Make a layout with :meth:`from_module` or :meth:`from_state_dict`.

    Attributes:
        num_params: d.
        names: names of the tensors in the vector, in order; for tied tensors the first name.
        slots: places of these tensors, in the same order.
        tied: dict from each further name of a tied tensor to its first name.
        excluded: names of the tensors that are not in the vector.
        num_statistics: m.
        statistics: places in the vector [m] of the tensors with the role "mean", which are among
            the excluded ones; empty without ``roles``.
        roles: dict from all names to roles. It can be the option ``roles`` of a Flower strategy.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        tied: Mapping[str, str],
        excluded: Sequence[str],
        statistics: Sequence[Slot],
        roles: Mapping[str, str],
    ) -> None:
        self.slots = tuple(slots)
        self.names = tuple(slot.name for slot in slots)
        self.num_params = slots[-1].stop if slots else 0
        self.tied = dict(tied)
        self.excluded = tuple(excluded)
        self.statistics = tuple(statistics)
        self.num_statistics = statistics[-1].stop if statistics else 0
        self.roles = dict(roles)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        integers: str = "error",
        convert: bool = False,
        roles: Roles | None = None,
    ) -> FlatLayout:
        """Make the layout of a module's state dict; arguments as in :meth:`from_state_dict`.

        With ``roles``, all floating-point buffers of normalisation layers are statistics, whatever
        their names.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        found = norm_statistics(module)
        return cls._of(_state_of(module), integers, convert, roles, found)

    @classmethod
    def from_state_dict(
        cls,
        state: State,
        *,
        integers: str = "error",
        convert: bool = False,
        roles: Roles | None = None,
    ) -> FlatLayout:
        """Make the layout of a state dict.

        Args:
            state: dict from names to tensors. The layout keeps no reference to them.
            integers: "error" or "exclude", see the class. With ``roles`` they are left out.
            convert: accept floating-point tensors of other dtypes than float32. The vector
                is float32: bfloat16 and float16 are represented exactly, float64 is rounded.
            roles: an ordered mapping from patterns of names, as of :mod:`fnmatch`, to the roles
                "rule" (in the vector [d]), "mean" (in the vector [m]), "server" or "local" (in
                neither). The first match decides. Names without a match, and all names with "auto",
                are "server" if the tensor holds integers or bools, "mean" if they end in
                running_mean or running_var, and else "rule". None: all floating-point tensors are
                in the vector [d].

        Raises:
            ValueError: there is no floating-point tensor for the vector, there are integer tensors
                and ``integers`` is "error", two tensors share only a part of their memory, tied
                tensors have different roles, or a pattern matches no tensor.
            TypeError: a tensor is complex, or is not float32 and ``convert`` is off.
        """
        return cls._of(state, integers, convert, roles, ())

    @classmethod
    def _of(
        cls,
        state: State,
        integers: str,
        convert: bool,
        roles: Roles | None,
        known: Collection[str],
    ) -> FlatLayout:
        """Make a layout; ``known`` are names of running statistics."""
        if integers not in ("error", "exclude"):
            raise ValueError(f'integers: expected "error" or "exclude", got {integers!r}')
        _check_mapping("state", state, "a dict from names to tensors")
        for name, tensor in state.items():
            _check_dense(name, tensor)
            if tensor.is_complex():
                raise TypeError(f"{name}: complex tensors are not supported")
        is_float = {name: tensor.is_floating_point() for name, tensor in state.items()}
        if roles is None:
            assigned = {name: "rule" if floats else "server" for name, floats in is_float.items()}
        else:
            assigned = assign_roles(is_float, read_roles(roles), known)
        vectors: dict[str, list[Slot]] = {"rule": [], "mean": []}
        tied: dict[str, str] = {}
        excluded: list[str] = []
        first_names: dict[tuple[object, ...], str] = {}
        for name, tensor in state.items():
            role = assigned[name]
            first = first_names.setdefault(_identity(tensor), name)
            if assigned[first] != role:
                raise ValueError(
                    f"roles: {first} and {name} are one tensor, but have the roles "
                    f"{assigned[first]!r} and {role!r}"
                )
            if role != "rule":
                excluded.append(name)
            if role not in vectors:
                continue
            if tensor.dtype != torch.float32 and not convert:
                raise TypeError(
                    f"{name}: expected dtype torch.float32, got {tensor.dtype}; convert=True "
                    "converts it to float32"
                )
            if first != name and role == "rule":
                tied[name] = first
                continue
            slots = vectors[role]
            start = slots[-1].stop if slots else 0
            slots.append(Slot(name, tensor.shape, tensor.dtype, start))
        if excluded and integers == "error" and roles is None:
            raise ValueError(
                f"expected floating-point tensors, got the integer or bool tensors {excluded}, "
                'which cannot be averaged; integers="exclude" leaves them out of the vector'
            )
        slots, statistics = vectors["rule"], vectors["mean"]
        if not slots:
            raise ValueError("the module or state dict has no floating-point tensor to flatten")
        _check_disjoint({slot.name: state[slot.name] for slot in slots})
        return cls(slots, tied, excluded, statistics, assigned)

    def flatten(self, source: nn.Module | State, out: Tensor | None = None) -> Tensor:
        """Copy all tensors into one vector.

        Args:
            source: a module or state dict with this layout's names, shapes and dtypes.
            out: [d] float32, the vector to write to, such as a row of an :class:`UpdateBuffer`.
                None allocates a new one.

        Returns:
            [d] float32: ``out`` or the new vector.

        Raises:
            TypeError, ValueError: names, shapes or dtypes do not match the layout, or the names of
                a tied tensor have different values. ``out`` is unchanged.
        """
        state = self._matching_state(source)
        self._check_tied(state)
        out = self._vector(state, self.num_params) if out is None else out
        return _copy(state, self.unflatten(out), self.names, out)

    def flatten_statistics(self, source: nn.Module | State, out: Tensor | None = None) -> Tensor:
        """Copy the statistics, the tensors with the role "mean", into one vector.

        Args:
            source: as in :meth:`flatten`.
            out: [m] float32, the vector to write to. None allocates a new one.

        Returns:
            [m] float32: ``out`` or the new vector.

        Raises:
            TypeError, ValueError: names, shapes or dtypes do not match the layout. ``out`` is
                unchanged.
        """
        state = self._matching_state(source)
        out = self._vector(state, self.num_statistics) if out is None else out
        views = self.unflatten_statistics(out)
        return _copy(state, views, tuple(views), out)

    def unflatten_statistics(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector with the statistics' names and shapes; copies nothing.

        Args:
            vector: [m] float32, contiguous.

        Returns:
            Dict from names to float32 views, which ``load_state_dict`` takes with ``strict=False``.
        """
        _check_vector(vector, self.num_statistics)
        return {s.name: vector[s.start : s.stop].view(s.shape) for s in self.statistics}

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector with the tensors' names and shapes; copies nothing.

        Args:
            vector: [d] float32, contiguous.

        Returns:
            Dict from names to float32 views. Tied names share one view. Excluded tensors are
            missing.
        """
        _check_vector(vector, self.num_params)
        views = {s.name: vector[s.start : s.stop].view(s.shape) for s in self.slots}
        return views | {name: views[first] for name, first in self.tied.items()}

    def state_dict(self, vector: Tensor, excluded: State | None = None) -> dict[str, Tensor]:
        """Make a state dict from a vector, with the dtypes of the model the layout was made from.

        Args:
            vector: [d] float32, contiguous.
            excluded: a state dict that has the excluded tensors; required if there are any.

        Returns:
            Dict from names to tensors, as ``load_state_dict`` takes it. Tensors of dtype float32
            are views of ``vector``, others are converted copies.

        Raises:
            ValueError: an excluded tensor is missing.
        """
        given = excluded or {}
        missing = [name for name in self.excluded if name not in given]
        if missing:
            raise ValueError(
                f"excluded: expected the tensors {missing}, which are not in the vector; pass the "
                "module's state_dict()"
            )
        views = self.unflatten(vector)
        state = {slot.name: views[slot.name].to(slot.dtype) for slot in self.slots}
        state |= {name: state[first] for name, first in self.tied.items()}
        return state | {name: given[name] for name in self.excluded}

    def bind(self, module: nn.Module, vector: Tensor) -> None:
        """Make a module's tensors that are in the vector views of ``vector``.

        The module takes the values of ``vector``. From then on both share memory: an in-place
        optimizer step changes the vector, and writing to the vector changes the module. The
        Parameter objects stay the same, so existing optimizers remain valid. Excluded tensors are
        not touched.

        Args:
            module: a module with this layout, all of whose tensors in the vector are float32.
            vector: [d] float32, contiguous, on the module's device; for instance a row of an
                :class:`UpdateBuffer`.

        Raises:
            TypeError, ValueError: the module or the vector does not match the layout. The module is
                unchanged.
        """
        state = self._matching_state(module)
        for slot in self.slots:
            if slot.dtype != torch.float32:
                raise TypeError(
                    f"{slot.name}: only float32 tensors can be views of the vector, got "
                    f"{slot.dtype}; convert the module with module.float() first"
                )
            if state[slot.name].device != vector.device:
                raise ValueError(
                    f"vector: expected device {state[slot.name].device}, got {vector.device}"
                )
        for name, view in self.unflatten(vector.detach()).items():
            state[name].data = view

    def _check_tied(self, state: State) -> None:
        """Refuse names of one place in the vector whose tensors have different float32 values."""
        for name, first in self.tied.items():
            if not _same_values(state[first], state[name]):
                raise ValueError(
                    f"source: {first} and {name} are one tensor in the layout, but have different "
                    "values here; pass a model whose tensors are tied, or make the layout from one "
                    "whose tensors are not"
                )

    def _vector(self, state: State, size: int) -> Tensor:
        """Return a new vector on the device of a model."""
        return torch.empty(size, device=state[self.names[0]].device, dtype=torch.float32)

    def _matching_state(self, source: nn.Module | State) -> State:
        """Return the tensors of ``source``, checked to have this layout's names and shapes."""
        state = _state_of(source) if isinstance(source, nn.Module) else source
        _check_mapping("source", state, "a module or a dict from names to tensors")
        expected = {*self.names, *self.tied, *self.excluded}
        if set(state) != expected:
            raise ValueError(
                f"source: expected the tensor names of the layout, got other names: missing "
                f"{sorted(expected - set(state))}, unknown {sorted(set(state) - expected)}"
            )
        slots = {slot.name: slot for slot in (*self.slots, *self.statistics)}
        for name in (*slots, *self.tied):
            slot = slots[self.tied.get(name, name)]
            if not isinstance(state[name], Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(state[name]).__name__}")
            if state[name].shape != slot.shape:
                raise ValueError(
                    f"{name}: expected shape {list(slot.shape)}, got {list(state[name].shape)}"
                )
            if state[name].dtype != slot.dtype:
                raise TypeError(f"{name}: expected dtype {slot.dtype}, got {state[name].dtype}")
        return state

    def __repr__(self) -> str:
        return f"FlatLayout(num_params={self.num_params}, tensors={len(self.slots)})"


def _copy(state: State, views: State, names: Sequence[str], out: Tensor) -> Tensor:
    """Copy tensors into views of ``out``; return ``out``."""
    with torch.no_grad():
        for name in names:
            views[name].copy_(state[name])
    return out


def _check_vector(vector: Tensor, size: int) -> None:
    """Check that ``vector`` is float32, contiguous and has ``size`` elements."""
    if not isinstance(vector, Tensor):
        raise TypeError(f"vector: expected a torch.Tensor, got {type(vector).__name__}")
    if vector.dtype != torch.float32:
        raise TypeError(f"vector: expected dtype torch.float32, got {vector.dtype}")
    if vector.shape != (size,):
        raise ValueError(f"vector: expected shape [{size}], got {list(vector.shape)}")
    if not vector.is_contiguous():
        raise ValueError(f"vector: expected a contiguous tensor, got strides {vector.stride()}")


def _state_of(module: nn.Module) -> State:
    """Return a module's parameters and persistent buffers themselves, not detached copies."""
    return module.state_dict(keep_vars=True)


def _check_mapping(name: str, state: object, expected: str) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"{name}: expected {expected}, got {type(state).__name__}")


def _check_dense(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{name}: is not initialised, since its module is lazy; run the module once first"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same memory, dtype, shape and strides."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have the same values in float32, NaN included."""
    if _identity(one) == _identity(other):
        return True
    first, second = one.detach().float(), other.detach().to(one.device).float()
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def _check_disjoint(state: State) -> None:
    """Refuse tensors that overlap in part, because they cannot be written independently."""
    spans = []
    for name, tensor in state.items():
        if tensor.numel() == 0 or tensor.device.type == "meta":
            continue
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        spans.append((str(tensor.device), start, start + extent * tensor.element_size(), name))
    spans.sort()
    for (device, _, stop, name), (next_device, start, _, other) in itertools.pairwise(spans):
        if device == next_device and start < stop:
            raise ValueError(
                f"{name} and {other} share part of their memory; tied tensors must share all of it "
                "and have the same shape and strides"
            )
