# SPDX-License-Identifier: Apache-2.0
"""What a rule costs, as each rule states it for :func:`fastagg.plan`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The sizes of a round: K clients, S of them active, d parameters.

    ``adopting``: updates come in an :class:`fastagg.UpdateBuffer`, whose rows the rule may keep.
    """

    K: int
    S: int
    d: int
    adopting: bool


@dataclass(frozen=True)
class Cost:
    """Bytes and flops of a rule.

    Attributes:
        state: bytes that the rule keeps between rounds, at most.
        scratch: bytes that it needs besides, at most, during a step or between them.
        moved: bytes read and written in a round.
        flops: additions and multiplications in a round.
        reduced: bytes of what takes all columns together: where columns are spread over ranks, each
            sends so many to the next, and receives the result.
    """

    state: int
    scratch: int
    moved: int
    flops: int
    reduced: int = 0
