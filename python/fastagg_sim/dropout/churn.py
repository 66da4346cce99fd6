# SPDX-License-Identifier: Apache-2.0
"""Clients that join during the run and leave for good, combined with another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fastagg_sim.dropout.base import register
from fastagg_sim.dropout.combined import Combined
from fastagg_sim.seeds import generator

_NEVER = 1 << 62  # rounds


@register("churn")
@dataclass(frozen=True, kw_only=True)
class Churn(Combined):
    """Client k is present from the round in which it joins to that in which it leaves for good.

    The rule grows when clients join, and forgets those that leave. Another process decides which of
    those present are available.

    initial: number of clients in round 0, from 1 to K; the others join one after the other, in the
        order of their ids.
    join_every: rounds from one client's joining to the next one's.
    lifetime: mean number of rounds for which a client stays, >= 1, drawn once per run from the
        geometric distribution on 1, 2, ...; None: clients do not leave.
    process, options: the name and the options of the other process. It uses all K clients and the
        same seed and history.
    """

    initial: int = 1
    join_every: int = 1
    lifetime: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole_numbers("initial", 1)
        self.whole_numbers("join_every", 1)
        if self.initial > self.num_clients:
            raise ValueError(
                f"initial: expected at most num_clients = {self.num_clients}, got {self.initial}"
            )
        stays = self.lifetime
        number = stays is None or (isinstance(stays, int | float) and not isinstance(stays, bool))
        if not number or (stays is not None and not 1.0 <= stays < _NEVER):
            raise ValueError(f"lifetime: expected a number of rounds >= 1, or null, got {stays!r}")

    @cached_property
    def joins(self) -> torch.Tensor:
        """The first round of each client, int64 [K], ascending."""
        later = torch.arange(self.num_clients) - (self.initial - 1)
        return later.clamp_min(0) * self.join_every

    @cached_property
    def leaves(self) -> torch.Tensor:
        """The first round in which each client is gone, int64 [K]."""
        if self.lifetime is None:
            return torch.full((self.num_clients,), _NEVER)
        rng = generator(self.seed, "dropout", "churn")
        drawn = torch.rand(self.num_clients, generator=rng, dtype=torch.float64)  # in [0, 1)
        # The number of rounds is above n with the probability (1 - 1 / lifetime)^n.
        rate = torch.tensor(-1.0 / self.lifetime, dtype=torch.float64).log1p()
        rounds = torch.floor((-drawn).log1p() / rate) + 1.0  # 1 if the rate is minus infinity
        return self.joins + rounds.to(torch.int64)

    def joined(self, round: int) -> int:
        return int((self.joins <= round).sum())

    def left(self, round: int) -> list[int]:
        found: list[int] = (self.leaves == round).nonzero().flatten().tolist()
        return found

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        available = self.inner.active(round, history)
        present = (self.joins <= round) & (round < self.leaves)
        return available[present[available]]
