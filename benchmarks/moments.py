# SPDX-License-Identifier: Apache-2.0
"""The comparison of the step of a server optimizer with ``torch.optim.Adam``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Comparison, Contender
from benchmarks.operands import normal, zeros
from fastagg import ops

_RATE, _BETAS, _TAU = 1e-3, (0.9, 0.99), 1e-3


def adam(S: int, d: int) -> Comparison:
    """A step of Adam on one vector of d parameters, along an aggregate that does not change.

    The rate and tau are those with which the step has torch's correction of the bias.
    """
    aggregate, moments = normal(S, d), zeros(3, d)
    params, m, s = moments.unbind(0)
    steps = itertools.count(1)

    def ours() -> Tensor:
        n = next(steps)
        first, second = (1.0 - beta**n for beta in _BETAS)
        rate, tau = _RATE * math.sqrt(second) / first, _TAU * math.sqrt(second)
        return ops.add_adaptive_(params, m, s, aggregate[0], "adam", rate, *_BETAS, tau)

    def torchs(**form: bool) -> Callable[[], Tensor]:
        own = torch.nn.Parameter(zeros(1, d)[0])
        own.grad = aggregate[0]
        optimizer = torch.optim.Adam([own], lr=_RATE, betas=_BETAS, eps=_TAU, maximize=True, **form)

        def step() -> Tensor:
            optimizer.step()
            return own.detach()

        return step

    contenders = [
        Contender("fastagg", ours, "ours"),
        Contender("torch.optim.Adam, fused", torchs(fused=True)),
        Contender("torch.optim.Adam, foreach", torchs(foreach=True), "naive"),
    ]
    return Comparison("add_adaptive_", S, d, contenders, (moments[0:1], aggregate))
