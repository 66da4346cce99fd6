# SPDX-License-Identifier: Apache-2.0
"""Every client is active at its own regular interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fastagg_sim.dropout.base import DropoutProcess, register
from fastagg_sim.seeds import numpy_generator

HALF_NORMAL_DEVIATION = 3.0


@register("round-robin")
@dataclass(frozen=True, kw_only=True)
class RoundRobin(DropoutProcess):
    """Client i is active in every tau_i-th round: bounded absences (MimiC, section 7.1, 1).

    tau_max: largest interval; no client is absent for tau_max or more rounds in a row.
    sampling: how each tau_i is drawn, once per run.
        "uniform" (the paper): a whole number from 0 to tau_max; 0 counts as 1, that is, the client
            is always active. Of 30 clients, 6.6, 3.2 and 1.8 are active on average for
            tau_max = 20, 50 and 100.
        "half-normal" (the released code): round(|N(0, 3^2)|), limited to [1, tau_max]; about 2.5 on
            average, so a tau_max of 15 or more makes little difference. Of 30 clients, 17.8 are
            active on average.
    phase: when client i is active for the first time; the paper does not say.
        "aligned" (the released code): in round 0, like all clients, and in all multiples of tau_i.
        "random": in a round drawn from 0 ... tau_i - 1.

    For the same seed, the "uniform" interval of a client grows with tau_max, so runs that only
    differ in tau_max are paired.
    """

    tau_max: int = 20
    sampling: str = "uniform"
    phase: str = "aligned"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole_numbers("tau_max", 1)
        self.one_of("sampling", ("uniform", "half-normal"))
        self.one_of("phase", ("aligned", "random"))

    @cached_property
    def intervals(self) -> torch.Tensor:
        """tau_i of each client, int64 [K], at least 1."""
        rng = numpy_generator(self.seed, "dropout", "round-robin", self.sampling)
        if self.sampling == "uniform":
            drawn = np.floor(rng.random_sample(self.num_clients) * (self.tau_max + 1))
        else:
            normal = rng.normal(0.0, HALF_NORMAL_DEVIATION, self.num_clients)
            drawn = np.minimum(np.rint(np.abs(normal)), self.tau_max)
        return torch.from_numpy(np.maximum(drawn, 1).astype(np.int64))

    @cached_property
    def first_rounds(self) -> torch.Tensor:
        """The first active round of each client, int64 [K], in [0, tau_i)."""
        if self.phase == "aligned":
            return torch.zeros(self.num_clients, dtype=torch.int64)
        rng = numpy_generator(self.seed, "dropout", "round-robin", "phase")
        drawn = np.floor(rng.random_sample(self.num_clients) * self.intervals.numpy())
        return torch.from_numpy(drawn.astype(np.int64))

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return torch.nonzero((round - self.first_rounds) % self.intervals == 0).flatten()
