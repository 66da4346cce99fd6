# SPDX-License-Identifier: Apache-2.0
"""Aggregation of the metrics of Flower's clients; faulty metrics never raise an error."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import MetricRecord, RecordDict
from flwr.common import Scalar

from fastagg.integrations._report import listed
from fastagg.integrations._untrusted import (
    LONGEST,
    MOST_METRICS,
    MOST_NUMBERS,
    brief,
    cut,
    is_finite,
)

_LOG = logging.getLogger("flwr")

MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
ResultsFn = Callable[[list[tuple[int, dict[str, Scalar]]]], dict[str, Scalar]]
Metric = int | float | list[int] | list[float]
Form = TypeVar("Form", bound=Hashable)
T = TypeVar("T")
LeftOut = list[tuple[str, list[str]]]
"""Metrics that are left out, each with the senders, for the log."""

_MOST_LOGGED = 5  # metrics in a line of the log


def weight_problem(records: Mapping[str, MetricRecord], key: str) -> str | None:
    """Return why a reply has no usable weight for its metrics, or None if it has one.

    A reply must have exactly one MetricRecord, with a finite number >= 0 under ``key``.
    """
    if len(records) != 1:
        return f"reply: expected one MetricRecord, got {len(records)}"
    (record,) = records.values()
    weight = record.get(key)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return f"metric {key!r}: expected a number, got {brief(weight)}"
    if not is_finite(weight) or weight < 0.0:
        return f"metric {key!r}: expected a finite number >= 0, got {brief(weight)}"
    return None


def combine_metrics(
    contents: Mapping[str, RecordDict],
    weighted_by_key: str,
    ignored_key: str,
    aggregate: MetricsFn | None,
) -> MetricRecord | None:
    """Combine the metrics of several replies, and log in one line what is left out.

    Each metric is averaged over the clients that sent a finite number for it, or a list of finite
    numbers as long as most others' lists. Where all clients sent that, the mean has the bits of
    Flower's. Left out are metrics that fewer than half of the replies have, names and lists that
    are too long, and all but the first metrics of a reply that has too many.

    A function of the user gets the replies that have the same metrics as most others, all finite,
    because functions like Flower's raise an error for metrics that differ.

    Args:
        contents: dict from senders to replies, each with one MetricRecord that has a weight.
        weighted_by_key: name of the weight.
        ignored_key: name of an entry that is not a metric: the partition id.
        aggregate: the user's function; None for the weighted mean of each metric.

    Returns:
        The combined metrics; None if there are no replies, no metrics, or the weights sum to 0, or
        if the user's function raises an error or returns no metrics, which is in the log.
    """
    replies = [_Reply.of(*item, weighted_by_key, ignored_key) for item in contents.items()]
    left: LeftOut = []
    crowded = [reply.sender for reply in replies if reply.unused]
    if crowded:
        limits = f"the first {MOST_METRICS} with names of at most {LONGEST} characters"
        left.append((f"all metrics but {limits}", crowded))
    try:
        return _combined(replies, weighted_by_key, aggregate, left)
    finally:
        _log_left_out(left)


def _combined(
    replies: Sequence[_Reply], weighted_by_key: str, aggregate: MetricsFn | None, left: LeftOut
) -> MetricRecord | None:
    """Return the combined metrics of replies; ``left`` gets what is left out."""
    counts = Counter(name for reply in replies for name in reply.metrics)
    if not counts:
        return None
    if sum(reply.weight for reply in replies) == 0.0:
        _LOG.warning("\tno metrics: the sum of %r is 0", weighted_by_key)
        return None
    if aggregate is None:
        common = [name for name, count in counts.items() if 2 * count >= len(replies)]
        _note_rare(replies, counts.keys() - common, left)
        means = {name: _mean(name, replies, left) for name in common}
        found = {name: mean for name, mean in means.items() if mean is not None}
        return MetricRecord(found) if found else None
    forms = {reply.sender: reply.forms() for reply in replies}
    usual = _most_common(form for form in forms.values() if _is_finite(form))
    kept = [reply for reply in replies if forms[reply.sender] == usual]
    _note_left_out("metrics", [s for s, form in forms.items() if form != usual], left)
    if sum(reply.weight for reply in kept) == 0.0:
        return None
    records = [reply.record(weighted_by_key) for reply in kept]
    return _called(aggregate, _record, records, weighted_by_key)


def combine_results(
    results: Mapping[str, tuple[int, Mapping[str, Scalar]]], aggregate: ResultsFn
) -> dict[str, Scalar]:
    """Call a user's function for the metrics of the older API, and log what is left out.

    It gets the results that have the same metrics as most others, with finite numbers where others
    have them, because functions like those in Flower's examples raise an error for metrics that
    differ. A metric that is not finite in most results is the function's affair.

    Args:
        results: dict from senders to numbers of samples, finite and >= 0, and metrics.
        aggregate: the function.

    Returns:
        Its result; empty if there are no results, if the numbers sum to 0, if it raises, or if it
        returns no dict.
    """
    bad = {
        sender: {name for name, value in metrics.items() if _is_bad(value)}
        for sender, (_, metrics) in results.items()
    }
    counts = Counter(name for names in bad.values() for name in names)
    have = Counter(name for _, metrics in results.values() for name in metrics)
    checked = {name for name, count in counts.items() if 2 * count <= have[name]}
    forms = {
        sender: _types(metrics) if bad[sender].isdisjoint(checked) else None
        for sender, (_, metrics) in results.items()
    }
    usual = _most_common(form for form in forms.values() if form is not None)
    left: LeftOut = []
    others = [s for s, form in forms.items() if form is None or form != usual]
    _note_left_out("metrics", others, left)
    _log_left_out(left)
    left_out = {*others}
    kept = [(n, dict(metrics)) for s, (n, metrics) in results.items() if s not in left_out]
    if sum(number for number, _ in kept) == 0:
        if kept:
            _LOG.warning("\tno metrics: the sum of num_examples is 0")
        return {}
    return _called(aggregate, _dict, kept) or {}


def _is_bad(value: Scalar) -> bool:
    """Return whether a metric is a number that is not finite."""
    is_number = isinstance(value, float | int | np.number) and not isinstance(value, bool)
    return is_number and not is_finite(value)


def _types(metrics: Mapping[str, Scalar]) -> tuple[tuple[str, str], ...]:
    """Return the names of metrics, sorted, and the type of each; all numbers are alike."""
    return tuple(
        (name, "number" if isinstance(value, float | int | np.number) else type(value).__name__)
        for name, value in sorted(metrics.items(), key=lambda item: item[0])
    )


def _record(found: Any) -> MetricRecord:
    """Return what a user's function has returned as a MetricRecord, which checkpoints hold."""
    return found if isinstance(found, MetricRecord) else MetricRecord(found)


def _dict(found: Any) -> dict[str, Scalar]:
    """Return what a user's function has returned as a dict, as Flower's server needs it."""
    return {**found}


def _called(function: Callable[..., Any], read: Callable[[Any], T], *arguments: object) -> T | None:
    """Return what a user's function for metrics returns; None, and log why, if there is none.

    The step has been taken, and what the function gets is from clients: it must not end the run.

    Args:
        function: the function; it may return None.
        read: returns its result in the form that is needed, or raises.
        arguments: for the function.
    """
    try:
        found = function(*arguments)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        _LOG.error(
            "\tno metrics: the function for metrics raised %s (%s, line %s)",
            cut(repr(error)),
            frame.filename,
            frame.lineno,
        )
        return None
    try:
        return None if found is None else read(found)
    except (TypeError, ValueError, AttributeError) as error:
        got = type(found).__name__
        _LOG.error(
            "\tno metrics: expected numbers by name from the function for metrics, got a value of "
            "type %s (%s)",
            got,
            cut(str(error)),
        )
        return None


@dataclass(frozen=True)
class _Reply:
    """The metrics of one client.

    Attributes:
        sender: name of the client.
        record_name: name of its MetricRecord.
        weight: its weight, finite and >= 0.
        metrics: the first metrics by name.
        unused: number of the others.
    """

    sender: str
    record_name: str
    weight: float
    metrics: dict[str, Metric]
    unused: int

    @classmethod
    def of(cls, sender: str, content: RecordDict, weighted_by_key: str, ignored_key: str) -> _Reply:
        ((name, record),) = content.metric_records.items()
        others = {k: v for k, v in record.items() if k not in (weighted_by_key, ignored_key)}
        short = {k: v for k, v in others.items() if len(k) <= LONGEST}
        used = dict(itertools.islice(short.items(), MOST_METRICS))
        weight = cast(float, record[weighted_by_key])  # weight_problem checked the type
        return cls(sender, name, weight, used, len(others) - len(used))

    def form(self, name: str) -> int | None:
        """Return -1 for a finite number, n for n finite numbers, None for all else."""
        value = self.metrics.get(name)
        if not isinstance(value, list):
            return -1 if is_finite(value) else None
        return len(value) if len(value) <= MOST_NUMBERS and all(map(is_finite, value)) else None

    def forms(self) -> tuple[tuple[str, int | None], ...]:
        """Return the names of the metrics, sorted, and the form of each."""
        return tuple((name, self.form(name)) for name in sorted(self.metrics))

    def record(self, weighted_by_key: str) -> RecordDict:
        """Return the reply for a function like Flower's."""
        record = MetricRecord({weighted_by_key: self.weight, **self.metrics})
        return RecordDict({self.record_name: record})


def _is_finite(forms: Iterable[tuple[str, int | None]]) -> bool:
    return all(form is not None for _, form in forms)


def _mean(name: str, replies: Sequence[_Reply], left: LeftOut) -> Metric | None:
    """Return the weighted mean of a metric, None if nobody sent a finite one with a weight."""
    sent = [reply for reply in replies if name in reply.metrics]
    forms = [reply.form(name) for reply in sent]
    usual = _most_common(form for form in forms if form is not None)
    kept = [r for r, form in zip(sent, forms, strict=True) if usual is not None and form == usual]
    others = [r for r, form in zip(sent, forms, strict=True) if usual is None or form != usual]
    _note_left_out(f"metric {brief(name)}", [reply.sender for reply in others], left)
    total = sum(reply.weight for reply in kept)
    if total == 0.0:
        return None
    shares = [reply.weight / total for reply in kept]
    values = [reply.metrics[name] for reply in kept]
    if usual == -1:
        return _sum(cast(list[float], values), shares)
    return [_sum(column, shares) for column in zip(*cast(list[list[float]], values), strict=True)]


def _sum(values: Sequence[float], shares: Sequence[float]) -> float:
    """Return the sum of products, in the order of Flower's sum."""
    total = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total += value * share
    return total


def _most_common(forms: Iterable[Form]) -> Form | None:
    """Return the most common form, the first of several; None if there is none."""
    return next((form for form, _ in Counter(forms).most_common(1)), None)


def _note_left_out(what: str, senders: list[str], left: LeftOut) -> None:
    if senders:
        left.append((what, senders))


def _note_rare(replies: Sequence[_Reply], rare: Collection[str], left: LeftOut) -> None:
    """Note metrics that fewer than half of the replies have."""
    senders = [reply.sender for reply in replies if not reply.metrics.keys().isdisjoint(rare)]
    first = brief(min(rare, default=""))
    others = f" and {len(rare) - 1} more" if len(rare) > 1 else ""
    _note_left_out(f"metric {first}{others} (of fewer than half of the replies)", senders, left)


def _log_left_out(left: LeftOut) -> None:
    if not left:
        return
    parts = [f"{what} of nodes {listed(senders)}" for what, senders in left[:_MOST_LOGGED]]
    if len(left) > _MOST_LOGGED:
        parts.append(f"{len(left) - _MOST_LOGGED} other metrics")
    text = "\t%s: left out, not finite, too long or not like most others"
    _LOG.warning(text, "; ".join(parts))
