# SPDX-License-Identifier: Apache-2.0
"""Flower strategies with a float16 model: a round beyond its range leaves it as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

from fastagg.integrations.flower import FastAggLegacyStrategy
from tests.integrations.test_flower import NodesGrid, strategy

pytestmark = [
    pytest.mark.flower,
    pytest.mark.usefixtures("flower_identity"),
    pytest.mark.filterwarnings("ignore"),  # of Flower: its legacy strategies are deprecated
]
OPTIONS: dict[str, Any] = {"num_clients": 2, "server_lr": 2.0, "max_norm": None}
LEGACY: dict[str, Any] = {"num_clients": 2, "rule_options": {"server_lr": 2.0, "max_norm": None}}
ERROR = "expected values in the range of float16"


class Node:
    cid = "node"


def weights(round: int) -> np.ndarray:
    return np.full(3, 20_000 if round == 1 else 60_000, np.float16)


def answer(content: RecordDict, round: int, client: int) -> RecordDict:
    arrays = ArrayRecord({"w": Array(weights(round))})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})


def test_message_api(tmp_path: Path, logged: list[str]) -> None:
    path = tmp_path / "run"
    used = strategy("fedavg", checkpoint_path=path, **OPTIONS)
    first = ArrayRecord({"w": Array(np.zeros(3, np.float16))})
    result = used.start(NodesGrid(answer, [7, 8]), first, num_rounds=3)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), np.full(3, 40_000, np.float16))
    assert used.last_report is not None and ERROR in str(used.last_report.error)
    assert any(f"the model stays as it was: array 'w': {ERROR}" in line for line in logged)
    again = strategy("fedavg", **OPTIONS)
    again.resume(path)
    assert again.server.rounds == 3


def test_legacy_api(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = ndarrays_to_parameters([np.zeros(3, np.float16)])
    used = FastAggLegacyStrategy("fedavg", checkpoint_path=path, **LEGACY)
    used.server.set_model(used._arrays(first))
    for number in (1, 2):
        used.server.open_round(["node"])
        parameters = ndarrays_to_parameters([weights(number)])
        fit = FitRes(Status(Code.OK, ""), parameters, 1, {"partition-id": 0})
        found, _ = used.aggregate_fit(number, [(Node(), fit)], [])
        assert (found is None) == (number == 2)  # the server keeps its model
    assert used.server.params.tolist() == [40_000.0] * 3
    assert used.last_report is not None and ERROR in str(used.last_report.error)
    again = FastAggLegacyStrategy("fedavg", **LEGACY)
    again.server.resume(path)
    assert again.server.rounds == 2
