# SPDX-License-Identifier: Apache-2.0
"""A fixed number of active clients, with at least one in every group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, active_count, register


@register("cluster-floor")
@dataclass(frozen=True, kw_only=True)
class ClusterFloor(DropoutProcess):
    """Exactly S = floor((1 - alpha) K) active clients, with at least one in every group.

    The released FL-FDMS code ensures Assumption 5 (every client has an active friend) in this way.
    Every round first draws the number of active clients of each group, uniformly among all ways to
    write S as a sum of one number in [1, group size] per group. It then draws this many clients of
    each group uniformly. The possible active sets are therefore not equally likely: uneven splits
    are more frequent than in a uniform draw among all sets with a client of every group.

    alpha: dropout ratio in [0, 1], with floor((1 - alpha) K) >= number of groups.
    groups: the group of every client; required.
    """

    alpha: float = 0.5

    @classmethod
    def at_ratio(cls, alpha: float) -> dict[str, Any]:
        return {"alpha": alpha}

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"groups"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is None:
            raise ValueError(
                "groups: cluster-floor needs the group of every client; "
                "use the partition 'clustered', which provides them"
            )
        count = active_count(self.num_clients, self.alpha)
        if count < len(self._members):
            raise ValueError(
                f"alpha: {self.alpha} leaves {count} of {self.num_clients} clients active, fewer "
                f"than the {len(self._members)} groups that need one each"
            )

    @cached_property
    def _members(self) -> list[torch.Tensor]:
        """The client ids of each group, sorted by group."""
        groups = torch.tensor(self.groups)
        return [torch.nonzero(groups == group).flatten() for group in torch.unique(groups)]

    @cached_property
    def _ways(self) -> list[list[int]]:
        """ways[g][r]: number of ways in which groups g, g + 1, ... have r active clients in all."""
        count = active_count(self.num_clients, self.alpha)
        ways = [[1] + [0] * count]
        for members in reversed(self._members):
            rest = ways[0]
            sizes = range(1, len(members) + 1)
            ways.insert(0, [sum(rest[r - n] for n in sizes if n <= r) for r in range(count + 1)])
        return ways

    def group_counts(self, rng: torch.Generator) -> list[int]:
        """Draw the number of active clients of each group, uniformly among all possible splits.

        The probabilities are exact up to float64 rounding.
        """
        left = active_count(self.num_clients, self.alpha)
        counts = []
        for group, members in enumerate(self._members):
            rest = self._ways[group + 1]
            choices = [n for n in range(1, len(members) + 1) if n <= left and rest[left - n]]
            draw = float(torch.rand((), generator=rng, dtype=torch.float64))
            for count in choices:
                # Python integers of any size, so only their ratio is rounded.
                draw -= rest[left - count] / self._ways[group][left]
                if draw < 0.0:
                    break
            counts.append(count)
            left -= counts[-1]
        return counts

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        chosen = []
        for members, count in zip(self._members, self.group_counts(rng), strict=True):
            chosen.append(members[torch.randperm(len(members), generator=rng)[:count]])
        return torch.cat(chosen).sort().values
