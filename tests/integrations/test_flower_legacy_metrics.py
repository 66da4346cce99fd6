# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics in Flower's older API: no client can end a run with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.common import Code, EvaluateRes, FitRes, Status, ndarrays_to_parameters
from flwr.common.serde import evaluate_res_from_proto, evaluate_res_to_proto
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.history import History
from flwr.server.server import Server
from flwr.server.strategy.aggregate import weighted_loss_avg

from fastagg.integrations._flower_metrics import combine_results
from fastagg.integrations.flower import FastAggLegacyStrategy

pytestmark = pytest.mark.flower

K = 5
OK = Status(Code.OK, "")
Metrics = dict[str, Any]


class Proxy(ClientProxy):
    """A client whose second answers come from functions, if it is client 0."""

    def __init__(self, client: int, fit: Metrics | None, evaluation: EvaluateRes | None) -> None:
        super().__init__(str(client))
        self.client, self.bad, self.evaluation = client, fit, evaluation
        self.fits = self.evaluations = 0

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> FitRes:
        self.fits += 1
        metrics = {"partition-id": self.client, "accuracy": 0.5}
        if self.bad is not None and self.client == 0 and self.fits == 2:
            metrics = self.bad
        return FitRes(OK, ins.parameters, 10, metrics)

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> EvaluateRes:
        self.evaluations += 1
        result = EvaluateRes(OK, 0.5 + self.client, 10 + self.client, {"accuracy": 0.5})
        if self.evaluation is not None and self.client == 0 and self.evaluations == 2:
            result = self.evaluation
        return evaluate_res_from_proto(evaluate_res_to_proto(result))

    def get_properties(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    get_parameters = reconnect = get_properties


def average(metrics: list[tuple[int, Metrics]]) -> Metrics:
    """Return the mean accuracy, as in Flower's examples."""
    total = sum(number for number, _ in metrics)
    return {"accuracy": sum(number * m["accuracy"] for number, m in metrics) / total}


def run(
    fit: Metrics | None = None, evaluation: EvaluateRes | None = None, **options: Any
) -> tuple[FastAggLegacyStrategy, History]:
    """Run three rounds, in the second of which client 0 answers as given."""
    used = FastAggLegacyStrategy(
        "fedavg",
        num_clients=K,
        min_available_clients=K,
        initial_parameters=ndarrays_to_parameters([np.zeros(3, np.float32)]),
        fit_metrics_aggregation_fn=average,
        evaluate_metrics_aggregation_fn=average,
        **options,
    )
    manager = SimpleClientManager()
    for client in range(K):
        manager.register(Proxy(client, fit, evaluation))
    history, _ = Server(client_manager=manager, strategy=used).fit(3, timeout=None)
    assert used.server.rounds == 3
    return used, history


def test_losses_are_those_of_flower() -> None:
    _, history = run()
    expected = weighted_loss_avg([(10 + k, 0.5 + k) for k in range(K)])
    assert history.losses_distributed == [(number, expected) for number in (1, 2, 3)]
    accuracy = history.metrics_distributed["accuracy"]
    assert [number for number, _ in accuracy] == [1, 2, 3]


@pytest.mark.parametrize(
    ("loss", "number"),
    [
        (0.5, -50),  # minus the sum of the others
        (0.5, -1),
        (math.nan, 10),
        (math.inf, 10),
        (-math.inf, 10),
    ],
)
def test_an_evaluation_that_cannot_be_used_is_left_out(
    loss: float, number: int, logged: list[str]
) -> None:
    _, history = run(evaluation=EvaluateRes(OK, loss, number, {"accuracy": 0.5}))
    others = weighted_loss_avg([(10 + k, 0.5 + k) for k in range(1, K)])
    assert history.losses_distributed[1] == (2, others)
    assert len(history.metrics_distributed["accuracy"]) == 3
    assert sum("rejected evaluation of 0: " in line for line in logged) == 1


def results(*pairs: tuple[float, int]) -> list[tuple[ClientProxy, EvaluateRes]]:
    return [(Proxy(k, None, None), EvaluateRes(OK, *pair, {})) for k, pair in enumerate(pairs)]


def test_a_round_without_a_usable_evaluation_has_no_loss(logged: list[str]) -> None:
    used = FastAggLegacyStrategy("fedavg", num_clients=K)
    assert used.aggregate_evaluate(1, [], []) == (None, {})
    assert used.aggregate_evaluate(1, results((0.5, 0), (0.5, 0)), []) == (None, {})
    assert used.aggregate_evaluate(1, results((0.5, -1), (math.nan, 1)), []) == (None, {})
    assert "the sum of num_examples is 0" in "\n".join(logged)
    assert used.aggregate_evaluate(1, results((0.5, 1), (7.0, 0)), [ValueError()]) == (0.5, {})
    strict = FastAggLegacyStrategy("fedavg", num_clients=K, accept_failures=False)
    assert strict.aggregate_evaluate(1, results((0.5, 1)), [ValueError()]) == (None, {})


def test_the_mean_of_finite_losses_is_finite() -> None:
    used = FastAggLegacyStrategy("fedavg", num_clients=K)
    loss, _ = used.aggregate_evaluate(1, results((1e308, 2**62), (-1e308, 2**62)), [])
    assert loss == 0.0


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"partition-id": 0},
        {"partition-id": 0, "accuracy": "x"},
        {"partition-id": 0, "accuracy": math.nan},
        {"partition-id": 0, "accuracy": 0.5, "more": 1.0},
        {"partition-id": 0, **{f"m{number}": 1.0 for number in range(50_000)}},
    ],
    ids=["none", "missing", "text", "NaN", "one more", "many"],
)
def test_a_client_with_other_metrics_does_not_change_those_of_the_others(
    metrics: Metrics, logged: list[str]
) -> None:
    used, history = run(fit=metrics)
    assert history.metrics_distributed_fit["accuracy"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert sum("metrics of nodes 0: left out" in line for line in logged) == 1
    assert used.last_report is not None and used.last_report.active == tuple(range(K))


def test_a_function_that_raises_does_not_end_the_run(logged: list[str]) -> None:
    def failing(metrics: list[tuple[int, Metrics]]) -> Metrics:
        raise ValueError("evil\n\tround 9" * 1000)

    used = FastAggLegacyStrategy("fedavg", num_clients=K, evaluate_metrics_aggregation_fn=failing)
    assert used.aggregate_evaluate(1, results((0.5, 1)), []) == (0.5, {})
    (line,) = [line for line in logged if "the function for metrics raised" in line]
    assert len(line) < 500 and "\n" not in line and __file__ in line


@pytest.mark.parametrize("returned", [3.0, [("a", 1)], "text"])
def test_a_function_that_returns_no_dict_does_not_end_the_run(
    returned: Any, logged: list[str]
) -> None:
    made = combine_results({"1": (2, {"a": 1.0})}, lambda _: returned)
    assert made == {}
    (line,) = logged
    assert "expected numbers by name from the function for metrics" in line


def called(results: dict[str, tuple[int, Metrics]]) -> list[tuple[int, Metrics]] | None:
    """Return what the user's function gets; None if it is not called."""
    seen: list[list[tuple[int, Metrics]]] = []

    def own(metrics: list[tuple[int, Metrics]]) -> Metrics:
        seen.append(metrics)
        return {}

    combine_results(results, own)
    return seen[0] if seen else None


def test_what_a_function_gets() -> None:
    assert called({}) is None
    assert called({"1": (0, {"a": 1.0})}) is None
    assert called({"1": (2, {})}) == [(2, {})]
    mixed = {"1": (2, {"a": 1, "b": b"x"}), "2": (3, {"b": b"y", "a": 1.5})}
    assert called(mixed) == [*mixed.values()]
    assert called({**mixed, "3": (1, {"a": True})}) == [*mixed.values()]
    assert called({**mixed, "3": (1, {"a": math.inf, "b": b"x"})}) == [*mixed.values()]
    assert called({**mixed, "3": (1, {"a": 1.0, "b": "x"})}) == [*mixed.values()]
    assert called({**mixed, "3": (1, {"a": 1, "b": b"x", "c": math.nan})}) == [*mixed.values()]


def test_a_metric_that_is_not_finite_in_most_results_is_passed_on() -> None:
    nan: dict[str, tuple[int, Metrics]] = {str(k): (1, {"a": math.nan, "b": 1}) for k in range(3)}
    assert called(nan) == [*nan.values()]
    other = {"8": (1, {"a": 2.0, "b": math.inf}), "9": (1, {"a": 2.0, "b": 1, "c": math.nan})}
    assert called({**nan, **other}) == [*nan.values()]
    assert called({**nan, "8": (1, {"a": 2.0, "b": 1})}) == [*nan.values(), (1, {"a": 2.0, "b": 1})]
