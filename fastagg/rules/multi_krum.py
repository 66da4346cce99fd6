# SPDX-License-Identifier: Apache-2.0
"""Multi-Krum: the mean of the updates with the best Krum scores (Blanchard et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fastagg.ops.memory import tensor_of
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import ReuseOptions
from fastagg.rules._sketched_gram_rule import SketchedGramRule
from fastagg.rules.gram_policy import Policy
from fastagg.rules.krum import krum_scores

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MultiKrumPolicy(Policy):
    """Return the factors of the weighted mean of the ``keep`` rows with the lowest Krum scores."""

    def __init__(self, num_byzantine: int, keep: int | None) -> None:
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)
        self.keep = None if keep is None else read_count("keep", keep, least=1)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        size, shares = len(weights), weights.numpy()
        order = krum_scores(gram, self.num_byzantine).numpy().argsort(kind="stable")
        kept = order[: size - self.num_byzantine if self.keep is None else self.keep]
        chosen = np.zeros(size)
        chosen[kept] = shares[kept]
        factors = tensor_of(chosen)
        return factors / factors.sum()


@register("multi-krum")
class MultiKrum(SketchedGramRule):
    """``params += server_lr * (weighted mean of the updates with the lowest Krum scores)``.

    Scores are those of :class:`fastagg.Krum`; the lowest ids win ties (Blanchard et al. 2017).

    Args:
        num_byzantine: f, the largest number of Byzantine clients among the n active ones, >= 0.
            With 0, and without ``keep``, the rule is the mean of all updates.
        keep: the number of updates in the mean, >= 1; all n if ``keep`` is larger. None: n - f.
        sketch, seed: distances from random projections; see
            :class:`fastagg.rules._sketched_gram_rule.SketchedGramRule`.
        reuse: use the last updates of absent clients as well; see :class:`GramRule`.
        client_weights: [K] relative weights in the mean; None: equal.
        **options: ``memory_dtype``, ``memory_folder`` and ``max_age`` (:class:`GramRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    A step raises ValueError if n <= 2f.
    """

    def __init__(
        self,
        *,
        num_byzantine: int = 0,
        keep: int | None = None,
        sketch: int | None = None,
        seed: int = 0,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        policy = MultiKrumPolicy(num_byzantine, keep)
        super().__init__(
            policy,
            sketch=sketch,
            seed=seed,
            reuse=reuse,
            client_weights=client_weights,
            **options,
        )
        self.num_byzantine = policy.num_byzantine
        self.keep = policy.keep
