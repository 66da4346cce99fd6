# SPDX-License-Identifier: Apache-2.0
"""Every client is active and absent in stretches, independently of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, probabilities, register
from fastagg_sim.seeds import generator


@register("markov")
@dataclass(frozen=True, kw_only=True)
class Markov(DropoutProcess):
    """Each client is an independent two-state Markov chain that starts in its stationary
    distribution.

    From one round to the next a client keeps its state with probability `memory`. Otherwise its
    state is drawn anew: active with probability `rate`. This is the chain with

        P(active -> absent) = (1 - memory) (1 - rate),   P(absent -> active) = (1 - memory) rate.

    Absences last 1 / ((1 - memory) rate) rounds on average, active stretches
    1 / ((1 - memory) (1 - rate)) rounds. States n rounds apart have the correlation memory^n. With
    memory = 0 the process has the same distribution as `bernoulli`.

    rate: the fraction of rounds in which a client is active, in [0, 1]; one number or a list of K.
    memory: in [0, 1).

    A round is a function of (seed, round) and does not need the states of all earlier rounds. It is
    enough to go back to the latest new draw of each client, about (1 + ln K) / (1 - memory) rounds
    for all clients. Rounds requested in ascending order reuse the previous state and go back less.
    """

    rate: float | Sequence[float] = 0.5
    memory: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.memory < 1.0:
            raise ValueError(f"memory: expected a number in [0, 1), got {self.memory}")
        _ = self._rates  # checks rate

    @classmethod
    def at_ratio(cls, alpha: float) -> dict[str, Any]:
        return {"rate": round(1.0 - alpha, 12)}

    @cached_property
    def _rates(self) -> torch.Tensor:
        return probabilities("rate", self.rate, self.num_clients)

    @cached_property
    def _last(self) -> dict[str, tuple[int, torch.Tensor]]:
        """A cache: under the key "state", the last requested round and the states in it."""
        return {}

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        known_round, known = self._last.get("state", (-1, torch.empty(0)))
        state = torch.zeros(self.num_clients, dtype=torch.bool)
        open_ = torch.ones(self.num_clients, dtype=torch.bool)  # clients without a new draw so far
        for t in range(round, -1, -1):
            if t == known_round:
                state |= open_ & known
                break
            stream = rng if t == round else generator(self.seed, "dropout", t)
            keep, value = torch.rand(2, self.num_clients, generator=stream, dtype=torch.float64)
            new = open_ & (keep >= self.memory) if t else open_
            state |= new & (value < self._rates)
            open_ = open_ & ~new
            if not open_.any():
                break
        self._last["state"] = (round, state)
        return torch.nonzero(state).flatten()
