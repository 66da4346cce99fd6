# SPDX-License-Identifier: Apache-2.0
"""The state of a rule: copies of it, checkpoints, and what a rule declares of it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastagg import checkpoint
from fastagg.calls import CallLock
from fastagg.checkpoint import invariants
from fastagg.clipping import Clipping, check_clipping
from fastagg.memory.rows import RowMemory, sink_of
from fastagg.modes import plain_modes, writable
from fastagg.norm_bound import RecentNorms, check_norms
from fastagg.options import option_names, to_saved
from fastagg.server_optimizer import Moments, check_moments
from fastagg.signals import SignalsDeferred
from fastagg.updates.cohort import check_vector

State = Mapping[str, Tensor | RowMemory]
"""The state of a rule: tensors and row memories by name, not copied."""


class SavedState:
    """The part of :class:`fastagg.Aggregator` for its state, in memory and in files."""

    name: ClassVar[str]
    num_params: int
    device: torch.device
    column_state: ClassVar[frozenset[str]]
    not_saved: ClassVar[frozenset[str]] = frozenset({"memory_folder"})
    """Names of constructor arguments that :meth:`options` leaves out."""
    state_options: ClassVar[frozenset[str]] = frozenset()
    """Options that give the state its meaning: :func:`fastagg.load` does not change them."""
    _lock: CallLock
    _norms: RecentNorms | None
    _clipping: Clipping | None
    _moments: Moments | None

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments: ``make(name, **options)`` makes an equal aggregator.

        Names are those of the constructor's signature, less ``not_saved``. A rule keeps each
        argument as an attribute of the same name. Values are tensors or JSON values.

        Raises:
            ValueError: an option cannot be saved (a custom threshold function).
        """
        names = [name for name in option_names(type(self)) if name not in self.not_saved]
        return {name: to_saved(name, getattr(self, name)) for name in names}

    @property
    def memory_bytes(self) -> int:
        """Size of the state in bytes."""
        return sum(value.nbytes for value in self._whole_state().values())

    def live_state(self) -> dict[str, Tensor | RowMemory]:
        """Return the state that a checkpoint holds, not copied."""
        return dict(self._whole_state())

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state; later steps do not change it."""
        with self.held("state_dict"), plain_modes():
            return {name: value.clone() for name, value in self._whole_state().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of ``state``, the ``state_dict`` of an equal aggregator.

        Memory rows are copied into newly allocated rows, and then exchanged.

        Raises:
            TypeError, ValueError: a name, shape or dtype is wrong, a value is not finite, or no
                steps lead to this state. The message names the tensor.
            MemoryError, OSError: there is no room for the copy.

        After an exception the state has not changed.
        """
        with self._alone("load_state_dict"), plain_modes():
            self._load_state_dict(state)

    def _load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own, given = self._whole_state(), dict(state)
        invariants.check_names(own, given)
        for name, value in own.items():
            given[name] = invariants.check_form(name, given[name], value)
        for name in own:
            invariants.check_finite(name, given[name])
        self._check_state(given)
        undo: list[Callable[[], object]] = []
        with SignalsDeferred():
            try:
                for name, value in own.items():
                    if isinstance(value, RowMemory):
                        undo.append(value.replace(given[name]))
                    else:
                        undo.append(partial(value.copy_, value.clone()))
                        value.copy_(given[name])
                self._derive()
            except BaseException:
                for back in reversed(undo):
                    back()
                raise

    def _derive(self) -> None:
        """Recompute what is derived from the state, after the state was replaced."""
        if self._moments is not None:
            self._moments.state_loaded()
        self._state_loaded()

    @torch.no_grad()
    def load_saved(self, saved: checkpoint.Saved, params: Tensor | None = None) -> None:
        """Read the state of a new aggregator from an open checkpoint; see :func:`fastagg.load`.

        Memory rows are read where they are kept, without a copy. If this raises, the aggregator
        must not be used, but ``params`` have not changed.

        Raises:
            TypeError, ValueError: ``params`` or something in the file is not as expected.
        """
        with self._alone("load_saved"), plain_modes():
            self._load_saved(saved, params)

    def _load_saved(self, saved: checkpoint.Saved, params: Tensor | None) -> None:
        own = self._whole_state()
        invariants.check_names(own, saved.entries)
        for name, value in own.items():
            entry = saved.entries[name]
            if saved.dtype(name) != value.dtype or entry.shape != tuple(value.shape):
                raise ValueError(
                    f"state[{name!r}]: expected {value.dtype} {list(value.shape)}, got "
                    f"{saved.dtype(name)} {list(entry.shape)}"
                )
        vector = None
        if params is not None:
            saved.check_params(self.num_params)
            vector = torch.empty(self.num_params, device="cpu", dtype=torch.float32)
        sinks = {name: sink_of(value) for name, value in own.items()}
        saved.read(sinks, None if vector is None else [vector])
        for name, value in own.items():
            invariants.check_finite(name, value)
        self._check_state(own)
        self._derive()
        if vector is not None and params is not None:
            if not bool(torch.isfinite(vector).all()):
                raise ValueError("params: expected finite values, got NaN or Inf")
            writable(params).copy_(vector)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        params: Tensor | None = None,
        key: bytes | None = None,
        keep: int = 1,
    ) -> None:
        """Write options and state to one file, and replace an existing file atomically.

        The file holds a digest of all its bytes, which :func:`fastagg.load` verifies. Only the
        owner may read it. A symbolic link is followed.

        Args:
            path: the file; its folder must exist.
            params: [d] float32, finite, the parameters of the model: they are written to the same
                file, so that model and rule are always of the same round. None: they are not.
            key: secret of at least 16 bytes. With it the digest is an HMAC-SHA256, which only
                holders of the key can compute; give the same key to :func:`fastagg.load`. None: the
                digest is a SHA-256, which shows damage but not a forgery.
            keep: number of files to keep, >= 1: ``path``, and the files that it replaced in
                ``path.1``, ``path.2``, ..., the newest first.

        Raises:
            TypeError, ValueError: an argument is not as described, or an option cannot be saved (a
                custom threshold function).
            OSError: the file cannot be written, for example because its folder is missing. An
                existing file is then intact.
        """
        with self.held("save"), plain_modes():
            if params is not None:
                check_vector("params", params, self.num_params, self.device)
                self._params_peak(params)
            checkpoint.write(
                path,
                self.name,
                self.options(),
                self._whole_state(),
                params=params,
                key=key,
                keep=keep,
            )

    def _check_state(self, state: State) -> None:
        """Check the values of a state before the rule takes it (:mod:`..checkpoint.invariants`).

        Names, shapes and dtypes are right, and all numbers are finite. A rule declares here what
        else holds after any sequence of steps: ranges, symmetry, relations between tensors. No
        state that passes may let a step fail half way or make parameters infinite.

        Args:
            state: the new state; a row memory is a tensor [K, d] or a memory without references.

        Raises:
            ValueError: no steps lead to this state.
        """
        if "rounds" in state:
            rounds = state["rounds"]
            assert isinstance(rounds, Tensor)
            invariants.check_rounds("rounds", rounds)
        if self._norms is not None:
            check_norms(state)
        check_clipping(state)
        if self._moments is not None:
            check_moments(state)

    def _state_loaded(self) -> None:
        """Recompute attributes that are derived from the state, after the state was replaced.

        If it raises, no attribute has changed.
        """

    @abstractmethod
    def _state(self) -> State:
        """Return the state of the rule that a checkpoint must hold, not copied."""

    def _whole_state(self) -> State:
        """Return all state that a checkpoint must hold, not copied."""
        state = self._state()
        if self._norms is not None:
            state = {**state, **self._norms.state()}
        if self._clipping is not None:
            state = {**state, **self._clipping.state()}
        return state if self._moments is None else {**state, **self._moments.state()}

    @property
    def whole_column_state(self) -> frozenset[str]:
        """Names of all state whose last dimension is d: of the rule and of the optimizer."""
        return self.column_state | Moments.column_state

    def held(self, call: str) -> AbstractContextManager[object]:
        """Return the lock of a call with this name; within it, calls of other threads wait.

        Raises:
            RuntimeError: the process was forked, or shares a file of memory rows, which may change
                at any time, with the one that it was forked from.
        """
        lock = self._lock.checked(call)
        if CallLock.forked:
            for value in self._whole_state().values():
                if isinstance(value, RowMemory):
                    value.check_process(call)
        return lock

    @abstractmethod
    def _alone(self, call: str) -> AbstractContextManager[object]:
        """Enter a call that changes state; no other call may be in progress."""

    @abstractmethod
    def _params_peak(self, params: Tensor) -> float:
        """Return the largest magnitude of ``params``; raise ValueError if it is not finite."""
