# SPDX-License-Identifier: Apache-2.0
"""Bulyan: rows chosen by Krum, then the mean around the median (El Mhamdi et al. 2018)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastagg import ops
from fastagg.costs import Cost, Sizes
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._columnwise_rule import sorting_operations
from fastagg.rules._gram_rule import ReuseOptions, used_rows
from fastagg.rules._sketched_gram_rule import SketchedGramRule
from fastagg.rules.gram_policy import Policy
from fastagg.staleness import none_but_constant
from fastagg.updates.any_rows import AnyRows
from fastagg.updates.columns import ColumnStatistic
from fastagg.updates.small import factors_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


def bulyan_selection(gram: Tensor, num_byzantine: int) -> list[int]:
    """Return the n - 2f rows that Krum chooses one after the other, each among the rest.

    With f = 0 all rows are chosen in their order, otherwise by
    :func:`fastagg.ops.krum_selection`.

    Args:
        gram: [n, n] float64.
        num_byzantine: f, 2f < n.

    Returns:
        Positions in the order in which they were chosen.
    """
    size = len(gram)
    if num_byzantine == 0:
        return list(range(size))
    chosen: list[int] = ops.krum_selection(gram, num_byzantine, size - 2 * num_byzantine).tolist()
    return chosen


class BulyanPolicy(Policy):
    """Give equal factors to the n - 2f rows that are chosen, and 0 to the others."""

    def __init__(self, num_byzantine: int) -> None:
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        size, f = len(weights), self.num_byzantine
        if f > 0 and size < 4 * f + 3:
            raise ValueError(
                f"updates: expected at least {4 * f + 3} rows, four times num_byzantine plus 3, "
                f"got {size}"
            )
        chosen = bulyan_selection(gram, f)
        factors = [0.0] * size
        for position in chosen:
            factors[position] = 1.0 / len(chosen)
        return factors_tensor(factors)


@register("bulyan")
class Bulyan(SketchedGramRule):
    """``params += server_lr * v``, v[k] the mean around the median of values of chosen clients.

    With n active clients, of which at most f are Byzantine (faulty or malicious)::

        theta = n - 2f clients are chosen, one after the other,
                by Krum among those not yet chosen
        beta = theta - 2f
        v[k] = mean of the beta values u_s[k] of chosen clients s
               that are nearest to the median of all theta

    Source: El Mhamdi, Guerraoui and Rouault 2018, section 4, with Krum as the rule A. Krum's scores
    are those of :class:`fastagg.Krum`. The lowest id wins a tie of scores, and the smaller one of
    two values at the same distance from the median is nearer. ``StepReport.weights`` are 1 / theta
    for the chosen clients and 0 for the others. A late row is a row like any other.

    Args:
        num_byzantine: f, the largest number of Byzantine clients among the active ones, >= 0. With
            0 all clients are chosen and the rule is the mean.
        sketch, seed: distances from random projections; see
            :class:`fastagg.rules._sketched_gram_rule.SketchedGramRule`.
        reuse: use the last updates of absent clients as well; see :class:`GramRule`.
        client_weights: [K]; a client of weight 0 is left out. Other values make no difference.
        **options: ``memory_dtype``, ``memory_folder`` and ``max_age`` (:class:`GramRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    A step raises ValueError if f > 0 and n < 4f + 3.
    """

    sums_rows = False
    refused_staleness = none_but_constant(
        "the rule has no weights of rows other than 0, so a factor would make no difference"
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
        policy = BulyanPolicy(num_byzantine)
        super().__init__(
            policy,
            sketch=sketch,
            seed=seed,
            reuse=reuse,
            client_weights=client_weights,
            **options,
        )
        self.num_byzantine = policy.num_byzantine

    def _sum(self, rows: AnyRows, factors: Tensor, scales: Tensor | None) -> None:
        chosen, shares = used_rows(rows, factors)
        keep = len(shares) - 2 * self.num_byzantine
        own = None if scales is None else scales[factors != 0.0]
        self.columns.statistic_(self._aggregate, chosen, ColumnStatistic(ops.meamed_, keep), own)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # The second pass sorts the values of the chosen rows instead of multiplying them.
        cost = super().cost(sizes, options)
        members = sizes.K if options.get("reuse", False) else sizes.S
        chosen = max(1, members - 2 * int(options.get("num_byzantine", 0)))
        return dataclasses.replace(
            cost, flops=cost.flops + sorting_operations(chosen) * chosen * sizes.d
        )
