# SPDX-License-Identifier: Apache-2.0
"""The clients of FedAWE: they train from a model of their own, and echo what they have learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

import fastagg


class Echoes:
    """The models of clients that were ever active; the others have the first global model.

    eta: the global rate of the paper.
    first: [d] float32, the first global model; it is copied.
    """

    def __init__(self, eta: float, first: Tensor) -> None:
        self._eta = eta
        self._first = first.clone()
        self._clients: dict[int, fastagg.FedAWEClient] = {}

    def _client(self, client: int) -> fastagg.FedAWEClient:
        if client not in self._clients:
            self._clients[client] = fastagg.FedAWEClient(self._first, eta=self._eta)
        return self._clients[client]

    def start(self, client: int) -> Tensor:
        """Return the model [d] from which a client trains; not copied."""
        known = self._clients.get(client)
        return self._first if known is None else known.model

    def echo_(self, client: int, row: Tensor, params: Tensor, round_index: int) -> None:
        """Change `row` [d] from the trained model minus `start` to the answer minus `params`."""
        trained = row.add_(self.start(client))
        self._client(client).answer_(trained, round_index).sub_(params)

    def receive(self, clients: Iterable[int], params: Tensor, round_index: int) -> None:
        """Give the server's new model to the clients whose answers counted."""
        for client in clients:
            self._client(client).receive(params, round_index)

    def leave(self, clients: Iterable[int]) -> None:
        """Drop the models of clients that have left for good."""
        for client in clients:
            self._clients.pop(client, None)

    def models(self) -> dict[str, Tensor]:
        """Return the models [d] by client id, not copied, and the first one as "first"."""
        return {"first": self._first, **{str(k): c.model for k, c in self._clients.items()}}

    def rounds(self) -> dict[str, int]:
        """Return the last active round of each client by id."""
        return {str(k): client.last for k, client in self._clients.items()}

    def load(self, models: Mapping[str, Tensor], rounds: Mapping[str, int]) -> None:
        """Replace what :meth:`models` and :meth:`rounds` returned."""
        self._first, self._clients = models["first"], {}
        for name, last in rounds.items():
            client = self._client(int(name))
            client.model, client.last = models[name], last
