# SPDX-License-Identifier: Apache-2.0
"""Fast and slow clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastagg_sim.client_process import check_numbers
from fastagg_sim.latency.base import LONGEST, SHORTEST, WIDEST, LatencyProcess, normal, register
from fastagg_sim.seeds import generator


@register("classes")
@dataclass(frozen=True, kw_only=True)
class Classes(LatencyProcess):
    """Each client belongs to one speed class for the whole run. Around the median of its class, its
    latencies are log-normal and independent from round to round.

    medians: the median latency of each class, in seconds.
    shares: the share of the clients in each class, relative to each other; by default all are
        equal. Class c gets the clients from K * (sum of the shares before it) to K * (sum with its
        own) of an order, both rounded to the nearest whole number (halves to the even one).
    sigma: standard deviation of the logarithm of a client's latencies, between 0 and 10.
    by: the order of the clients. "client": a random one. "group": by their group, so that slow
        clients have data of their own; within a group by id. "id": by id.
    groups: required with by="group"; the simulation takes them from the partition.
    """

    medians: Sequence[float] = (1.0, 4.0)
    shares: Sequence[float] | None = None
    sigma: float = 0.25
    by: str = "client"

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"groups"} if options.get("by") == "group" else ())

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("by", ("client", "group", "id"))
        for name in ("medians", "shares"):
            value = getattr(self, name)
            if name == "shares" and value is None:
                continue
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise ValueError(
                    f"{name}: expected a list of numbers, one per class, got {value!r}"
                )
            check_numbers(name, value, SHORTEST, LONGEST)
        if self.shares is not None and len(self.shares) != len(self.medians):
            raise ValueError(
                f"shares: expected one per class, {len(self.medians)}, got {len(self.shares)}"
            )
        check_numbers("sigma", (self.sigma,), 0.0, WIDEST)
        if self.by == "group" and self.groups is None:
            raise ValueError(
                'groups: classes with by="group" needs the group of every client; pass groups, or '
                "use a partition with groups"
            )

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """The speed class of each client."""
        shares = self.shares or [1.0] * len(self.medians)
        total, clients = math.fsum(shares), self.num_clients
        ends = [round(clients * math.fsum(shares[: c + 1]) / total) for c in range(len(shares))]
        found = [0] * clients
        for place, client in enumerate(self._order()):
            found[client] = next(c for c, end in enumerate(ends) if place < end)
        return tuple(found)

    def _order(self) -> list[int]:
        if self.by == "client":
            rng = generator(self.seed, "latency", "classes")
            return torch.randperm(self.num_clients, generator=rng).tolist()
        groups = self.groups if self.by == "group" else None
        return sorted(range(self.num_clients), key=lambda k: (groups[k] if groups else 0, k))

    def draw(self, client: int, round: int, u: float) -> float:
        return self.medians[self.classes[client]] * math.exp(self.sigma * normal(u))
