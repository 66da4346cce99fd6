# SPDX-License-Identifier: Apache-2.0
"""Roles of arrays on the server: statistics, frozen arrays, and arrays that clients keep."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastagg
from fastagg import checkpoint
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer

K = 6
Values = dict[str, np.ndarray]
ROLES = {"frozen": "server", "head.*": "local"}


def first() -> Values:
    rng = np.random.default_rng(3)
    return {
        "w": rng.standard_normal((2, 3)).astype(np.float32),
        "bn.running_mean": np.zeros(3, np.float32),
        "frozen": np.full(2, 7.0, np.float32),
        "bn.running_var": np.ones(3, np.float16),
        "bn.num_batches_tracked": np.array(0, np.int64),
        "head.w": np.full(4, 5.0, np.float32),
    }


def pack(values: Values) -> dict[str, bytes]:
    arrays = {}
    for name, value in values.items():
        stream = io.BytesIO()
        np.save(stream, value)
        arrays[name] = stream.getvalue()
    return arrays


def model_of(server: AggregationServer) -> Values:
    return {k: np.load(io.BytesIO(data)) for k, data in server.arrays().items()}


def trained(sent: Values, round: int, client: int) -> Values:
    """Return what a client sends: it has its own head, and its statistics are near its id."""
    rng = np.random.default_rng([round, client])
    return {
        "w": sent["w"] + rng.standard_normal((2, 3)).astype(np.float32),
        "bn.running_mean": np.full(3, client, np.float32) + rng.random(3).astype(np.float32),
        "frozen": np.full(2, -1.0, np.float32),
        "bn.running_var": np.full(3, 0.25 + client, np.float16),
        "bn.num_batches_tracked": np.array(9, np.int64),
        "head.w": rng.standard_normal(4).astype(np.float32),
    }


def serve(rule: str = "fedavg", **options: Any) -> AggregationServer:
    server = AggregationServer(rule, num_clients=K, **{"roles": ROLES, **options})
    server.set_model(pack(first()))
    return server


def run_round(
    server: AggregationServer,
    clients: Iterable[int],
    changed: dict[int, dict[str, np.ndarray | None]] | None = None,
) -> RoundReport:
    """Run a round. ``changed``: values that clients send instead of theirs, None for missing."""
    sent, number = model_of(server), server.rounds + 1
    answers = []
    for k in clients:
        values = {**trained(sent, number, k), **(changed or {}).get(k, {})}
        answers.append(Answer(f"n{k}", pack({n: v for n, v in values.items() if v is not None}), k))
    server.open_round(f"n{k}" for k in range(K))
    return server.close_round(answers)


def state_of(server: AggregationServer) -> dict[str, torch.Tensor]:
    return {
        "params": server.params,
        **server.aggregator.state_dict(),
        **server.model.statistics.state(server.aggregator.max_norm),
    }


def same(left: AggregationServer, right: AggregationServer) -> bool:
    states = state_of(left), state_of(right)
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )


@pytest.mark.parametrize("rule", ["fedavg", "fdms", "mifa", "krum"])
def test_every_role(rule: str) -> None:
    server = serve(rule)
    alone = fastagg.make(rule, num_clients=K, num_params=6, nonfinite="drop")
    params = torch.tensor(first()["w"].ravel())
    assert set(model_of(server)) == {*first()} - {"head.w"}
    for number, clients in enumerate([[0, 1, 2, 3], [5, 1, 2], [4, 0, 3, 5]], start=1):
        sent = model_of(server)
        answers = [trained(sent, number, k) for k in clients]
        rows = [torch.tensor((a["w"] - sent["w"]).ravel()) for a in answers]
        expected = alone.step(params, rows, clients)
        report = run_round(server, clients)
        assert report.active == tuple(expected.active.tolist())
        now = model_of(server)
        assert torch.equal(torch.tensor(now["w"].ravel()), params)
        for name in ("bn.running_mean", "bn.running_var"):
            mean = np.mean([a[name].astype(np.float64) for a in answers], axis=0)
            # float16 values of at most 6, and sums of at most 4 float32.
            np.testing.assert_allclose(now[name], mean, rtol=1e-3 if "var" in name else 1e-6)
        assert now["bn.running_var"].dtype == np.float16
        np.testing.assert_array_equal(now["frozen"], first()["frozen"])
        assert now["bn.num_batches_tracked"] == 0


def test_the_order_of_answers_does_not_change_a_bit() -> None:
    servers = [serve(), serve()]
    for _ in range(3):
        run_round(servers[0], [0, 3, 1, 4, 2])
        run_round(servers[1], [4, 2, 1, 0, 3])
    assert same(*servers)


def test_means_have_the_weights_of_the_rule() -> None:
    server = serve(client_weights=[1.0, 0.0, 3.0, 0.0, 1.0, 1.0])
    run_round(server, [0, 1, 2])
    np.testing.assert_array_equal(model_of(server)["bn.running_var"], [(0.25 + 3 * 2.25) / 4] * 3)
    mifa = serve("mifa", client_weights=[1.0, 0.0, 3.0, 0.0, 1.0, 1.0])
    report = run_round(mifa, [1, 3])  # whose weights are zero
    assert report.active == (1, 3)
    np.testing.assert_array_equal(model_of(mifa)["bn.running_var"], np.ones(3))


@pytest.mark.parametrize("names", [["head.w"], ["frozen", "bn.num_batches_tracked"]])
def test_answers_may_lack_what_the_server_does_not_use(names: list[str]) -> None:
    servers = [serve("mifa"), serve("mifa")]
    for _ in range(2):
        run_round(servers[0], range(4))
        report = run_round(servers[1], range(4), {k: dict.fromkeys(names) for k in (0, 2)})
        assert report.active == (0, 1, 2, 3)
    assert same(*servers)


def test_local_arrays_are_not_read() -> None:
    servers = [serve(), serve()]
    run_round(servers[0], range(3))
    report = run_round(servers[1], range(3), {1: {"head.w": np.array("text")}})
    assert report.rejected == {}
    assert same(*servers)


BAD: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "missing weights": ({"w": None}, r"missing \['w'\]"),
    "missing statistics": ({"bn.running_var": None}, r"missing \['bn.running_var'\]"),
    "unknown": ({"tail": np.zeros(1)}, r"unknown \['tail'\]"),
    "shape": ({"bn.running_mean": np.zeros(4, np.float32)}, "'bn.running_mean': expected shape"),
    "dtype": ({"bn.running_var": np.ones(3, np.float32)}, "'bn.running_var': expected dtype"),
    "frozen": ({"frozen": np.zeros(3, np.float32)}, "'frozen': expected shape"),
    "NaN": (
        {"bn.running_mean": np.array([0, math.nan, 0], np.float32)},
        "'bn.running_mean': expected finite statistics of at most 1e.30, got nan",
    ),
    "Inf": ({"bn.running_var": np.array([1, math.inf, 1], np.float16)}, "got inf"),
    "huge": ({"bn.running_mean": np.full(3, -3e38, np.float32)}, "got 3e.38"),
    "negative": (
        {"bn.running_var": np.array([1, -0.125, 1], np.float16)},
        "'bn.running_var': expected variances >= 0, got -0.125",
    ),
    "far": (
        {"bn.running_mean": np.full(3, 1e6, np.float32)},
        r"statistics of client 4: 1\.73205e\+06 from the server's, but the adaptive limit is",
    ),
}


@pytest.mark.parametrize("rule", ["fedavg", "mifa"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_changes_nothing(rule: str, case: str) -> None:
    servers = [serve(rule), serve(rule)]
    for server in servers:
        run_round(server, range(K))
    values, message = BAD[case]
    with_it = run_round(servers[0], [0, 1, 4, 2], {4: values})
    run_round(servers[1], [0, 1, 2])
    assert with_it.active == (0, 1, 2)
    assert [*with_it.rejected] == ["n4"]
    assert re.search(message, with_it.rejected["n4"])
    if case == "far":  # as with max_norm, the limit itself is recorded in place of the distance
        servers[0].model.statistics._norms = servers[1].model.statistics._norms
    assert same(*servers)


def test_statistics_of_a_client_whose_weights_are_rejected_are_not_used() -> None:
    servers = [serve(), serve()]
    for server in servers:
        run_round(server, range(K))
    nan = np.full((2, 3), math.nan, np.float32)
    report = run_round(servers[0], range(5), {4: {"w": nan}})
    assert "NaN or Inf" in report.rejected["n4"]
    run_round(servers[1], range(4))
    assert same(*servers)


def test_the_limit_of_distances_follows_max_norm() -> None:
    far = {3: {"bn.running_mean": np.full(3, 1e6, np.float32)}}
    for max_norm, rejected in [(None, {}), (1e3, {"n3"}), ({"multiple": 1e8}, {})]:
        server = serve(max_norm=max_norm)
        run_round(server, range(K))
        assert run_round(server, range(4), far).rejected.keys() == {*rejected}
    server = serve(max_norm=None)
    run_round(server, range(3))
    server.aggregator.max_norm = "adaptive"  # no distance is known, so those of the round count
    assert run_round(server, range(4), far).rejected.keys() == {"n3"}


def test_statistics_stay_where_the_model_stays() -> None:
    refused = serve("krum", num_byzantine=2)
    few = serve(min_answers=4)
    for server in (refused, few):
        run_round(server, range(5))
        before = state_of(server)
        before = {name: value.clone() for name, value in before.items()}
        report = run_round(server, range(3))
        assert report.error is not None
        after = state_of(server)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    mifa = serve("mifa")
    run_round(mifa, range(3))
    before = model_of(mifa)
    assert run_round(mifa, []).moved
    after = model_of(mifa)
    assert not np.array_equal(after["w"], before["w"])
    np.testing.assert_array_equal(after["bn.running_mean"], before["bn.running_mean"])


@pytest.mark.parametrize("rule", ["fdms", "mifa"])
def test_a_stopped_run_resumes_bit_identically(rule: str, tmp_path: Path) -> None:
    rounds = [range(K), [4, 1, 2], [0, 5, 3, 1], [], [0, 2, 3]]
    whole = serve(rule)
    for clients in rounds:
        run_round(whole, clients)
    path = tmp_path / "run"
    before = serve(rule, checkpoint_path=path)
    for clients in rounds[:2]:
        run_round(before, clients)
    after = AggregationServer(rule, num_clients=K, roles=ROLES)
    assert after.resume(path) == []
    assert after.arrays() == before.arrays()
    assert same(after, before)
    for clients in rounds[2:]:
        run_round(after, clients)
    assert same(after, whole)
    assert after.arrays() == whole.arrays()


def test_a_checkpoint_before_the_first_round(tmp_path: Path) -> None:
    server = serve()
    server.save(tmp_path / "run")
    again = AggregationServer("fedavg", num_clients=K, roles=ROLES)
    again.resume(tmp_path / "run")
    assert same(again, server)


def test_a_resumed_run_with_another_max_norm_forgets_distances(tmp_path: Path) -> None:
    server = serve(checkpoint_path=tmp_path / "run")
    run_round(server, range(K))
    for max_norm, known in [("adaptive", K), (None, None), (5.0, K), ({"multiple": 3.0}, 0)]:
        again = AggregationServer("fedavg", num_clients=K, roles=ROLES, max_norm=max_norm)
        again.resume(tmp_path / "run")
        state = again.model.statistics.state(again.aggregator.max_norm)
        assert torch.equal(state["values"], server.model.statistics.values)
        assert ("norm_count" in state) == (known is not None)
        assert known is None or int(state["norm_count"]) == known


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("auto", "'frozen' was 'server', is 'rule'; 'head.w' was 'local', is 'rule'; to go on"),
        ({"*": "rule", **ROLES}, "'bn.running_mean' was 'mean', is 'rule'"),
        ({**ROLES, "x": "local"}, "the pattern 'x' matches no array"),
    ],
)
def test_a_run_with_other_roles_is_not_resumed(roles: Any, message: str, tmp_path: Path) -> None:
    server = serve(checkpoint_path=tmp_path / "run")
    run_round(server, range(3))
    other = AggregationServer("fedavg", num_clients=K, roles=roles)
    with pytest.raises(ValueError, match=message):
        other.resume(tmp_path / "run")
    assert not other.has_model


def test_checkpoints_of_versions_without_roles(tmp_path: Path) -> None:
    path = tmp_path / "run"
    plain = {k: v for k, v in first().items() if "running" not in k}
    for values, resumes in [(first(), False), (plain, True)]:
        server = AggregationServer("fedavg", num_clients=K, roles={"*": "rule"})
        server.set_model(pack(values))
        server.save(path)
        kind, content, state = checkpoint.read(path)
        content["layout"] = [slot[:3] for slot in content["layout"]]
        checkpoint.write(path, kind, content, state)
        now = AggregationServer("fedavg", num_clients=K)
        if resumes:
            now.resume(path)
        else:
            with pytest.raises(ValueError, match=r"'bn.running_mean' was 'rule', is 'mean'"):
                now.resume(path)
        as_before = AggregationServer("fedavg", num_clients=K, roles={"*": "rule"})
        as_before.resume(path)
        assert as_before.arrays() == server.arrays() == pack(values)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("values", torch.zeros(5), r"statistics: expected \[6\] float32"),
        ("values", torch.tensor([0.0, 0, math.nan, 1, 1, 1]), "expected finite"),
        ("values", torch.tensor([0.0, 0, 0, 1, -1, 1]), "bn.running_var.*expected numbers in"),
        ("norms", torch.full((256,), 1.0, dtype=torch.float64), "norms"),
        ("norm_count", None, "expected .*'norm_count'"),
    ],
)
def test_a_forged_checkpoint_is_refused(
    name: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    server = serve(checkpoint_path=path)
    run_round(server, range(K))
    kind, content, state = checkpoint.read(path)
    del state[f"statistics.{name}"]
    if value is not None:
        state[f"statistics.{name}"] = value
    checkpoint.write(path, kind, content, state)
    twin = serve()
    run_round(twin, range(4))
    before = {name: value.clone() for name, value in state_of(twin).items()}
    with pytest.raises(ValueError, match=message):
        twin.resume(path)
    after = state_of(twin)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_models_that_are_refused() -> None:
    server = AggregationServer("fedavg", num_clients=K, roles={"tail": "local"})
    with pytest.raises(ValueError, match="the pattern 'tail' matches no array"):
        server.set_model(pack(first()))
    server = AggregationServer("fedavg", num_clients=K)
    negative = first() | {"bn.running_var": np.full(3, -1.0, np.float16)}
    with pytest.raises(ValueError, match=r"'bn.running_var': expected variances >= 0"):
        server.set_model(pack(negative))
    assert not server.has_model
    with pytest.raises(ValueError, match="with the role 'rule', got"):
        AggregationServer("fedavg", num_clients=K, roles={"*": "local"}).set_model(pack(first()))
    with pytest.raises(ValueError, match="expected one of"):
        AggregationServer("fedavg", num_clients=K, roles={"*": "mine"})


def test_a_later_model_may_lack_local_arrays() -> None:
    """Wrappers of a strategy change the model that the server returned, and give it back."""
    server = serve()
    run_round(server, range(3))
    changed = model_of(server)
    changed["w"] += 1.0
    changed["bn.running_mean"] -= 1.0
    server.set_model(pack(changed))
    now = model_of(server)
    assert all(np.array_equal(now[name], value) for name, value in changed.items())
    with pytest.raises(ValueError, match=r"expected the model of the run: .*missing"):
        server.set_model(pack({"w": changed["w"]}))
    assert server.arrays() == pack(now)
