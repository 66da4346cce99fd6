# SPDX-License-Identifier: Apache-2.0
"""What holds for the participation intervals of clients after any sequence of FedAU steps."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fastagg.checkpoint import invariants

_ROUNDING = 1e-6
"""Relative margin for the float64 roundings of the factors, of which each adds 2^-53."""


def check_interval_state(state: invariants.State, cutoff: int) -> None:
    """Check factors, intervals and waiting times of :class:`fastagg.FedAU`.

    Raises:
        ValueError: no steps lead to this state.
    """
    factors = cast(Tensor, state["factors"])
    intervals, waiting = cast(Tensor, state["intervals"]), cast(Tensor, state["waiting"])
    invariants.check_range("factors", factors, 1.0, cutoff * (1.0 + _ROUNDING))
    invariants.check_rounds("intervals", intervals)
    invariants.check_range("waiting", waiting, 0, cutoff - 1)
    invariants.require(
        bool((factors[intervals == 0] == 1.0).all()), "factors", "1 before the first interval"
    )
    rounds = factors * intervals  # the sum of the lengths of the intervals that have ended
    invariants.require(
        bool(((rounds - rounds.round()).abs() <= _ROUNDING * rounds).all()),
        "factors",
        "intervals of whole rounds",
    )
