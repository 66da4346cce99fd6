# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run in its checkpoint."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fastagg import checkpoint
from fastagg.integrations._history import MetricHistory
from fastagg.integrations._server import AggregationServer


def test_metrics_come_back_as_they_were() -> None:
    history = MetricHistory()
    history.add("train", 1, {"loss": 0.1, "count": 3, "per class": [1.0, 2.5e-300]})
    history.add("train", 10, {"loss": -math.inf})
    history.add("evaluate", 2, {})
    history.add("server", 2, None)
    again = MetricHistory.from_tensor(history.to_tensor())
    assert again.rounds == history.rounds
    assert again.rounds["server"] == {}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"train": {}, "evaluate": {}}',
        b'{"train": [], "evaluate": {}, "server": {}}',
        b'{"train": {"x": {}}, "evaluate": {}, "server": {}}',
        b'{"train": {"1": {"loss": "x"}}, "evaluate": {}, "server": {}}',
        b'{"train": {"1": {"loss": [[1]]}}, "evaluate": {}, "server": {}}',
        b'{"train": {"1": 3}, "evaluate": {}, "server": {}}',
        b"[" * 100_000,
    ],
)
def test_damaged_histories(text: bytes) -> None:
    with pytest.raises(ValueError, match="history: expected the metrics of rounds"):
        MetricHistory.from_tensor(torch.tensor(list(text), dtype=torch.uint8))


def test_a_checkpoint_without_a_history_is_loaded(tmp_path: Path) -> None:

    stream = io.BytesIO()
    np.save(stream, np.zeros(3, np.float32))
    server = AggregationServer("mifa", num_clients=2)
    server.set_model({"w": stream.getvalue()})
    server.history.add("train", 1, {"loss": 1.0})
    server.save(tmp_path / "new")
    again = AggregationServer("mifa", num_clients=2)
    again.resume(tmp_path / "new")
    assert again.history.rounds == server.history.rounds
    kind, content, state = checkpoint.read(tmp_path / "new")
    assert json.loads(bytes(state.pop("history").tolist()))["train"] == {"1": {"loss": 1.0}}
    checkpoint.write(tmp_path / "old", kind, content, state)
    again.resume(tmp_path / "old")
    assert again.history.rounds["train"] == {}
