# SPDX-License-Identifier: Apache-2.0
"""Clients that join during the run and leave for good, combined with another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, register
from fastagg_sim.dropout.combined import Combined
from fastagg_sim.dropout.sampled import Sampled

_NEVER = 1 << 62  # rounds


@register("churn")
@dataclass(frozen=True, kw_only=True)
class Churn(Combined):
    """Client k is present from the round in which it joins to that in which it leaves for good.

    The rule grows when clients join, and forgets those that leave. Another process decides which of
    those present are available. If clients join or leave in the other process, too, a client is
    present while it is in both.

    initial: number of clients in round 0, from 1 to K; the others join one after the other, in the
        order of their ids.
    join_every: rounds from one client's joining to the next one's.
    lifetime: mean number of rounds for which a client stays, >= 1, drawn once per run from the
        geometric distribution on 1, 2, ...; None: clients do not leave.
    process, options: the name and the options of the other process. It uses all K clients and the
        same seed and history. It may not sample those absent the longest: it does not know who is
        present, and would sample clients that have not joined again and again.
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
        self._check_sampling()

    def _check_sampling(self) -> None:
        """Raise ValueError if a process in this one samples the clients absent the longest."""
        inner: DropoutProcess = self.inner
        while isinstance(inner, Combined):
            if isinstance(inner, Sampled) and inner.selection != "random":
                raise ValueError(
                    f"process: expected sampled with selection=random within churn, got "
                    f"{inner.selection}: clients that have not joined would be sampled in every "
                    "round; use sampled with among=available and process=churn"
                )
            inner = inner.inner

    @classmethod
    def changes_clients(cls, options: Mapping[str, Any]) -> bool:
        return True

    @cached_property
    def joins(self) -> torch.Tensor:
        """The first round of each client, int64 [K], ascending; without the other process."""
        later = torch.arange(self.num_clients) - (self.initial - 1)
        return later.clamp_min(0) * self.join_every

    @cached_property
    def leaves(self) -> torch.Tensor:
        """The first round in which each client is gone, here or in the other process, int64 [K]."""
        own, other = self._own_leaves(), self.inner.leaves
        return own if other is None else torch.minimum(own, other)

    def _own_leaves(self) -> torch.Tensor:
        if self.lifetime is None:
            return torch.full((self.num_clients,), _NEVER)
        rng = self.stream("churn")
        drawn = torch.rand(self.num_clients, generator=rng, dtype=torch.float64)  # in [0, 1)
        # The number of rounds is above n with the probability (1 - 1 / lifetime)^n.
        rate = torch.tensor(-1.0 / self.lifetime, dtype=torch.float64).log1p()
        rounds = torch.floor((-drawn).log1p() / rate) + 1.0  # 1 if the rate is minus infinity
        return self.joins + rounds.to(torch.int64)

    def joined(self, round: int) -> int:
        return min(int((self.joins <= round).sum()), self.inner.joined(round))

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        available = self.inner.active(round, history)
        present = (self.joins <= round) & (round < self.leaves)
        return available[present[available]]
