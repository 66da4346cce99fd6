# SPDX-License-Identifier: Apache-2.0
"""A fixed number of active clients, drawn uniformly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, active_count, register


@register("exact")
@dataclass(frozen=True, kw_only=True)
class Exact(DropoutProcess):
    """Exactly floor((1 - alpha) K) active clients, all sets of this size equally likely (FL-FDMS).

    alpha: dropout ratio in [0, 1]; with 1 no client is active. For the same seed the active sets of
        two values of alpha are nested, so runs that only differ in alpha are paired.
    """

    alpha: float = 0.5

    @classmethod
    def at_ratio(cls, alpha: float) -> dict[str, Any]:
        return {"alpha": alpha}

    def __post_init__(self) -> None:
        super().__post_init__()
        active_count(self.num_clients, self.alpha)

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        order = torch.randperm(self.num_clients, generator=rng)
        return order[: active_count(self.num_clients, self.alpha)].sort().values
