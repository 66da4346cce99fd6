# SPDX-License-Identifier: Apache-2.0
"""Refuse updates that are views of a rule's own state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor

from fastagg.updates.cohort import Cohort


def refuse_shared_memory(cohort: Cohort, state: Sequence[Tensor]) -> None:
    """Refuse rows that share memory with the rule's own ``state``, which the step may write.

    Args:
        cohort: the rows of this step.
        state: contiguous tensors [d] of one dtype.

    Raises:
        ValueError: names the client.
    """
    if not state:
        return
    length, starts = state[0].nbytes, [tensor.data_ptr() for tensor in state]
    rows = cohort.rows
    if isinstance(rows, Tensor):  # all of them lie before or after the state, as a rule
        begin = rows.data_ptr()
        end = begin + rows.itemsize * ((len(rows) - 1) * rows.stride(0) + rows.shape[1])
        if end <= min(starts) or max(starts) + length <= begin:
            return
    starts.sort()
    for client, row in zip(cohort.ids, rows, strict=True):
        if not isinstance(row, Tensor):
            continue
        begin = row.data_ptr()
        before = bisect_left(starts, begin + row.nbytes) - 1  # the last that begins before its end
        if before >= 0 and starts[before] + length > begin:
            raise ValueError(
                "updates: must not share memory with the aggregator's, but client "
                f"{client}'s does; pass a separate tensor, such as row.clone()"
            )
