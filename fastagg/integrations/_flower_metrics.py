# SPDX-License-Identifier: Apache-2.0
"""Aggregation of the metrics of Flower's clients; faulty metrics never raise an error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import cast

from flwr.app import MetricRecord, RecordDict

_LOG = logging.getLogger("flwr")


def weight_problem(records: Mapping[str, MetricRecord], key: str) -> str | None:
    """Return why a reply has no usable weight for its metrics, or None if it has one.

    A reply must have exactly one MetricRecord, with a finite number >= 0 under ``key``.
    """
    if len(records) != 1:
        return f"reply: expected one MetricRecord, got {len(records)}"
    (record,) = records.values()
    weight = record.get(key)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return f"metric {key!r}: expected a number, got {weight!r}"
    if not 0.0 <= weight < math.inf:
        return f"metric {key!r}: expected a finite number >= 0, got {weight}"
    return None


def mean_of_metrics(
    contents: Mapping[str, RecordDict],
    weighted_by_key: str,
    ignored_key: str,
    aggregate: Callable[[list[RecordDict], str], MetricRecord],
) -> MetricRecord | None:
    """Combine the metrics of several replies by a function like Flower's.

    Replies whose metrics differ in names or lengths from those of the first reply are left out with
    a warning, because Flower's function raises an error for them.

    Args:
        contents: dict from senders to replies, each with one MetricRecord that has a weight.
        weighted_by_key: name of the weight.
        ignored_key: name of an entry that is not a metric: the partition id.
        aggregate: Flower's function, or the user's.

    Returns:
        The combined metrics; None if there are no replies, no metrics, or the weights sum to 0.
    """
    records: list[RecordDict] = []
    record_name = ""
    shape: dict[str, int | None] | None = None
    total = 0.0
    for sender, content in contents.items():
        ((name, record),) = content.metric_records.items()
        values = {key: value for key, value in record.items() if key != ignored_key}
        own = {k: len(v) if isinstance(v, list) else None for k, v in values.items()}
        if shape is None:
            record_name, shape = name, own
        if own != shape:
            _LOG.warning("\tmetrics of node %s differ from the others' and are left out", sender)
            continue
        total += float(cast(float, record[weighted_by_key]))  # weight_problem checked the type
        records.append(RecordDict({record_name: MetricRecord(values)}))
    if not records or not set(shape or ()) - {weighted_by_key}:
        return None
    if total == 0.0:
        _LOG.warning("\tno metrics: the sum of %r is 0", weighted_by_key)
        return None
    return aggregate(records, weighted_by_key)
