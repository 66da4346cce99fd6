# SPDX-License-Identifier: Apache-2.0
"""Clients that come and go: ``grow`` and ``forget``, for every rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.memory.rows import RowMemory
from fastagg.modes import plain_modes
from fastagg.ops import bits
from fastagg.options import option_names, read_size
from fastagg.signals import SignalsDeferred
from fastagg.updates.buffer import Clients
from fastagg.updates.cohort import read_ids
from fastagg.updates.columns import Columns

if TYPE_CHECKING:
    from typing_extensions import Self

_KEPT = ("_lock", "committed", "last_report")
"""Attributes of an aggregator that it keeps when it grows."""


class ChangingClients:
    """The part of :class:`fastagg.Aggregator` for clients that come and go."""

    num_clients: int
    columns: Columns
    committed: int
    remembers_clients: bool = True
    """Whether the state has something of single clients."""
    name: ClassVar[str]
    not_saved: ClassVar[frozenset[str]]

    @torch.no_grad()
    def forget(self, clients: Clients) -> None:
        """Set what the rule remembers of ``clients``, ids as for :meth:`step`, to its first state.

        Use it when the id of a client that has left goes to another one. Nothing else changes, and
        nothing at all if the ids are wrong (TypeError, ValueError, IndexError).
        """
        with self._alone("forget"), plain_modes():
            ids = read_ids(clients, self.num_clients)
            if ids:
                with SignalsDeferred():
                    self._forget(ids)

    @torch.no_grad()
    def grow(self, num_clients: int, **options: Any) -> None:
        """Go on with more clients, with ids from the present K to ``num_clients`` - 1.

        Clients keep their ids and all that the rule remembers of them; of the new ones it remembers
        what it does of others at first. What depends on K, such as weights of 1/K, is that of the
        new K. Memory rows are not copied. Tensors that were taken from the rule before, such as
        ``total``, are no longer its own.

        Args:
            num_clients: the new K, at least the present one.
            **options: options of the rule with one value for each client (``client_weights``,
                ``local_work``), for all clients. They may be left out if all values are equal:
                those of the new clients are then equal, too.

        Raises:
            TypeError, ValueError: an argument is not as described.
            MemoryError, OSError: there is no room. After an exception nothing has changed.
        """
        with self._alone("grow"), plain_modes():
            if read_size("num_clients", num_clients) == self.num_clients and not options:
                return
            grown = self._grown(num_clients, options)
            with SignalsDeferred():
                self._become(grown)

    def _grown(self, num_clients: int, options: Mapping[str, Any]) -> Self:
        """Return a rule with more clients that shares memory rows with this one."""
        if num_clients < self.num_clients:
            raise ValueError(
                f"num_clients: expected at least {self.num_clients}, because clients keep their "
                f"ids, got {num_clients}"
            )
        own = self.live_state()
        given = {
            name: getattr(self, name)
            for name in option_names(type(self))
            if name != "num_clients" and name not in self.not_saved
        }
        folders = [row.store.folder for row in own.values() if isinstance(row, RowMemory)]
        if any(folders):
            given["memory_folder"] = folders[0]
        given |= self._of_more_clients(given, num_clients, options)
        given["num_clients"] = num_clients
        grown = type(self)(**given)
        self._check_growth(grown)
        grown.columns = self.columns
        take_state(grown, own, self.num_clients)
        grown._keep_others(self)
        return grown

    def _of_more_clients(
        self, present: Mapping[str, Any], num_clients: int, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options that have a value for each client, for ``num_clients`` clients."""
        each = {
            name: value
            for name, value in present.items()
            if isinstance(value, Tensor) and value.shape == (self.num_clients,)
        }
        unknown = sorted(set(given) - set(each))
        if unknown:
            raise TypeError(
                f"options: expected options with a value for each client, {sorted(each)}, got "
                f"{unknown}"
            )
        values = dict(given)
        for name in each.keys() - given.keys():
            first = float(each[name][0])
            if not bool((each[name] == first).all()):
                raise ValueError(
                    f"{name}: expected {num_clients} values for the clients, because those of the "
                    f"present {self.num_clients} differ, got none"
                )
            if name == "client_weights" and first == 1.0 / self.num_clients:
                first = 1.0 / num_clients  # the default
            values[name] = torch.full((num_clients,), first, dtype=torch.float64, device="cpu")
        return values

    def _become(self, grown: Self) -> None:
        """Take over everything of a rule from :meth:`_grown`. Cannot fail."""
        kept = {name: value for name, value in vars(self).items() if name in _KEPT}
        vars(self).update(vars(grown))
        vars(self).update(kept)

    def _become_again(self, before: Mapping[str, Any]) -> None:
        """Take :meth:`_become` back: ``before`` are the attributes of then. Cannot fail."""
        kept = {name: value for name, value in vars(self).items() if name in _KEPT}
        vars(self).clear()
        vars(self).update(before)
        vars(self).update(kept)

    @torch.no_grad()
    def _kept(self, clients: Sequence[int]) -> Callable[[], None] | None:
        """Return a function that takes a :meth:`forget` back, unless a step has followed.

        None: there is nothing to forget.
        """
        with self._alone("forget"), plain_modes():
            ids = read_ids(clients, self.num_clients)
            if not ids or not self.remembers_clients:
                return None
            with SignalsDeferred():
                state = self.live_state()
                saved = {name: self._saved(name, value, ids) for name, value in state.items()}

        def restore() -> None:
            with self._alone("forget"), plain_modes(), torch.no_grad():
                for name, value in self.live_state().items():
                    saved[name](value)
                self._derive()

        return restore

    def _saved(
        self, name: str, value: Tensor | RowMemory, ids: list[int]
    ) -> Callable[[Tensor | RowMemory], object]:
        """Copy what :meth:`_forget` may change in ``value``; return a function that sets it back.

        Of rows of clients, and of matrices of pairs of clients, that is what belongs to ``ids``.
        """
        if isinstance(value, RowMemory):
            rows = value.kept(ids)
            return lambda _: rows()
        vector = value.dim() == 1 and name in self.whole_column_state
        if value.dim() == 0 or len(value) != self.num_clients or vector:
            copy = value.clone()
            return lambda now: _tensor(now).copy_(copy)
        parts = [(0, ids)]
        if name == "candidates":
            parts.append((1, sorted({client // 8 for client in ids})))  # bits of bytes
        elif value.dim() == 2 and value.shape[1] == self.num_clients:
            parts.append((1, ids))
        places = [(dim, torch.tensor(of, device=value.device)) for dim, of in parts]
        copies = [(dim, at, value.index_select(dim, at)) for dim, at in places]

        def put_back(now: Tensor | RowMemory) -> None:
            for dim, at, part in copies:
                _tensor(now).index_copy_(dim, at, part)

        return put_back

    @property
    def tells_clients_apart(self) -> bool:
        """Whether results depend on which client sent a row, by memory or by client weights."""
        weights = getattr(self, "client_weights", None)
        alike = weights is None or bool((weights == weights[0]).all())
        return self.remembers_clients or not alike

    # --- what a rule may override -------------------------------------------------------------

    def _forget(self, ids: list[int]) -> None:
        """Do what :meth:`forget` says, for S >= 1 ids. Allocates before it writes."""
        if self.remembers_clients:
            raise NotImplementedError(f"{self.name} cannot forget clients")

    def _widened(self, state: dict[str, Tensor | RowMemory]) -> dict[str, Tensor | RowMemory]:
        """Recompute what depends on the number of clients; see :func:`widened_state`."""
        return state

    def _keep_others(self, before: Self) -> None:
        """Take from ``before``, the rule with fewer clients, what is neither option nor state.

        It may share tensors with ``before``, but must not change it: it is used again if there is
        no step (:func:`newcomers`).
        """

    def _check_growth(self, grown: Self) -> None:
        """Raise ValueError if the state cannot be that of ``grown``, a rule with more clients."""

    # --- what Aggregator has ------------------------------------------------------------------

    @abstractmethod
    def _alone(self, call: str) -> AbstractContextManager[object]: ...

    @property
    @abstractmethod
    def whole_column_state(self) -> frozenset[str]: ...

    @abstractmethod
    def live_state(self) -> dict[str, Tensor | RowMemory]: ...

    @abstractmethod
    def _derive(self) -> None: ...


@contextmanager
def newcomers(
    rule: ChangingClients, num_clients: int, forgotten: Sequence[int] = ()
) -> Iterator[None]:
    """Grow and forget for a block with a step; if no step takes effect in it, take both back.

    Args:
        rule: no other thread may use it meanwhile.
        num_clients: as for :meth:`ChangingClients.grow`.
        forgotten: as for :meth:`ChangingClients.forget`.

    Raises:
        TypeError, ValueError, MemoryError, OSError: as for these. Nothing has changed.
    """
    before, committed = dict(vars(rule)), rule.committed
    restore = None
    try:
        rule.grow(num_clients)
        restore = rule._kept(forgotten)
        rule.forget(forgotten)
        yield
    finally:
        if rule.committed == committed:
            with SignalsDeferred():
                if restore is not None:
                    restore()
                if rule.num_clients != before["num_clients"]:
                    rule._become_again(before)


def take_state(
    grown: ChangingClients, before: Mapping[str, Tensor | RowMemory], num_clients: int
) -> None:
    """Give a new rule the state of one with fewer clients; see :func:`widened_state`.

    Args:
        grown: the rule. It shares the memory rows of ``before``, so only one of the two may be
            used afterwards.
        before: the ``live_state`` of the other rule; its values do not change.
        num_clients: the number of its clients.
    """
    own = grown.live_state()
    invariants.check_names(own, before)
    state: dict[str, Tensor | RowMemory] = {}
    for name, value in own.items():
        old = before[name]
        if isinstance(value, RowMemory) and isinstance(old, RowMemory):
            value.share(old)
            state[name] = value
        elif isinstance(value, Tensor) and isinstance(old, Tensor):
            state[name] = _widen(name, old, value, grown.num_clients, num_clients)
    for name, value in grown._widened(state).items():
        target = own[name]
        if isinstance(value, Tensor) and isinstance(target, Tensor):
            target.copy_(value)
    grown._derive()


def widened_state(
    aggregator: ChangingClients, state: Mapping[str, Tensor], num_clients: int
) -> dict[str, Tensor]:
    """Return the state of a rule with fewer clients as a state of ``aggregator``.

    Clients keep their ids. What is remembered of the others is as it is at first.

    Args:
        aggregator: a new aggregator with K clients.
        state: the ``state_dict`` of an aggregator with the same options but fewer clients.
        num_clients: their number, less than K.

    Returns:
        A state for ``aggregator.load_state_dict``, which checks it.

    Raises:
        ValueError: a tensor is missing, or has more elements than here.
    """
    own = aggregator.live_state()
    invariants.check_names(own, state)
    wide: dict[str, Tensor | RowMemory] = {
        name: _widen(name, state[name], value, aggregator.num_clients, num_clients)
        for name, value in own.items()
    }
    return {k: v for k, v in aggregator._widened(wide).items() if isinstance(v, Tensor)}


def _tensor(value: Tensor | RowMemory) -> Tensor:
    assert isinstance(value, Tensor)  # as it was when it was saved
    return value


def _widen(
    name: str, before: Tensor, first: Tensor | RowMemory, num_clients: int, fewer: int
) -> Tensor:
    """Return ``first`` with ``before`` in its first rows and columns, in a new tensor.

    Args:
        name: of the tensor in the state.
        before: of a state with ``fewer`` clients.
        first: of a first state with ``num_clients``.
        num_clients, fewer: numbers of clients.
    """
    packed = name == "candidates" and before.dim() == 2
    if packed:
        before, first = bits.unpack(before, fewer), bits.unpack(_tensor(first), num_clients)
    fits = before.dim() == len(first.shape) and all(
        n <= m for n, m in zip(before.shape, first.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"state[{name!r}]: expected at most shape {list(first.shape)}, got {list(before.shape)}"
        )
    wide = first.clone()
    wide[tuple(slice(n) for n in before.shape)] = before
    return bits.pack(wide) if packed else wide
