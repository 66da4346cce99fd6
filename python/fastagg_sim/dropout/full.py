# SPDX-License-Identifier: Apache-2.0
"""No client drops out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastagg_sim.dropout.base import DropoutProcess, register


@register("full")
@dataclass(frozen=True, kw_only=True)
class Full(DropoutProcess):
    """Every client is active in every round."""

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return torch.arange(self.num_clients)
