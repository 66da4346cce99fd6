# SPDX-License-Identifier: Apache-2.0
"""The adapter for NVIDIA FLARE under the controller of recipes, by direct calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed (make test-flower installs it)")

from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from fastagg.integrations.nvflare import FastAggAggregator
from tests.integrations.nvflare_rounds import (
    BAD,
    ROUNDS,
    Aggregator,
    K,
    by_hand,
    first_model,
    run_round,
    same,
    trained,
)

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Engine:
    """NVFlare's server, which knows some clients."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_clients(self) -> list[Client]:
        return [Client(name, f"token of {name}") for name in self.names]


def fetch(
    aggregator: FastAggAggregator, model: object, *names: object, engine: Engine | None = None
) -> None:
    """Fire the events of a round in which clients fetch their tasks, under their own names."""
    aggregator.reset_stats()
    for name in names:
        fl_ctx, peer = FLContext(), FLContext()
        fl_ctx.set_prop(ReservedKey.ENGINE, engine, private=True)
        peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False)
        fl_ctx.set_peer_context(peer)
        task = DXO("WEIGHTS", data=model).to_shareable()
        fl_ctx.set_prop(AppConstants.TRAIN_SHAREABLE, task, private=True, sticky=False)
        aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, fl_ctx)


def fl_model(name: object, params: object, **options: Any) -> FLModel:
    """Return the answer of a client as the controller FedAvg passes it on."""
    return FLModel(params=params, meta={"client_name": name}, **options)


@pytest.mark.parametrize("kind", [ParamsType.FULL, ParamsType.DIFF])
def test_a_recipe_has_the_bits_of_a_loop(kind: ParamsType) -> None:
    data_kind = "WEIGHTS" if kind == ParamsType.FULL else "WEIGHT_DIFF"
    aggregator, model = Aggregator("mifa", K, expected_data_kind=data_kind), first_model()
    assert isinstance(aggregator, ModelAggregator)  # NVFlare would replace another one by its own
    expected = by_hand("mifa")
    for number, clients in enumerate(ROUNDS):
        fetch(aggregator, model, *[f"site-{client}" for client in range(K)])
        for client in clients:
            data = trained(model, number, client)
            if kind == ParamsType.DIFF:
                data = {name: data[name] - model[name] for name in data}
            answer = fl_model(f"site-{client}", data, params_type=kind, metrics={"m": client})
            aggregator.accept_model(answer)
        result = aggregator.aggregate_model()
        assert result.params_type == kind and result.metrics == {"m": np.mean(clients)}
        if kind == ParamsType.FULL:
            model = result.params
        else:
            model = {name: model[name] + result.params[name] for name in model}
        assert aggregator.last_report is not None and aggregator.last_report.error is None
        assert aggregator.last_report.active == tuple(sorted(clients))
        assert {*aggregator.last_report.absent.values()} == {*range(K)} - {*clients}
    for name in model:
        np.testing.assert_allclose(
            model[name], expected[name], rtol=0, atol=0 if kind == ParamsType.FULL else 4e-6
        )


def test_bad_answers_in_a_recipe_change_nothing() -> None:
    model = first_model()
    plain = FastAggAggregator("mimic", K)
    after = run_round(plain, model, 0, [0, 1])
    for data in BAD.values():
        aggregator = Aggregator("mimic", K)
        fetch(aggregator, model, "site-0", "site-1", "evil")
        if data is not None:
            with pytest.raises(ValueError, match=r"^evil: "):
                aggregator.accept_model(fl_model("evil", data))
        for client in (0, 1):
            aggregator.accept_model(fl_model(f"site-{client}", trained(model, 0, client)))
        assert same(aggregator.aggregate_model().params, after)
    with pytest.raises(ValueError, match="already"):
        aggregator.accept_model(fl_model("site-0", model))
        aggregator.accept_model(fl_model("site-0", model))
    for name in (None, "", 3):
        with pytest.raises(ValueError, match="client's name"):
            aggregator.accept_model(fl_model(name, model))
    with pytest.raises(ValueError, match="params_type"):
        aggregator.accept_model(fl_model("site-3", model, params_type=ParamsType.DIFF))


@pytest.mark.parametrize("name", [7, None, "", 1.5, [1], {"a": 1}, b"site-3", ("site-3",)])
def test_a_client_with_a_name_that_is_no_text_changes_nothing(name: object) -> None:
    aggregator, model = Aggregator("mifa", K), first_model()
    after = run_round(FastAggAggregator("mifa", K), model, 0, [0, 1])
    fetch(aggregator, model, "site-0", "site-1", "site-2", name)
    for client in (0, 1):
        aggregator.accept_model(fl_model(f"site-{client}", trained(model, 0, client)))
    assert same(aggregator.aggregate_model().params, after)
    assert aggregator.last_report is not None
    assert aggregator.last_report.absent == {"site-2": None}


def test_names_that_the_server_does_not_know_are_not_absent() -> None:
    aggregator, model = Aggregator("fedavg", K), first_model()
    engine = Engine("site-0", "site-1")
    invented = [f"site-{number}" for number in range(2, 50)]
    fetch(aggregator, model, "site-0", "site-1", *invented, engine=engine)
    aggregator.accept_model(fl_model("site-0", model))
    aggregator.aggregate_model()
    assert aggregator.last_report is not None
    assert aggregator.last_report.absent == {"site-1": None}


def test_metrics_that_are_no_finite_numbers_are_left_out() -> None:
    aggregator, model = Aggregator("fedavg", K), first_model()
    sent: list[dict[Any, Any] | None] = [
        {"a": 1, "b": np.float32(2.0), "c": "x", 5: 1.0},
        {"a": float("nan"), "b": 4.0, "c": [1.0]},
        {"a": 10**400, "b": True, "c": 1j},
        None,
    ]
    fetch(aggregator, model, *[f"site-{client}" for client in range(K)])
    for client, metrics in enumerate(sent):
        aggregator.accept_model(fl_model(f"site-{client}", model, metrics=metrics))
    assert aggregator.aggregate_model().metrics == {"a": 1.0, "b": 3.0}


def means(sent: list[Any]) -> dict[str, float] | None:
    """Return the metrics of a round whose clients send these."""
    aggregator, model = Aggregator("fedavg", len(sent)), first_model()
    fetch(aggregator, model, *[f"site-{client}" for client in range(len(sent))])
    for client, metrics in enumerate(sent):
        answer = fl_model(f"site-{client}", model)
        answer.metrics = metrics
        aggregator.accept_model(answer)
    found: dict[str, float] | None = aggregator.aggregate_model().metrics
    assert aggregator.last_report is not None and len(aggregator.last_report.active) == len(sent)
    return found


HUGE = np.finfo(np.float64).max


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.7e308, 1.7e308], 1.7e308),
        ([1.0, 1.0, 1.7e308, 1.7e308], 8.5e307),
        ([HUGE] * 3, HUGE),
        ([-HUGE] * 7, -HUGE),
        ([HUGE, HUGE, -HUGE, -HUGE], 0.0),
        ([0.1, 0.2, 0.3, 0.4], 0.25),
    ],
)
def test_the_mean_of_finite_metrics_is_finite(values: list[float], expected: float) -> None:
    found = means([{"loss": value} for value in values])
    assert found is not None and found["loss"] == pytest.approx(expected, rel=1e-15)


def test_one_client_cannot_add_metrics_or_end_the_job_with_them() -> None:
    many = {f"m{number}": 1.0 for number in range(50_000)}
    assert means([{"loss": 1.0}, {"loss": 2.0}, {**many, "x" * 10_000: 1.0}]) == {"loss": 1.5}
    found = means([many, many])
    assert found is not None and len(found) == 1000
    assert means([{"x" * 10_000: 1.0}] * 2) is None
    for metrics in ([1.0], "loss", 5, {1: 2.0, None: 1.0, ("a",): 3.0}):
        assert means([{"loss": 1.0}, metrics]) == {"loss": 1.0}


def test_rounds_of_a_recipe_without_answers() -> None:
    model = first_model()
    for kind in ("WEIGHTS", "WEIGHT_DIFF"):
        aggregator = Aggregator("fedavg", K, expected_data_kind=kind, max_empty_rounds=2)
        fetch(aggregator, model)
        with pytest.raises(RuntimeError, match="no client has fetched"):
            aggregator.aggregate_model()
        fetch(aggregator, model, "site-0")
        result = aggregator.aggregate_model()
        assert same(result.params, model if kind == "WEIGHTS" else {}) and result.metrics is None
        fetch(aggregator, model, "site-0")
        with pytest.raises(RuntimeError, match="max_empty_rounds"):
            aggregator.aggregate_model()
        assert aggregator.last_report is not None and aggregator.last_report.round == 2
    fetch(aggregator, {}, "site-0")
    with pytest.raises(ValueError, match="expected a model with weights"):
        aggregator.aggregate_model()
