# SPDX-License-Identifier: Apache-2.0
"""Mean around the median: of each column (Xie, Koyejo and Gupta 2018)."""

from __future__ import annotations

from fastagg import ops
from fastagg.registry import register
from fastagg.rules._columnwise_rule import TrimmingRule
from fastagg.rules.gram_policy import check_majority
from fastagg.updates.columns import ColumnStatistic


@register("meamed")
class Meamed(TrimmingRule):
    """``params += server_lr * v``, v[k] the mean of the values u_s[k] nearest to their median.

    The S - f nearest ones of the active clients' S values count. Of two values at the same distance
    from the median, the smaller one is nearer. Source: Xie, Koyejo and Gupta 2018, "Generalized
    Byzantine-tolerant SGD".

    Args:
        num_byzantine: f, the largest number of Byzantine clients among the active ones, >= 0. With
            0 the rule is the mean.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    A step raises ValueError if S <= 2f.
    """

    def _statistic(self, num_rows: int) -> ColumnStatistic:
        check_majority(num_rows, self.num_byzantine)
        return ColumnStatistic(ops.meamed_, num_rows - self.num_byzantine)
