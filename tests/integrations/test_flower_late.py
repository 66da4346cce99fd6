# SPDX-License-Identifier: Apache-2.0
"""Late results in Flower's older API, and late replies within wrappers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.common import (
    Code,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import strategy as legacy
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server
from flwr.serverapp import strategy as current

from fastagg.integrations._flower_legacy_late import LateResults
from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore"),  # of Flower: its legacy strategies are deprecated
]

K, D = 3, 4
SOON = 0.25  # seconds of a round that waits for a client that is late
LATE: dict[str, Any] = {"staleness": "constant", "max_staleness": 2, "max_norm": None}


def noise(client: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + client)
    return torch.randn(D, generator=generator)


class Slow(ClientProxy):
    """A client that answers at once, but to the rounds of ``slow`` only when it is released."""

    lock = threading.Lock()  # the parser of np.load is not thread-safe on Python 3.11

    def __init__(self, client: int, slow: Iterable[int] = (), **changes: Any) -> None:
        super().__init__(f"cid{client}")
        self.client, self.changes = client, changes
        self.slow = {number: threading.Event() for number in slow}
        self.asked: list[int] = []
        self.timeouts: list[float | None] = []
        self.evaluated: list[int | None] = []

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        number = int(ins.config["round"])
        self.asked.append(number)
        self.timeouts.append(timeout)
        if number in self.slow:
            assert self.slow[number].wait(60.0)
            if "error" in self.changes:
                raise RuntimeError("connection lost")
        with self.lock:
            (model,) = parameters_to_ndarrays(ins.parameters)
        model = model + noise(self.client, number).numpy()
        if number in self.slow:
            model += self.changes.get("added", 0.0)
        status = Status(self.changes.get("code", Code.OK), "")
        metrics = {"partition-id": self.client, "round": number}
        return FitRes(status, ndarrays_to_parameters([model]), 10, metrics)

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> EvaluateRes:
        self.evaluated.append(group_id)
        return EvaluateRes(Status(Code.OK, ""), 1.0, 10, {})

    def get_properties(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    get_parameters = reconnect = get_properties


class Federation:
    """Clients, the strategy and the reports of its rounds."""

    def __init__(self, clients: list[Slow], rule: str = "fedavg", **options: Any) -> None:
        self.clients = clients
        self.manager = SimpleClientManager()
        for client in clients:
            self.manager.register(client)
        self.reports: list[Any] = []
        self.before: dict[int, Callable[[], None]] = {}  # what is done before a round
        self.strategy = FastAggLegacyStrategy(
            rule,
            on_fit_config_fn=self._config,
            initial_parameters=ndarrays_to_parameters([np.zeros(D, np.float32)]),
            num_clients=K,
            **{"rule_options": LATE, "fraction_evaluate": 0.0, **options},
        )
        late = self.strategy._late
        call = late.call

        def patient(proxy: Any, number: int, ins: Any, timeout: float, group_id: Any) -> FitRes:
            """Wait longer for clients that are not late, so that a machine may stall."""
            seconds = timeout if number in proxy.slow else 60.0
            return call(proxy, number, ins, seconds, group_id)

        late.call = patient  # type: ignore[method-assign]

    def _config(self, number: int) -> dict[str, Any]:
        if number > 1:
            self.reports.append(self.strategy.last_report)
        self.before.get(number, id(number).bit_length)()
        return {"round": number}

    def release(self, client: int, number: int) -> None:
        """Let a client answer to a round, and wait until its result has arrived."""
        self.clients[client].slow[number].set()
        assert self.strategy._late.wait_for_one([f"cid{client}"], 60.0)

    def run(self, rounds: int, timeout: float | None = SOON) -> None:
        try:
            server = Server(client_manager=self.manager, strategy=self.strategy)
            server.fit(num_rounds=rounds, timeout=timeout)
        finally:
            self.strategy.server.guard.uninstall()
            for client in self.clients:
                for event in client.slow.values():
                    event.set()
        self.reports.append(self.strategy.last_report)


@pytest.mark.parametrize("rule", ["fedavg", "mifa", "mimic", "fdms"])
def test_a_late_result_counts_with_its_age(rule: str, logged: list[str]) -> None:
    """Client 2 answers to round 1 before round 3, and is not asked in round 2."""
    seen = []

    def metrics(results: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        seen.append([(m["partition-id"], m["round"]) for _, m in results])
        return {}

    clients = [Slow(0), Slow(1), Slow(2, [1, 3])]
    found = Federation(clients, rule, fit_metrics_aggregation_fn=metrics)
    found.before[3] = lambda: found.release(2, 1)
    found.run(3)
    agg = fastagg.make(rule, num_clients=K, num_params=D, **LATE)
    params, models = torch.zeros(D), {}
    script = [[(0, 1), (1, 1)], [(0, 2), (1, 2)], [(0, 3), (1, 3), (2, 1)]]
    for number, came in enumerate(script, start=1):
        models[number] = params.clone()
        rows = [(models[r] + noise(k, r)) - models[r] for k, r in came]
        agg.step(params, rows, [k for k, _ in came], ages=[number - r for _, r in came])
    assert torch.equal(found.strategy.server.params, params)
    assert [report.late for report in found.reports] == [{}, {}, {"cid2": 2}]
    assert [[*report.absent] for report in found.reports] == [["cid2"], [], []]
    assert clients[2].asked == [1, 3]
    assert clients[2].timeouts == [43200.0] * 2  # a shorter one would disconnect the client
    assert seen == script
    assert "late: client 2 (cid2), age 2" in "".join(logged)
    assert "it counts when it comes" in "".join(logged)


def test_one_late_result_by_hand() -> None:
    """The updates are 1 for the model 0 and 3 for the model 1: the mean is 2."""
    found = Federation([Slow(0), Slow(1, [1, 2])])
    fits = {(0, 1): 1.0, (0, 2): 3.0, (1, 1): 1.0}

    def fit(client: Slow) -> Callable[..., FitRes]:
        def answer(ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
            number = int(ins.config["round"])
            if number in client.slow:
                assert client.slow[number].wait(60.0)
            with Slow.lock:
                (model,) = parameters_to_ndarrays(ins.parameters)
            sent = ndarrays_to_parameters(
                [model + np.float32(fits.get((client.client, number), 0))]
            )
            return FitRes(Status(Code.OK, ""), sent, 10, {"partition-id": client.client})

        return answer

    for client in found.clients:
        client.fit = fit(client)  # type: ignore[method-assign]
    found.before[2] = lambda: found.release(1, 1)
    found.run(2)
    assert found.strategy.server.params.tolist() == [3.0] * D  # 1 + (3 + 1) / 2
    assert found.reports[1].late == {"cid1": 1}


def test_a_client_that_answers_late_and_in_time_counts_once() -> None:
    clients = [Slow(0), Slow(1), Slow(2, [1])]
    found = Federation(clients)
    found.before[2] = lambda: found.release(2, 1)
    found.run(2)
    assert found.reports[1].late == {} and found.reports[1].active == (0, 1, 2)
    why = "a newer answer of this client counts"
    assert found.reports[1].rejected == {"cid2 (of round 1)": why}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"added": np.nan}, "NaN or Inf"),
        ({"error": True}, "Received late failure: client cid2: RuntimeError('connection lost')"),
        ({"code": Code.FIT_NOT_IMPLEMENTED}, "Received late failure: client cid2: Status"),
    ],
)
def test_a_late_result_that_cannot_be_used(
    changes: dict[str, Any], said: str, logged: list[str]
) -> None:
    ends = []
    for late in (changes, {}):
        found = Federation([Slow(0), Slow(1), Slow(2, [1, 2], **late)], "mifa")
        if late:
            found.before[2] = lambda found=found: found.release(2, 1)
        found.run(2)
        assert found.reports[1].late == {} and found.reports[1].active == (0, 1)
        ends.append(found.strategy.server.params)
    assert said in "".join(logged)
    assert torch.equal(ends[0], ends[1])


def test_a_result_that_is_too_old_is_rejected() -> None:
    found = Federation([Slow(0), Slow(1), Slow(2, [1, 5])])
    found.before[5] = lambda: found.release(2, 1)
    found.run(5)
    assert found.reports[4].rejected == {
        "cid2 (of round 1)": "late: round 1 is too old, max_staleness is 2"
    }


def test_clients_that_are_late_are_not_evaluated() -> None:
    clients = [Slow(0), Slow(1), Slow(2, [1])]
    Federation(clients, fraction_evaluate=1.0).run(1)
    assert [client.evaluated for client in clients] == [[1], [1], []]


def test_a_round_waits_for_one_client() -> None:
    """All clients are late; the second round begins when the first of them has answered."""
    clients = [Slow(0, [1]), Slow(1, [1])]
    found = Federation(clients)
    timer = threading.Timer(SOON, clients[0].slow[1].set)
    found.before[2] = timer.start
    found.run(2)
    timer.join()
    assert [client.asked for client in clients] == [[1, 2], [1]]
    assert found.reports[1].active == (0,)


def test_without_a_timeout_nobody_is_late() -> None:
    client = Slow(2, [1])
    timer = threading.Timer(SOON, client.slow[1].set)
    timer.start()
    found = Federation([Slow(0), Slow(1), client])
    found.run(1, timeout=None)
    timer.join()
    assert found.reports[0].active == (0, 1, 2)


def test_without_max_staleness_nothing_is_watched() -> None:
    found = Federation(
        [Slow(0)], rule_options={"max_norm": None}, min_available_clients=1, min_fit_clients=1
    )
    sent = ndarrays_to_parameters([np.zeros(D, np.float32)])
    ((proxy, _),) = found.strategy.configure_fit(1, sent, found.manager)
    assert proxy is found.clients[0]


def test_failures_must_be_accepted() -> None:
    with pytest.raises(ValueError, match=r"^accept_failures: expected True with max_staleness"):
        Federation([], accept_failures=False)


def test_a_workflow_that_sends_messages_itself_is_refused() -> None:
    """DefaultWorkflow takes node_id from the proxies, and never calls fit."""
    client = Slow(0)
    client.node_id = 7
    found = Federation([client], min_available_clients=1, min_fit_clients=1)
    sent = ndarrays_to_parameters([np.zeros(D, np.float32)])
    ((proxy, ins),) = found.strategy.configure_fit(1, sent, found.manager)
    assert proxy.node_id == 7 and proxy.cid == "cid0"
    with pytest.raises(ValueError, match=r"^max_staleness: expected a server that calls"):
        found.strategy.aggregate_fit(1, [(proxy, client.fit(ins, None, 1))], [])
    assert found.strategy.server.rounds == 0


def test_many_threads_take_every_late_result_once() -> None:
    """Calls of 32 clients end around their timeouts: each is in time, or late, and never both."""
    kept: dict[str, tuple[int, FitRes]] = {}
    late = LateResults(lambda cid, number, result: kept.update({cid: (number, result)}))
    result = FitRes(Status(Code.OK, ""), Parameters([], ""), 1, {})

    class Waiting(Slow):
        def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> FitRes:
            time.sleep(0.002 * (self.client % 8))
            return result

    for number in range(1, 6):
        outcomes: dict[str, bool] = {}

        def call(proxy: ClientProxy, outcomes: dict[str, bool] = outcomes) -> None:
            try:
                outcomes[proxy.cid] = proxy.fit(None, 0.007, 1) is result  # type: ignore[arg-type]
            except TimeoutError:
                outcomes[proxy.cid] = False

        proxies = late.watched([Waiting(client) for client in range(32)], number)
        threads = [threading.Thread(target=call, args=[proxy]) for proxy in proxies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for proxy in proxies:
            assert late.wait_for_one([proxy.cid], 60.0)
        taken, kept = kept, {}
        assert taken.keys() == {cid for cid, in_time in outcomes.items() if not in_time}
        assert all(found == (number, result) for found in taken.values())
        assert len(outcomes) == 32


# --- wrappers -------------------------------------------------------------------------------

WRAPPERS = [
    f"DifferentialPrivacy{side}Side{kind}Clipping"
    for side in ("Client", "Server")
    for kind in ("Fixed", "Adaptive")
]


def wrapped(module: Any, wrapper: str, strategy: Any) -> Any:
    bound = {"clipping_norm": 1.0} if "Fixed" in wrapper else {}
    return getattr(module, wrapper)(strategy, 0.1, num_sampled_clients=K, **bound)


class Plain:
    """A wrapper without any effect, with a loop of rounds of its own."""

    def __init__(self, strategy: FastAggStrategy) -> None:
        self.strategy = strategy

    def configure_train(self, *args: Any) -> Any:
        return self.strategy.configure_train(*args)


@pytest.mark.usefixtures("flower_identity")
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "Plain"])
def test_late_replies_are_refused_within_a_wrapper(wrapper: str) -> None:
    grid: Any = SimpleNamespace(get_node_ids=lambda: [1, 2, 3])
    arrays = ArrayRecord({"w": Array(np.ones(D, np.float32))})
    for options, refused in ((LATE, True), ({}, False), ({"staleness": "constant"}, False)):
        strategy = FastAggStrategy("fedavg", num_clients=K, weighted=False, **options)
        made = Plain(strategy) if wrapper == "Plain" else wrapped(current, wrapper, strategy)
        if not refused:
            assert len([*made.configure_train(1, arrays, ConfigRecord(), grid)]) == K
            continue
        with pytest.raises(ValueError, match="max_staleness"):
            made.configure_train(1, arrays, ConfigRecord(), grid)
        assert not strategy.server.has_model  # nothing has happened yet


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_older_api_refuses_them_within_wrappers_for_privacy(wrapper: str) -> None:
    strategy = FastAggLegacyStrategy("fedavg", num_clients=K, weighted=False, rule_options=LATE)
    sent: Parameters = ndarrays_to_parameters([np.ones(D, np.float32)])
    with pytest.raises(ValueError, match="max_staleness lets late answers count"):
        wrapped(legacy, wrapper, strategy).configure_fit(1, sent, SimpleClientManager())
