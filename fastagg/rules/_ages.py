# SPDX-License-Identifier: Apache-2.0
"""The ages of memory rows, for the option ``max_age``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.options import MOST, read_count


class RowAges:
    """The round in which each client was last active, and whose memory rows have expired.

    The age of a memory row is the number of rounds since its client was last active, skipped rounds
    included: 1 if it was active in the previous round. A row of a higher age than ``max_age`` has
    expired: in this round and until the client is active again, it counts as never seen.

    Args:
        num_clients: K.
        max_age: >= 1.
        rounds: [] int64, the rounds so far, which the rule counts.

    Attributes:
        last: [K] int64, the round in which the client was last active; -1: never, or expired.
    """

    def __init__(self, num_clients: int, max_age: int, rounds: Tensor) -> None:
        self.max_age, self.rounds = max_age, rounds
        self.last = torch.full((num_clients,), -1, dtype=torch.int64)

    def expired(self) -> list[int]:
        """Return the ids of the clients whose rows have expired, ascending."""
        old = (self.last >= 0) & (self.rounds - self.last > self.max_age)
        found: list[int] = old.nonzero().flatten().tolist()
        return found

    def renew(self, clients: Tensor, expired: Sequence[int] = ()) -> None:
        """Note that ``clients`` were active in this round, and that other rows have expired.

        Call it before the round is counted.
        """
        self.forget(expired)
        self.last[clients] = self.rounds

    def forget(self, clients: Sequence[int]) -> None:
        """Note that ``clients`` count as never active."""
        for client in clients:
            self.last[client] = -1


def read_max_age(value: object) -> int | None:
    """Return the option ``max_age``: None or a number of rounds, at least 1."""
    return None if value is None else read_count("max_age", value, least=1, most=MOST)


def age_bytes(options: Mapping[str, Any], num_clients: int, *, counts_rounds: bool = False) -> int:
    """Return the bytes of state that ``max_age`` adds.

    Args:
        options: those of the rule.
        num_clients: K.
        counts_rounds: the rule has ``rounds`` in its state anyway.
    """
    if options.get("max_age") is None:
        return 0
    return 8 * num_clients + (0 if counts_rounds else 8)


def check_ages(state: invariants.State, rows: str) -> None:
    """Check ``last`` and ``rounds`` of a state; clients never active have zeros in ``rows``.

    Raises:
        ValueError: no steps lead to this state.
    """
    last, rounds = cast(Tensor, state["last"]), int(cast(Tensor, state["rounds"]))
    invariants.check_range("last", last, -1, rounds - 1)
    invariants.check_blank_rows(rows, state[rows], last == -1, "it was not active")
