# SPDX-License-Identifier: Apache-2.0
"""The types of data sets, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


class DataError(Exception):
    """Something is wrong with a data set."""


class DataNotFoundError(DataError):
    """A data set is not on this machine; the message states what to do."""


class CorruptDataError(DataError):
    """A file is truncated, has another format, or has other contents than the data set."""


Samples = tuple[torch.Tensor, torch.Tensor]
"""x float32 [n, *in_shape] and y int64 [n]."""


@dataclass(frozen=True)
class Dataset:
    """A classification data set in memory.

    train_x, test_x: float32 [n, *in_shape]; images are [n, channels, height, width].
    train_y, test_y: int64 [n], in [0, num_classes).
    clients: the training indices of each client, int64, if the data set is divided among clients;
        else None.
    """

    name: str
    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    num_classes: int
    clients: Sequence[torch.Tensor] | None = None

    @property
    def in_shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch dimension."""
        return tuple(self.train_x.shape[1:])

    def taken(self, ids: torch.Tensor) -> Samples:
        """Return some training samples; ids: int64 [n], indices of `train_x`."""
        return self.train_x[ids], self.train_y[ids]


class GeneratedDataset(Dataset):
    """A data set that is divided among clients and generated client by client.

    A client's samples are a pure function of its id. `client` generates them when they are needed.
    `train_x`, `train_y` and `clients` concern all clients together; the samples of all clients are
    generated, and kept, when one of the first two is first asked for. The test data are generated
    when they are first asked for.

    name, in_shape, num_classes: as for `Dataset`.
    num_clients: K.
    make: `make(client)` generates all samples of a client: those for training, then those for the
        test.
    sizes: `sizes(client)` returns the numbers of both, without generating x.
    test_clients: the test data are those of clients 0 to test_clients - 1.
    groups: the group of each client, whose clients have the same distribution; None if there are
        none.
    """

    def __init__(
        self,
        name: str,
        in_shape: tuple[int, ...],
        num_classes: int,
        num_clients: int,
        make: Callable[[int], tuple[Samples, Samples]],
        sizes: Callable[[int], tuple[int, int]],
        test_clients: int,
        groups: Sequence[int] | None = None,
    ) -> None:
        given = {
            "name": name,
            "num_classes": num_classes,
            "num_clients": num_clients,
            "groups": groups,
            "_in_shape": in_shape,
            "_make": make,
            "_sizes": sizes,
            "_test_clients": test_clients,
        }
        self.__dict__.update(given)  # a subclass of a frozen dataclass

    num_clients: int
    groups: Sequence[int] | None
    _in_shape: tuple[int, ...]
    _make: Callable[[int], tuple[Samples, Samples]]
    _sizes: Callable[[int], tuple[int, int]]
    _test_clients: int

    def client(self, client: int) -> Samples:
        """Generate the training samples of a client in [0, K)."""
        return self._make(client)[0]

    @cached_property
    def sizes(self) -> torch.Tensor:
        """The number of training samples of each client, int64 [K]."""
        return torch.tensor([self._sizes(client)[0] for client in range(self.num_clients)])

    def taken(self, ids: torch.Tensor) -> Samples:
        """Return some training samples. Only the clients that have them are generated."""
        ends = self.sizes.cumsum(0)
        owners = torch.searchsorted(ends, ids.contiguous(), right=True)
        places = ids - (ends - self.sizes)[owners]  # among the samples of the owner
        x, y = torch.empty(len(ids), *self.in_shape), torch.empty(len(ids), dtype=torch.int64)
        for client in torch.unique(owners).tolist():
            own = owners == client
            xs, ys = self.client(client)
            x[own], y[own] = xs[places[own]], ys[places[own]]
        return x, y

    @property
    def in_shape(self) -> tuple[int, ...]:
        return self._in_shape

    @cached_property
    def _train(self) -> Samples:
        return _joined([self.client(k) for k in range(self.num_clients)])

    @cached_property
    def _test(self) -> Samples:
        return _joined([self._make(k)[1] for k in range(self._test_clients)])

    @property
    def train_x(self) -> torch.Tensor:
        return self._train[0]

    @property
    def train_y(self) -> torch.Tensor:
        return self._train[1]

    @property
    def test_x(self) -> torch.Tensor:
        return self._test[0]

    @property
    def test_y(self) -> torch.Tensor:
        return self._test[1]

    @cached_property
    def clients(self) -> Sequence[torch.Tensor]:
        return torch.arange(int(self.sizes.sum())).split(self.sizes.tolist())


def _joined(parts: Sequence[Samples]) -> Samples:
    xs, ys = zip(*parts, strict=True)
    return torch.cat(xs), torch.cat(ys)
