# SPDX-License-Identifier: Apache-2.0
"""Trimmed mean: of each column, without its extreme values (Yin et al. 2018)."""

from __future__ import annotations

from fastagg import ops
from fastagg.registry import register
from fastagg.rules._columnwise_rule import TrimmingRule
from fastagg.rules.gram_policy import check_majority
from fastagg.updates.columns import ColumnStatistic


@register("trimmed-mean")
class TrimmedMean(TrimmingRule):
    """``params += server_lr * v``, v[k] the trimmed mean of the active clients' values u_s[k].

    It is the mean without the f smallest and the f largest of the S values. Source: Yin, Chen,
    Ramchandran and Bartlett 2018, definition 2 and algorithm 1, option II, with beta = f / S.

    Args:
        num_byzantine: f, the largest number of Byzantine clients among the active ones, >= 0. With
            0 the rule is the mean.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    A step raises ValueError if S <= 2f.
    """

    def _statistic(self, num_rows: int) -> ColumnStatistic:
        check_majority(num_rows, self.num_byzantine)
        return ColumnStatistic(ops.trimmed_mean_, self.num_byzantine)
