# SPDX-License-Identifier: Apache-2.0
"""The minimum work of each op, independent of the implementation.

All rates are computed with these formulas. S rows of d float32 are 4 S d bytes. Bytes count every
operand once for reading and once for writing; flops count a fused multiply-add as two.

======================= ============================ ==================== ==========
op                      bytes                        flops                pattern
======================= ============================ ==================== ==========
gram                    4 S d                        S (S + 1) d          read
gram of groups          4 S d                        S (S / 10 + 1) d     read
gram_rows               4 S d                        4 S d                read
gram_and_sum_           4 S d + 8 d                  S (S + 3) d          read
sketch_                 4 S d                        4 S d                read
select_friends          6 S K + S K / 8              S K                  read
eliminate_              12 S K + S K / 2             2 S K                read
update_scores_          20 S S                       3 S S                read
weighted_sum_           4 S d + 8 d                  2 S d                read
mimic_                  12 S d + 8 d                 3 S d + 2 d          update
memory_update_          12 S d + 24 d                3 S d + 3 d          update
add_adaptive_           28 d                         12 d                 update
step of fedavg          as weighted_sum_
step of fdms            as gram_and_sum_
step of fdms, sketch    4 S d + 8 d                  6 S d                read
steps of mimic, mimic-aged  as mimic_
steps of mifa, stale    as memory_update_
step of mifa, int8      6 S d + 24 d                 as memory_update_    update
step of fedvarp         12 S d + 48 d                3 S d + 6 d          update
columns                 4 S d + 4 d                  S d                  read
steps of robust rules   8 S d + 8 d (rows twice)     S (S + 3) d          read
======================= ============================ ==================== ==========

``gram_rows`` is for 2 changed rows. The ops on pairs of clients are for K = 2 S clients, S of them
active, and have K instead of d. A pair is a float32 score, an int16 count and a bit. ``eliminate_``
processes all 2 S rows and writes the bits. ``update_scores_`` reads and writes the pairs of active
clients, and reads their float64 scores of the round.

``columns`` are the statistics of sorted columns. Comparisons are not flops.

8 d bytes are the parameters (read and written), 24 d bytes the parameters and a float64 total. The
aggregate of fedvarp is not its total, so the total is read and written once more. The
pattern is the bandwidth that bounds the op: that of reading, or that of updating (two values read
and one written, 12 bytes). Ops update in place; steps that may not change old rows before all is
checked write the new ones beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CHANGED = 2
"""Number of changed rows in "gram_rows"."""
GROUPS = 10
"""Number of groups in "gram of groups"; candidate sets have shrunk to these groups."""


@dataclass(frozen=True)
class Work:
    """The minimum number of bytes and flops of a call; pattern is "read" or "update"."""

    num_bytes: int
    flops: int
    pattern: str

    @property
    def intensity(self) -> float:
        """Flops per byte."""
        return self.flops / self.num_bytes

    def floor(self, bandwidth: float, peak: float) -> float:
        """Return the minimum time in seconds, at a bandwidth in bytes/s and a peak in flops/s."""
        return max(self.num_bytes / bandwidth, self.flops / peak)


def gram(S: int, d: int) -> Work:
    return Work(4 * S * d, S * (S + 1) * d, "read")


def gram_of_groups(S: int, d: int) -> Work:
    return Work(4 * S * d, S * (S // GROUPS + 1) * d, "read")


def gram_rows(S: int, d: int) -> Work:
    return Work(4 * S * d, 2 * CHANGED * S * d, "read")


def sketch(S: int, d: int) -> Work:
    return Work(4 * S * d, 4 * S * d, "read")


def weighted_sum(S: int, d: int) -> Work:
    return Work(4 * S * d + 8 * d, 2 * S * d, "read")


def add_adaptive(S: int, d: int) -> Work:
    return Work(28 * d, 12 * d, "update")


def select_friends(S: int, K: int) -> Work:
    return Work(6 * S * K + S * K // 8, S * K, "read")


def eliminate(S: int, K: int) -> Work:
    return Work(12 * S * K + S * K // 2, 2 * S * K, "read")


def update_scores(S: int, K: int) -> Work:
    return Work(20 * S * S, 3 * S * S, "read")


def mimic(S: int, d: int) -> Work:
    return Work(12 * S * d + 8 * d, 3 * S * d + 2 * d, "update")


def memory_update(S: int, d: int) -> Work:
    return Work(12 * S * d + 24 * d, 3 * S * d + 3 * d, "update")


def memory_of_int8(S: int, d: int) -> Work:
    return Work(6 * S * d + 24 * d, 3 * S * d + 3 * d, "update")


def fedvarp(S: int, d: int) -> Work:
    return Work(12 * S * d + 48 * d, 3 * S * d + 6 * d, "update")


def gram_and_sum(S: int, d: int) -> Work:
    return Work(4 * S * d + 8 * d, S * (S + 3) * d, "read")


def sketched_step(S: int, d: int) -> Work:
    return Work(4 * S * d + 8 * d, 6 * S * d, "read")


def columns(S: int, d: int) -> Work:
    return Work(4 * S * d + 4 * d, S * d, "read")


def two_reads(S: int, d: int) -> Work:
    """The Gram matrix of the rows, then a weighted sum of them."""
    return Work(8 * S * d + 8 * d, S * (S + 3) * d, "read")


WORK: dict[str, Callable[[int, int], Work]] = {
    "gram": gram,
    "gram of a list": gram,
    "gram of groups": gram_of_groups,
    "gram of all pairs": gram,
    "gram_rows": gram_rows,
    "sketch_": sketch,
    "gram_and_sum_": gram_and_sum,
    "select_friends": select_friends,
    "eliminate_": eliminate,
    "update_scores_": update_scores,
    "weighted_sum_": weighted_sum,
    "add_adaptive_": add_adaptive,
    "mimic_": mimic,
    "memory_update_": memory_update,
    "step fedavg": weighted_sum,
    "step fdms": gram_and_sum,
    "step fdms, sketch": sketched_step,
    "step mimic": mimic,
    "step mimic-aged": mimic,
    "step mifa": memory_update,
    "step mifa, int8": memory_of_int8,
    "step stale": memory_update,
    "step fedvarp": fedvarp,
    "step geometric-median": two_reads,
    "step multi-krum": two_reads,
    "step nnm": two_reads,
    "columns median": columns,
    "columns trimmed-mean": columns,
    "columns meamed": columns,
}
