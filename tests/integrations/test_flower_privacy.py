# SPDX-License-Identifier: Apache-2.0
"""Flower's wrappers for differential privacy around a rule, and noise of a rule of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.common import Parameters, ndarrays_to_parameters
from flwr.server import strategy as legacy
from flwr.server.client_manager import SimpleClientManager
from flwr.serverapp import strategy as current

from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

pytestmark = [
    pytest.mark.flower,
    pytest.mark.usefixtures("flower_identity"),
    pytest.mark.filterwarnings("ignore"),  # of Flower: its legacy strategies are deprecated
]

K = 4
WRAPPERS = [
    f"DifferentialPrivacy{side}Side{kind}Clipping"
    for side in ("Client", "Server")
    for kind in ("Fixed", "Adaptive")
]
every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


def wrapped(module: Any, wrapper: str, strategy: Any) -> Any:
    bound = {"clipping_norm": 1.0} if "Fixed" in wrapper else {}
    return getattr(module, wrapper)(strategy, 0.1, num_sampled_clients=K, **bound)


def configure(wrapper: str, strategy: FastAggStrategy) -> list[Any]:
    grid: Any = SimpleNamespace(get_node_ids=lambda: [1, 2, 3, 4])
    arrays = ArrayRecord({"w": Array(np.ones(3, np.float32))})
    made = wrapped(current, wrapper, strategy)
    return list(made.configure_train(1, arrays, ConfigRecord(), grid))


@every_wrapper
@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("fdms", {}, "the rule 'fdms' may give a client a larger factor"),
        ("mifa", {}, "or remember its update"),
        ("fedavg", {}, "num-examples"),
        ("fedavg", {"client_weights": [1, 2, 3, 4]}, "client_weights that differ"),
        ("fedavg", {"weighted": False, "server_lr": 2.0}, "server_lr=2"),
        ("fedavg", {"weighted": False, "server_optimizer": "adam"}, "adam"),
    ],
)
def test_a_rule_that_is_no_mean_is_refused(
    wrapper: str, rule: str, options: dict[str, Any], said: str
) -> None:
    strategy = FastAggStrategy(rule, num_clients=K, **options)
    with pytest.raises(ValueError, match=f"^{wrapper} adds noise for a mean") as found:
        configure(wrapper, strategy)
    assert said in str(found.value) and "clip_norm and noise_multiplier" in str(found.value)
    assert not strategy.server.has_model  # nothing has happened yet


@every_wrapper
def test_a_mean_passes(wrapper: str) -> None:
    messages = configure(wrapper, FastAggStrategy("fedavg", num_clients=K, weighted=False))
    assert len(messages) == K


def test_no_wrapper_passes() -> None:
    grid: Any = SimpleNamespace(get_node_ids=lambda: [1, 2, 3, 4])
    arrays = ArrayRecord({"w": Array(np.ones(3, np.float32))})
    strategy = FastAggStrategy("fdms", num_clients=K)
    assert len([*strategy.configure_train(1, arrays, ConfigRecord(), grid)]) == K


@every_wrapper
def test_the_older_api_refuses_it_too(wrapper: str) -> None:
    strategy = FastAggLegacyStrategy("fdms", num_clients=K)
    sent: Parameters = ndarrays_to_parameters([np.ones(3, np.float32)])
    made = wrapped(legacy, wrapper, strategy)
    with pytest.raises(ValueError, match=f"^{wrapper} adds noise for a mean"):
        made.configure_fit(1, sent, SimpleClientManager())


@pytest.mark.parametrize("wrapper", ["DPFedAvgFixed", "DPFedAvgAdaptive"])
def test_the_oldest_wrappers_are_for_a_mean_too(wrapper: str) -> None:
    sent: Parameters = ndarrays_to_parameters([np.ones(3, np.float32)])
    bound = {"clip_norm": 1.0} if "Fixed" in wrapper else {}
    for rule, said in (("fdms", "a larger factor"), ("fedavg", "")):
        strategy = FastAggLegacyStrategy(rule, num_clients=K, node_timeout=0.01)
        made = getattr(legacy, wrapper)(strategy, num_sampled_clients=K, **bound)
        manager = SimpleClientManager()
        manager.wait_for = lambda number, timeout=0: False  # type: ignore[method-assign]
        if said:
            with pytest.raises(ValueError, match=f"^{wrapper} adds noise for a mean.*{said}"):
                made.configure_fit(1, sent, manager)
        else:  # it gives all results the same weight
            assert made.configure_fit(1, sent, manager) == []


def test_a_wrapper_in_a_wrapper_is_seen() -> None:
    inner = wrapped(current, WRAPPERS[0], FastAggStrategy("fdms", num_clients=K))

    class Outer:
        def configure_train(self, *arguments: Any) -> Any:
            return inner.configure_train(*arguments)

    arrays = ArrayRecord({"w": Array(np.ones(3, np.float32))})
    with pytest.raises(ValueError, match="adds noise for a mean"):
        list(Outer().configure_train(1, arrays, ConfigRecord(), SimpleNamespace()))


def test_noise_of_the_rule_does_not_cover_statistics() -> None:
    arrays = ArrayRecord({name: Array(np.ones(3, np.float32)) for name in ("w", "n.running_var")})
    options: dict[str, Any] = {"num_clients": K, "clip_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match=r"^roles: expected no array with the role 'mean'"):
        FastAggStrategy("fedavg", **options)._take(arrays)
    FastAggStrategy("fedavg", roles={"*running*": "server"}, **options)._take(arrays)


def test_noise_of_the_rule_leaves_num_examples_out(logged: list[str]) -> None:
    strategy = FastAggStrategy("fedavg", num_clients=K, clip_norm=1.0, noise_multiplier=1.0)
    assert not strategy.server.weighing.used
    assert "come from the data of clients" in strategy.server.weighing.reason
