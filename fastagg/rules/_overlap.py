# SPDX-License-Identifier: Apache-2.0
"""A check of the rows that a step would otherwise make halfway through its writing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from torch import Tensor

from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import AnyRows


def refuse_shared_memory(cohort: Cohort, state: Iterable[Tensor]) -> None:
    """Refuse rows that are views of the rule's own ``state``, which the step writes.

    Raises:
        ValueError: names the client.
    """
    own = sorted(map(_span, state))
    if _apart(cohort.rows, own):
        return
    starts = [start for start, _ in own]
    for client, row in zip(cohort.ids, cohort.rows, strict=True):
        start, stop = _span(row) if isinstance(row, Tensor) else (0, 0)
        before = bisect_left(starts, stop) - 1  # the last one that begins before the row ends
        if before >= 0 and own[before][1] > start:
            raise ValueError(
                f"updates: must not share memory with the aggregator's, but client {client}'s "
                "does; pass a separate tensor"
            )


def _apart(rows: AnyRows, own: list[tuple[int, int]]) -> bool:
    """Whether all rows of one tensor [S, d] lie before or after all of ``own``, ascending."""
    if not own or not isinstance(rows, Tensor) or not rows.numel():
        return False
    start = rows.data_ptr()
    stop = start + rows.itemsize * ((len(rows) - 1) * rows.stride(0) + rows.shape[1])
    return stop <= own[0][0] or max(stop for _, stop in own) <= start


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a contiguous tensor, from the first to after the last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
