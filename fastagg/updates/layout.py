# SPDX-License-Identifier: Apache-2.0
"""Named tensors <-> one flat vector: what a model looks like to the server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Slot:
    """Where one tensor lives in the flat vector."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class FlatLayout:
    """The order in which a model's tensors make up one flat float32 vector [d].

    Floating-point tensors of the state dict (parameters and persistent buffers such as running
    means) follow each other in its order, without gaps. Integer and bool tensors (BatchNorm's
    ``num_batches_tracked``) cannot be averaged and are never put into the vector: with
    ``integers="error"`` a layout refuses them, with ``"exclude"`` it leaves them out and lists
    them in ``excluded``. Tied tensors (one tensor under several names) take one place.

    Make one with :meth:`from_module` or :meth:`from_state_dict`.

    Attributes:
        num_params: d.
        names: of the tensors in the vector, in order; of tied ones the first name.
        slots: their places.
        tied: the other names of tied tensors -> the first name.
        excluded: names of the integer and bool tensors left out.
    """

    def __init__(
        self, slots: Sequence[Slot], tied: Mapping[str, str], excluded: Sequence[str]
    ) -> None:
        self.slots = tuple(slots)
        self.names = tuple(slot.name for slot in slots)
        self.num_params = slots[-1].stop if slots else 0
        self.tied = dict(tied)
        self.excluded = tuple(excluded)

    @classmethod
    def from_module(
        cls, module: nn.Module, *, integers: str = "error", convert: bool = False
    ) -> FlatLayout:
        """The layout of a module's state dict; arguments as in :meth:`from_state_dict`."""
        return cls.from_state_dict(_state_of(module), integers=integers, convert=convert)

    @classmethod
    def from_state_dict(
        cls, state: State, *, integers: str = "error", convert: bool = False
    ) -> FlatLayout:
        """The layout of a state dict.

        Args:
            state: names -> tensors; read, not kept.
            integers: "error" or "exclude", see the class.
            convert: accept floating-point tensors of other dtypes than float32. The vector
                is float32: bfloat16 and float16 fit exactly, float64 is rounded.

        Raises:
            ValueError: there is nothing to put into a vector, there are integer tensors and
                they are not excluded, or tensors share memory without being the same.
            TypeError: a tensor is complex, or not float32 while ``convert`` is off.
        """
        if integers not in ("error", "exclude"):
            raise ValueError(f'integers: expected "error" or "exclude", got {integers!r}')
        slots: list[Slot] = []
        tied: dict[str, str] = {}
        excluded: list[str] = []
        first_names: dict[tuple[object, ...], str] = {}
        for name, tensor in state.items():
            _check_dense(name, tensor)
            if not tensor.is_floating_point():
                if tensor.is_complex():
                    raise TypeError(f"{name}: complex tensors are not supported")
                excluded.append(name)
                continue
            if tensor.dtype != torch.float32 and not convert:
                raise TypeError(
                    f"{name}: expected dtype torch.float32, got {tensor.dtype}; convert=True "
                    "accepts it (the flat vector is float32)"
                )
            first = first_names.setdefault(_identity(tensor), name)
            if first != name:
                tied[name] = first
                continue
            start = slots[-1].stop if slots else 0
            slots.append(Slot(name, tensor.shape, tensor.dtype, start))
        if excluded and integers == "error":
            raise ValueError(
                f'integer tensors {excluded} cannot be averaged; integers="exclude" leaves '
                "them out of the vector"
            )
        if not slots:
            raise ValueError("the module or state dict has no floating-point tensor to flatten")
        _check_disjoint({slot.name: state[slot.name] for slot in slots})
        return cls(slots, tied, excluded)

    def flatten(self, source: nn.Module | State, out: Tensor | None = None) -> Tensor:
        """Copy all tensors into one vector.

        Args:
            source: a module or state dict with this layout's names and shapes.
            out: [d] float32, written to; may be a row of an :class:`UpdateBuffer`. None: new.

        Returns:
            [d] float32.

        Raises:
            TypeError, ValueError: names, shapes or dtypes do not fit. ``out`` is then as before.
        """
        state = self._matching_state(source)
        if out is None:
            out = torch.empty(self.num_params, device=state[self.names[0]].device)
        views = self.unflatten(out)
        with torch.no_grad():
            for name in self.names:
                views[name].copy_(state[name])
        return out

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector under the names and shapes of the tensors; nothing is copied.

        Args:
            vector: [d] float32, contiguous.

        Returns:
            name -> view, float32; tied names get the same view. Excluded tensors are absent.
        """
        self._check_vector(vector)
        views = {s.name: vector[s.start : s.stop].view(s.shape) for s in self.slots}
        return views | {name: views[first] for name, first in self.tied.items()}

    def state_dict(self, vector: Tensor, excluded: State | None = None) -> dict[str, Tensor]:
        """A state dict with the values of a vector, in the dtypes that the layout was made of.

        Args:
            vector: [d] float32, contiguous.
            excluded: where to take the excluded tensors from; required if there are any.

        Returns:
            Names -> tensors, fit for ``load_state_dict``: views of ``vector`` where the dtype
            is float32, converted copies elsewhere.

        Raises:
            ValueError: excluded tensors are missing.
        """
        given = excluded or {}
        missing = [name for name in self.excluded if name not in given]
        if missing:
            raise ValueError(f"excluded: expected the tensors {missing} that the vector lacks")
        views = self.unflatten(vector)
        state = {slot.name: views[slot.name].to(slot.dtype) for slot in self.slots}
        state |= {name: state[first] for name, first in self.tied.items()}
        return state | {name: given[name] for name in self.excluded}

    def bind(self, module: nn.Module, vector: Tensor) -> None:
        """Make a module's parameters and float buffers views of ``vector``, whose values win.

        From then on the module lives in ``vector``: an in-place optimiser step changes it, and
        writing to it changes the module. The Parameter objects stay the same, so an optimiser
        made before remains valid. Excluded tensors stay where they are.

        Args:
            module: a module of this layout, all float32.
            vector: [d] float32, contiguous, on the module's device; for instance a row of an
                :class:`UpdateBuffer`.

        Raises:
            TypeError, ValueError: module or vector do not fit. The module is then as before.
        """
        state = self._matching_state(module)
        for slot in self.slots:
            if slot.dtype != torch.float32:
                raise TypeError(
                    f"{slot.name}: only float32 tensors can be views of the vector, this one "
                    f"is {slot.dtype}; convert the module with module.float() first"
                )
            if state[slot.name].device != vector.device:
                raise ValueError(
                    f"vector: expected device {state[slot.name].device}, got {vector.device}"
                )
        for name, view in self.unflatten(vector.detach()).items():
            state[name].data = view

    def _matching_state(self, source: nn.Module | State) -> State:
        """The tensors of ``source`` after checking that they are those of this layout."""
        state = _state_of(source) if isinstance(source, nn.Module) else source
        expected = {*self.names, *self.tied, *self.excluded}
        if set(state) != expected:
            raise ValueError(
                f"names differ from the layout's: missing {sorted(expected - set(state))}, "
                f"unknown {sorted(set(state) - expected)}"
            )
        slots = {slot.name: slot for slot in self.slots}
        for name in (*self.names, *self.tied):
            slot = slots[self.tied.get(name, name)]
            if state[name].shape != slot.shape:
                raise ValueError(
                    f"{name}: expected shape {list(slot.shape)}, got {list(state[name].shape)}"
                )
            if state[name].dtype != slot.dtype:
                raise TypeError(f"{name}: expected dtype {slot.dtype}, got {state[name].dtype}")
        return state

    def _check_vector(self, vector: Tensor) -> None:
        if vector.dtype != torch.float32:
            raise TypeError(f"vector: expected dtype torch.float32, got {vector.dtype}")
        if vector.shape != (self.num_params,):
            raise ValueError(
                f"vector: expected shape [{self.num_params}], got {list(vector.shape)}"
            )
        if not vector.is_contiguous():
            raise ValueError(f"vector: expected a contiguous tensor, got strides {vector.stride()}")

    def __repr__(self) -> str:
        return f"FlatLayout(num_params={self.num_params}, tensors={len(self.slots)})"


def _state_of(module: nn.Module) -> State:
    """A module's parameters and persistent buffers, the tensors themselves."""
    return module.state_dict(keep_vars=True)


def _check_dense(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name}: is not initialised yet; run the module once first")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory seen the same way."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _check_disjoint(state: State) -> None:
    """Refuse tensors that share memory in part: they could not be written independently."""
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
                f"{name} and {other} share part of their memory; only tensors that are the same "
                "as a whole can be tied"
            )
