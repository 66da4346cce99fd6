# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that substitute friends for absent clients: how much each row counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastagg import ops
from fastagg.aggregator import CommonOptions
from fastagg.report import Plan, Reading
from fastagg.rules._client_weights import relative
from fastagg.rules._share_cap import Proposal, divide, read_max_share, round_cap
from fastagg.rules._weighted_rule import WeightedRule
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import factors_tensor, flags_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class Substitution(Plan):
    """The plan of FDMS: friends, the pairs to score, and the elimination threshold."""

    wanted: Tensor | None = field(kw_only=True)  # [S, S] bool, symmetric; None: all pairs
    threshold: float = field(kw_only=True)  # Theta_t


@dataclass
class Scored(Reading):
    """The similarities of this round."""

    scores: Tensor  # [S, S] float64


class SubstitutionRule(WeightedRule[Substitution, Scored]):
    """Divides the shares of absent clients among rows; subclasses choose the friends.

    Args:
        max_share: largest factor of a row, in [1/K, 1]; None: no limit.
        client_weights: [K] relative weights; None: equal.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        scores, counts, candidates: see :class:`fastagg.FDMS`.
    """

    scores: Tensor
    counts: Tensor
    candidates: Tensor | None

    def __init__(
        self,
        *,
        max_share: float | None = None,
        client_weights: Any = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(client_weights=client_weights, **options)
        self.max_share = read_max_share(max_share, self.num_clients)
        self._shares = relative(self.client_weights, "all clients")  # [K], sums to 1
        self._share_list: list[float] = self._shares.tolist()

    def _substitute(self, cohort: Cohort, friends: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors [S] float64 and the friends [K] that take a part of absent clients."""
        if self.max_share is None:
            return self._weights(cohort, friends), friends
        return self._capped(cohort, friends, self.max_share)

    def _weights(self, cohort: Cohort, friends: Tensor) -> Tensor:
        """Return factors [S] float64: a client's share goes to its friend's row, or all rows."""
        # A plain loop: torch calls take longer just after a pass over the rows, with cold caches.
        by_friend = [0.0] * (self.num_clients + 1)  # the last entry: -1, no friend
        orphans = []  # the shares of clients without a friend
        for friend, share in zip(friends.tolist(), self._share_list, strict=True):
            by_friend[friend] += share
            if friend < 0:
                orphans.append(share)
        weights = factors_tensor([by_friend[client] for client in cohort.ids])
        if by_friend[-1] == 0.0:
            return weights
        return weights + math.fsum(orphans) / len(cohort)

    def _capped(self, cohort: Cohort, friends: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """Return factors [S] float64 of at most ``cap``, or 1/S, and friends that took a part."""
        ids, active = cohort.ids, set(cohort.ids)
        own = [self._share_list[client] for client in ids]
        absent = {k: share for k, share in enumerate(self._share_list) if k not in active}
        propose = partial(self._proposals, ids=ids)
        weights, first = divide(own, absent, round_cap(cap, len(ids)), propose)
        friends = friends.clone()
        for client in absent:
            friends[client] = ids[first[client]] if client in first else -1
        return weights, friends

    def _proposals(self, clients: list[int], rows: list[int], ids: list[int]) -> list[Proposal]:
        """Return the proposal of each of ``clients`` to its best friend among ``rows``.

        Args:
            clients: ids of absent clients.
            rows: positions of the rows with room.
            ids: of the active clients.
        """
        places = {ids[position]: position for position in rows}
        active = flags_of(list(places), self.num_clients).to(self.device)
        friends = ops.select_friends(self.scores, self.counts, active, self.candidates)
        best = self.scores.gather(1, friends.clamp(min=0)[:, None])[:, 0].tolist()
        found: list[int] = friends.tolist()
        return [
            Proposal(best[client], client, places[found[client]], 1.0)
            for client in clients
            if found[client] >= 0
        ]
