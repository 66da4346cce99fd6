# SPDX-License-Identifier: Apache-2.0
"""Krum: the one update that is closest to its neighbours (Blanchard et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import GramRule, ReuseOptions
from fastagg.rules.gram_policy import Policy, check_majority, square_distances

if TYPE_CHECKING:
    from typing_extensions import Unpack


def krum_scores(gram: Tensor, num_byzantine: int) -> Tensor:
    """Sums of squared distances to the n - f - 2 nearest others (at least one): [n, n] -> [n]."""
    size = len(gram)
    check_majority(size, num_byzantine)
    neighbours = max(1, size - num_byzantine - 2)
    distances = square_distances(gram, own=-1.0).numpy()  # a row itself comes first, also
    distances.sort(axis=1)  # before its copies
    return torch.from_numpy(distances)[:, 1 : 1 + neighbours].sum(dim=1)


class KrumPolicy(Policy):
    """All weight on the row with the lowest score, the first one on ties."""

    def __init__(self, num_byzantine: int) -> None:
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        best = krum_scores(gram, self.num_byzantine).sort(stable=True).indices[0]
        factors = torch.zeros(len(weights), dtype=torch.float64)
        factors[best] = 1.0
        return factors


@register("krum")
class Krum(GramRule):
    """``params += server_lr * u_k``, k the client closest to its n - f - 2 nearest neighbours.

    The score of a client is the sum of squared distances to its n - f - 2 nearest other active
    clients (to its nearest one if that is less than one), f of the n active clients being out to
    do harm; the lowest id wins a tie. Blanchard et al. prove resilience for n >= 2f + 3.

    Args:
        num_byzantine: f, >= 0.
        reuse: remember the last update of every client and use it again (:class:`GramRule`).
        client_weights: [K]; clients of weight 0 have no say. Otherwise Krum knows no weights.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    A step raises ValueError with 2f active clients or fewer.
    """

    def __init__(
        self,
        *,
        num_byzantine: int = 0,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        policy = KrumPolicy(num_byzantine)
        super().__init__(policy, reuse=reuse, client_weights=client_weights, **options)
        self.num_byzantine = policy.num_byzantine
