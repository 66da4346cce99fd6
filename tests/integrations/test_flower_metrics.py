# SPDX-License-Identifier: Apache-2.0
"""Means of clients' metrics: each over the clients that sent a finite number for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fastagg.integrations._flower_metrics import Metric, combine_metrics, weight_problem

pytestmark = pytest.mark.flower

KEY = "num-examples"


def content(weight: float, **metrics: Metric) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({KEY: weight, "partition-id": 7, **metrics})})


def mean(contents: Mapping[str, RecordDict]) -> MetricRecord | None:
    return combine_metrics(contents, KEY, "partition-id", None)


def test_the_bits_of_flower_where_all_clients_send_the_same_metrics() -> None:
    contents = {
        str(k): content(3 + 7 * k, loss=1 / (3 + k), steps=k, recall=[0.1 * k, 0.3])
        for k in range(9)
    }
    records = []
    for record in contents.values():
        metrics = dict(record["metrics"])
        del metrics["partition-id"]
        records.append(RecordDict({"metrics": MetricRecord(metrics)}))
    assert mean(contents) == aggregate_metricrecords(records, KEY)


def test_one_client_with_another_metric_changes_no_other_mean() -> None:
    contents = {"1": content(1, loss=2.0, extra=5.0), "2": content(3, loss=6.0)}
    assert mean(contents) == MetricRecord({"loss": 5.0, "extra": 5.0})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, [1.0, 2.0], [math.nan], []])
def test_a_metric_that_is_not_finite_or_of_another_form_is_left_out(
    bad: Metric, logged: list[str]
) -> None:
    contents = {
        "11": content(100, loss=bad, accuracy=0.5),
        "12": content(1, loss=2.0, accuracy=0.25),
        "13": content(3, loss=6.0, accuracy=0.25),
    }
    combined = mean(contents)
    assert combined is not None
    assert combined["loss"] == 5.0
    assert combined["accuracy"] == pytest.approx(51 / 104, rel=1e-15)
    (line,) = logged
    assert line.startswith("\tmetric 'loss' of nodes 11: left out")


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_one_client_with_many_metrics_adds_none_and_one_line(
    value: float, logged: list[str]
) -> None:
    many = {f"m{number}": value for number in range(50_000)}
    contents = {str(k): content(1, loss=1.0 + k) for k in range(4)}
    contents["4"] = content(1, loss=5.0, **many)
    assert mean(contents) == MetricRecord({"loss": 3.0})
    (line,) = logged
    assert " of nodes 4" in line and len(line) < 1000


def test_many_metrics_that_are_not_like_others_are_in_one_line(logged: list[str]) -> None:
    names = [f"m{number}" for number in range(500)]
    contents = {str(k): content(1, **dict.fromkeys(names, 1.0)) for k in range(4)}
    contents["4"] = content(1, **dict.fromkeys(names, math.nan))
    assert mean(contents) == MetricRecord(dict.fromkeys(names, 1.0))
    (line,) = logged
    assert "metric 'm0' of nodes 4" in line and "495 other metrics" in line


def test_metrics_that_fewer_than_half_of_the_replies_have_are_left_out() -> None:
    contents = {str(k): content(1, loss=1.0) for k in range(4)}
    contents["4"] = content(1, loss=1.0, two=1.0)
    contents["5"] = content(1, loss=1.0, two=3.0, three=1.0)
    assert set(mean(contents) or ()) == {"loss"}
    contents["3"] = content(1, loss=1.0, two=5.0)
    assert set(mean(contents) or ()) == {"loss", "two"}


def test_the_first_thousand_metrics_of_a_reply_count(logged: list[str]) -> None:
    many = {f"m{number}": 1.0 for number in range(3000)}
    first = MetricRecord(dict(list(many.items())[:1000]))
    contents = {"1": content(1, **many), "2": content(3, **many)}
    assert mean(contents) == first
    assert len(logged) == 1
    seen = []

    def own(records: list[RecordDict], key: str) -> MetricRecord:
        seen.extend(records)
        return MetricRecord({"n": len(records)})

    assert combine_metrics(contents, KEY, "partition-id", own) == MetricRecord({"n": 2})
    assert [len(record["metrics"]) for record in seen] == [1001, 1001]


def test_long_names_and_long_lists_are_left_out(logged: list[str]) -> None:
    contents = {str(k): content(1, loss=1.0, **{"x" * 100_000: 1.0}) for k in range(3)}
    assert mean(contents) == MetricRecord({"loss": 1.0})
    contents = {str(k): content(1, loss=1.0, recall=[0.5] * 20_000) for k in range(3)}
    assert mean(contents) == MetricRecord({"loss": 1.0})
    contents = {str(k): content(1, recall=[0.5] * 10_000) for k in range(3)}
    assert mean(contents) == MetricRecord({"recall": [0.5] * 10_000})
    assert len(logged) == 2 and max(map(len, logged)) < 1000


def test_numbers_beyond_float64_do_not_raise() -> None:
    for value in (10**400, [10**400]):
        contents = {"1": content(1, loss=2.0), "2": content(1, loss=1.0, extra=value)}
        assert mean(contents) == MetricRecord({"loss": 1.5})
    record = MetricRecord({KEY: 10**5000})
    assert "finite number" in (weight_problem({"metrics": record}, KEY) or "")


def test_lists_are_averaged_by_position() -> None:
    contents = {
        "1": content(1, recall=[1.0, 0.0]),
        "2": content(3, recall=[0.0, 1.0]),
        "3": content(5, recall=[1.0, 1.0, 1.0]),
    }
    assert mean(contents) == MetricRecord({"recall": [0.25, 0.75]})


def test_a_metric_without_weight_or_number_has_no_mean() -> None:
    assert mean({}) is None
    assert mean({"1": content(1)}) is None
    assert mean({"1": content(1, loss=math.nan)}) is None
    assert mean({"1": content(0, loss=1.0)}) is None
    mixed = {"1": content(0, loss=1.0), "2": content(2, accuracy=0.5)}
    assert mean(mixed) == MetricRecord({"accuracy": 0.5})


def test_a_function_of_the_user_gets_finite_metrics_like_most_others() -> None:
    seen: list[RecordDict] = []

    def own(records: list[RecordDict], key: str) -> MetricRecord:
        assert key == KEY
        seen.extend(records)
        return MetricRecord({"count": len(records)})

    contents = {
        "1": content(1, loss=math.nan),
        "2": content(2, loss=math.nan),
        "3": content(3, loss=math.nan),
        "4": content(4, loss=1.0),
        "5": content(5, loss=2.0),
        "6": content(6, loss=3.0, extra=1),
    }
    assert combine_metrics(contents, KEY, "partition-id", own) == MetricRecord({"count": 2})
    assert [dict(record["metrics"]) for record in seen] == [
        {KEY: 4.0, "loss": 1.0},
        {KEY: 5.0, "loss": 2.0},
    ]


def test_a_function_that_raises_does_not_end_the_run(logged: list[str]) -> None:
    def failing(records: list[RecordDict], key: str) -> MetricRecord:
        raise KeyError("evil\n\tround 9" * 1000)

    assert combine_metrics({"1": content(1, loss=1.0)}, KEY, "partition-id", failing) is None
    (line,) = logged
    assert "the function for metrics raised KeyError" in line
    assert len(line) < 500 and "\n" not in line and __file__ in line


@pytest.mark.parametrize("returned", [3.0, [1], "text", {"a": "text"}, {"a": np.float32(1)}])
def test_a_function_that_returns_no_metrics_does_not_end_the_run(
    returned: Any, logged: list[str]
) -> None:
    own: Any = lambda *_: returned  # noqa: E731
    assert combine_metrics({"1": content(1, loss=1.0)}, KEY, "partition-id", own) is None
    (line,) = logged
    assert "expected numbers by name from the function for metrics" in line


@pytest.mark.parametrize("returned", [{"a": 1.0}, None])
def test_a_function_may_return_a_dict_or_nothing(returned: Any, logged: list[str]) -> None:
    own: Any = lambda *_: returned  # noqa: E731
    made = combine_metrics({"1": content(1, loss=1.0)}, KEY, "partition-id", own)
    assert made == (None if returned is None else MetricRecord(returned))
    assert logged == []
