# SPDX-License-Identifier: Apache-2.0
"""FDMS with several friends per absent client. Not from a paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import CommonOptions
from fastagg.costs import Cost, Sizes
from fastagg.options import read_count, read_positive
from fastagg.registry import register
from fastagg.rules._share_cap import Proposal
from fastagg.rules.fdms import FDMS
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import flags_of, ids_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BLOCK = 256
"""Number of absent clients whose scores (256 x S numbers) are sorted at a time."""


@register("fdms-soft")
class FDMSSoft(FDMS):
    """The m most similar active clients together substitute for an absent one.

    **Not from a paper.** FL-FDMS uses the single best friend, so the noise of one update is counted
    twice or more. Here the share of an absent client is divided among the m best active clients
    that have a score with it, in proportion to ``exp(score / temperature)``. Scores and the
    treatment of clients without a friend are those of :class:`fastagg.FDMS`; ``friends=1`` equals
    FDMS. ``StepReport.friends`` holds the best friend. There is no candidate elimination, because
    it would remove the other m - 1 friends.

    Args:
        friends: m, >= 1.
        temperature: > 0, in units of the scores. Large: friends have similar parts. Small: FDMS.
        similarity: "cosine" or "distance".
        precision: "highest" or, with "cosine", "tf32"; see :class:`fastagg.FDMS`.
        max_share: largest factor of a row, in [1/K, 1]; None: no limit. See :class:`fastagg.FDMS`:
            what a row has no room for is divided among the m best friends that have room.
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    not_saved = FDMS.not_saved | {"elimination"}

    def __init__(
        self,
        *,
        friends: int = 3,
        temperature: float = 0.1,
        similarity: str = "cosine",
        precision: str = "highest",
        max_share: float | None = None,
        client_weights: Any = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        if "elimination" in options:
            raise TypeError("elimination: not an option of fdms-soft; use the rule fdms")
        super().__init__(
            similarity=similarity,
            precision=precision,
            max_share=max_share,
            client_weights=client_weights,
            **options,
        )
        self.friends = read_count("friends", friends, least=1)
        self.temperature = read_positive("temperature", temperature)

    def _weights(self, cohort: Cohort, friends: Tensor) -> Tensor:
        """Return factors [S] float64: own shares, and those of absent clients, divided."""
        clients, active = cohort.clients, flags_of(cohort.ids, self.num_clients)
        befriended = ((friends >= 0) & ~active).nonzero().flatten()
        orphans = self._shares[friends < 0]
        weights = self._shares.index_select(0, clients) + math.fsum(orphans.tolist()) / len(clients)
        for absent in befriended.split(_BLOCK):
            positions, parts = self._spread(absent, clients)  # [A, m]
            shares = self._shares[absent][:, None] * parts
            weights += torch.bincount(positions.flatten(), shares.flatten(), len(clients))
        return weights

    def _proposals(self, clients: list[int], rows: list[int], ids: list[int]) -> list[Proposal]:
        if not rows:
            return []
        open_ids = ids_tensor([ids[position] for position in rows])
        proposals = []
        for absent in ids_tensor(clients).split(_BLOCK):
            known = (self.counts[absent[:, None], open_ids] > 0).any(dim=1).cpu()
            positions, parts = self._spread(absent, open_ids)
            scores = self.scores[absent[:, None], open_ids[positions]].cpu()
            listed = zip(absent, known, positions, parts, scores, strict=True)
            for client, scored, *three in listed:
                if scored:
                    columns = zip(*(column.tolist() for column in three), strict=True)
                    proposals += [
                        Proposal(score, int(client), rows[position], part)
                        for position, part, score in columns
                        if part > 0.0
                    ]
        return proposals

    def _spread(self, absent: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best m of ``clients`` for each of A ``absent``.

        Returns:
            Positions in ``clients`` [A, m] int64, and parts [A, m] float64, of sum 1 per row.
        """
        pairs = absent[:, None], clients  # [A, S]
        unscored = (self.counts[pairs] <= 0).cpu()
        scores = self.scores[pairs].cpu().double().masked_fill(unscored, -math.inf)
        best = scores.sort(dim=1, descending=True, stable=True)  # on ties the lowest id first
        m = min(self.friends, len(clients))
        parts = torch.exp((best.values[:, :m] - best.values[:, :1]) / self.temperature)
        return best.indices[:, :m], parts / parts.sum(dim=1, keepdim=True)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # that of FDMS, plus scores and counts of blocks of absent clients with the active ones
        K, S = sizes.K, sizes.S
        base = super().cost(sizes, options)
        scratch = 48 * min(_BLOCK, K - S) * S
        moved = base.moved + 6 * (K - S) * S
        return dataclasses.replace(base, scratch=base.scratch + scratch, moved=moved)
