# SPDX-License-Identifier: Apache-2.0
"""The geometric median of the updates, by Weiszfeld's algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import MOST_ITERATIONS, read_count, read_positive
from fastagg.registry import register
from fastagg.rules._gram_rule import GramRule, ReuseOptions
from fastagg.rules.gram_policy import Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack


class WeiszfeldPolicy(Policy):
    """Run the smoothed Weiszfeld algorithm, starting from the weighted mean or from zero."""

    def __init__(self, nu: float, iterations: int, start: str) -> None:
        self.nu = read_positive("nu", nu)
        self.iterations = read_count(
            "iterations", iterations, least=1 if start == "zero" else 0, most=MOST_ITERATIONS
        )
        if start not in ("mean", "zero"):
            raise ValueError(f"start: expected 'mean' or 'zero', got {start!r}")
        self.start = start
        self.uses_norms = start == "zero"  # the first distances are those from zero

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        start = weights if self.start == "mean" else torch.zeros_like(weights)
        return ops.weiszfeld(gram, weights, start, self.nu, self.iterations)


@register("geometric-median")
class GeometricMedian(GramRule):
    """``params += server_lr * z``, where z approximately minimises ``sum_s w_s |u_s - z|`` (RFA).

    Source: the smoothed Weiszfeld algorithm of Pillutla, Kakade and Harchaoui::

        z = sum_s a_s u_s,   a_s = w_s / sum w
        repeat:  a_s = w_s / max(nu, |u_s - z|), divided by their sum
                 z = sum_s a_s u_s

    z stays in the convex hull of the updates. Outliers with less than half of the weight can move
    the median only by a bounded distance. They can move the starting mean arbitrarily far; an
    iteration divides that displacement by the ratio of the two weights (inliers to outliers), so a
    mean that is very far away needs more iterations. ``start="zero"``, as in Su et al., avoids
    this, but a result that has not converged is then not equivariant to translation of the updates.

    Args:
        nu: smoothing, > 0, in units of the updates.
        iterations: in [0, 100000]; 0 gives the weighted mean and requires ``start="mean"``. An
            iteration takes O(S^2) operations, whatever d is.
        start: the first z: ``"mean"`` (the weighted mean) or ``"zero"``.
        reuse: use the last updates of absent clients as well; see :class:`GramRule`.
        client_weights: [K] relative weights; None: equal.
        **options: ``memory_dtype``, ``memory_folder`` and ``max_age`` (:class:`GramRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).
    """

    def __init__(
        self,
        *,
        nu: float = 1e-6,
        iterations: int = 8,
        start: str = "mean",
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        policy = WeiszfeldPolicy(nu, iterations, start)
        super().__init__(policy, reuse=reuse, client_weights=client_weights, **options)
        self.nu = policy.nu
        self.iterations = policy.iterations
        self.start = policy.start
