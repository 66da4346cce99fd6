# SPDX-License-Identifier: Apache-2.0
"""Cost of a round, as each rule states it for :func:`fastagg.plan`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The sizes of a round.

    Attributes:
        K: number of clients.
        S: number of active clients.
        d: number of parameters (columns).
        owned: updates are in an :class:`fastagg.UpdateBuffer`, so the rule takes ownership of
            its rows instead of copying them.
    """

    K: int
    S: int
    d: int
    owned: bool


@dataclass(frozen=True)
class Cost:
    """Bytes and floating-point operations of a rule.

    Attributes:
        state: bytes that the rule keeps between rounds and writes to checkpoints.
        references: upper bound of the bytes of the reference vectors, which it keeps as well.
        scratch: upper bound of the further bytes that it holds, during a step or between steps.
        moved: bytes read and written in a round.
        flops: additions and multiplications in a round.
        reduced: bytes of the results that need all columns, such as the Gram matrix. If the columns
            are spread over ranks, each rank sends this many bytes to the next rank and receives
            the result.
        sketched: numbers of rows of which sketches are computed. ``moved`` has 4 bytes, and
            ``flops`` 6 operations, for each.
    """

    state: int
    scratch: int
    moved: int
    flops: int
    reduced: int = 0
    references: int = 0
    sketched: int = 0
