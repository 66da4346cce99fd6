# SPDX-License-Identifier: Apache-2.0
"""The type of all partitions, forms of index sets, and a helper function."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


class IndexSets(Sequence[torch.Tensor]):
    """The sample indices of K clients, int64 [n_k] each, made when they are asked for.

    sizes: int64 [K], the number n_k of each client.
    """

    sizes: torch.Tensor

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> torch.Tensor:  # type: ignore[override]  # no slices
        """Return the indices of a client. Raises IndexError outside [-K, K)."""
        count = len(self)
        if not -count <= client < count:
            raise IndexError(f"client: expected an id in [0, {count}), got {client}")
        return self._of(client % count)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self._of, range(len(self)))

    @abstractmethod
    def _of(self, client: int) -> torch.Tensor:
        """Return the indices of a client in [0, K)."""

    def first(self, sizes: torch.Tensor) -> IndexSets:
        """Return the first `sizes[k]` indices of each client k; int64 [K], at most `self.sizes`."""
        return Drawn(self._of, sizes)

    def joined(self) -> torch.Tensor:
        """Return the indices of all clients, int64 [N], one client after the other."""
        return torch.cat(list(self))


class Ranges(IndexSets):
    """Index sets that are ranges of one list: those of client k are
    order[begins[k] : begins[k] + sizes[k]].

    They take 16 bytes per client beside the list. A set is a view of it.

    order: int64 [N].
    begins, sizes: int64 [K].
    """

    def __init__(self, order: torch.Tensor, begins: torch.Tensor, sizes: torch.Tensor) -> None:
        self.order = order
        self.begins = begins
        self.sizes = sizes

    @staticmethod
    def consecutive(order: torch.Tensor, sizes: torch.Tensor) -> Ranges:
        """Return ranges that follow one another in `order`, from its first element on."""
        return Ranges(order, sizes.cumsum(0) - sizes, sizes)

    @staticmethod
    def listed(clients: Sequence[torch.Tensor]) -> Ranges:
        """Return the given sets, copied into one list."""
        order = torch.cat(list(clients)) if clients else torch.empty(0, dtype=torch.int64)
        return Ranges.consecutive(order, torch.tensor([len(indices) for indices in clients]))

    def place(self, client: int) -> slice:
        """Return which part of `order` a client has."""
        begin = int(self.begins[client])
        return slice(begin, begin + int(self.sizes[client]))

    def _of(self, client: int) -> torch.Tensor:
        return self.order[self.place(client)]

    def first(self, sizes: torch.Tensor) -> Ranges:
        return Ranges(self.order, self.begins, sizes)

    def joined(self) -> torch.Tensor:
        shifts = self.begins - (self.sizes.cumsum(0) - self.sizes)  # from the place in the result
        places = torch.repeat_interleave(shifts, self.sizes)
        return self.order[places.add_(torch.arange(len(places)))]


class Drawn(IndexSets):
    """Index sets that a pure function of the client draws; nothing is kept.

    Clients may share samples.

    draw: `draw(client)` returns the indices of a client, int64, always the same; the first
        sizes[client] of them are used.
    sizes: int64 [K].
    """

    def __init__(self, draw: Callable[[int], torch.Tensor], sizes: torch.Tensor) -> None:
        self._draw = draw
        self.sizes = sizes

    def _of(self, client: int) -> torch.Tensor:
        return self._draw(client)[: int(self.sizes[client])]


class Counted(IndexSets):
    """Consecutive ranges of [0, N), whose sizes are counted when one of them is needed.

    num_clients: K.
    count: `count()` returns the sizes of the ranges, int64 [K].
    fraction: in (0, 1]; each client keeps this fraction of its range, from its start.
    """

    def __init__(
        self, num_clients: int, count: Callable[[], torch.Tensor], fraction: float = 1.0
    ) -> None:
        self._num_clients = num_clients
        self._count = count
        self._fraction = fraction

    def __len__(self) -> int:
        return self._num_clients

    @cached_property
    def _begins(self) -> torch.Tensor:
        sizes = self._count()
        return sizes.cumsum(0) - sizes

    @cached_property
    def sizes(self) -> torch.Tensor:  # type: ignore[override]  # counted once, never assigned
        return torch.tensor([kept(size, self._fraction) for size in self._count().tolist()])

    def _of(self, client: int) -> torch.Tensor:
        begin = int(self._begins[client])
        return torch.arange(begin, begin + int(self.sizes[client]))


def kept(size: int, fraction: float) -> int:
    """Return how many of `size` samples a client keeps, `fraction` of them, rounded down.

    1e-9 corrects rounding errors such as 0.7 * 10 = 7 - 1e-15.
    """
    return int(fraction * size + 1e-9)


@dataclass(frozen=True)
class Partition:
    """The training samples of K clients.

    clients: the indices of each client's samples in the training set. No two clients share a
        sample, unless the partition says so.
    groups: the group of each client, or None if the partition has no groups. Clients of one group
        have the same distribution: they are true friends of each other.
    """

    clients: IndexSets
    groups: Sequence[int] | None = None

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @property
    def sizes(self) -> torch.Tensor:
        """The number of samples of each client, int64 [K]."""
        return self.clients.sizes

    def label_counts(self, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
        """Return how many samples of each label each client has, int64 [K, C].

        labels: the labels of the training set, int64 [n].
        num_classes: C.
        """
        counts = [
            torch.bincount(labels[indices], minlength=num_classes) for indices in self.clients
        ]
        return torch.stack(counts)


def shuffled(values: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Return `values` [n] in random order."""
    return values[torch.randperm(len(values), generator=rng)]
