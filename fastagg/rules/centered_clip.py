# SPDX-License-Identifier: Apache-2.0
"""Centered clipping (Karimireddy, He and Jaggi), as Su et al. use it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fastagg.options import read_count, read_positive
from fastagg.registry import register
from fastagg.rules._gram import GramRule, ReuseOptions
from fastagg.rules._policy import Policy, distances_to

if TYPE_CHECKING:
    from typing_extensions import Unpack


def clip(gram: Tensor, weights: Tensor, tau: float, iterations: int) -> Tensor:
    """The factors [n + 1] after some steps of eq. 43 from the last of n + 1 rows.

    Args:
        gram: [n + 1, n + 1] float64.
        weights: [n] float64, > 0, of sum 1.
    """
    size = len(weights)
    factors = torch.zeros(size + 1, dtype=torch.float64)
    factors[size] = 1.0  # v_0
    for _ in range(iterations):
        distances = distances_to(gram, factors)[:size]
        clipped = (tau / distances).clamp_max(1.0)
        # v + sum_i w_i c_i (u_i - v); what is left of v is written so as to be 0 if all c are 1
        factors = (weights * (1.0 - clipped)).sum() * factors
        factors[:size] += weights * clipped
    return factors


class ClippingPolicy(Policy):
    """``iterations`` steps of eq. 43 from the last row, the previous aggregate."""

    uses_previous = True

    def __init__(self, tau: float, iterations: int) -> None:
        self.tau = read_positive("tau", tau, infinite=True)
        self.iterations = read_count("iterations", iterations, least=1)

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        return clip(gram, weights, self.tau, self.iterations)


@register("centered-clip")
class CenteredClip(GramRule):
    """``params += server_lr * v_L``, with v_0 the previous aggregate (Su et al. eq. 43)::

        v_{l+1} = v_l + sum_s w_s (u_s - v_l) min(1, tau / |u_s - v_l|),   l = 0 ... L - 1

    over the active clients s, with w_s the client's relative weight among them (1/S each by
    default), and over all clients with ``reuse``, as eq. 43 has it. Vectors are clipped whole, not
    layer by layer. v_0 is zero in the first round.

    Args:
        tau: clipping radius, > 0, in units of the updates, or infinity ("inf" is the same). The
            default is 10 / (1 - momentum) of Su et al. for momentum 0.9, sent as it is.
        iterations: L, >= 1; each touches S x S numbers only.
        reuse: remember the last update of every client and use it again (:class:`GramRule`).
        client_weights: [K] relative weights; None: equal.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

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

    def options(self) -> dict[str, Any]:
        tau = "inf" if math.isinf(self.tau) else self.tau  # which JSON cannot hold
        return super().options() | {"tau": tau, "iterations": self.iterations}
