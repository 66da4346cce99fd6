# SPDX-License-Identifier: Apache-2.0
"""Whose answer it is: claims of others' ids, reconnecting nodes, functions that decide."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer

K, D = 4, 6


def npy(values: Tensor) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values.numpy())
    return stream.getvalue()


def made(rule: str = "mifa", **options: object) -> AggregationServer:
    server = AggregationServer(rule, num_clients=K, **options)  # type: ignore[arg-type]
    server.set_model({"w": npy(torch.zeros(D))})
    return server


def run(
    server: AggregationServer, claims: dict[str, int | None], connected: list[str], size: float
) -> RoundReport:
    """Run a round in which all connected nodes are asked; each answer is ``size`` off the model."""
    server.open_round(connected, connected)
    model = server.params.clone()
    answers = [Answer(s, {"w": npy(model + size)}, partition) for s, partition in claims.items()]
    return server.close_round(answers)


def memory(server: AggregationServer) -> Tensor:
    return server.aggregator.state_dict()["memory"][:, 0]


ALL = ["a", "b", "c", "d"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_known_node_cannot_take_the_id_of_an_absent_client(restart: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    server = made(checkpoint_path=path)
    run(server, {"a": 0, "b": 1, "c": 2, "d": 3}, ALL, 1.0)
    if restart:
        server = made(checkpoint_path=path)
        server.resume(path)
    assert memory(server).tolist() == [1.0] * 4
    report = run(server, {"b": 3, "a": 0}, ["a", "b", "c"], 5.0)  # d has left, b claims its id
    assert report.rejected == {"b": "partition id: b is client 1, and claims to be client 3"}
    assert report.active == (0,)
    assert memory(server).tolist() == [5.0, 1.0, 1.0, 1.0]
    report = run(server, {"b": 1, "d": 3}, ALL, 2.0)  # the owner is back
    assert report.rejected == {}
    assert memory(server).tolist() == [5.0, 2.0, 1.0, 2.0]


def test_a_new_node_cannot_take_the_id_of_a_connected_one() -> None:
    server = made()
    run(server, {"a": 0, "b": 1}, ["a", "b"], 1.0)
    report = run(server, {"x": 1}, ["a", "b", "x"], 9.0)
    assert report.rejected == {"x": "partition id: x claims to be client 1, who is b"}
    assert "rejected x: partition id: x claims to be client 1, who is b" in report.lines()
    report = run(server, {"x": 1, "b": 1}, ["a", "b", "x"], 2.0)
    assert report.active == (1,)
    assert list(report.rejected) == ["x"]
    assert memory(server).tolist() == [1.0, 2.0, 0.0, 0.0]


def test_a_client_that_reconnects_under_another_name_keeps_its_row() -> None:
    server = made()
    run(server, {"a": 0, "b": 1}, ["a", "b"], 1.0)
    report = run(server, {"b2": 1}, ["a", "b2"], 3.0)
    assert report.reassigned == {1: ("b", "b2")}
    assert report.forgotten == ()
    assert "client 1: b has left, it is b2 now" in report.lines()
    assert memory(server).tolist() == [1.0, 3.0, 0.0, 0.0]


def test_never_release_with_authenticated_nodes() -> None:
    server = made(release_after=None)
    run(server, {"a": 0, "b": 1}, ["a", "b"], 1.0)
    for _ in range(5):
        assert run(server, {"x": 1}, ["a", "x"], 9.0).rejected.keys() == {"x"}
    assert run(server, {"b": 1}, ["a", "b"], 2.0).active == (1,)


@pytest.mark.parametrize("ids", ["partition", "node"])
def test_reconnecting_nodes_without_a_partition_do_not_use_up_ids(ids: str) -> None:
    server = made(ids=ids)
    for number in range(3 * K):
        present = ["a", "b", f"c{number}", f"d{number}"]
        report = run(server, dict.fromkeys(present), present, 1.0 + number)
        assert report.active == (0, 1, 2, 3)
        assert report.rejected == {}
        if number:
            assert report.forgotten == (2, 3)
            assert "the rule forgot what it remembered of: 2, 3" in report.lines()
    assert len(server.ids.known) == K


def test_the_new_client_of_an_id_does_not_inherit_a_row() -> None:
    server = made()
    run(server, dict.fromkeys(ALL), ALL, 8.0)
    present = ["b", "c", "d", "e"]
    report = run(server, {"e": None}, present, 4.0)  # e gets the id of a
    assert report.ids == {"e": 0}
    assert memory(server).tolist() == [4.0, 8.0, 8.0, 8.0]
    assert torch.allclose(server.params, torch.full((D,), 8.0 + 7.0))


def test_an_answer_that_is_rejected_takes_no_id() -> None:
    server = made()
    run(server, dict.fromkeys(ALL), ALL, 1.0)
    present = ["b", "c", "d", "e"]
    server.open_round(present, present)
    report = server.close_round([Answer("e", {"w": npy(torch.zeros(D + 1))})])
    assert "expected shape" in report.rejected["e"]
    assert report.forgotten == () and report.reassigned == {}
    assert memory(server).tolist() == [1.0] * 4
    assert server.ids.known == {"a": 0, "b": 1, "c": 2, "d": 3}


@pytest.mark.parametrize("rule", ["fedavg", "krum", "amplified"])
def test_rules_without_memory_need_no_ids(rule: str) -> None:
    server = made(rule)
    nodes = [f"n{k}" for k in range(50)]
    for number in range(10):
        asked = nodes[4 * number : 4 * number + 4]
        server.open_round(asked, nodes)  # all stay connected
        model = server.params.clone()
        answers = [Answer(s, {"w": npy(model + 1.0)}) for s in asked]
        report = server.close_round(answers)
        assert report.active == (0, 1, 2, 3)
        assert report.rejected == {}


def test_client_weights_need_lasting_ids() -> None:
    server = made("fedavg", client_weights=[1.0, 2.0, 3.0, 4.0])
    run(server, dict.fromkeys(ALL), ALL, 1.0)
    assert "all 4 are taken" in run(server, {"e": None}, [*ALL, "e"], 1.0).rejected["e"]


@pytest.mark.parametrize(
    ("options", "match"), [({"ids": "key"}, "source"), ({"release_after": -2}, "release_after")]
)
def test_wrong_options(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made(**options)  # type: ignore[arg-type]
