# SPDX-License-Identifier: Apache-2.0
"""The strategies in Flower's loops: rounds without training, clients or a disk; changed models."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Array, ArrayRecord, Error, MetricRecord, RecordDict
from flwr.common import Parameters
from flwr.server import strategy as legacy_strategies
from flwr.server.client_manager import SimpleClientManager
from flwr.server.server import Server
from flwr.serverapp import strategy as message_strategies
from flwr.serverapp.strategy import Strategy

from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy
from tests.integrations.test_flower import (
    K,
    NodesGrid,
    Proxy,
    first_model,
    initial,
    legacy,
    npy,
    reply,
    strategy,
)

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("flower_identity")]


def equal(left: ArrayRecord, right: ArrayRecord) -> bool:
    return all(np.array_equal(left[name].numpy(), right[name].numpy()) for name in "wnh")


def test_rounds_without_training_keep_the_model(tmp_path: Path) -> None:
    """The rule remembers updates, which it would apply in a round without an answer."""
    path = tmp_path / "run"
    trained = strategy("mifa", checkpoint_path=path).start(NodesGrid(reply), initial(), 2)
    used = strategy("mifa", fraction_train=0.0)
    result = used.start(NodesGrid(reply), num_rounds=14, resume_from=path)
    assert used.server.rounds == 14 and used.server.empty_rounds == 0
    assert equal(result.arrays, trained.arrays)
    assert used.last_report is not None and not used.last_report.moved
    assert used.last_report.error is None


@pytest.mark.parametrize("every", [1, 5])
def test_a_run_has_its_result_without_its_last_checkpoint(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    used = strategy(checkpoint_path=tmp_path / "run", checkpoint_every=every)

    def full(path: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(used.server, "save", full)
    result = used.start(NodesGrid(reply), initial(), num_rounds=2)
    assert equal(result.arrays, strategy().start(NodesGrid(reply), initial(), 2).arrays)
    assert sum("the last checkpoint was not written: no space left" in s for s in logged) == 1


class Halving(FastAggStrategy):
    """Halves one array of each new model, in the record that the base class has returned."""

    in_place = True

    def aggregate_train(self, *args: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(*args)
        if arrays is not None:
            if not self.in_place:
                arrays = ArrayRecord(dict(arrays.items()))
            arrays["w"] = Array(arrays["w"].numpy() / np.float32(2))
        return arrays, metrics


@pytest.mark.parametrize("start", [FastAggStrategy.start, Strategy.start])
def test_a_model_that_a_subclass_changes_in_place_is_the_next_one(start: Any) -> None:
    ends = []
    for in_place in (True, False):
        used = Halving("mifa", num_clients=K, fraction_evaluate=0.0)
        used.in_place = in_place
        ends.append(start(used, NodesGrid(reply), initial(), 3).arrays)
    assert equal(*ends)


class HalvingLegacy(FastAggLegacyStrategy):
    """Halves one tensor of each new model, in the list that the base class has returned."""

    in_place = True

    def aggregate_fit(self, *args: Any) -> tuple[Parameters | None, dict[str, Any]]:
        made, metrics = super().aggregate_fit(*args)
        if made is not None:
            made = made if self.in_place else Parameters([*made.tensors], made.tensor_type)
            made.tensors[0] = npy(np.load(io.BytesIO(made.tensors[0])) / np.float32(2))
        return made, metrics


def model() -> Parameters:
    return Parameters([npy(value) for value in first_model().values()], "numpy.ndarray")


def test_a_legacy_model_that_a_subclass_changes_in_place_is_the_next_one() -> None:
    ends = []
    for in_place in (True, False):
        manager = SimpleClientManager()
        for client in range(K):
            manager.register(Proxy(str(client), client, {}))
        used = HalvingLegacy(
            "mifa",
            num_clients=K,
            fraction_evaluate=0.0,
            initial_parameters=model(),
            on_fit_config_fn=lambda number: {"round": number},
        )
        used.in_place = in_place
        server = Server(client_manager=manager, strategy=used)
        server.fit(3, 10.0)
        ends.append(server.parameters.tensors)
    assert ends[0] == ends[1]


def alone(**options: Any) -> tuple[FastAggLegacyStrategy, Server]:
    """Return a strategy of the older API whose server has no client."""
    used = FastAggLegacyStrategy(
        num_clients=K,
        fraction_evaluate=0.0,
        initial_parameters=model(),
        node_timeout=0.01,
        **options,
    )
    manager = SimpleClientManager()
    manager.wait_for = lambda number, timeout=0: False  # type: ignore[method-assign]
    return used, Server(client_manager=manager, strategy=used)


def test_legacy_rounds_without_any_client_are_empty_ones(logged: list[str]) -> None:
    used, server = alone(rule="fedavg", max_empty_rounds=3)
    with pytest.raises(RuntimeError, match="max_empty_rounds: 3 rounds in a row"):
        server.fit(5, 1.0)
    assert used.server.rounds == 3
    assert used.last_report is not None and used.last_report.error == "no client is connected"
    assert used.last_report.round == sum("no client is connected" in line for line in logged) == 3


def test_legacy_rounds_without_any_client_count_and_keep_model_and_rule(tmp_path: Path) -> None:
    path = tmp_path / "run"
    before = legacy({}, 2, rule="mifa", checkpoint_path=path)
    used, server = alone(rule="mifa", resume_from=path, checkpoint_path=path)
    server.fit(2, 1.0)
    used.server.guard.uninstall()
    assert used.server.rounds == 4
    for again in (used, legacy({}, 0, rule="mifa", resume_from=path)):
        assert again.server.rounds == 4
        assert again.server.params.equal(before.server.params)
        state = again.server.aggregator.state_dict()
        for name, value in before.server.aggregator.state_dict().items():
            assert value.equal(state[name])


def test_legacy_failures_that_are_not_accepted_leave_a_memory_alone(logged: list[str]) -> None:
    """The rule would apply what it remembers in a round without an answer."""
    whole = legacy({}, 1, rule="mifa", accept_failures=False)
    used = legacy({2: {1: "raise"}}, 2, rule="mifa", accept_failures=False)
    assert used.server.rounds == 2 and used.server.params.equal(whole.server.params)
    assert used.last_report is not None and len(used.last_report.absent) == K
    assert "clients failed, and accept_failures is False" in "\n".join(logged)


@pytest.mark.parametrize("most", [1, 2])
def test_the_last_round_of_a_run_that_fails_is_reported(most: int, logged: list[str]) -> None:
    def silent(content: RecordDict, round: int, client: int) -> None:
        return None

    used = strategy("fedavg", max_empty_rounds=most)
    with pytest.raises(RuntimeError, match="max_empty_rounds"):
        used.start(NodesGrid(silent), initial(), num_rounds=5)
    assert used.last_report is not None and used.last_report.round == most
    assert len(used.last_report.absent) == K
    assert sum(line.startswith(f"\tround {most}: 0 active") for line in logged) == 1


@pytest.mark.parametrize("accept", [True, False])
def test_legacy_the_last_round_of_a_run_that_fails_is_reported(
    accept: bool, logged: list[str]
) -> None:
    faults = {number: dict.fromkeys(range(K), "raise") for number in range(1, 5)}
    with pytest.raises(RuntimeError, match="max_empty_rounds: 2 rounds"):
        legacy(faults, 4, rule="fedavg", max_empty_rounds=2, accept_failures=accept)
    assert sum(line.startswith("\tround 2: 0 active") for line in logged) == 1


def failing(content: RecordDict, round: int, client: int) -> RecordDict | Error:
    """Return the answer of a node; node 0 always fails, and all count equally."""
    if client == 0:
        return Error(code=0, reason="out of memory")
    answer = reply(content, round, client)
    metrics = MetricRecord({**answer["metrics"], "num-examples": 10})
    return RecordDict({"arrays": answer["arrays"], "metrics": metrics})


@pytest.mark.filterwarnings("ignore")  # of Flower's wrapper, which expects no failures
@pytest.mark.parametrize("seed", [1, 4])
def test_a_round_that_a_wrapper_does_not_aggregate_counts(seed: int, logged: list[str]) -> None:
    """Otherwise the next round asks the same nodes, of which one fails again."""
    used = strategy("fedavg", weighted=False, fraction_train=0.4, seed=seed)
    grid = NodesGrid(failing)
    made = message_strategies.DifferentialPrivacyServerSideFixedClipping(used, 0.1, 1.0, 2)
    made.start(grid, initial(), num_rounds=8)
    asked = [sorted(nodes) for nodes in grid.asked if nodes]
    assert len(asked) == 8 and used.server.rounds >= 7
    assert all(nodes != asked[0] for nodes in asked[1:3])
    assert any(0 in nodes for nodes in asked) and not all(0 in nodes for nodes in asked)
    assert sum("was not aggregated" in line for line in logged) > 0


@pytest.mark.filterwarnings("ignore")  # the legacy wrapper is deprecated
def test_legacy_rounds_that_a_wrapper_does_not_aggregate_count() -> None:
    manager = SimpleClientManager()
    for client in range(K):
        faults = {number: {0: "raise"} for number in range(9)}
        manager.register(Proxy(str(client), client, faults))
    used = FastAggLegacyStrategy(
        "fedavg",
        num_clients=K,
        weighted=False,
        fraction_evaluate=0.0,
        max_empty_rounds=3,
        initial_parameters=model(),
        on_fit_config_fn=lambda number: {"round": number},
    )
    made = legacy_strategies.DifferentialPrivacyServerSideFixedClipping(used, 0.1, 1.0, K)
    with pytest.raises(RuntimeError, match="max_empty_rounds: 3 rounds in a row"):
        Server(client_manager=manager, strategy=made).fit(5, 10.0)
    assert used.server.rounds == 3
    assert used.last_report is not None and len(used.last_report.absent) == K


@pytest.mark.parametrize("late", [False, True])
def test_a_legacy_round_may_wait_as_long_as_one_likes(late: bool) -> None:
    options = {"staleness": "constant", "max_staleness": 2} if late else {}
    used = FastAggLegacyStrategy(
        "mifa",
        num_clients=K,
        node_timeout=1e300,
        rule_options=options,
        on_fit_config_fn=lambda number: {"round": number},
    )
    manager = SimpleClientManager()
    coming = [threading.Timer(0.1, manager.register, [Proxy(str(k), k, {})]) for k in range(2)]
    for timer in coming:
        timer.start()
    asked = used.configure_fit(1, model(), manager)
    for proxy, ins in asked:
        assert proxy.fit(ins, 1e300, None).num_examples == 10
    assert len(asked) == 2
    for timer in coming:
        timer.join()


@pytest.mark.parametrize(
    "returned", [3.0, "text", {"a": "text"}, {"a": np.float32(1)}, (0.5, {"a": 1.0})]
)
def test_what_is_no_metrics_of_the_server_is_refused_before_the_first_round(
    returned: Any, tmp_path: Path
) -> None:
    used = strategy(checkpoint_path=tmp_path / "run")
    with pytest.raises(TypeError, match=r"^evaluate_fn: expected a function that returns a Metric"):
        used.start(NodesGrid(reply), initial(), 2, evaluate_fn=lambda number, arrays: returned)
    assert used.server.rounds == 0


def test_a_dict_of_metrics_of_the_server_survives_a_restart(tmp_path: Path) -> None:
    def evaluate(number: int, arrays: ArrayRecord) -> Any:
        return {"accuracy": 0.5, "counts": [1, 2]}

    path = tmp_path / "run"
    used = strategy(checkpoint_path=path)
    used.start(NodesGrid(reply), initial(), 2, evaluate_fn=evaluate)
    result = strategy().start(NodesGrid(reply), num_rounds=2, resume_from=path)
    assert result.evaluate_metrics_serverapp[1] == MetricRecord(evaluate(1, result.arrays))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: strategy("mifa", sends_updates=True), "no option"),
        (lambda: strategy("mifa", node_timeou=3), "Did you mean node_timeout="),
        (lambda: strategy("mifa", num_params=3), r"expected none of \['num_params'\]"),
        (lambda: legacy({}, 1, rule="mifa", rule_options={"saves_earlier": True}), "no option"),
        (lambda: legacy({}, 1, rule="mifa", rule_options={"num_clients": 3}), "expected none of"),
        (lambda: legacy({}, 1, rule="mifa", rule_options={"min_answers": 3}), "no option"),
    ],
)
def test_options_that_are_none_of_the_rule(build: Callable[[], Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        build()
