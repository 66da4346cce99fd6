# SPDX-License-Identifier: Apache-2.0
"""Servers whose clients come and go: more clients than ids, ids of others, and restarts."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg.integrations._ids import ClientIds
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer

D = 5
RULES = [name for name in fastagg.available() if name not in ("scaffold", "mifa-client", "bulyan")]
SIZES = {name: {"num_byzantine": 0} for name in ("krum", "multi-krum", "nnm", "trimmed-mean")}


def pack(vector: Tensor) -> dict[str, bytes]:
    stream = io.BytesIO()
    np.save(stream, vector.numpy())
    return {"w": stream.getvalue()}


def update(number: int, node: str) -> Tensor:
    seed = int.from_bytes(f"{number}/{node}".encode(), "little") % (1 << 40)
    return torch.randn(D, generator=torch.Generator().manual_seed(seed))


def serve(rule: str, num_clients: int, **options: Any) -> AggregationServer:
    server = AggregationServer(rule, num_clients=num_clients, **{**SIZES.get(rule, {}), **options})
    server.set_model(pack(torch.zeros(D)))
    return server


def run_round(
    server: AggregationServer,
    answers: dict[str, int | None],
    connected: Collection[str] | None = None,
) -> RoundReport:
    number = server.rounds + 1
    server.open_round(answers, connected)
    params = server.params.clone()
    sent = [Answer(n, pack(params + update(number, n)), part) for n, part in answers.items()]
    return server.close_round(sent)


@pytest.mark.parametrize("rule", RULES)
def test_a_server_that_grows_has_the_bits_of_a_rule_that_grows(
    rule: str, tmp_path: Path, same: Callable[[Tensor, Tensor], None]
) -> None:
    """By itself, and when it is told to; then a restart with the first number of clients."""
    path = tmp_path / "run"
    server = serve(rule, 3, max_clients=6, checkpoint_path=path)
    given = {"nonfinite": "drop", **SIZES.get(rule, {})}
    agg = fastagg.make(rule, num_clients=3, num_params=D, **given)
    params = torch.zeros(D)
    parts: list[dict[str, int | None]] = [
        {"a": 0, "b": 1, "c": 2},
        {"a": 0, "d": 4, "c": 2},  # partition 4 of 3
        {"b": 1, "e": 3, "d": 4},
    ]
    for number, answers in enumerate(parts, 1):
        agg.grow(max([agg.num_clients, *(int(part or 0) + 1 for part in answers.values())]))
        report = run_round(server, answers)
        assert report.rejected == {} and report.error is None
        listed = sorted((int(part or 0), node) for node, part in answers.items())
        rows = [params + update(number, node) - params for _, node in listed]
        agg.step(params, rows, [part for part, _ in listed])
        same(server.params, params)
    assert server.num_clients == server.aggregator.num_clients == 5
    again = serve(rule, 3, max_clients=6)
    assert again.resume(path) == []
    assert again.num_clients == 5
    for one in (server, again):
        run_round(one, {"a": 0, "f": 5})
    same(server.params, again.params)
    assert again.num_clients == 6
    report = run_round(again, {"g": 6, "a": 0})
    assert "expected one in [0, 6)" in report.rejected["g"]


@pytest.fixture
def same() -> Callable[[Tensor, Tensor], None]:
    def check(a: Tensor, b: Tensor) -> None:
        assert a.numpy().tobytes() == b.numpy().tobytes()

    return check


def test_nodes_without_a_partition_get_new_ids_after_the_free_ones() -> None:
    server = serve("mifa", 2, max_clients=4)
    run_round(server, {"n0": None, "n1": None}, ["n0", "n1"])
    # n0 has left: the rule grows by one client only, because another one takes its id
    report = run_round(server, {"n1": None, "n2": None, "n3": None}, ["n1", "n2", "n3"])
    assert server.num_clients == 3
    assert report.ids == {"n1": 1, "n2": 2, "n3": 0}
    assert report.forgotten == (0,)
    nodes = [f"n{k}" for k in range(1, 7)]
    report = run_round(server, dict.fromkeys(nodes), nodes)
    assert server.num_clients == 4
    assert len(report.ids) == 4 and len(report.rejected) == 2


def test_forgotten_clients_leave_free_ids(same: Callable[[Tensor, Tensor], None]) -> None:
    server = serve("mifa", 2, release_after=None)
    run_round(server, {"n0": None, "n1": None})
    server.forget([1])
    assert server.ids.known == {"n0": 0}
    assert not server.aggregator.state_dict()["memory"][1].any()
    report = run_round(server, {"n0": None, "n2": None})
    assert report.ids == {"n0": 0, "n2": 1}
    assert report.forgotten == ()  # nothing was left
    with pytest.raises(IndexError, match="clients"):
        server.forget([2])
    assert server.ids.known == {"n0": 0, "n2": 1}


def test_growing_before_there_is_a_model() -> None:
    server = AggregationServer("fedavg", num_clients=2, client_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="client_weights"):
        server.grow(3)
    assert server.num_clients == 2
    server.grow(3, client_weights=[1.0, 2.0, 3.0])
    server.set_model(pack(torch.zeros(D)))
    assert run_round(server, {"a": 2, "b": 1}).step.weights.tolist() == pytest.approx([0.4, 0.6])
    server.grow(4, client_weights=[1.0, 2.0, 3.0, 2.0])
    assert run_round(server, {"a": 2, "d": 3}).step.weights.tolist() == pytest.approx([0.6, 0.4])
    with pytest.raises(ValueError, match="num_clients: expected at least 4"):
        server.grow(3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_clients": 1}, ValueError, "max_clients: expected at least 2"),
        ({"max_clients": 2.5}, TypeError, "max_clients"),
        ({"max_clients": 3, "client_weights": [1, 2]}, ValueError, "max_clients: expected equal"),
    ],
)
def test_bad_limits(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AggregationServer("fedavg", num_clients=2, **options)


@given(data=st.data())
def test_with_as_many_clients_as_needed_all_get_ids(data: st.DataObject) -> None:
    """For reports in [0, most) and none; one client fewer would leave out a sender."""
    num_clients, most = data.draw(st.integers(1, 3)), 12
    ids = ClientIds(num_clients, release_after=None)
    for number in (1, 2):
        ids.open_round(number, None)
        partitions = st.one_of(st.none(), st.integers(0, most + 2))
        reported = data.draw(st.dictionaries(st.sampled_from("abcdef"), partitions, max_size=4))
        needed = ids.needed(reported, most)
        assert ids.num_clients <= needed <= most
        fewer, before = needed - 1, ids.num_clients
        ids.num_clients = needed
        found = ids.resolve(reported)
        assert found.unplaced == []
        beyond = {n for n, p in reported.items() if p is not None and p >= needed}
        assert all(reported[name] >= most for name in beyond)
        claims = [p for p in reported.values() if p is not None]
        if fewer >= before and len(set(claims)) == len(claims):  # contested ids go to nobody
            ids.num_clients = fewer
            assert fewer in reported.values() or ids.resolve(reported).unplaced
            ids.num_clients = needed
        ids.remember(found, reported)


class TestServerWithoutAFramework:
    def server(self, **options: Any) -> fastagg.Server:
        model = {"w": torch.zeros(D)}
        return fastagg.Server("mifa", model, round_seconds=60.0, **options)

    def answer(self, server: fastagg.Server, *clients: int | str) -> RoundReport:
        server.begin_round(clients)
        for client in clients:
            assert server.submit(client, {"w": torch.ones(D)}) is None
        return server.finish_round()

    def test_numbers(self) -> None:
        server = self.server(num_clients=2)
        self.answer(server, 0, 1)
        server.grow(4)
        assert server.num_clients == 4
        assert self.answer(server, 3, 1).active == (1, 3)
        server.forget([1])
        with pytest.raises(IndexError, match="clients"):
            server.forget([4])
        server.begin_round([0])
        for call in (lambda: server.grow(5), lambda: server.forget([0])):
            with pytest.raises(RuntimeError, match="round 3 is open"):
                call()

    def test_names(self) -> None:
        server = self.server(num_clients=2, ids="name", max_clients=3)
        assert self.answer(server, "x", "y", "z").active == (0, 1, 2)
        report = self.answer(server, "x", "w")
        assert "all 3 are taken" in report.rejected["w"]
        server.forget(["y"])
        assert self.answer(server, "x", "w").ids == {"x": 0, "w": 1}
        with pytest.raises(ValueError, match="expected clients that have answered"):
            server.forget(["y"])

    @pytest.mark.parametrize("rule", ["mifa", "fedavg"])
    def test_growing_beyond_max_clients(self, rule: str) -> None:
        options: dict[str, Any] = {"num_clients": 2, "max_clients": 3, "ids": "name"}
        server = fastagg.Server(rule, {"w": torch.zeros(D)}, **options)
        self.answer(server, "a", "b")
        server.grow(5)
        for names in ("abc", "abcde", "ab"):
            report = self.answer(server, *names)
            assert report.rejected == {} and len(report.active) == len(names)
        report = self.answer(server, *"abcdef")
        assert "all 5 are taken" in report.rejected["f"]
        assert server.num_clients == 5

    def test_a_forgotten_client_stays_forgotten(
        self, tmp_path: Path, same: Callable[[Tensor, Tensor], None]
    ) -> None:
        """After a restart without ``close``, too, and when no checkpoint is due."""
        options = {"num_clients": 2, "ids": "name", "checkpoint_path": tmp_path / "run"}
        server = self.server(checkpoint_every=10, **options)
        self.answer(server, "ann", "bob")
        server.forget(["bob"])
        again = self.server(**options)
        again.resume(tmp_path / "run")
        assert again.rounds == 1
        for one in (server, again):
            assert self.answer(one, "ann", "eve").ids == {"ann": 0, "eve": 1}
            same(one.model()["w"], server.model()["w"])

    def test_a_client_is_forgotten_though_that_cannot_be_saved(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        server = self.server(num_clients=2, checkpoint_path=folder / "run")
        self.answer(server, 0, 1)
        (folder / "run").unlink()
        folder.rmdir()
        with pytest.raises(OSError, match="the clients are forgotten, but in no checkpoint"):
            server.forget([1])
        assert not server._core.aggregator.state_dict()["memory"][1].any()
        folder.mkdir()
        server.close()
        again = self.server(num_clients=2)
        again.resume(folder / "run")
        assert not again._core.aggregator.state_dict()["memory"][1].any()

    @pytest.mark.parametrize("then", ["close", "a round"])
    def test_growth_survives_a_restart(self, then: str, tmp_path: Path) -> None:
        path = tmp_path / "run"
        server = self.server(num_clients=2, checkpoint_path=path, checkpoint_every=3)
        for _ in range(3):
            self.answer(server, 0, 1)
        server.grow(4)
        server.close() if then == "close" else self.answer(server, 3)
        again = self.server(num_clients=4)
        again.resume(path)
        assert again.rounds == server.rounds
        with pytest.raises(ValueError, match="num_clients"):
            self.server(num_clients=2).resume(path)

    def test_a_name_of_many_digits(self) -> None:
        server = self.server(num_clients=3, ids="name")
        assert self.answer(server, "9" * 5000, "x", "10").active == (0, 1, 2)
        assert self.answer(server, "9" * 5000, "x").ids == {"9" * 5000: 1, "x": 2}

    def test_a_number_that_no_client_has(self) -> None:
        server = self.server(num_clients=2)
        server.begin_round([0])
        for call in (lambda: server.submit(10**5000, {}), lambda: server.task(-(10**5000))):
            with pytest.raises(ValueError, match=r"client: expected an id in \[0, 2\)"):
                call()
        assert server.submit(-1, {"w": torch.ones(D)}) == "was not asked in round 1"
        with pytest.raises(TypeError, match="key: expected a str or None, got int"):
            server.submit(0, {"w": torch.ones(D)}, 7)  # type: ignore[arg-type]
