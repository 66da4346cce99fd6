# SPDX-License-Identifier: Apache-2.0
"""Every client is active independently of the others and of earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, probabilities, register


@register("bernoulli")
@dataclass(frozen=True, kw_only=True)
class Bernoulli(DropoutProcess):
    """Each client is active with its own fixed probability, independently (MimiC's "static").

    p: the probability, in [0, 1]: one number for all clients (the paper) or a list of K numbers.
        Rounds may be empty; with K = 30 and p = 0.1, 4 % of them are.
    levels: if larger than 1, p must be one number, and the probability of client k is the
        (k mod levels)-th of `levels` numbers evenly spaced from p to 1. MimiC's released code uses
        5 levels: with p = 0.1 the probabilities are 0.1, 0.325, 0.55, 0.775 and 1, 0.55 on average.
    """

    p: float | Sequence[float] = 0.5
    levels: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole_numbers("levels", 1)
        _ = self.rates  # checks p

    @classmethod
    def at_ratio(cls, alpha: float) -> dict[str, Any]:
        return {"p": round(1.0 - alpha, 12)}

    @cached_property
    def rates(self) -> torch.Tensor:
        """The probability that each client is active, float64 [K]."""
        p = probabilities("p", self.p, self.num_clients)
        if self.levels == 1:
            return p
        if isinstance(self.p, Sequence):
            raise ValueError(f"p: expected one number with levels = {self.levels}, got a list")
        spaced = torch.linspace(self.p, 1.0, self.levels, dtype=torch.float64)
        return spaced[torch.arange(self.num_clients) % self.levels]

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        draws = torch.rand(self.num_clients, generator=rng, dtype=torch.float64)  # in [0, 1)
        return torch.nonzero(draws < self.rates).flatten()
