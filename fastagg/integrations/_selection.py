# SPDX-License-Identifier: Apache-2.0
"""Which senders a server asks, of those that are connected."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from fastagg.options import MOST

SELECTIONS = ("random", "longest-absent")


class Selection:
    """Choose senders for training.

    Args:
        kind: "random": uniformly. "longest-absent": those that were asked the longest ago, those
            never asked first; ties are broken at random (Yan et al. 2020, FedLaAvg, where all that
            are asked answer). A sender that does not answer counts as asked, because it would be
            asked in every round otherwise.

    Attributes:
        asked: dict from senders to the last round in which each was asked. Empty with "random".
    """

    def __init__(self, kind: str = "random") -> None:
        if kind not in SELECTIONS:
            raise ValueError(f"selection: expected one of {SELECTIONS}, got {kind!r}")
        self.kind = kind
        self.asked: dict[str, int] = {}
        self._last = 0  # the number of the round of the last :meth:`note`
        self._before: dict[str, int] = {}  # `asked` before it

    def draw(self, candidates: Sequence[str], count: int, rng: random.Random) -> list[str]:
        """Return ``count`` different ``candidates``, or all of them if there are fewer."""
        count = min(count, len(candidates))
        if self.kind == "random":
            return rng.sample(candidates, count)
        order = rng.sample(candidates, len(candidates))
        order.sort(key=lambda sender: self.asked.get(sender, -1))
        return order[:count]

    def note(self, number: int, senders: Collection[str], lasting: Collection[str] | None) -> None:
        """Note that ``senders`` are asked in round ``number``.

        Args:
            number: of the round.
            senders: those that are asked.
            lasting: other senders to remember; None: all.
        """
        if self.kind == "random":
            return
        if number != self._last:
            self._last, self._before = number, self.asked
        kept = self.asked if lasting is None else {k: self.asked.get(k, -1) for k in lasting}
        kept = {sender: last for sender, last in kept.items() if last >= 0}
        self.asked = {**kept, **dict.fromkeys(senders, number)}

    def finished(self, rounds: int) -> dict[str, int]:
        """Return ``asked`` as after this number of rounds, without those of a round that is open.

        A restart begins that round again, and must ask the same senders.
        """
        return self._before if self._last > rounds else self.asked

    def load_json(self, asked: object) -> None:
        """Take ``asked`` of a checkpoint; an older one has none.

        Raises:
            ValueError: it is not a map of senders to rounds. Nothing has changed.
        """
        if not isinstance(asked, Mapping) or not all(
            isinstance(sender, str) and type(last) is int and 0 <= last < MOST
            for sender, last in asked.items()
        ):
            raise ValueError(f"asked: expected a map of senders to rounds, got {asked!r}")
        self.asked = dict(asked) if self.kind != "random" else {}
