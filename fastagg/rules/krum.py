# SPDX-License-Identifier: Apache-2.0
"""Krum: the one update that is closest to its neighbours (Blanchard et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastagg import ops
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import ReuseOptions
from fastagg.rules._sketched_gram_rule import SketchedGramRule
from fastagg.rules.gram_policy import Policy, check_majority
from fastagg.staleness import none_but_constant
from fastagg.updates.small import factors_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


def krum_scores(gram: Tensor, num_byzantine: int) -> Tensor:
    """Return the Krum score of each row, given the Gram matrix of n rows.

    The score is the sum of the squared distances to the max(1, n - f - 2) nearest other rows.

    Args:
        gram: [n, n] float64.
        num_byzantine: f.

    Returns:
        [n] float64.

    Raises:
        ValueError: n <= 2f.
    """
    check_majority(len(gram), num_byzantine)
    return ops.krum_scores(gram, num_byzantine)


class KrumPolicy(Policy):
    """Give factor 1 to the row with the lowest Krum score, the first one on ties; 0 to others."""

    def __init__(self, num_byzantine: int) -> None:
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        factors = [0.0] * len(weights)
        factors[int(krum_scores(gram, self.num_byzantine).numpy().argmin())] = 1.0
        return factors_tensor(factors)


@register("krum")
class Krum(SketchedGramRule):
    """``params += server_lr * u_k``, k the client closest to its n - f - 2 nearest neighbours.

    n is the number of active clients, and at most f of them are assumed to be Byzantine (faulty or
    malicious). The score of a client is the sum of the squared distances from its update to the
    max(1, n - f - 2) nearest other ones. The aggregate is the update with the lowest score; the
    lowest id wins a tie. A late row is a row like any other. Source: Blanchard et al. 2017, who
    prove resilience for n >= 2f + 3.

    Args:
        num_byzantine: f, the largest number of Byzantine clients among the active ones, >= 0.
        sketch, seed: distances from random projections; see
            :class:`fastagg.rules._sketched_gram_rule.SketchedGramRule`.
        reuse: use the last updates of absent clients as well; see :class:`GramRule`.
        client_weights: [K]; a client of weight 0 is left out. Other values make no difference.
        **options: ``memory_dtype``, ``memory_folder`` and ``max_age`` (:class:`GramRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    A step raises ValueError if n <= 2f.
    """

    refused_staleness = none_but_constant(
        "the rule takes one row as it is, so a factor would make no difference"
    )

    def __init__(
        self,
        *,
        num_byzantine: int = 0,
        sketch: int | None = None,
        seed: int = 0,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        policy = KrumPolicy(num_byzantine)
        super().__init__(
            policy,
            sketch=sketch,
            seed=seed,
            reuse=reuse,
            client_weights=client_weights,
            **options,
        )
        self.num_byzantine = policy.num_byzantine
