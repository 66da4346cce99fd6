# SPDX-License-Identifier: Apache-2.0
"""The ages of memory rows, for the options ``max_age`` and ``staleness``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.options import MOST, read_count
from fastagg.staleness import Staleness
from fastagg.updates.cohort import Cohort


class RowAges:
    """The round of each client's memory row, and whose memory rows have expired.

    The age of a memory row is the number of rounds since its client was last active, skipped rounds
    included: 1 if it was active in the previous round. A row that arrived late belongs to the round
    whose model it started from, and its age counts from that round. A row of a higher age than
    ``max_age`` has expired: in this round and until the client is active again, it counts as never
    seen.

    Args:
        num_clients: K.
        max_age: >= 1; None: no row expires.
        rounds: [] int64, the rounds so far, which the rule counts.

    Attributes:
        last: [K] int64, the round of the client's memory row; -1: there is none, or it has expired.
    """

    def __init__(self, num_clients: int, max_age: int | None, rounds: Tensor) -> None:
        self.max_age, self.rounds = max_age, rounds
        self.last = torch.full((num_clients,), -1, dtype=torch.int64, device="cpu")

    def expired(self) -> list[int]:
        """Return the ids of the clients whose rows have expired, ascending."""
        if self.max_age is None:
            return []
        old = (self.last >= 0) & (self.rounds - self.last > self.max_age)
        found: list[int] = old.nonzero().flatten().tolist()
        return found

    def too_late(self, cohort: Cohort, ages: Tensor) -> dict[int, str]:
        """Return, by position, why late rows cannot become memory rows.

        A memory keeps the newest row of a client. So a row is too late if the memory row is of the
        same round or of a later one; and so is one that would have expired.

        Args:
            cohort: the active clients, with late rows.
            ages: [S] int64, those of the cohort.

        Raises:
            ValueError: a row is from before the first round.
        """
        rounds, oldest = int(self.rounds), int(ages.max())
        if oldest > rounds:
            raise ValueError(
                f"ages: expected at most {rounds}, the number of rounds so far, got {oldest}"
            )
        found = {}
        known = self.of(cohort.clients).tolist()
        for position, (age, remembered) in enumerate(zip(ages.tolist(), known, strict=True)):
            if age and self.max_age is not None and age > self.max_age:
                found[position] = f"age {age}, but rows expire at max_age = {self.max_age}"
            elif age and remembered <= age:
                found[position] = f"age {age}, but a row of age {remembered} is remembered"
        return found

    def of(self, clients: Tensor, late: Tensor | None = None) -> NDArray[np.int64]:
        """Return the ages of the clients' memory rows [S].

        For a client without a memory row, it is the number of rounds so far, plus 1.

        Args:
            clients: [S] int64.
            late: [S] int64, how many rounds ago the round was in which the ages are wanted; None:
                zeros.
        """
        # NumPy: torch's operations take several times as long, which counts for small models.
        ages: NDArray[np.int64] = int(self.rounds) - self.last.numpy()[clients.numpy()]
        return ages if late is None else ages - late.numpy()

    def renew(
        self, clients: Tensor, expired: Sequence[int] = (), ages: Tensor | None = None
    ) -> None:
        """Note that ``clients`` have new rows, and that other rows have expired.

        Call it before the round is counted.

        Args:
            clients: [S] int64.
            expired: ids.
            ages: [S] int64, of the new rows; None: zeros.
        """
        self.forget(expired)
        rounds = int(self.rounds)
        self.last.numpy()[clients.numpy()] = rounds if ages is None else rounds - ages.numpy()

    def forget(self, clients: Sequence[int]) -> None:
        """Note that ``clients`` count as never active."""
        for client in clients:
            self.last[client] = -1


def read_max_age(value: object) -> int | None:
    """Return the option ``max_age``: None or a number of rounds, at least 1."""
    return None if value is None else read_count("max_age", value, least=1, most=MOST)


def make_ages(
    num_clients: int, max_age: int | None, staleness: Staleness | None, rounds: Tensor
) -> RowAges | None:
    """Return the ages of the rows of a rule; None if no option needs them.

    Late rows need them, because the memory keeps the newest row of a client.
    """
    if max_age is None and staleness is None:
        return None
    return RowAges(num_clients, max_age, rounds)


def age_bytes(options: Mapping[str, Any], num_clients: int, *, counts_rounds: bool = False) -> int:
    """Return the bytes of state that ``max_age`` or ``staleness`` adds.

    Args:
        options: those of the rule.
        num_clients: K.
        counts_rounds: the rule has ``rounds`` in its state anyway.
    """
    if options.get("max_age") is None and options.get("staleness") is None:
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
