# SPDX-License-Identifier: Apache-2.0
"""A fixed number of active clients, drawn with weights that change in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, active_count, register
from fastagg_sim.seeds import generator


@register("time-varying")
@dataclass(frozen=True, kw_only=True)
class TimeVarying(DropoutProcess):
    """Exactly floor(P K) active clients, drawn with random weights (MimiC, section 7.1, 3).

    Every round draws a weight a ~ U[low, high] for each client. It then draws clients one after the
    other, without replacement, with probability proportional to their weights. The weights are
    independent between rounds and between clients. Rounds are therefore independent, and over many
    rounds every client is active at the same rate floor(P K) / K.

    fraction: P in (0, 1], with P K >= 1.
    low, high: 0 < low <= high; 1 and 10 in the paper. Only their ratio matters: the values 0.1 and
        1 of the released code are equivalent.
    """

    fraction: float = 0.5
    low: float = 1.0
    high: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction: expected a number in (0, 1], got {self.fraction}")
        if self.count < 1:
            raise ValueError(
                f"fraction: {self.fraction} of {self.num_clients} clients is less than one client"
            )
        if not 0.0 < self.low <= self.high < float("inf"):
            raise ValueError(
                f"low, high: expected 0 < low <= high, got low = {self.low}, high = {self.high}"
            )

    @classmethod
    def at_ratio(cls, alpha: float) -> dict[str, Any]:
        return {"fraction": round(1.0 - alpha, 12)}

    @property
    def count(self) -> int:
        """The number of active clients in every round, floor(P K)."""
        return active_count(self.num_clients, 1.0 - self.fraction)

    def weights(self, round: int) -> torch.Tensor:
        """Return the weights a of `round`, float64 [K]."""
        return self._weights(generator(self.seed, "dropout", round))

    def _weights(self, rng: torch.Generator) -> torch.Tensor:
        uniform = torch.rand(self.num_clients, generator=rng, dtype=torch.float64)
        return self.low + (self.high - self.low) * uniform

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        weights = self._weights(rng)
        # Of independent exponential clocks with rates a, clock i rings first with probability
        # a_i / sum a, and the remaining times are again exponential. The order in which the clocks
        # ring is therefore the order of a weighted draw without replacement.
        uniform = torch.rand(self.num_clients, generator=rng, dtype=torch.float64)
        clocks = -torch.log1p(-uniform) / weights
        return torch.argsort(clocks, stable=True)[: self.count].sort().values
