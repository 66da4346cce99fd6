# SPDX-License-Identifier: Apache-2.0
"""Heavy-tailed latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fastagg_sim.latency.base import LONGEST, SHORTEST, LatencyProcess, register


@register("pareto")
@dataclass(frozen=True, kw_only=True)
class Pareto(LatencyProcess):
    """Latencies with a Pareto distribution: P(latency > x) = (minimum / x)^shape for x >= minimum,
    independently for each client and round.

    The mean is minimum * shape / (shape - 1) for shape > 1, and infinite otherwise: the slowest of
    many clients then takes about as long as all others together.

    minimum: the shortest latency in seconds, one number for all clients or a list of K.
    shape: between 0.1 and 100, one number or a list of K. Small values have heavy tails.
    """

    minimum: float | Sequence[float] = 1.0
    shape: float | Sequence[float] = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._minima, self._shapes  # checks the options

    @cached_property
    def _minima(self) -> tuple[float, ...]:
        return self.numbers("minimum", SHORTEST, LONGEST)

    @cached_property
    def _shapes(self) -> tuple[float, ...]:
        return self.numbers("shape", 0.1, 100.0)

    def draw(self, client: int, round: int, u: float) -> float:
        return self._minima[client] * (1.0 - u) ** (-1.0 / self._shapes[client])
