# SPDX-License-Identifier: Apache-2.0
"""The option ``roles`` of both strategies: what is sent, and what clients may answer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Parameters, Status
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

pytestmark = pytest.mark.flower

K = 3
ROLES = {"head": "local"}


def first() -> dict[str, np.ndarray]:
    return {
        "head": np.zeros(3, np.float32),
        "w": np.zeros(2, np.float32),
        "bn.running_var": np.ones(2, np.float32),
        "n": np.array(5, np.int64),
    }


NAMES = [*first()]
SENT = [name for name in NAMES if name != "head"]


def trained(client: int) -> dict[str, np.ndarray]:
    return {
        "head": np.full(3, 9.0, np.float32),
        "w": np.full(2, 1.0 + client, np.float32),
        "bn.running_var": np.full(2, 2.0 + client, np.float32),
        "n": np.array(6, np.int64),
    }


EXPECTED = {"w": [2.0, 2.0], "bn.running_var": [3.0, 3.0], "n": 5}


def bytes_of(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


class Nodes:
    """A grid of nodes that answer with some of their arrays each."""

    def __init__(self, kept: list[list[str]]) -> None:
        self.kept = kept
        self.seen: list[list[str]] = []

    def get_node_ids(self) -> list[int]:
        return [*range(1, K + 1)]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies = []
        for message in messages:
            client = message.metadata.dst_node_id - 1
            self.seen.append([*message.content["arrays"]])
            answer = {name: Array(trained(client)[name]) for name in self.kept[client]}
            metrics = MetricRecord({"num-examples": 1, "partition-id": client})
            content = RecordDict({"arrays": ArrayRecord(answer), "metrics": metrics})
            replies.append(Message(content, reply_to=message))
        return replies


@pytest.fixture
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let newer versions of Flower make messages in a process that they did not start."""
    module = pytest.importorskip("flwr.supercore.task_identity", exc_type=ModuleNotFoundError)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(module.TaskIdentity, name, 1)


@pytest.mark.usefixtures("_identity")
def test_local_arrays_are_not_sent_and_may_be_missing(tmp_path: Path) -> None:
    def strategy() -> FastAggStrategy:
        return FastAggStrategy(
            "fedavg",
            num_clients=K,
            fraction_evaluate=0.0,
            checkpoint_path=tmp_path / "run",
            roles=ROLES,
        )

    grid: Any = Nodes([NAMES, SENT, ["w", "bn.running_var"]])
    used = strategy()
    arrays = ArrayRecord({name: Array(value) for name, value in first().items()})
    result = used.start(grid, arrays, num_rounds=2)
    assert used.last_report is not None
    assert used.last_report.rejected == {}
    assert grid.seen == [SENT] * 2 * K
    found = {name: array.numpy().tolist() for name, array in result.arrays.items()}
    assert found == EXPECTED
    again = strategy()
    result = again.start(grid, num_rounds=3, resume_from=tmp_path / "run")
    assert {name: array.numpy().tolist() for name, array in result.arrays.items()} == EXPECTED


class Proxy(ClientProxy):
    """Only a name: the test calls the strategy itself."""

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    get_properties = get_parameters = fit = evaluate = reconnect = _unused


def legacy_round(used: FastAggLegacyStrategy, kept: list[list[str]]) -> list[np.ndarray]:
    """Run a round; clients answer with arrays in the order of the model."""
    manager = SimpleClientManager()
    for client in range(K):
        manager.register(Proxy(f"c{client}"))
    parameters = used.initialize_parameters(manager)
    assert parameters is not None
    used.server.guard.uninstall()
    asked = used.configure_fit(1, parameters, manager)
    sent = asked[0][1].parameters.tensors
    results = [
        (
            proxy,
            FitRes(
                Status(Code.OK, ""),
                Parameters([bytes_of(trained(k)[name]) for name in kept[k]], "numpy.ndarray"),
                1,
                {"partition-id": k},
            ),
        )
        for proxy, _ in asked
        for k in [int(proxy.cid[1:])]
    ]
    moved, _ = used.aggregate_fit(1, results, [])
    assert moved is not None
    assert len(sent) == len(moved.tensors)
    used.configure_fit(2, moved, manager)  # now nobody changes the model any more: it is saved
    return [np.load(io.BytesIO(tensor)) for tensor in moved.tensors]


def legacy(**options: Any) -> FastAggLegacyStrategy:
    model = Parameters([bytes_of(value) for value in first().values()], "numpy.ndarray")
    return FastAggLegacyStrategy(
        "fedavg", num_clients=K, initial_parameters=model, min_available_clients=K, **options
    )


@pytest.mark.parametrize("names", [NAMES, None])
def test_legacy_arrays_by_name_and_by_position(names: list[str] | None) -> None:
    roles = ROLES if names else {"0": "local", "2": "mean"}
    used = legacy(names=names, roles=roles)
    found = legacy_round(used, [NAMES, SENT, SENT])
    assert [value.tolist() for value in found] == [*EXPECTED.values()]
    assert used.last_report is not None
    assert used.last_report.rejected == {}


def test_legacy_answers_of_another_length_are_rejected() -> None:
    used = legacy(names=NAMES, roles=ROLES)
    found = legacy_round(used, [SENT[:-1], SENT, [*NAMES, "w"]])
    assert [value.tolist() for value in found] == [[2.0, 2.0], [3.0, 3.0], 5]
    assert used.last_report is not None
    assert used.last_report.active == (1,)
    assert "missing ['bn.running_var']" in used.last_report.rejected["c0"]
    assert "unknown ['4']" in used.last_report.rejected["c2"]


@pytest.mark.parametrize("names", [[], NAMES[:3], [*NAMES[:3], "w"]])
def test_legacy_names_that_do_not_fit(names: list[str]) -> None:
    with pytest.raises(ValueError, match="names: expected a different one for each of the 4"):
        legacy_round(legacy(names=names), [NAMES] * K)


def test_legacy_names_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    legacy_round(legacy(names=NAMES, roles=ROLES, checkpoint_path=path), [NAMES] * K)
    again = legacy(names=NAMES, roles=ROLES, resume_from=path)
    found = legacy_round(again, [SENT] * K)
    assert [value.tolist() for value in found] == [*EXPECTED.values()]
    other = legacy(names=NAMES[::-1], roles=ROLES, resume_from=path)
    with pytest.raises(ValueError, match="names: expected those of the checkpoint"):
        legacy_round(other, [SENT] * K)
