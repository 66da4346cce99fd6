# SPDX-License-Identifier: Apache-2.0
"""Base of the rules whose aggregate is a statistic of each column."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator, CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.options import read_count
from fastagg.report import Plan, Reading
from fastagg.staleness import none_but_constant
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import ColumnStatistic
from fastagg.updates.small import factors_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


def sorting_operations(num_rows: int) -> int:
    """Return the minima and maxima of a bitonic sorting network, for each of n values.

    There are L (L + 1) / 2 stages with L = ceil(log2 n), and in each stage one for each value.
    """
    levels = (num_rows - 1).bit_length()
    return levels * (levels + 1) // 2


class ColumnwiseRule(Aggregator[Plan, Reading]):
    """``params += server_lr * v``; v[k] is a statistic of the S values of column k.

    A client has a different influence on every column, so the rule has no factor for a row.
    ``StepReport.weights`` are 1/S. A step reads the rows once; with ``max_norm`` once more, unless
    they are streamed. A late row is a row like any other.

    Args:
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    collects_streams = False
    gathers_rows = True
    reads_streams_once = True
    remembers_clients = False
    no_weights = "it sorts the values of a column, and every client has one value"
    refused = MappingProxyType(
        {
            "client_weights": "the rule sorts the values of a column, and every client has one "
            "value; to leave a client out, do not pass its update",
            "sketch": "a sketch has no values of columns, and the rule needs no distances",
            "reuse": "last updates of absent clients are not remembered; bulyan has reuse",
        }
    )

    refused_staleness = none_but_constant(
        "the rule sorts the values of a column, and every row has one value"
    )

    def __init__(self, **options: Unpack[CommonOptions]) -> None:
        super().__init__(**options)
        self._aggregate = torch.zeros(
            self.num_params, device=self.device, dtype=torch.float32
        )  # [d], scratch

    @abstractmethod
    def _statistic(self, num_rows: int) -> ColumnStatistic:
        """Return the statistic of S rows.

        Raises:
            ValueError: the rule needs more rows.
        """

    def _receive(self, cohort: Cohort) -> Cohort:
        return cohort  # rows need not be in memory

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True  # as their values are read

    def _plan(self, cohort: Cohort) -> Plan:
        size = len(cohort)
        self._statistic(size)
        return Plan(factors_tensor([1.0 / size] * size))

    def _read(self, params: Tensor, cohort: Cohort, plan: Plan) -> Reading:
        statistic = self._statistic(len(cohort))
        # The norms of rows with scales have been checked.
        if cohort.streamed and self.max_norm is not None and cohort.scales is None:
            largest, squares = self.columns.statistic_and_squares_(
                self._aggregate, cohort.rows, statistic
            )
            self._check_squares(cohort, squares.tolist())
        else:
            largest = self.columns.statistic_(
                self._aggregate, cohort.rows, statistic, cohort.scales
            )
        # A value that is not finite may have been left out of the aggregate.
        if not math.isfinite(largest) or largest > self._largest_row():
            self._row_peaks(cohort)
        return Reading(plan.weights, self._vector(plan, params, self._aggregate))

    def _state(self) -> State:
        return {}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # As a weighted sum, but values are sorted instead of multiplied.
        S, d = sizes.S, sizes.d
        flops = (sorting_operations(S) + 1) * S * d
        return Cost(state=0, scratch=4 * d, moved=4 * S * d + 24 * d, flops=flops)


class TrimmingRule(ColumnwiseRule):
    """A columnwise rule that leaves values out.

    Args:
        num_byzantine: f, the largest number of Byzantine clients among the active ones, >= 0.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    def __init__(self, *, num_byzantine: int = 0, **options: Unpack[CommonOptions]) -> None:
        super().__init__(**options)
        self.num_byzantine = read_count("num_byzantine", num_byzantine, least=0)
