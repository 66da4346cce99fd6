# SPDX-License-Identifier: Apache-2.0
"""fastagg.Server: weights of answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fastagg
from fastagg import Server, tensor_file
from tests.integrations.server_rounds import (
    K,
    expire,
    flat,
    model,
    server,
    trained,
)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_answers_count_by_their_weights(as_bytes: bool) -> None:
    loop = server("fedavg", weighted=True, max_norm=None)
    agg, params = fastagg.FedAvg(num_clients=K, num_params=24), flat(model())
    task, before = loop.begin_round(), loop.model()
    weights: dict[int, Any] = {0: 30, 1: 10, 2: 2.5, 3: 0}
    for client, weight in weights.items():
        sent = trained(before, 1, client)
        data = tensor_file.dump(sent, {}, limit=1 << 20) if as_bytes else None
        assert data is None or loop.submit_bytes(client, data, task.key, weight=weight) is None
        assert as_bytes or loop.submit(client, sent, task.key, weight=weight) is None
    report = loop.finish_round()
    rows = [flat(trained(before, 1, client)) - params for client in range(K)]
    agg.step(params, rows, range(K), weights=[*weights.values()])
    assert report.active == (0, 1, 2, 3) and torch.equal(flat(loop.model()), params)


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


WRONG_WEIGHTS = {
    "none": None,
    "negative": -1.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "beyond float32": 1e39,
    "beyond float64": 10**400,
    "beyond text": 10**5000,
    "far below 0": -(10**5000),
    "flag": True,
    "text": "5",
    "list": [10**5000],
    "nested": nested(3000),
    "tensor": torch.ones(3),
}


@pytest.mark.parametrize("which", WRONG_WEIGHTS)
def test_an_answer_with_a_wrong_weight_is_not_used(which: str) -> None:
    weight: Any = WRONG_WEIGHTS[which]
    loop = server("fedavg", weighted=True)
    task, state = loop.begin_round([0, 1]), loop.model()
    assert loop.submit(0, trained(state, 1, 0), task.key, weight=7) is None
    reason = loop.submit(1, trained(state, 1, 1), task.key, weight=weight)
    assert reason is not None and reason.startswith("weight: expected a ")
    report = loop.finish_round()
    assert report.active == (0,) and report.rejected == {"1": reason}


@pytest.mark.parametrize("weight", [2**63, 10**38, np.int64(2**62), np.float64(1e30)])
def test_a_large_weight_counts(weight: Any) -> None:
    loop, twin = server("fedavg", weighted=True), server("fedavg", weighted=True)
    for used, given in ((loop, weight), (twin, float(weight))):
        task, state = used.begin_round([0, 1]), used.model()
        assert used.submit(0, trained(state, 1, 0), task.key, weight=5) is None
        assert used.submit(1, trained(state, 1, 1), task.key, weight=given) is None
        assert used.finish_round().active == (0, 1)
    assert torch.equal(flat(loop.model()), flat(twin.model()))


@pytest.mark.parametrize("which", WRONG_WEIGHTS)
def test_other_servers_ignore_weights_of_late_answers(which: str) -> None:
    weight: Any = WRONG_WEIGHTS[which]
    loop = server("fedavg", staleness="constant", max_staleness=1)
    first, state = loop.begin_round([0, 1]), loop.model()
    assert loop.submit(0, trained(state, 1, 0), first.key, weight=weight) is None
    expire(loop)
    loop.begin_round([0])
    assert loop.submit(1, trained(state, 1, 1), first.key, weight=weight) is None
    report = expire(loop)
    assert report.late == {"1": 1} and report.rejected == {}


def test_other_servers_ignore_weights() -> None:
    loop, twin = server("fedavg"), server("fedavg")
    for used, weight in ((loop, 5.0), (twin, None)):
        task, state = used.begin_round([0, 1]), used.model()
        for client in (0, 1):
            sent = trained(state, 1, client)
            assert used.submit(client, sent, task.key, weight=client and weight) is None
        used.finish_round()
    assert torch.equal(flat(loop.model()), flat(twin.model()))


@pytest.mark.parametrize("rule", ["krum", "mifa", "fdms", "median"])
def test_weights_need_a_rule_that_takes_them(rule: str) -> None:
    with pytest.raises(
        ValueError, match=f"^weighted: expected .*, because {rule} takes no weights"
    ):
        server(rule, weighted=True)


def test_statistics_have_the_weights_of_their_answers() -> None:
    state = {"w": torch.zeros(3), "norm.running_var": torch.ones(2)}
    loop = Server("fedavg", state, num_clients=2, weighted=True, max_norm=None)
    task = loop.begin_round()
    for client, (value, weight) in enumerate([(4.0, 3), (8.0, 1)]):
        sent = {name: torch.full_like(old, value) for name, old in state.items()}
        assert loop.submit(client, sent, task.key, weight=weight) is None
    loop.finish_round()
    assert loop.model()["w"].tolist() == [5.0] * 3  # (3 * 4 + 8) / 4
    assert loop.model()["norm.running_var"].tolist() == [5.0] * 2
