# SPDX-License-Identifier: Apache-2.0
"""Latencies whose logarithm is normal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fastagg_sim.latency.base import LONGEST, SHORTEST, WIDEST, LatencyProcess, normal, register


@register("lognormal")
@dataclass(frozen=True, kw_only=True)
class Lognormal(LatencyProcess):
    """A latency is median * exp(sigma * Z) with a standard normal Z, independently for each client
    and round.

    The mean is median * exp(sigma^2 / 2); one latency in forty is above median * exp(1.96 sigma).

    median: seconds, one number for all clients or a list of K.
    sigma: between 0 and 10, one number or a list of K. With 0 every latency is the median.
    """

    median: float | Sequence[float] = 1.0
    sigma: float | Sequence[float] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._medians, self._sigmas  # checks the options

    @cached_property
    def _medians(self) -> tuple[float, ...]:
        return self.numbers("median", SHORTEST, LONGEST)

    @cached_property
    def _sigmas(self) -> tuple[float, ...]:
        return self.numbers("sigma", 0.0, WIDEST)

    def draw(self, client: int, round: int, u: float) -> float:
        return self._medians[client] * math.exp(self._sigmas[client] * normal(u))
