# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour mixing before a robust rule (Allouah et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import ReuseOptions
from fastagg.rules._wrapper_rule import WrapperRule
from fastagg.rules.gram_policy import (
    Around,
    Policy,
    all_times,
    check_majority,
    nearest,
    square_distances,
    times,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NeighbourMixing(Around):
    """Every row becomes the weighted mean of its n - f nearest rows, itself included: with W [n, n]
    of rows of sum 1, ``policy(W G W^T) @ W``."""

    def __init__(self, policy: Policy, num_byzantine: int) -> None:
        super().__init__(policy)
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        size = len(weights)
        check_majority(size, self.num_byzantine)
        distances = square_distances(gram[:size, :size], own=-1.0)  # itself comes first
        mixing = nearest(distances, size - self.num_byzantine) * weights
        mixing /= mixing.sum(dim=1, keepdim=True)
        # The previous aggregate, if there is one, stays as it is.
        further = len(gram) - size
        if further:
            mixing = torch.block_diag(mixing, torch.eye(further, dtype=torch.float64))
        mixed = all_times(mixing, all_times(gram, mixing))  # gram is symmetric
        factors = self.policy((mixed + mixed.T) / 2.0, weights, t)
        return times(mixing.T.contiguous(), factors)


@register("nnm")
class NNM(WrapperRule):
    """Each update becomes the mean of its n - f nearest ones, then ``rule`` aggregates those.

    Of the n active clients f are out to do harm; an update is among its own nearest, and the
    lowest ids win ties. Only Gram matrices are mixed, never updates: ``W G W^T``.

    Args:
        num_byzantine: f, >= 0. With 0 every update becomes the mean.
        rule: the rule that aggregates the means, by name.
        rule_options: its own options, by name; ``num_byzantine`` is not passed on.
        reuse: remember the last update of every client and use it again (:class:`GramRule`).
        client_weights: [K] relative weights, in the means and in the rule; None: equal.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    A step raises ValueError with 2f active clients or fewer.
    """

    def __init__(
        self,
        *,
        num_byzantine: int = 0,
        rule: str = "geometric-median",
        rule_options: Mapping[str, Any] | None = None,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)
        super().__init__(
            lambda policy: NeighbourMixing(policy, num_byzantine),
            rule=rule,
            rule_options=rule_options,
            reuse=reuse,
            client_weights=client_weights,
            **options,
        )
