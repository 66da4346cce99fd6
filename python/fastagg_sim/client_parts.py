# SPDX-License-Identifier: Apache-2.0
"""The clients' part of rules whose clients keep a vector: of all clients that were ever active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

import fastagg
from fastagg.updates.row_pool import RowPool


class ClientParts(Protocol):
    """What the clients of a rule keep between rounds, and what they do in a step.

    Attributes:
        file: name of the file of a checkpoint that holds the kept vectors.
        dtype: their dtype.
    """

    file: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def step(self, params: Tensor, updates: RowPool, clients: Tensor) -> fastagg.StepReport:
        """Change the updates of the active `clients` into what they send; run the server's step.

        params: [d] float32, changed in place by the server.
        updates: the rows of the clients, changed in place.
        """
        ...

    def leave(self, clients: Sequence[int]) -> None:
        """Let `clients` leave for good: they hand over what the server needs, and are forgotten."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the kept vectors [d] by client id, not copied."""
        ...

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        """Replace the kept vectors by those that :meth:`state` returned."""
        ...


class MimicClients:
    """The corrections of clients under MimiC's client mode."""

    file: ClassVar[str] = "corrections.safetensors"
    dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(self, aggregator: fastagg.MimiC) -> None:
        self._server = aggregator
        self._clients: dict[int, fastagg.MimiCClient] = {}

    def _client(self, client: int) -> fastagg.MimiCClient:
        if client not in self._clients:
            server = self._server
            self._clients[client] = fastagg.MimiCClient(server.num_params, server.device)
        return self._clients[client]

    def step(self, params: Tensor, updates: RowPool, clients: Tensor) -> fastagg.StepReport:
        sent = {k: self._client(k).correct_(updates.row(k)) for k in clients.tolist()}
        report = self._server.step(params, list(sent.values()), clients)
        # Rejected rows are not finite and do not contribute to the aggregate, so these clients
        # must not update their corrections.
        rejected = set(report.rejected.tolist())
        for client, row in sent.items():
            if client not in rejected:
                self._clients[client].learn(row, self._server.aggregate)
        return report

    def leave(self, clients: Sequence[int]) -> None:
        for client in clients:
            self._clients.pop(client, None)
        self._server.forget(clients)

    def state(self) -> dict[str, Tensor]:
        return {str(k): client.correction for k, client in self._clients.items()}

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        self._clients = {}
        for name, correction in vectors.items():
            self._client(int(name)).correction = correction


class MifaClients:
    """The rows of clients under `mifa-client`; they learn at once which of them counted."""

    file: ClassVar[str] = "rows.safetensors"
    dtype: ClassVar[torch.dtype] = torch.float64

    def __init__(self, aggregator: fastagg.MIFADifferences) -> None:
        self._server = aggregator
        self._clients: dict[int, fastagg.MIFAClient] = {}

    def _client(self, client: int) -> fastagg.MIFAClient:
        if client not in self._clients:
            server = self._server
            self._clients[client] = fastagg.MIFAClient(server.num_params, server.device)
        return self._clients[client]

    def step(self, params: Tensor, updates: RowPool, clients: Tensor) -> fastagg.StepReport:
        ids = clients.tolist()
        sent = [self._client(k).difference_(updates.row(k)) for k in ids]
        report = self._server.step(params, sent, clients)
        for client in ids:
            self._clients[client].learn(int(self._server.answers[client]))
        return report

    def leave(self, clients: Sequence[int]) -> None:
        rows = [self._client(client).row for client in clients]
        self._server.withdraw(torch.stack(rows), clients)
        for client in clients:
            del self._clients[client]

    def state(self) -> dict[str, Tensor]:
        return {str(k): client.row for k, client in self._clients.items()}

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        self._clients = {}
        for name, row in vectors.items():
            client = self._client(int(name))
            client.row, client.answers = row, int(self._server.answers[int(name)])


def client_parts(aggregator: fastagg.Aggregator) -> ClientParts | None:
    """Return the clients' part of a rule; None if clients send their updates as they are."""
    if isinstance(aggregator, fastagg.MimiC) and aggregator.mode == "client":
        return MimicClients(aggregator)
    if isinstance(aggregator, fastagg.MIFADifferences):
        return MifaClients(aggregator)
    return None
