# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour mixing before a robust rule (Allouah et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastagg import ops
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import ReuseOptions
from fastagg.rules._wrapper_rule import WrapperRule
from fastagg.rules.gram_policy import Around, Policy, check_majority, times

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NeighbourMixing(Around):
    """Replace each of n rows by the weighted mean of its n - f nearest rows, itself included.

    Row i of W [n, n] holds the weights of mean i, of sum 1. The factors of the original rows are
    ``policy(W G W^T) @ W``.
    """

    def __init__(self, policy: Policy, num_byzantine: int) -> None:
        super().__init__(policy)
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        size = len(weights)
        check_majority(size, self.num_byzantine)
        mixed, mixing = ops.nearest_means(gram, weights, size - self.num_byzantine)
        factors = self.policy(mixed, weights, t)
        return times(mixing.T, factors)


@register("nnm")
class NNM(WrapperRule):
    """Replace each update by the mean of its n - f nearest ones, then aggregate with ``rule``.

    n is the number of active clients, and at most f of them are assumed to be Byzantine (faulty or
    malicious). An update is one of its own nearest ones; the lowest ids win ties. The rule mixes
    only the Gram matrix (``W G W^T``), never the updates. Source: Allouah et al. 2023.

    Args:
        num_byzantine: f, >= 0. With 0, every update is replaced by the mean of all.
        rule: name of the rule that aggregates the means.
        rule_options: options of that rule, by name. ``num_byzantine`` is not passed on to it.
        reuse: use the last updates of absent clients as well; see :class:`GramRule`.
        client_weights: [K] relative weights, in the means and in the rule; None: equal.
        **options: ``memory_dtype``, ``memory_folder`` and ``max_age`` (:class:`GramRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    A step raises ValueError if n <= 2f.
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
