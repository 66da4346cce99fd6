# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that substitute friends for absent clients: how much each row counts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fastagg.aggregator import CommonOptions, R
from fastagg.clipping import FLOAT32_SUM
from fastagg.ops.memory import shares_by_friend, tensor_of
from fastagg.rules._client_weights import absent_without_weights, all_shares, relative
from fastagg.rules._share_cap import Propose, divide, read_max_share, round_cap
from fastagg.rules._weighted_rule import P, WeightedRule
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SubstitutionRule(WeightedRule[P, R]):
    """Divides the shares of absent clients among rows; subclasses choose the friends.

    Args:
        max_share: largest factor of a row, in [1/K, 1]; None: no limit.
        client_weights: [K] relative weights; None: equal. With them, a step takes ``weights`` for
            the active clients.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    no_noise = ""

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
        self.no_weights = absent_without_weights(self.client_weights)

    def _round_shares(self, cohort: Cohort) -> Tensor:
        """Return the shares of all clients in this round, of sum 1: [K] float64."""
        return all_shares(self.client_weights, self._shares, cohort)

    def _largest_change(self, cohort: Cohort, plan: P) -> float:
        # The friends of this round follow from similarities of earlier rounds, which one client
        # changes with its rows: all shares of absent clients may move from one row to another. Each
        # of these changes the aggregate by up to twice its size, and the client's own share by its
        # size.
        own = self._shares[cohort.clients]
        absent = max(0.0, 1.0 - math.fsum(own.tolist()))
        return float(own.max()) + 2.0 * absent

    def _largest_rounding(self, cohort: Cohort, plan: P) -> float:
        return FLOAT32_SUM  # shares add up to 1

    def _weights(self, cohort: Cohort, friends: Tensor) -> Tensor:
        """Return factors [S] float64: a client's share goes to its friend's row, or all rows."""
        return shares_by_friend(self._round_shares(cohort), friends, cohort.ids)

    def _capped(self, cohort: Cohort, propose: Propose, cap: float) -> tuple[Tensor, Tensor]:
        """Return factors [S] float64 of at most ``cap``, or 1/S.

        Also return friends [K]: for an absent client the first one that took a part of its share,
        -1 if none did.
        """
        ids, active = cohort.ids, set(cohort.ids)
        shares: list[float] = self._round_shares(cohort).tolist()
        own = [shares[client] for client in ids]
        absent = {k: share for k, share in enumerate(shares) if k not in active}
        weights, first = divide(own, absent, round_cap(cap, len(ids)), propose)
        friends = np.full(self.num_clients, -1)
        friends[ids] = ids
        for client, position in first.items():
            friends[client] = ids[position]
        return weights, tensor_of(friends)
