# SPDX-License-Identifier: Apache-2.0
"""A run with late replies, in both of Flower's APIs, that can kill its own process.

    python -m tests.integrations.late_federation API FOLDER POINT

runs it until SIGKILL in the round ``KILLED``; see :data:`POINTS`. The functions in :data:`RUNS` run
it to the end, or continue from FOLDER as another process: with a Grid that knows no message of
before, or with clients that have other names.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import (
    Code,
    EvaluateRes,
    FitIns,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server
from flwr.serverapp import Grid

from fastagg import Aggregator
from fastagg.inbox import Inbox
from fastagg.integrations._server import AggregationServer
from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

K, D, ROUNDS = 4, 9, 5
KILLED = 3  # the round in which the process is killed
# By round and client: the round in which the answer comes. Two come in the round of the kill.
DELAYS = {(1, 3): 3, (2, 3): 99, (2, 1): 3, (3, 1): 4, (3, 3): 4, (4, 2): 5, (5, 2): 99}
POINTS = [
    "kept",  # when the late answers have arrived
    "taken",  # before the step
    "stepped",  # before the checkpoint
    "saved",  # before files of used answers are deleted
    "settled",
]


def options(folder: Path) -> dict[str, Any]:
    return {
        "num_clients": K,
        "checkpoint_path": folder / "run",
        "checkpoint_keep": 1,  # so that files of used answers go with the next checkpoint
        "inbox_path": folder / "inbox",
        "fraction_evaluate": 0.0,
    }


RULE = {"staleness": "constant", "max_staleness": 2, "max_norm": None}


def trained(model: np.ndarray[Any, Any], number: int, client: int) -> np.ndarray[Any, Any]:
    """Return the weights of a client: a function of the model, the round and the client."""
    draw = np.random.default_rng([number, client])
    return (0.9 * model + draw.standard_normal(D)).astype(np.float32)


class LateGrid(Grid):
    """Nodes whose replies can be pulled some rounds later; it knows its own messages only."""

    def __init__(self) -> None:
        self.now = 0
        self.replies: dict[str, tuple[int, Message]] = {}

    def get_node_ids(self) -> Iterable[int]:
        return [10 + client for client in range(K)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # type: ignore[override]
        keys = []
        for message in messages:
            client = message.metadata.dst_node_id - 10
            self.now = int(message.content["config"]["server-round"])
            key = f"{self.now}-{client}"
            message.metadata.__dict__["_message_id"] = key
            model = trained(message.content["arrays"]["w"].numpy(), self.now, client)
            metrics = MetricRecord({"num-examples": 10, "partition-id": client, "of": self.now})
            content = RecordDict({"a": ArrayRecord({"w": Array(model)}), "metrics": metrics})
            at = DELAYS.get((self.now, client), self.now)
            self.replies[key] = at, Message(content, reply_to=message)
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # type: ignore[override]
        known = [key for key in message_ids if key in self.replies]
        found = [key for key in known if self.replies[key][0] <= self.now]
        return [self.replies.pop(key)[1] for key in found]

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = send_and_receive
    run = property(send_and_receive)


def run_message(folder: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    used = FastAggStrategy("mifa", min_available_nodes=1, **options(folder), **RULE)
    reports = _reports(used)
    first = ArrayRecord({"w": Array(np.zeros(D, np.float32))})
    resumed = folder / "run" if (folder / "run").exists() else None
    result = used.start(LateGrid(), first, num_rounds=rounds, timeout=0.01, resume_from=resumed)
    metrics = {n: dict(record) for n, record in result.train_metrics_clientapp.items()}
    return {"params": used.server.params, "reports": reports, "metrics": metrics}


class LateClient(ClientProxy):
    """A client of the older API, whose late answers wait for an event."""

    lock = threading.Lock()  # the parser of np.load is not thread-safe on Python 3.11

    def __init__(self, name: str, client: int) -> None:
        super().__init__(name)
        self.client = client
        self.events = {n: threading.Event() for n, k in DELAYS if k == client}

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        number = int(ins.config["round"])
        if number in self.events:
            self.events[number].wait()
        with self.lock:
            (model,) = parameters_to_ndarrays(ins.parameters)
        sent = ndarrays_to_parameters([trained(model, number, self.client)])
        metrics = {"partition-id": self.client, "of": number, "bytes": b"\xff", "nan": float("nan")}
        return FitRes(Status(Code.OK, ""), sent, 10, metrics)

    def evaluate(self, *args: Any) -> EvaluateRes:
        raise NotImplementedError

    get_properties = get_parameters = reconnect = evaluate  # type: ignore[assignment]


def run_legacy(folder: Path) -> dict[str, Any]:
    """Run the older API; after a restart, its clients have other names."""
    resumed = folder / "run" if (folder / "run").exists() else None
    prefix = "old" if resumed is None else "new"
    clients = [LateClient(f"{prefix}{client}", client) for client in range(K)]
    metrics: dict[int, Any] = {}
    done = 0

    def config(number: int) -> dict[str, Any]:
        """Let the answers come that are due before a round, and wait for them."""
        number += done
        for (asked, client), due in DELAYS.items():
            if due == number and done < asked:
                clients[client].events[asked].set()
                assert used._late.wait_for_one([clients[client].cid], 60.0)
        return {"round": number}

    def combine(results: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        metrics[used.server.rounds] = [(n, m["of"], m["bytes"], repr(m)) for n, m in results]
        return {}

    used = FastAggLegacyStrategy(
        "mifa",
        on_fit_config_fn=config,
        fit_metrics_aggregation_fn=combine,
        initial_parameters=ndarrays_to_parameters([np.zeros(D, np.float32)]),
        min_fit_clients=1,
        min_available_clients=1,
        rule_options=RULE,
        resume_from=resumed,
        **options(folder),
    )
    call = used._late.call

    def patient(proxy: Any, number: int, ins: Any, timeout: float, group_id: Any) -> FitRes:
        """Wait longer for clients that are not late, so that a machine may stall."""
        seconds = timeout if number in proxy.events else 60.0
        return call(proxy, number, ins, seconds, group_id)

    used._late.call = patient  # type: ignore[method-assign]
    if resumed is not None:
        done = KILLED if _rounds(resumed) == KILLED else KILLED - 1
    reports, manager = _reports(used), SimpleClientManager()
    for client in clients:
        manager.register(client)
    try:
        Server(client_manager=manager, strategy=used).fit(ROUNDS - done, timeout=0.2)
    finally:
        used.server.guard.uninstall()
        for client in clients:
            for event in client.events.values():
                event.set()
    return {"params": used.server.params, "reports": reports, "metrics": metrics}


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {"message": run_message, "legacy": run_legacy}


def _rounds(path: Path) -> int:
    server = AggregationServer("mifa", num_clients=K, checkpoint_path=path, **RULE)
    server.resume(path)
    return server.rounds


def _reports(used: FastAggStrategy | FastAggLegacyStrategy) -> dict[int, Any]:
    """Return a dict that gets the report of each round: active clients and late ages by client."""
    reports: dict[int, Any] = {}
    close = used.server.close_round

    def closed(*args: Any, **kwargs: Any) -> Any:
        report = close(*args, **kwargs)
        late = {report.ids[sender]: age for sender, age in report.late.items()}
        reports[report.round] = report.active, late
        return report

    used.server.close_round = closed  # type: ignore[method-assign]
    return reports


def kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process lives")


def kill_at(point: str) -> None:
    """Let this process kill itself at a point of the round ``KILLED``."""
    servers: list[AggregationServer] = []
    put, step = AggregationServer.put_late, Aggregator.step
    save, settle = AggregationServer.save, Inbox.settle

    def put_late(self: AggregationServer, answer: Any) -> str | None:
        servers[:] = [self]
        reason = put(self, answer)
        if point == "kept" and len(self._late.waiting()) == 2:
            kill()
        return reason

    def stepped(self: Aggregator, *args: Any, **kwargs: Any) -> Any:
        if point == "taken" and servers and servers[0].rounds == KILLED - 1:
            kill()
        return step(self, *args, **kwargs)

    def saved(self: AggregationServer, *args: Any) -> None:
        if point == "stepped" and self.rounds == KILLED:
            kill()
        save(self, *args)

    def settled(self: Inbox, round: int) -> None:
        if point == "saved" and round == KILLED:
            kill()
        settle(self, round)
        if point == "settled" and round == KILLED:
            kill()

    AggregationServer.put_late = put_late  # type: ignore[method-assign]
    Aggregator.step = stepped  # type: ignore[method-assign]
    AggregationServer.save = saved  # type: ignore[method-assign]
    Inbox.settle = settled  # type: ignore[method-assign]


def set_identity() -> None:
    """Let newer versions of Flower make messages in a process that they did not start."""
    try:
        module = importlib.import_module("flwr.supercore.task_identity")
    except ModuleNotFoundError:
        return
    for name in ("_run_id", "_node_id", "_task_id"):
        setattr(module.TaskIdentity, name, 1)


if __name__ == "__main__":
    api, folder, point = sys.argv[1:]
    torch.set_num_threads(1)
    set_identity()
    kill_at(point)
    RUNS[api](Path(folder))
