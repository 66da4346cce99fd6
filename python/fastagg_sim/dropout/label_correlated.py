# SPDX-License-Identifier: Apache-2.0
"""Availability that depends on the labels of a client's samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, register


@register("label-correlated")
@dataclass(frozen=True, kw_only=True)
class LabelCorrelated(DropoutProcess):
    """Each client is active independently with probability low + (high - low) s, where the score s
    in [0, 1] depends on its labels c = 0 ... C - 1.

    The absent clients are therefore not a representative sample of the data.

    pattern: how the score is computed.
        "smallest" (the experiments of MIFA): s = the client's smallest label / (C - 1), the same in
            every round. Clients with label 0 are active least often.
        "cycle" (day and night): s is the mean over the client's samples of
            (1 + cos(2 pi (t / period - c / C))) / 2. Clients with label c are most active in round
            c * period / C and every `period` rounds after it. Over a whole number of periods every
            client is active in a fraction (low + high) / 2 of the rounds.
    low, high: 0 <= low <= high <= 1.
    period: rounds per cycle, at least 2; only used by "cycle".
    label_counts: required; the simulation takes them from the partition.
    """

    pattern: str = "smallest"
    low: float = 0.1
    high: float = 1.0
    period: int = 24

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"label_counts"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("pattern", ("smallest", "cycle"))
        self.whole_numbers("period", 2)
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError(
                f"low, high: expected 0 <= low <= high <= 1, got low = {self.low}, "
                f"high = {self.high}"
            )
        if self.label_counts is None:
            raise ValueError(
                "label_counts: label-correlated needs the labels of every client; pass label_counts"
            )
        if any(sum(row) == 0 for row in self.label_counts):
            raise ValueError("label_counts: expected at least one sample per client")

    @cached_property
    def _shares(self) -> torch.Tensor:
        """The share of each label in each client's samples, float64 [K, C]."""
        counts = torch.tensor(self.label_counts, dtype=torch.float64)
        return counts / counts.sum(dim=1, keepdim=True)

    def rates(self, round: int) -> torch.Tensor:
        """Return the probability that each client is active in `round`, float64 [K]."""
        classes = self._shares.shape[1]
        if self.pattern == "smallest":
            smallest = (self._shares > 0).double().argmax(dim=1).double()  # the first > 0
            score = smallest / max(classes - 1, 1)
        else:
            turns = round / self.period - torch.arange(classes, dtype=torch.float64) / classes
            score = self._shares @ (0.5 + 0.5 * torch.cos(2.0 * math.pi * turns))
        return self.low + (self.high - self.low) * score

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        draws = torch.rand(self.num_clients, generator=rng, dtype=torch.float64)  # in [0, 1)
        return torch.nonzero(draws < self.rates(round)).flatten()
