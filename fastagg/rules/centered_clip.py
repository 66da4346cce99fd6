# SPDX-License-Identifier: Apache-2.0
"""Centered clipping (Karimireddy, He and Jaggi), as Su et al. use it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fastagg import ops
from fastagg.options import MOST_ITERATIONS, read_count, read_positive
from fastagg.registry import register
from fastagg.rules._gram_rule import GramRule, ReuseOptions
from fastagg.rules.gram_policy import Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ClippingPolicy(Policy):
    """Iterate eq. 43 of Su et al., starting from the last row, which is the previous aggregate."""

    uses_previous = True

    def __init__(self, tau: float, iterations: int) -> None:
        self.tau = read_positive("tau", tau, infinite=True)
        self.iterations = read_count("iterations", iterations, least=1, most=MOST_ITERATIONS)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        return ops.clip_towards(gram, weights, self.tau, self.iterations)


@register("centered-clip")
class CenteredClip(GramRule):
    """``params += server_lr * v_L``, where v_0 is the previous aggregate (Su et al. eq. 43)::

        v_{l+1} = v_l + sum_s w_s (u_s - v_l) min(1, tau / |u_s - v_l|), l = 0 ... L - 1

    The sum is over the active clients s, and w_s is the weight of client s divided by the sum of
    their weights (1/S by default). With ``reuse`` it is over all clients, as in eq. 43. Vectors
    are clipped as a whole, not layer by layer. v_0 is zero in the first round.

    Args:
        tau: clipping radius, > 0, in units of the updates; ``math.inf`` or "inf": no clipping. The
            default is 10 / (1 - momentum) of Su et al. for momentum 0.9, where clients send their
            momentum without the factor 1 - momentum.
        iterations: L, in [1, 100000]. An iteration takes O(S^2) operations, whatever d is.
        reuse: use the last updates of absent clients as well; see :class:`GramRule`.
        client_weights: [K] relative weights; None: equal.
        **options: ``memory_dtype``, ``memory_folder`` and ``max_age`` (:class:`GramRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    Attributes:
        previous: [d] float32, v_0 of the next round.
    """

    def __init__(
        self,
        *,
        tau: float | Literal["inf"] = 100.0,
        iterations: int = 3,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        policy = ClippingPolicy(math.inf if tau == "inf" else tau, iterations)
        super().__init__(policy, reuse=reuse, client_weights=client_weights, **options)
        self.tau = policy.tau
        self.iterations = policy.iterations
