# SPDX-License-Identifier: Apache-2.0
"""Running statistics of a model, such as those of batch normalisation, in a simulation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fastagg
from fastagg import FlatLayout
from fastagg.updates.statistics import mean_


class RunningStatistics:
    """The server's running statistics, and those of this round's clients.

    All clients share one model object. Each one starts with the server's statistics and counters;
    after the round, the server's statistics are the mean of those of the active clients. A model
    without buffers has none, and all methods do nothing.

    values: [m] float32, the server's statistics.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout) -> None:
        self._model = model
        self._layout = layout
        self.values = layout.flatten_statistics(model)
        self._next = torch.zeros_like(self.values)
        # Counters and other tensors that no client changes for the server.
        names = set(layout.excluded) - {slot.name for slot in layout.statistics}
        state = model.state_dict()
        self._fixed = {name: state[name].clone() for name in sorted(names)}
        self._sent: dict[int, Tensor] = {}  # client -> [m]

    def __bool__(self) -> bool:
        return bool(self._layout.excluded)

    def put(self) -> None:
        """Give the model the server's statistics and counters."""
        if self:
            views = self._layout.unflatten_statistics(self.values)
            self._model.load_state_dict({**views, **self._fixed}, strict=False)

    def take(self, client: int) -> None:
        """Keep the model's statistics as those of `client` in this round."""
        if self:
            self._sent[client] = self._layout.flatten_statistics(self._model)

    def average(self, aggregator: fastagg.Aggregator, active: list[int]) -> None:
        """Make the mean over the `active` clients, ascending, the server's statistics.

        The clients have the weights of the rule, if it has any. Raises ValueError if a client's
        statistics hold NaN or Inf; the server's have not changed then.
        """
        sent, self._sent = self._sent, {}
        if not len(self.values):
            return
        rows = [sent[client] for client in active]
        for client, row in zip(active, rows, strict=True):
            if not bool(torch.isfinite(row).all()):
                raise ValueError(f"statistics: client {client} has NaN or Inf in its model")
        weights = getattr(aggregator, "client_weights", None)
        if mean_(self._next, rows, active, weights):
            self.values, self._next = self._next, self.values
