# SPDX-License-Identifier: Apache-2.0
"""Refuse updates that share memory with the state of a rule."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastagg.ops.memory import shared_row
from fastagg.updates.cohort import Cohort


def refuse_shared_memory(cohort: Cohort, state: Sequence[Tensor]) -> None:
    """Refuse rows that share memory with tensors that the step may write.

    Args:
        cohort: the active clients and their rows; streamed rows are not checked.
        state: tensors of the rule, contiguous [d], all of one dtype.

    Raises:
        ValueError: a row shares memory with one of them; the message names the client.
    """
    position = shared_row(cohort.rows, state)
    if position >= 0:
        raise ValueError(
            "updates: must not share memory with the state of the aggregator, but the row of "
            f"client {cohort.ids[position]} does; pass a separate tensor, such as row.clone()"
        )
