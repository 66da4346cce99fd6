# SPDX-License-Identifier: Apache-2.0
"""The geometric median of the updates, by Weiszfeld's algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import read_count, read_positive
from fastagg.registry import register
from fastagg.rules._gram_rule import GramRule, ReuseOptions
from fastagg.rules.gram_policy import Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack


class WeiszfeldPolicy(Policy):
    """``iterations`` steps of the smoothed Weiszfeld algorithm from the weighted mean or zero."""

    def __init__(self, nu: float, iterations: int, start: str) -> None:
        self.nu = read_positive("nu", nu)
        self.iterations = read_count("iterations", iterations, least=1 if start == "zero" else 0)
        if start not in ("mean", "zero"):
            raise ValueError(f"start: expected 'mean' or 'zero', got {start!r}")
        self.start = start

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        start = weights if self.start == "mean" else torch.zeros_like(weights)
        return ops.weiszfeld(gram, weights, start, self.nu, self.iterations)


@register("geometric-median")
class GeometricMedian(GramRule):
    """``params += server_lr * z``, z near the minimum of ``sum_s w_s |u_s - z|`` (RFA).

    The smoothed Weiszfeld algorithm of Pillutla, Kakade and Harchaoui, from the weighted mean::

        z = sum_s a_s u_s,   a_s = w_s / sum w
        repeat:  a_s = w_s / max(nu, |u_s - z|), divided by their sum;  z = sum_s a_s u_s

    z stays in the convex hull of the updates, and updates with less than half of the weight cannot
    take the median away from the others. Where they try, an iteration divides what is left of
    their pull by the ratio of the two weights: a mean pulled very far away takes more iterations.
    From ``start="zero"``, as in Su et al., it comes from the other side, and does not move with a
    translation of the updates before it has converged.

    Args:
        nu: smoothing, > 0, in units of the updates.
        iterations: >= 0; each touches S x S numbers only. 0 gives the mean (and needs it as start).
        start: the first z: ``"mean"``, the weighted mean, or ``"zero"``.
        reuse: remember the last update of every client and use it again (:class:`GramRule`).
        client_weights: [K] relative weights; None: equal.
        **options: those of :class:`fastagg.aggregator.Aggregator`.
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
