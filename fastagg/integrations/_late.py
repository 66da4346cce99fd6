# SPDX-License-Identifier: Apache-2.0
"""What a server keeps of earlier rounds, so that late answers to them can count."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class _Round:
    """A round that has been opened."""

    steps: int  # of the rule, before it
    params: Tensor  # [d], the model that was sent; rounds with the same one share it
    missing: set[str]  # senders that were asked and have not answered


class EarlierRounds:
    """The models of the last rounds, and the senders that have not answered yet.

    Clients send weights, so the update of a late answer is the difference from the model of its own
    round. Its age is the number of steps of the rule since then, which is less than the number of
    rounds if the rule took no step in some. A model is kept for ``most`` steps.

    The rounds are those of this process: after a restart, nobody can answer to the ones before.

    Args:
        most: the largest age of an answer, ``max_staleness``; None or 0: nothing is kept, and no
            late answer counts.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most or 0
        self._rounds: dict[int, _Round] = {}

    def begin(self, number: int, senders: Iterable[str], params: Tensor, steps: int) -> None:
        """Note a round: its number, who is asked, the model [d], and the steps of the rule."""
        if not self.most:
            return
        kept = {n: r for n, r in self._rounds.items() if steps - r.steps <= self.most}
        last = next(reversed(self._rounds.values()), None)
        same = last is not None and torch.equal(last.params, params)
        own = last.params if same and last is not None else params.clone()
        self._rounds = {**kept, number: _Round(steps, own, set(senders))}

    def end(self, number: int, answered: Collection[str]) -> None:
        """Note that senders have answered in a round, in time or late."""
        if number in self._rounds:
            self._rounds[number].missing.difference_update(answered)

    def oldest(self, present: int) -> int:
        """Return the number of the first round that is kept; ``present`` if none is."""
        return min(self._rounds, default=present)

    def problem(self, number: int, sender: str) -> str | None:
        """Return why an answer to an earlier round cannot be used; None if it can."""
        if not self.most:
            return f"late: round {number} has ended"
        if number not in self._rounds:
            return f"late: round {number} is too old, max_staleness is {self.most}"
        if sender not in self._rounds[number].missing:
            return f"was not asked in round {number}, or has answered already"
        return None

    def model(self, number: int) -> Tensor:
        """Return the model [d] of a round for which :meth:`problem` found none."""
        return self._rounds[number].params

    def age(self, number: int, steps: int) -> int:
        """Return the steps of the rule since a round for which :meth:`problem` found none."""
        return steps - self._rounds[number].steps
