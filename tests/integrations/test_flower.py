# SPDX-License-Identifier: Apache-2.0
"""The strategies for both of Flower's APIs, with nodes that are function calls.

test_flower_example.py runs examples/flower: real servers and clients in separate processes.
"""

from __future__ import annotations

import io
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import (
    Array,
    ArrayRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common import Code, FitRes, Parameters, Status
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("flower_identity")]

K = 5
NODES = [9_000_000_000_000_000_000 - 7 * k for k in range(K)]  # the partition of NODES[k] is k


def first_model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((3, 4)).astype(np.float32),
        "n": np.array(5, np.int64),
        "h": rng.standard_normal(2).astype(np.float16),
    }


def flat(model: dict[str, np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([model[k].ravel().astype(np.float32) for k in "wh"]))


def trained(model: dict[str, np.ndarray], round: int, client: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([round, client])
    return {
        name: (a + rng.standard_normal(a.shape)).astype(a.dtype) if a.dtype.kind == "f" else a + 1
        for name, a in model.items()
    }


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


Fault = Callable[[RecordDict, int, int], RecordDict | Error | None]

FORGED = "evil\n\tround 1: 5 active: 0, 1, 2, 3, 4\x1b[2J" * 1000  # lines of a log, from a client


def reply(content: RecordDict, round: int, client: int, *, report: bool = True) -> RecordDict:
    model = {name: array.numpy() for name, array in content["arrays"].items()}
    arrays = ArrayRecord(
        {k: Array(np.asarray(v)) for k, v in trained(model, round, client).items()}
    )
    metrics = {"num-examples": 10 + client, "loss": 1.0 / (1 + client)}
    if report:
        metrics["partition-id"] = client
    return RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})


class NodesGrid(Grid):
    """Nodes that answer at once, in reverse order, with a function of the round and client."""

    def __init__(self, answer: Fault, nodes: list[int] | None = None) -> None:
        self.answer = answer
        self.nodes = nodes or NODES
        self.asked: list[list[int]] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        self.asked.append([self.nodes.index(m.metadata.dst_node_id) for m in messages])
        replies = []
        for message in reversed(messages):
            client = self.nodes.index(message.metadata.dst_node_id)
            round = int(message.content["config"]["server-round"])
            answer = self.answer(message.content, round, client)
            if answer is not None:
                replies.append(Message(answer, reply_to=message))
        return replies

    def set_run(self, run: Any) -> None: ...
    def create_message(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    push_messages = pull_messages = create_message
    run = property(create_message)


def initial() -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in first_model().items()})


def strategy(rule: str = "fdms", **options: Any) -> FastAggStrategy:
    options = {"num_clients": K, "fraction_evaluate": 0.0, "min_available_nodes": 1} | options
    return FastAggStrategy(rule, **options)


def by_hand(rule: str, rounds: list[list[int]], *, alike: bool = False) -> Tensor:
    """Compute the model after rounds with the updates of these clients.

    ``alike``: all clients report the same ``num-examples``.
    """
    params = flat(first_model())
    agg = fastagg.make(rule, num_clients=K, num_params=14)
    model = first_model()
    for number, clients in enumerate(rounds, start=1):
        model["w"] = params[:12].numpy().reshape(3, 4).copy()
        model["h"] = params[12:].numpy().astype(np.float16)
        rows = [flat(trained(model, number, k)) - params for k in clients]
        weights = [10 + k for k in clients] if rule == "fedavg" and not alike else None
        agg.step(params, rows, clients, weights=weights)
    return params


def scripted(absent: dict[int, dict[int, str]]) -> Fault:
    """Return clients that fail as given: round -> client -> fault."""

    def answer(content: RecordDict, round: int, client: int) -> RecordDict | Error | None:
        fault = absent.get(round, {}).get(client, "")
        if fault == "silence":
            return None
        if fault == "error":
            return Error(code=2, reason="out of memory")
        good = reply(content, round, client)
        if fault == "nan":
            good["arrays"]["w"] = Array(np.full((3, 4), np.nan, np.float32))
        elif fault == "long":
            good["arrays"]["w"] = Array(np.full((3, 4), 1e30, np.float32))
        elif fault == "shape":
            good["arrays"]["w"] = Array(np.zeros((4, 3), np.float32))
        elif fault == "dtype":
            good["arrays"]["w"] = Array(np.zeros((3, 4), np.float64))
        elif fault == "pickle":
            good["arrays"]["w"] = Array("float32", (3, 4), "pickle", b"cos\nsystem\n(S'false'\ntR.")
        elif fault == "partition":
            good["metrics"]["partition-id"] = K
        elif fault == "impostor":
            good["metrics"]["partition-id"] = (client + 1) % K
        elif fault == "no metrics":
            del good["metrics"]
        elif fault == "weight":
            good["metrics"]["num-examples"] = math.nan
        elif fault == "two arrays":
            good["more"] = ArrayRecord({})
        return good

    return answer


@pytest.mark.parametrize("rule", ["fdms", "mifa", "fedavg"])
def test_same_bits_as_the_rule(rule: str, logged: list[str]) -> None:
    faults = {
        2: {1: "silence", 4: "error"},
        3: dict.fromkeys(range(K), "silence"),
        4: {0: "nan", 2: "shape", 3: "long"},
    }
    used = strategy(rule, max_norm=1e3)
    result = used.start(NodesGrid(scripted(faults)), initial(), num_rounds=5)
    rounds = [[*range(K)], [0, 2, 3], [], [1, 4], [*range(K)]]
    assert torch.equal(used.server.params, by_hand(rule, rounds))
    arrays = {name: array.numpy() for name, array in result.arrays.items()}
    assert list(arrays) == ["w", "n", "h"]
    for name, value in first_model().items():
        assert arrays[name].dtype == value.dtype
        assert arrays[name].shape == value.shape
        array = result.arrays[name]  # the metadata matches the content
        assert (array.dtype, tuple(array.shape)) == (str(value.dtype), value.shape)
    assert arrays["n"] == 5
    np.testing.assert_array_equal(arrays["w"].ravel(), used.server.params[:12].numpy())
    text = "\n".join(logged)
    assert f"absent: client 1 ({NODES[1]}), client 4 ({NODES[4]})" in text
    assert "out of memory" in text
    assert "update of client 0: NaN or Inf" in text
    assert "update of client 3: norm 3.4641e+30, but max_norm is 1000" in text
    assert "expected shape [3, 4], got [4, 3]" in text
    assert ("the model stays as it was" in text) == (rule != "mifa")
    assert ("the rule applied what it remembers" in text) == (rule == "mifa")
    assert ("stood in: " in text) == (rule == "fdms")
    assert set(result.train_metrics_clientapp) == {1, 2, 4, 5}
    assert set(result.train_metrics_clientapp[1]) == {"loss"}


@pytest.mark.parametrize(
    "fault",
    ["nan", "shape", "dtype", "pickle", "partition", "weight", "no metrics", "two arrays"],
)
def test_a_bad_answer_counts_as_an_absent_client(fault: str) -> None:
    with_it, without = strategy(), strategy()
    with_it.start(NodesGrid(scripted({2: {3: fault}})), initial(), num_rounds=3)
    without.start(NodesGrid(scripted({2: {3: "silence"}})), initial(), num_rounds=3)
    assert torch.equal(with_it.server.params, without.server.params)
    assert torch.isfinite(with_it.server.params).all()


def wordy(content: RecordDict, round: int, client: int) -> RecordDict | Error:
    """Return answers with texts and values that would fill a log, or write lines of their own."""
    good = reply(content, round, client)
    if client == 0:
        good["arrays"]["x" * 100_000] = Array(np.zeros(1, np.float32))
    elif client == 1:
        good["metrics"]["partition-id"] = [1.0 / 3] * 100_000
    elif client == 2:
        good["metrics"]["num-examples"] = [1.0 / 3] * 100_000
    elif client == 3:
        return Error(code=1, reason=FORGED)
    return good


@pytest.mark.parametrize("ids", ["partition", lambda node, metrics: metrics["partition-id"]])
def test_texts_of_clients_are_short_lines_in_log_and_report(ids: Any, logged: list[str]) -> None:
    used = strategy("fedavg", ids=ids)
    used.start(NodesGrid(wordy), initial(), num_rounds=2)
    assert used.last_report is not None and used.last_report.active == (4,)
    reasons = used.last_report.rejected
    assert reasons.keys() == {str(node) for node in NODES[:3]}
    assert all(len(reason) <= 200 for reason in reasons.values())
    assert "a list of 100000 values" in reasons[str(NODES[1])]
    assert max(map(len, logged)) < 1000
    assert not any("\n" in line or "\x1b" in line for line in logged)
    assert any(r"evil\n\tround 1" in line for line in logged)


def test_an_id_claimed_by_two_nodes_is_given_to_neither() -> None:
    used = strategy("fedavg")
    used.start(NodesGrid(scripted({1: {3: "impostor"}})), initial(), num_rounds=1)
    assert used.last_report is not None
    assert used.last_report.active == (0, 1, 2)
    assert set(used.last_report.rejected) == {str(NODES[3]), str(NODES[4])}


def test_a_node_cannot_claim_the_partition_of_an_absent_one() -> None:
    faults = {2: {4: "silence", 3: "impostor"}}
    used = strategy("mifa", max_norm=None)
    used.start(NodesGrid(scripted(faults)), initial(), num_rounds=2)
    assert used.last_report is not None
    assert used.last_report.active == (0, 1, 2)
    assert used.last_report.rejected == {
        str(NODES[3]): f"partition id: {NODES[3]} is client 3, and claims to be client 4"
    }
    honest = strategy("mifa", max_norm=None)
    honest.start(NodesGrid(scripted({2: {4: "silence", 3: "silence"}})), initial(), num_rounds=2)
    assert torch.equal(used.server.params, honest.server.params)
    rows = [one.server.aggregator.state_dict()["memory"] for one in (used, honest)]
    assert torch.equal(*rows)


def test_a_function_decides_who_is_who() -> None:
    def who(node: int, metrics: dict[str, Any]) -> int:
        assert metrics["num-examples"] >= 10
        return {NODES[k]: (k + 1) % K for k in range(4)}[node]  # NODES[4] is not in the list

    used = strategy("mifa", ids=who)
    used.start(NodesGrid(scripted({})), initial(), num_rounds=1)
    assert used.last_report is not None
    assert used.last_report.ids == {str(NODES[k]): k + 1 for k in range(4)}
    (problem,) = used.last_report.rejected.values()
    assert problem == f"ids: the function raised KeyError({NODES[4]})"
    for wrong in (None, True, 1.0, "1"):
        used = strategy("mifa", ids=lambda node, metrics, wrong=wrong: wrong, max_empty_rounds=9)
        with pytest.raises(RuntimeError, match="no client was active"):
            used.start(NodesGrid(scripted({})), initial(), num_rounds=1)
        assert used.last_report is not None
        assert f"got {wrong!r}" in used.last_report.rejected[str(NODES[0])]
    with pytest.raises(ValueError, match="ids: expected"):
        strategy("mifa", ids="key")


def test_nodes_that_reconnect_without_a_report_stay_active() -> None:
    def answer(content: RecordDict, round: int, client: int) -> RecordDict:
        return reply(content, round, client, report=False)

    class Reconnecting(NodesGrid):
        def get_node_ids(self) -> Iterable[int]:
            self.nodes = [node + 1 for node in self.nodes]
            return list(self.nodes)

    used = strategy("fdms")
    used.start(Reconnecting(answer), initial(), num_rounds=4)
    assert used.last_report is not None
    assert used.last_report.active == tuple(range(K))
    assert used.last_report.forgotten == tuple(range(K))


def test_clients_without_a_report_are_identified_by_their_node() -> None:
    def answer(content: RecordDict, round: int, client: int) -> RecordDict:
        return reply(content, round, client, report=False)

    used = strategy("mifa")
    used.start(NodesGrid(answer), initial(), num_rounds=2)
    assert used.last_report is not None
    assert used.last_report.ids == {str(node): k for k, node in enumerate(sorted(NODES))}


@pytest.mark.parametrize("rule", ["fdms", "mimic"])
def test_resuming_is_bit_identical_with_other_nodes(rule: str, tmp_path: Path) -> None:
    faults = scripted({2: {1: "silence"}, 3: {0: "error", 2: "silence"}, 5: {4: "nan"}})
    whole = strategy(rule)
    whole_result = whole.start(NodesGrid(faults), initial(), num_rounds=6)
    path = tmp_path / "run"
    strategy(rule, checkpoint_path=path).start(NodesGrid(faults), initial(), num_rounds=3)
    other_nodes = [node + 1 for node in NODES[::-1]]

    grid = NodesGrid(lambda c, r, i: faults(c, r, i), other_nodes[::-1])
    again = strategy(rule, checkpoint_path=path)
    result = again.start(grid, num_rounds=6, resume_from=path)
    assert torch.equal(again.server.params, whole.server.params)
    assert set(result.train_metrics_clientapp) == {1, 2, 3, 4, 5, 6}
    for name, array in whole_result.arrays.items():
        assert result.arrays[name].data == array.data
    # resuming at the end: no round remains
    done = strategy(rule).start(NodesGrid(faults), num_rounds=6, resume_from=path)
    assert done.arrays["w"].data == result.arrays["w"].data


def test_sampling_resumes_with_the_same_clients(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fraction_train": 0.6, "min_train_nodes": 1, "seed": 3}
    whole = NodesGrid(scripted({}))
    first = strategy("fedau", **options)
    first.start(whole, initial(), num_rounds=6)
    assert all(len(asked) == 3 for asked in whole.asked)
    assert len({tuple(sorted(asked)) for asked in whole.asked}) > 1
    path = tmp_path / "run"
    parts = NodesGrid(scripted({}))
    strategy("fedau", checkpoint_path=path, **options).start(parts, initial(), num_rounds=4)
    last = strategy("fedau", **options)
    last.start(parts, num_rounds=6, resume_from=path)
    assert parts.asked == whole.asked
    assert torch.equal(last.server.params, first.server.params)


def test_an_interrupt_writes_a_last_checkpoint(tmp_path: Path) -> None:
    def answer(content: RecordDict, round: int, client: int) -> RecordDict:
        if (round, client) == (3, 2):
            signal.raise_signal(signal.SIGINT)
        return reply(content, round, client)

    path = tmp_path / "run"
    stopped = strategy("mifa", checkpoint_path=path, checkpoint_every=1000)
    with pytest.raises(KeyboardInterrupt):
        stopped.start(NodesGrid(answer), initial(), num_rounds=5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again, whole = strategy("mifa"), strategy("mifa")
    result = again.start(NodesGrid(scripted({})), num_rounds=5, resume_from=path)
    assert set(result.train_metrics_clientapp) == {1, 2, 3, 4, 5}
    whole.start(NodesGrid(scripted({})), initial(), num_rounds=5)
    assert torch.equal(again.server.params, whole.server.params)


def test_metrics_without_an_average_do_not_stop_the_run(logged: list[str]) -> None:
    def answer(content: RecordDict, round: int, client: int) -> RecordDict:
        good = reply(content, round, client)
        if client in (1, 2, 4):
            good["metrics"]["extra"] = 1
        if client == 2:
            good["metrics"]["own"] = 1
        if round == 2:
            good["metrics"]["num-examples"] = 0
        return good

    used = strategy("fdms", fraction_evaluate=1.0)
    grid = NodesGrid(lambda c, r, k: answer(c, r, k))
    result = used.start(grid, initial(), num_rounds=2)
    assert set(result.train_metrics_clientapp) == set(result.evaluate_metrics_clientapp) == {1}
    weights = {k: 10 + k for k in range(K)}
    mean = sum(w / (1 + k) for k, w in weights.items()) / sum(weights.values())
    metrics = result.train_metrics_clientapp[1]
    assert set(metrics) == {"loss", "extra"}
    assert metrics["loss"] == pytest.approx(mean, rel=1e-12)
    assert metrics["extra"] == pytest.approx(1, rel=1e-12)
    assert "the sum of 'num-examples' is 0" in "\n".join(logged)
    assert used.last_report is not None
    assert used.last_report.active == tuple(range(K))  # the updates still count


def test_evaluation_on_the_server_and_the_summary(logged: list[str]) -> None:
    seen: list[tuple[int, bytes]] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen.append((round, arrays["w"].data))
        return MetricRecord({"accuracy": 0.5}) if round else None

    used = strategy("mifa")
    result = used.start(NodesGrid(scripted({})), initial(), 2, evaluate_fn=evaluate)
    assert [round for round, _ in seen] == [0, 1, 2]
    assert seen[-1][1] == result.arrays["w"].data
    assert set(result.evaluate_metrics_serverapp) == {1, 2}
    assert "Rule: mifa, 5 clients" in "\n".join(logged)
    assert "Fraction: train (1.00)" in "\n".join(logged)


def test_arrays_are_read_from_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server avoids the conversions that copy each array."""
    used = strategy("fdms")
    aggregate = used.aggregate_train

    def watched(number: int, replies: Iterable[Message]) -> Any:
        with monkeypatch.context() as patch:
            for owner, name in ((Array, "numpy"), (np, "load"), (np, "concatenate")):
                patch.setattr(owner, name, lambda *_, **__: pytest.fail("converts an array"))
            return aggregate(number, replies)

    monkeypatch.setattr(used, "aggregate_train", watched)
    used.start(NodesGrid(scripted({})), initial(), num_rounds=2)
    assert torch.equal(used.server.params, by_hand("fdms", [[*range(K)]] * 2))


def test_the_strategy_runs_in_the_loop_of_flower() -> None:
    from flwr.serverapp.strategy import Strategy

    ours, theirs = strategy(), strategy()
    ours.start(NodesGrid(scripted({2: {1: "silence"}})), initial(), num_rounds=3)
    grid = NodesGrid(scripted({2: {1: "silence"}}))
    Strategy.start(theirs, grid, initial(), num_rounds=3)
    assert torch.equal(ours.server.params, theirs.server.params)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: strategy("fdsm"), ValueError, "fdms"),
        (lambda: strategy(num_clients=None), TypeError, "num_clients"),
        (lambda: strategy(mu=2), TypeError, "mu"),
        (lambda: strategy().start(NodesGrid(scripted({}))), ValueError, "initial_arrays"),
    ],
)
def test_wrong_arguments(build: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_a_strategy_runs_once() -> None:
    used = strategy()
    used.start(NodesGrid(scripted({})), initial(), num_rounds=1)
    with pytest.raises(RuntimeError, match="has run already"):
        used.start(NodesGrid(scripted({})), initial(), num_rounds=1)


def test_a_round_does_not_wait_for_a_node_that_is_gone(logged: list[str]) -> None:
    used = strategy("fedavg", min_available_nodes=K + 1, fraction_evaluate=1.0, node_timeout=0.01)
    begin = time.monotonic()
    used.start(NodesGrid(scripted({})), initial(), num_rounds=2)
    assert time.monotonic() - begin < 30.0
    assert used.last_report is not None
    assert used.last_report.active == tuple(range(K))
    said = f"{K} of {K + 1} nodes after 0.01 s (node_timeout): the round goes on without the others"
    assert sum(said in line for line in logged) == 4  # training and evaluation


def test_a_round_begins_when_enough_nodes_are_there(logged: list[str]) -> None:
    grid = NodesGrid(scripted({}))
    late = iter([NODES[:1], NODES[:1], NODES[:2]])
    used = strategy("fedavg", min_available_nodes=K)
    grid.get_node_ids = lambda: next(late, NODES)  # type: ignore[method-assign]
    used.start(grid, initial(), num_rounds=1)
    assert sorted(grid.asked[0]) == [*range(K)]
    waiting = [line for line in logged if "waiting for nodes" in line]
    assert waiting == [f"\twaiting for nodes: {n} of {K} are connected" for n in (1, 2)]


@pytest.mark.parametrize("rounds", [3, 20])
def test_a_run_without_an_active_client_is_an_error(rounds: int, tmp_path: Path) -> None:
    """At the end of a short run, and after max_empty_rounds of a long one."""
    path = tmp_path / "run"
    faults = {number: dict.fromkeys(range(K), "silence") for number in range(1, 21)}
    used = strategy("mifa", max_empty_rounds=4, checkpoint_path=path)
    words = "4 rounds in a row" if rounds > 4 else "no client was active in any of the 3 rounds"
    with pytest.raises(RuntimeError, match=words):
        used.start(NodesGrid(scripted(faults)), initial(), num_rounds=rounds)
    assert used.server.rounds == min(rounds, 4)
    assert path.exists()


def test_metrics_survive_a_restart(tmp_path: Path, logged: list[str]) -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"mean": float(arrays["w"].numpy().mean()), "parts": [round, 2]})

    def run(rounds: int, **options: Any) -> dict[str, dict[int, dict[str, Any]]]:
        used = strategy("mifa", fraction_evaluate=1.0, checkpoint_path=path)
        start = {k: options.pop(k) for k in ("resume_from",) if k in options} or {
            "initial_arrays": initial()
        }
        result = used.start(
            NodesGrid(scripted({2: {1: "silence"}})),
            num_rounds=rounds,
            evaluate_fn=evaluate,
            **start,
        )
        return {
            "train": {n: dict(m) for n, m in result.train_metrics_clientapp.items()},
            "evaluate": {n: dict(m) for n, m in result.evaluate_metrics_clientapp.items()},
            "server": {n: dict(m) for n, m in result.evaluate_metrics_serverapp.items()},
        }

    path = tmp_path / "run"
    whole = run(5)
    assert [*map(len, whole.values())] == [5, 5, 6]
    run(3)
    logged.clear()
    assert run(5, resume_from=path) == whole  # with the evaluation of round 3, which comes first
    assert sum("Final results" in line for line in logged) == 1
    summary = logged[logged.index("Final results:") :]
    for number in range(1, 6):  # of all rounds, in all three tables but the server's round 0
        assert sum(f"{number}: {{" in line for line in summary) == 3, summary


class AddsNoise(Strategy):
    """A wrapper as Flower's for differential privacy: it changes the model after aggregation."""

    def __init__(self, strategy: FastAggStrategy) -> None:
        self.strategy = strategy

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        return self.strategy.configure_train(*arguments)

    def configure_evaluate(self, *arguments: Any) -> Iterable[Message]:
        return self.strategy.configure_evaluate(*arguments)

    def aggregate_evaluate(self, *arguments: Any) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(*arguments)

    def summary(self) -> None:
        self.strategy.summary()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        if arrays is None:
            return None, metrics
        noised = {name: array.numpy() for name, array in arrays.items()}
        noised["w"] = noised["w"] + np.float32(server_round)
        return ArrayRecord({name: Array(np.asarray(v)) for name, v in noised.items()}), metrics


def test_the_checkpoint_has_the_model_that_a_wrapper_made(tmp_path: Path) -> None:
    path = tmp_path / "run"
    used = strategy("mifa", checkpoint_path=path)
    result = AddsNoise(used).start(NodesGrid(scripted({})), initial(), num_rounds=2)
    again = strategy("mifa")
    arrays = again.resume(path)
    assert {k: v.data for k, v in arrays.items()} == {k: v.data for k, v in result.arrays.items()}
    AddsNoise(again).start(NodesGrid(scripted({})), arrays, num_rounds=1)
    assert again.server.rounds == 3
    with pytest.raises(RuntimeError, match="has run already"):
        again.resume(path)


def test_a_legacy_checkpoint_has_the_model_that_a_wrapper_made(tmp_path: Path) -> None:
    path = tmp_path / "run"
    used = FastAggLegacyStrategy("mifa", num_clients=K, checkpoint_path=path)
    sent = Parameters([npy(v) for v in first_model().values()], "numpy.ndarray")
    manager = SimpleClientManager()
    for k in range(K):
        manager.register(Proxy(str(k), k, {}))
    used.on_fit_config_fn = lambda number: {"round": number}
    (asked, *_), results = used.configure_fit(1, sent, manager), []
    for proxy, ins in [asked]:
        results.append((proxy, proxy.fit(ins, None, None)))
    made, _ = used.aggregate_fit(1, results, [])
    assert made is not None and not path.exists()
    noised = Parameters([npy(np.load(io.BytesIO(t)) + 1) for t in made.tensors], "numpy.ndarray")
    used.evaluate(1, noised)
    again = FastAggLegacyStrategy("mifa", num_clients=K, resume_from=path)
    resumed = again.initialize_parameters(manager)
    assert resumed is not None and resumed.tensors[0] == noised.tensors[0]


# --- the legacy API -------------------------------------------------------------------------


class Proxy(ClientProxy):
    """A client that is a function call in a thread of the server."""

    lock = threading.Lock()  # the parser of np.load is not thread-safe on Python 3.11

    def __init__(self, cid: str, client: int, faults: dict[int, dict[int, str]]) -> None:
        super().__init__(cid)
        self.client = client
        self.faults = faults

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> FitRes:
        round = int(ins.config["round"])
        fault = self.faults.get(round, {}).get(self.client, "")
        if fault == "raise":
            raise RuntimeError("connection lost")
        if fault == "wordy error":
            return FitRes(Status(Code.GET_PARAMETERS_NOT_IMPLEMENTED, FORGED), None, 10, {})
        if fault == "wordy type":
            return FitRes(Status(Code.OK, ""), Parameters([], FORGED), 10, {})
        with self.lock:
            arrays = [np.load(io.BytesIO(t)) for t in ins.parameters.tensors]
        model = trained(dict(zip("wnh", arrays, strict=True)), round, self.client)
        if fault in ("nan", "long"):
            model["w"][0, 0] = np.inf if fault == "nan" else 1e30
        status = Status(Code.FIT_NOT_IMPLEMENTED if fault == "error" else Code.OK, "")
        tensors = [npy(value) for value in model.values()]
        if fault == "tensors":
            tensors = tensors[:2]
        metrics = {"partition-id": self.client, "loss": 1.0}
        kind = "pickle" if fault == "type" else "numpy.ndarray"
        return FitRes(status, Parameters(tensors, kind), 10, metrics)

    def get_properties(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    get_parameters = evaluate = reconnect = get_properties


def legacy(
    faults: dict[int, dict[int, str]], rounds: int, first: int = 1, **options: Any
) -> FastAggLegacyStrategy:
    manager = SimpleClientManager()
    for client in range(K):
        manager.register(Proxy(f"{first}{'abcdefgh'[client]}", client, faults))
    model = Parameters([npy(value) for value in first_model().values()], "numpy.ndarray")
    used = FastAggLegacyStrategy(
        fraction_evaluate=0.0,
        on_fit_config_fn=lambda round: {"round": first + round - 1},
        initial_parameters=model,
        **{"num_clients": K, "min_available_clients": K, **options},
    )
    server = Server(client_manager=manager, strategy=used)
    server.fit(num_rounds=rounds, timeout=10.0)
    used.server.guard.uninstall()
    arrays = [np.load(io.BytesIO(t)) for t in server.parameters.tensors]
    assert [(a.dtype, a.shape) for a in arrays] == [
        (a.dtype, a.shape) for a in first_model().values()
    ]
    return used


@pytest.mark.parametrize("rule", ["fdms", "mifa"])
def test_legacy_same_bits_as_the_rule(rule: str, logged: list[str]) -> None:
    faults = {
        2: {1: "raise", 4: "error"},
        3: dict.fromkeys(range(K), "raise"),
        4: {0: "nan", 1: "long", 2: "tensors", 3: "type"},
    }
    used = legacy(faults, 5, rule=rule, rule_options={"max_norm": 1e3})
    rounds = [[*range(K)], [0, 2, 3], [], [4], [*range(K)]]
    assert torch.equal(used.server.params, by_hand(rule, rounds))
    said = ("connection lost", "absent: client 1 (1b)", "NaN or Inf", "norm 1e+30", "tensor_type")
    for words in said:
        assert words in "\n".join(logged)


def test_legacy_texts_of_clients_are_short_lines(logged: list[str]) -> None:
    used = legacy({1: {1: "wordy error", 2: "wordy type"}}, 1, rule="fedavg")
    assert used.last_report is not None and used.last_report.active == (0, 3, 4)
    (reason,) = used.last_report.rejected.values()
    assert "tensor_type" in reason and len(reason) <= 200
    evil = [line for line in logged if "evil" in line]
    assert len(evil) == 2 and all(len(line) < 300 and "\n" not in line for line in evil)


def test_legacy_resuming_is_bit_identical(tmp_path: Path) -> None:
    faults = {2: {1: "raise"}, 4: {0: "nan"}}
    whole = legacy(faults, 5, rule="mimic")
    path = tmp_path / "run"
    legacy(faults, 3, rule="mimic", checkpoint_path=path)
    again = legacy(faults, 2, first=4, rule="mimic", resume_from=path)
    assert again.server.rounds == 5
    assert torch.equal(again.server.params, whole.server.params)


def test_legacy_failures_that_are_not_accepted() -> None:
    used = legacy({2: {1: "raise"}}, 3, rule="fedavg", accept_failures=False)
    assert torch.equal(used.server.params, by_hand_skipping_round_two())


def by_hand_skipping_round_two() -> Tensor:
    return by_hand("fedavg", [[*range(K)], [], [*range(K)]], alike=True)


def test_legacy_rounds_do_not_wait_for_a_client_that_is_gone(logged: list[str]) -> None:
    used = legacy({}, 2, rule="fedavg", min_available_clients=K + 1, node_timeout=0.01)
    assert used.last_report is not None
    assert used.last_report.active == tuple(range(K))
    assert sum(f"{K} of {K + 1} nodes after 0.01 s" in line for line in logged) == 2


def test_legacy_runs_without_an_active_client_are_an_error() -> None:
    faults = {number: dict.fromkeys(range(K), "raise") for number in range(1, 5)}
    with pytest.raises(RuntimeError, match="max_empty_rounds: 3 rounds in a row"):
        legacy(faults, 4, rule="fedavg", max_empty_rounds=3)


def test_legacy_metrics_of_accepted_clients() -> None:
    seen: list[list[tuple[int, dict[str, Any]]]] = []

    def mean(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        seen.append(metrics)
        return {}

    legacy({1: {2: "nan"}}, 1, rule="fedavg", fit_metrics_aggregation_fn=mean)
    assert [m["partition-id"] for _, m in seen[0]] == [0, 1, 3, 4]


class SlowGrid(NodesGrid):
    """Nodes whose replies can be pulled some rounds later: ``delays`` by (round, client)."""

    def __init__(self, answer: Fault, delays: dict[tuple[int, int], int]) -> None:
        super().__init__(answer)
        self.delays, self.now = delays, 0
        self.replies: dict[str, tuple[int, Message]] = {}  # round in which it comes, by message

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # type: ignore[override]
        keys = []
        for message in messages:
            client = self.nodes.index(message.metadata.dst_node_id)
            self.now = int(message.content["config"]["server-round"])
            key = f"{self.now}-{client}"
            message.metadata.__dict__["_message_id"] = key
            answer = self.answer(message.content, self.now, client)
            assert answer is not None
            at = self.now + self.delays.get((self.now, client), 0)
            self.replies[key] = at, Message(answer, reply_to=message)
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # type: ignore[override]
        found = [key for key in message_ids if self.replies[key][0] <= self.now]
        return [self.replies.pop(key)[1] for key in found]


def test_late_replies_count_with_their_age(logged: list[str]) -> None:
    delays = {(1, 3): 1, (2, 3): 1, (3, 3): 1, (2, 1): 2, (3, 1): 9, (4, 1): 9, (4, 2): 1}
    used = strategy("mifa", staleness="constant", max_staleness=2)
    grid = SlowGrid(reply, delays)
    used.start(grid, initial(), num_rounds=5, timeout=0.01)
    # The same rounds by hand. A client that answers both in time and late counts once.
    params, models = flat(first_model()), {}
    agg = fastagg.make("mifa", num_clients=K, num_params=14, staleness="constant", max_staleness=2)
    for number in range(1, 6):
        model = first_model()
        model["w"] = params[:12].numpy().reshape(3, 4).copy()
        model["h"] = params[12:].numpy().astype(np.float16)
        models[number] = model, params.clone()
        came = {k: number for k in range(K) if (number, k) not in delays}
        for (r, k), delay in delays.items():
            if r + delay == number and k not in came:
                came[k] = r
        rows = [flat(trained(models[r][0], r, k)) - models[r][1] for k, r in came.items()]
        ages = [number - r for r in came.values()]
        agg.step(params, rows, list(came), ages=ages)
    assert torch.equal(used.server.params, params)
    assert any("late: client 3" in line and "age 1" in line for line in logged)
    assert any("a newer answer of this client counts" in line for line in logged)
    assert "3-1" in grid.replies  # it has not come when its round is too old


def test_without_staleness_late_replies_are_not_pulled() -> None:
    used = strategy("mifa")
    used.start(NodesGrid(reply), initial(), num_rounds=2)  # which has no pull_messages
    assert not used.server.takes_late_answers
