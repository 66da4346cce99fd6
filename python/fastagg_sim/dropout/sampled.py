# SPDX-License-Identifier: Apache-2.0
"""Client sampling by the server, combined with another dropout process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastagg_sim.dropout.base import register
from fastagg_sim.dropout.combined import Combined
from fastagg_sim.dropout.full import Full
from fastagg_sim.seeds import first_of_order


@register("sampled")
@dataclass(frozen=True, kw_only=True)
class Sampled(Combined):
    """The server samples clients; another process decides which clients are available.

    sample: number of clients that the server samples per round, from 1 to K.
    process, options: the name and the options of the other process. It uses all K clients and the
        same seed and history, so for the same seed the same clients are available as without
        sampling.
    among: the clients from which the server samples. "all": it does not know which are available;
        the active clients are those that are sampled and available, sample * rate of them on
        average. "available": only the available clients; if they are fewer than `sample`, all of
        them are active.

    selection: how the server samples. "random": uniformly. "longest-absent": the clients that were
        active the longest ago, those never active first; ties are broken at random (Yan et al.
        2020, FedLaAvg). Only with among="available" or process="full", because a client that is
        sampled and never available would be sampled again and again.

    For uniform sampling without dropout, use process="full". A round of a small sample of many
    clients then takes time and memory for the sample alone.
    """

    sample: int = 10
    among: str = "all"
    selection: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole_numbers("sample", 1)
        if self.sample > self.num_clients:
            raise ValueError(
                f"sample: expected at most num_clients = {self.num_clients}, got {self.sample}"
            )
        self.one_of("among", ("all", "available"))
        self.one_of("selection", ("random", "longest-absent"))
        if self.selection != "random" and self.among == "all" and self.process != "full":
            raise ValueError(
                f"selection: expected random with among=all, got {self.selection}: clients that "
                "are not available would be sampled in every round; use among=available"
            )

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        # A separate stream: the other process already uses the stream of `rng`.
        own = self.stream("sampled", round)
        if isinstance(self.inner, Full) and self.selection == "random":
            return first_of_order(self.num_clients, self.sample, own).sort().values
        order = torch.randperm(self.num_clients, generator=own)
        able = torch.zeros(self.num_clients, dtype=torch.bool)
        able[self.inner.active(round, history)] = True
        if self.selection == "longest-absent":
            order = order[last_active(self.num_clients, history)[order].argsort(stable=True)]
        if self.among == "available":
            order = order[able[order]][: self.sample]
        else:
            order = order[: self.sample]
            order = order[able[order]]
        return order.sort().values


def last_active(num_clients: int, history: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the last round in which each client was active, int64 [K]; -1: in none.

    history: the active ids of all earlier rounds, oldest first.
    """
    last = torch.full((num_clients,), -1)
    if not history:
        return last
    rounds = torch.arange(len(history)).repeat_interleave(torch.tensor([*map(len, history)]))
    return last.scatter_reduce(0, torch.cat([*history]), rounds, "amax")
