# SPDX-License-Identifier: Apache-2.0
"""Assignment of columns to ranks: whole segments, in order, spread evenly."""

from __future__ import annotations

from fastagg.updates.columns import segment_columns


def default_segment(num_params: int, num_ranks: int) -> int:
    """Return the default number of columns of a segment.

    It is that of one process or, if there were fewer segments than ranks, the largest power of two
    that gives every rank a segment.

    Raises:
        ValueError: there are fewer columns than ranks.
    """
    if num_params < num_ranks:
        raise ValueError(
            f"num_params: expected at least one column for each of {num_ranks} ranks, "
            f"got {num_params}"
        )
    segment = segment_columns(num_params)
    while _count(num_params, segment) < num_ranks:
        segment //= 2
    return segment


def shard_bounds(num_params: int, num_ranks: int, segment: int) -> list[tuple[int, int]]:
    """Return the columns (begin, end) of every rank.

    Args:
        num_params: d.
        num_ranks: number of ranks.
        segment: columns of a segment.

    Raises:
        ValueError: there are fewer segments than ranks.
    """
    segments = _count(num_params, segment)
    if segments < num_ranks:
        raise ValueError(
            f"segment: expected at least one segment for each of {num_ranks} ranks, got {segments} "
            f"segments of {segment} columns in {num_params}; use fewer ranks or a smaller segment"
        )
    starts = [rank * segments // num_ranks * segment for rank in range(num_ranks)]
    return list(zip(starts, [*starts[1:], num_params], strict=True))


def _count(num_params: int, segment: int) -> int:
    """Return the number of segments."""
    return -(-num_params // segment)
