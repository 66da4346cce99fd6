# SPDX-License-Identifier: Apache-2.0
"""Multi-Krum: the mean of the updates with the best Krum scores (Blanchard et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import GramRule, ReuseOptions
from fastagg.rules.gram_policy import Policy
from fastagg.rules.krum import krum_scores

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MultiKrumPolicy(Policy):
    """The weighted mean of the ``keep`` rows with the lowest scores, the first ones on ties."""

    def __init__(self, num_byzantine: int, keep: int | None) -> None:
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)
        self.keep = None if keep is None else read_count("keep", keep, least=1)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        size = len(weights)
        order = krum_scores(gram, self.num_byzantine).sort(stable=True).indices
        kept = order[: size - self.num_byzantine if self.keep is None else self.keep]
        factors = torch.zeros(size, dtype=torch.float64)
        factors[kept] = weights[kept]
        return factors / factors.sum()


@register("multi-krum")
class MultiKrum(GramRule):
    """``params += server_lr * (weighted mean of the updates with the lowest Krum scores)``.

    Scores as in :class:`fastagg.rules.krum.Krum`.

    Args:
        num_byzantine: f, >= 0.
        keep: how many updates are averaged, >= 1 (all, if fewer are there); None: n - f of the n
            active ones.
        reuse: remember the last update of every client and use it again (:class:`GramRule`).
        client_weights: [K] relative weights in the mean; None: equal.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    A step raises ValueError with 2f active clients or fewer.
    """

    def __init__(
        self,
        *,
        num_byzantine: int = 0,
        keep: int | None = None,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        policy = MultiKrumPolicy(num_byzantine, keep)
        super().__init__(policy, reuse=reuse, client_weights=client_weights, **options)
        self.num_byzantine = policy.num_byzantine
        self.keep = policy.keep
