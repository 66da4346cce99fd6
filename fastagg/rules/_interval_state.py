# SPDX-License-Identifier: Apache-2.0
"""The participation intervals of clients, from which ``fedau`` and ``fedstale`` estimate rates."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastagg.checkpoint import invariants

_ROUNDING = 1e-6
"""Relative margin for the float64 roundings of the factors, of which each adds 2^-53."""


LONGEST = 1 << 31
"""The largest cutoff, in rounds."""

Intervals = tuple[Tensor, Tensor, Tensor]
"""factors [K] float64, the mean length of a client's intervals so far, 1 before the first one ends;
intervals [K] int64, the number of those that have ended; waiting [K] int64, the rounds since."""


def first_intervals(num_clients: int) -> Intervals:
    """Return the intervals before the first round."""
    return (
        torch.ones(num_clients, dtype=torch.float64, device="cpu"),
        torch.zeros(num_clients, dtype=torch.int64, device="cpu"),
        torch.zeros(num_clients, dtype=torch.int64, device="cpu"),
    )


def intervals_after(before: Intervals, clients: Tensor, cutoff: int) -> Intervals:
    """Return the intervals after another round, in new tensors.

    Args:
        before: those before the round; not changed.
        clients: [S] int64, the active ones.
        cutoff: length of the longest interval in rounds.
    """
    factors, intervals, waiting = before
    waiting = waiting + 1
    ended = waiting == cutoff
    ended[clients] = True
    intervals = intervals + ended
    change = (waiting - factors) / intervals.clamp_min(1)
    factors = factors + torch.where(ended, change, 0.0)
    return factors, intervals, waiting.masked_fill_(ended, 0)


def intervals_without(before: Intervals, ids: list[int]) -> Intervals:
    """Return the intervals with those of ``ids`` as they are at first, in new tensors."""
    places = torch.tensor(ids, device="cpu")
    factors, intervals, waiting = before
    return (
        factors.index_fill(0, places, 1.0),
        intervals.index_fill(0, places, 0),
        waiting.index_fill(0, places, 0),
    )


def check_interval_state(state: invariants.State, cutoff: int) -> None:
    """Check factors, intervals and waiting times in the state of a rule.

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
