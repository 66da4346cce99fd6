# SPDX-License-Identifier: Apache-2.0
"""Median: of each column (Yin et al. 2018)."""

from __future__ import annotations

from fastagg import ops
from fastagg.registry import register
from fastagg.rules._columnwise_rule import ColumnwiseRule
from fastagg.updates.columns import ColumnStatistic


@register("median")
class Median(ColumnwiseRule):
    """``params += server_lr * v``, v[k] the median of the active clients' values u_s[k].

    For an even number of clients it is the mean of the two middle values. Source: Yin, Chen,
    Ramchandran and Bartlett 2018, definition 1 and algorithm 1, option I.

    Args:
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    def _statistic(self, num_rows: int) -> ColumnStatistic:
        return ColumnStatistic(ops.trimmed_mean_, (num_rows - 1) // 2)
