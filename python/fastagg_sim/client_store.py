# SPDX-License-Identifier: Apache-2.0
"""The training samples of every client, on the device, in memory that does not grow with K."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

import torch

from fastagg_sim.client import ClientData
from fastagg_sim.data import Dataset, GeneratedDataset
from fastagg_sim.partition import Partition
from fastagg_sim.partition.base import Ranges, kept

CACHE_BYTES = 1 << 27
"""Bytes of generated samples that are kept: those of all clients of Synthetic(1,1) if K = 100, and
of about a thousand clients with the average number of samples."""


class ClientStore(ABC):
    """The training samples of K clients. `store[k]` are those of client k, always the same."""

    @abstractmethod
    def __getitem__(self, client: int) -> ClientData:
        """Return the samples of a client in [0, K)."""


class DealtSamples(ClientStore):
    """Samples of a data set that is in memory, by a partition.

    If the partition is made of ranges, the samples that clients have are copied once, in the order
    of clients, and every client has a view of them; the rest of the data set can be freed.
    Otherwise clients may share samples: the data set is kept, and a client's samples are copied
    when they are asked for.
    """

    def __init__(self, dataset: Dataset, split: Partition, device: torch.device) -> None:
        self._sets = split.clients
        self._x, self._y = dataset.train_x, dataset.train_y
        if isinstance(split.clients, Ranges):
            order = split.clients.joined()
            self._sets = Ranges.consecutive(order, split.sizes)
            self._x, self._y = self._x[order], self._y[order]
        self._x, self._y = self._x.to(device), self._y.to(device)

    def __getitem__(self, client: int) -> ClientData:
        if isinstance(self._sets, Ranges):
            place = self._sets.place(client)
            return ClientData(self._x[place], self._y[place])
        ids = self._sets[client].to(self._x.device)
        return ClientData(self._x[ids], self._y[ids])


class GeneratedSamples(ClientStore):
    """Samples of a data set that is generated client by client, those used last in a cache.

    fraction: in (0, 1], the part of its samples that each client keeps, from the first on.
    capacity: bytes of the cache. A client with more samples is never in it.
    """

    def __init__(
        self,
        dataset: GeneratedDataset,
        fraction: float,
        device: torch.device,
        capacity: int = CACHE_BYTES,
    ) -> None:
        self._dataset = dataset
        self._fraction = fraction
        self._device = device
        self._capacity = capacity
        self._kept: OrderedDict[int, ClientData] = OrderedDict()  # the one used last is the last
        self.cached_bytes = 0

    def __getitem__(self, client: int) -> ClientData:
        if client in self._kept:
            self._kept.move_to_end(client)
            return self._kept[client]
        x, y = self._dataset.client(client)
        size = kept(len(y), self._fraction)
        data = ClientData(x[:size].to(self._device), y[:size].to(self._device))
        self._keep(client, data)
        return data

    def _keep(self, client: int, data: ClientData) -> None:
        if _bytes(data) > self._capacity:
            return
        self._kept[client] = data
        self.cached_bytes += _bytes(data)
        while self.cached_bytes > self._capacity:
            _, oldest = self._kept.popitem(last=False)
            self.cached_bytes -= _bytes(oldest)


def _bytes(data: ClientData) -> int:
    """Return the bytes that keeping `data` takes, those of the rest of its storage included."""
    return data.x.untyped_storage().nbytes() + data.y.untyped_storage().nbytes()
