# SPDX-License-Identifier: Apache-2.0
"""The aggregates of the last rounds, to which the corrections of late rows belong (MimiC)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.options import FLOAT32_LIMIT, MOST, read_count
from fastagg.updates.small import copy_in_pieces_

RECENT = "recent"
"""Name of the state that has columns."""


class RecentAggregates:
    """The aggregates of the last A rounds that moved the parameters.

    A row of round r started from the model of that round, and so did the rows of the first
    aggregate from round r on: a skipped round leaves the model as it is. :meth:`find` returns this
    aggregate.

    Args:
        rounds: A >= 1, the largest age of a row.
        num_params: d.
        device: where the aggregates live.

    Attributes:
        recent: [A, d] float32; aggregate number n is at n modulo A. Zeros at first.
        count: [] int64, number of aggregates so far.
        before: [A] int64; the number of aggregates before round r is at r modulo A. Zeros at first.
    """

    def __init__(self, rounds: int, num_params: int, device: torch.device) -> None:
        self.recent = torch.zeros((rounds, num_params), dtype=torch.float32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device="cpu")
        self.before = torch.zeros(rounds, dtype=torch.int64, device="cpu")

    def find(self, since: int) -> Tensor | None:
        """Return the first aggregate [d] from round ``since`` on, not copied; None: there is none.

        Args:
            since: one of the last A rounds.
        """
        number = int(self.before[since % len(self.before)])
        return None if number == int(self.count) else self.recent[number % len(self.recent)]

    def add(self, t: int, aggregate: Tensor | None) -> None:
        """Note the aggregate [d] of round t; None: the round was skipped. Allocates nothing."""
        self.before[t % len(self.before)] = self.count
        if aggregate is not None:
            copy_in_pieces_(self.recent[int(self.count) % len(self.recent)], aggregate)
            self.count += 1

    def state(self) -> dict[str, Tensor]:
        return {RECENT: self.recent, "aggregates": self.count, "before": self.before}


def recent_bytes(options: Mapping[str, Any], num_params: int) -> int:
    """Return the bytes of state for the options of a rule with corrections.

    Raises:
        TypeError, ValueError: ``max_staleness`` is missing or wrong.
    """
    if options.get("staleness") is None:
        return 0
    most = read_count("max_staleness", options.get("max_staleness"), least=1, most=MOST)
    return most * (4 * num_params + 8) + 8


def check_recent(state: invariants.State) -> None:
    """Check the recent aggregates in a state that has ``rounds`` as well.

    Raises:
        ValueError: no steps lead to this state.
    """
    recent, before = cast(Tensor, state[RECENT]), cast(Tensor, state["before"])
    rounds, size = int(cast(Tensor, state["rounds"])), len(before)
    invariants.check_range("aggregates", cast(Tensor, state["aggregates"]), 0, rounds)
    count = int(cast(Tensor, state["aggregates"]))
    known = min(rounds, size)
    counts = [int(before[t % size]) for t in range(rounds - known, rounds)] + [count]
    steps = {later - earlier for earlier, later in pairwise(counts)}
    valid = steps <= {0, 1} and counts[0] >= 0 and (known == size or counts[0] == 0)
    invariants.require(valid, "before", "numbers of aggregates before the last rounds")
    positions = torch.arange(size, device="cpu")
    invariants.check_blank("before", before, positions >= known, "there was no round")
    invariants.check_range(RECENT, recent, -FLOAT32_LIMIT, FLOAT32_LIMIT)
    invariants.check_blank_rows(
        RECENT, recent, positions >= min(count, size), "there was no aggregate"
    )
