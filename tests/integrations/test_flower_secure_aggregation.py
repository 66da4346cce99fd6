# SPDX-License-Identifier: Apache-2.0
"""Flower's secure aggregation: the mean of all models comes in the place of each model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

from fastagg.integrations.flower import FastAggLegacyStrategy
from tests.integrations.test_flower import Proxy

pytestmark = [
    pytest.mark.flower,
    pytest.mark.usefixtures("flower_identity"),
    pytest.mark.filterwarnings("ignore"),  # of Flower: its legacy strategies are deprecated
]

K = 4


def begin(strategy: FastAggLegacyStrategy) -> bool:
    """Run the first stage of the protocol; without clients, it ends after configure_fit."""
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: 1}),
            MAIN_PARAMS_RECORD: ArrayRecord({"0": Array(np.ones(3, np.float32))}),
        }
    )
    context: Any = Context(run_id=1, node_id=0, node_config={}, state=state, run_config={})
    context.strategy, context.client_manager = strategy, SimpleClientManager()
    workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
    return workflow.setup_stage(SimpleNamespace(), context, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("fdms", {}, "the rule 'fdms' needs the update of each client"),
        ("mifa", {}, "the rule 'mifa' needs"),
        ("krum", {"num_byzantine": 1}, "the rule 'krum' needs"),
        ("fedavg", {"clip_norm": 1.0}, "clip_norm needs"),
    ],
)
def test_a_rule_that_needs_single_updates_is_refused(
    rule: str, options: dict[str, Any], said: str
) -> None:
    strategy = FastAggLegacyStrategy(rule, num_clients=K, rule_options=options)
    with pytest.raises(ValueError, match=r"^SecAggPlusWorkflow gives a strategy the mean") as found:
        begin(strategy)
    assert said in str(found.value)
    assert not strategy.server.has_model  # nothing has happened yet


def test_a_mean_is_enough_for_fedavg() -> None:
    strategy = FastAggLegacyStrategy(
        "fedavg", num_clients=K, min_available_clients=0, min_fit_clients=0, node_timeout=0.01
    )
    assert begin(strategy) is False
    assert strategy.server.has_model


def test_fedavg_returns_the_mean_that_it_gets() -> None:
    """As the last stage of the protocol does: each result has the mean, and its own count."""
    strategy = FastAggLegacyStrategy("fedavg", num_clients=K, min_available_clients=K)
    manager = SimpleClientManager()
    proxies = [Proxy(f"cid{client}", client, {}) for client in range(K)]
    for proxy in proxies:
        manager.register(proxy)
    before = ndarrays_to_parameters([np.zeros(3, np.float32)])
    assert len(strategy.configure_fit(1, before, manager)) == K
    mean = np.array([0.25, -1.5, 3.0], np.float32)
    sent = ndarrays_to_parameters([mean])
    results: list[Any] = [
        (proxy, FitRes(Status(Code.OK, ""), sent, 10 + 7 * k, {"partition-id": k}))
        for k, proxy in enumerate(proxies)
    ]
    after, _ = strategy.aggregate_fit(1, results, [])
    assert after is not None
    # Rounding: shares of 1, and one product and sum in float32.
    np.testing.assert_allclose(parameters_to_ndarrays(after)[0], mean, rtol=2e-7)
