# SPDX-License-Identifier: Apache-2.0
"""The framework-free server: rounds with absent and broken clients, and restarts."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import CheckpointError, checkpoint
from fastagg.integrations._report import Answer
from fastagg.integrations._server import AggregationServer

K = 6
Npy = Callable[..., bytes]


@pytest.fixture
def model(npy: Npy) -> dict[str, bytes]:
    rng = np.random.default_rng(3)
    return {
        "w": npy(rng.standard_normal((4, 5)), np.float32),
        "n": npy(12, np.int64),
        "b": npy(rng.standard_normal(4), np.float32),
    }


def pack(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def trained(model: dict[str, bytes], round: int, client: int) -> dict[str, bytes]:
    """Return what a client sends: the model plus noise that depends on the client."""
    arrays = {name: np.load(io.BytesIO(data)) for name, data in model.items()}
    rng = np.random.default_rng([round, client])
    return {
        name: pack(a + rng.standard_normal(a.shape).astype(np.float32) if a.dtype == "f4" else a)
        for name, a in arrays.items()
    }


def flat(arrays: dict[str, bytes]) -> Tensor:
    parts = [np.load(io.BytesIO(arrays[name])).ravel() for name in ("w", "b")]
    return torch.from_numpy(np.concatenate(parts))


def run_round(server: AggregationServer, clients: Iterable[int], **kwargs: Any) -> Any:
    """Run a round: all clients are asked, ``clients`` answer; nodes are named n0, n1, ..."""
    number = server.rounds + 1
    sent = server.arrays()
    server.open_round(f"n{k}" for k in range(K))
    answers = [Answer(f"n{k}", trained(sent, number, k), k) for k in clients]
    return server.close_round(answers + list(kwargs.get("more", [])))


# SCAFFOLD is refused: its clients need the control variate of the server.
RULES = [name for name in fastagg.available() if name not in ("scaffold", "mifa-client")]


@pytest.mark.parametrize("rule", RULES)
def test_same_bits_as_the_rule(rule: str, model: dict[str, bytes]) -> None:
    server = AggregationServer(rule, num_clients=K)
    server.set_model(model)
    agg = fastagg.make(rule, num_clients=K, num_params=24, nonfinite="drop")
    params = flat(model)
    for number, clients in enumerate([range(K), [4, 1, 2], [], [0, 5, 3, 1]], start=1):
        before = server.arrays()
        updates = [flat(trained(before, number, k)) - params for k in clients]
        expected = agg.step(params, updates, list(clients))
        report = run_round(server, clients)
        assert torch.equal(server.params, params)
        assert torch.equal(flat(server.arrays()), params)
        assert report.active == tuple(expected.active.tolist())
        assert report.round == number
        assert server.arrays()["n"] == model["n"]
    assert not torch.equal(params, flat(model))


def test_answers_in_any_order_give_the_same_bits(model: dict[str, bytes]) -> None:
    ends = []
    for clients in ([0, 3, 1, 4], [4, 3, 1, 0], [3, 1, 0, 4]):
        server = AggregationServer("fdms", num_clients=K)
        server.set_model(model)
        run_round(server, clients)
        run_round(server, clients[:3])
        ends.append(server.params.clone())
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], ends[1])  # whose second round misses another client


def test_absent_clients_are_those_asked_that_did_not_answer(model: dict[str, bytes]) -> None:
    server = AggregationServer("fdms", num_clients=K)
    server.set_model(model)
    first = run_round(server, range(4))
    assert first.absent == {"n4": None, "n5": None}
    second = run_round(server, [0, 1, 4])
    assert second.absent == {"n2": 2, "n3": 3, "n5": None}
    assert second.active == (0, 1, 4)
    assert set(second.friends) == {2, 3}  # client 5 has no scores yet, so it has no friend
    assert set(second.friends.values()) <= {0, 1, 4}
    text = "\n".join(second.lines())
    assert "absent: client 2 (n2), client 3 (n3), n5 (not known)" in text
    assert "for 2" in text


def test_a_sender_of_another_type_does_not_stop_the_report(model: dict[str, bytes]) -> None:
    server = AggregationServer("mifa", num_clients=3, ids="trusted")
    server.set_model(model)
    asked: list[Any] = ["0", "1", 7, None]
    server.open_round(asked)
    report = server.close_round([Answer("0", trained(model, 0, 0), 0)])
    assert report.moved and report.absent == {"1": None, 7: None, None: None}
    assert any("absent: " in line for line in report.lines())


def bad_answers(npy: Npy, sent: dict[str, bytes]) -> dict[str, tuple[list[Answer], str]]:
    good = trained(sent, 1, 5)
    nan = pack(np.full((4, 5), math.nan, np.float32))
    return {
        "NaN": ([Answer("n5", good | {"w": nan}, 5)], "NaN or Inf"),
        "shape": ([Answer("n5", good | {"b": npy([1.0] * 5, np.float32)}, 5)], "expected shape"),
        "dtype": ([Answer("n5", good | {"b": npy([1.0] * 4, np.float64)}, 5)], "expected dtype"),
        "integers": ([Answer("n5", good | {"n": npy(1.0, np.float32)}, 5)], "expected dtype"),
        "names": ([Answer("n5", {"w": good["w"]}, 5)], "missing"),
        "id": ([Answer("n5", good, K)], "partition id"),
        "twice": ([Answer("n5", good, 5), Answer("n5", good, 5)], "answered 2 times"),
        "stranger": ([Answer("m5", good, 5)], "not asked"),
        "problem": ([Answer("n5", good, 5, problem="no metrics")], "no metrics"),
    }


@pytest.mark.parametrize("rule", ["fdms", "mifa"])
@pytest.mark.parametrize("case", bad_answers(lambda *_: b"", {"w": pack(np.zeros(1, "f4"))}))
def test_a_bad_answer_changes_nothing(
    rule: str, case: str, npy: Npy, model: dict[str, bytes]
) -> None:
    servers = [AggregationServer(rule, num_clients=K) for _ in range(2)]
    for server in servers:
        server.set_model(model)
        run_round(server, range(5))
    answers, message = bad_answers(npy, servers[0].arrays())[case]
    with_it = run_round(servers[0], range(4), more=answers)
    without = run_round(servers[1], range(4))
    assert torch.equal(servers[0].params, servers[1].params)
    states = [server.aggregator.state_dict() for server in servers]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert servers[0].ids.to_json() == servers[1].ids.to_json()
    assert with_it.active == without.active == (0, 1, 2, 3)
    (why,) = with_it.rejected.values()
    assert message in why
    assert "n5" in with_it.absent or answers[0].sender == "n5"
    assert any(line.startswith("rejected ") for line in with_it.lines())


def test_two_answers_with_one_id_are_both_rejected(model: dict[str, bytes]) -> None:
    server = AggregationServer("fedavg", num_clients=K)
    server.set_model(model)
    report = run_round(server, [0, 1], more=[Answer("n3", trained(model, 1, 3), 1)])
    assert report.active == (0,)
    assert set(report.rejected) == {"n1", "n3"}


def test_a_round_without_answers(model: dict[str, bytes]) -> None:
    server = AggregationServer("stale", num_clients=K)
    server.set_model(model)
    run_round(server, range(3))
    before = server.params.clone()
    report = run_round(server, [])
    assert torch.equal(server.params, before)
    assert report.active == ()
    assert report.error is None
    assert server.rounds == 2


def test_a_rule_may_move_the_model_in_a_round_without_answers(model: dict[str, bytes]) -> None:
    server = AggregationServer("mifa", num_clients=K)
    server.set_model(model)
    start = server.params.clone()
    run_round(server, range(3))
    first = server.params - start
    report = run_round(server, [])
    torch.testing.assert_close(server.params, start + 2.0 * first)  # one rounding in each step
    assert report.active == ()
    assert report.moved
    assert not any("the model stays" in line for line in report.lines())
    assert report.error is None
    assert server.rounds == 2


@pytest.mark.parametrize("rule", ["fedavg", "mifa"])
def test_a_round_with_too_few_answers_leaves_the_model(rule: str, model: dict[str, bytes]) -> None:
    server = AggregationServer(rule, num_clients=K, min_answers=3)
    server.set_model(model)
    run_round(server, range(3))
    before, state = server.params.clone(), server.aggregator.state_dict()
    report = run_round(server, range(2))
    assert report.error == "min_answers: expected at least 3, got 2"
    assert report.active == ()
    assert torch.equal(server.params, before)
    after = server.aggregator.state_dict()
    assert state.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(value, state[name])


def test_empty_rounds_in_a_row_end_the_run(tmp_path: Path, model: dict[str, bytes]) -> None:
    path = tmp_path / "run"
    server = AggregationServer(
        "fedavg", num_clients=K, max_empty_rounds=2, checkpoint_path=path, checkpoint_every=100
    )
    server.set_model(model)
    run_round(server, [])
    run_round(server, [0])
    run_round(server, [])
    server.open_round(None)  # a round without training does not count
    server.close_round([])
    run_round(server, [])
    assert server.empty_rounds == 1
    server.open_round(["n0", "n1"])
    bad = Answer("n0", {}, 0, problem="reply: expected one ArrayRecord, got 0")
    words = (
        "max_empty_rounds: 2 rounds in a row had no active client; in the last one, round 6, 2 "
        r"clients were asked, 1 did not answer and 1 answers were rejected \(reply: expected one"
    )
    with pytest.raises(RuntimeError, match=words):
        server.close_round([bad])
    again = AggregationServer("fedavg", num_clients=K)
    again.resume(path)
    assert again.rounds == 6
    assert again.empty_rounds == 0


def test_a_round_that_the_rule_refuses_leaves_the_model(model: dict[str, bytes]) -> None:
    server = AggregationServer("krum", num_clients=K, num_byzantine=2)
    server.set_model(model)
    before = server.params.clone()
    report = run_round(server, [0, 1, 2])  # Krum with f = 2 needs five
    assert torch.equal(server.params, before)
    assert "more than 4 rows" in str(report.error)
    assert report.active == ()
    assert "the model stays" in report.lines()[-1]
    assert run_round(server, range(5)).active == (0, 1, 2, 3, 4)


def test_a_row_near_the_end_of_float32_is_rejected(model: dict[str, bytes]) -> None:
    server = AggregationServer("fedavg", num_clients=K, server_lr=2.0)
    server.set_model(model)
    before = server.params.clone()
    huge = {name: pack(np.load(io.BytesIO(data))) for name, data in model.items()}
    huge["w"] = pack(np.full((4, 5), 3e38, np.float32))
    server.open_round(["a"])
    report = server.close_round([Answer("a", huge)])
    assert "but at most 5e+29 is accepted" in report.rejected["a"]
    assert report.error is None
    assert torch.equal(server.params, before)


@pytest.mark.parametrize("rule", RULES)
def test_too_long_an_update_is_rejected_with_its_norm(
    rule: str, tmp_path: Path, model: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    server = AggregationServer(rule, num_clients=K, max_norm=1e3, checkpoint_path=path)
    server.set_model(model)
    twin = AggregationServer(rule, num_clients=K)
    twin.set_model(model)
    huge = {**model, "w": pack(np.full((4, 5), 3e38, np.float32))}
    report = run_round(server, range(3), more=[Answer("n4", huge, 4)])
    run_round(twin, range(3))
    norm = f"{3e38 * 20**0.5:.6g}"
    assert report.rejected == {"n4": f"update of client 4: norm {norm}, but max_norm is 1000"}
    assert report.active == (0, 1, 2)
    assert torch.equal(server.params, twin.params)
    server.resume(path)
    (change,) = twin.resume(path)
    assert change.startswith("max_norm was 1000.0, is {'kind': 'AdaptiveNorm'")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
def test_a_stopped_run_resumes_bit_identically(
    rule: str, tmp_path: Path, model: dict[str, bytes]
) -> None:
    answers = [range(K), [4, 1, 2], [0, 5, 3, 1], [1, 2, 5], [0, 2, 3]]
    whole = AggregationServer(rule, num_clients=K)
    whole.set_model(model)
    for clients in answers:
        run_round(whole, clients)
    path = tmp_path / "run.safetensors"
    first = AggregationServer(rule, num_clients=K, checkpoint_path=path)
    first.set_model(model)
    for clients in answers[:3]:
        run_round(first, clients)
    second = AggregationServer(rule, num_clients=K)
    second.resume(path)
    assert second.rounds == 3
    assert torch.equal(second.params, first.params)
    assert second.arrays() == first.arrays()
    for clients in answers[3:]:
        run_round(second, clients)
    assert torch.equal(second.params, whole.params)
    states = whole.aggregator.state_dict(), second.aggregator.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert second.ids.to_json() == whole.ids.to_json()


@pytest.mark.parametrize("norm", ["adaptive", 50.0, None])
@pytest.mark.parametrize("before", ["adaptive", 60.0, None])
def test_a_resumed_run_may_change_rate_and_norm(
    norm: str | float | None, before: str | float | None, tmp_path: Path, model: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    first = AggregationServer("mifa", num_clients=K, max_norm=before, checkpoint_path=path)
    first.set_model(model)
    run_round(first, range(K))
    again = AggregationServer("mifa", num_clients=K, max_norm=norm, server_lr=0.5)
    changed = again.resume(path)
    assert [text.partition(" ")[0] for text in changed] == (
        ["server_lr"] if norm == before else ["max_norm", "server_lr"]
    )
    wanted = fastagg.make("mifa", num_clients=K, num_params=24, max_norm=norm, nonfinite="drop")
    assert again.aggregator.max_norm == wanted.max_norm
    assert ("norms" in again.aggregator.state_dict()) == (norm == "adaptive")
    if norm == before == "adaptive":  # the norms are still known
        assert int(again.aggregator.state_dict()["norm_count"]) == K
    first.aggregator.server_lr = 0.5
    run_round(first, range(2))
    run_round(again, range(2))
    assert torch.equal(again.params, first.params)


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_may_have_more_clients(
    rule: str, tmp_path: Path, model: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    first = AggregationServer(rule, num_clients=K, checkpoint_path=path)
    first.set_model(model)
    run_round(first, range(K))
    run_round(first, [1, 2, 3])
    again = AggregationServer(rule, num_clients=K + 2)
    assert again.resume(path) == [f"num_clients was {K}, is {K + 2}"]
    assert torch.equal(again.params, first.params)
    assert again.ids.known == first.ids.known
    new = [f"n{K}", f"n{K + 1}"]
    again.open_round([*again.ids.known, *new])
    sent = again.arrays()
    report = again.close_round([Answer(s, trained(sent, 3, k), k) for k, s in enumerate(new, K)])
    assert report.active == (K, K + 1) or report.error is not None  # too few rows for some rules
    few = AggregationServer(rule, num_clients=K - 1)
    with pytest.raises(ValueError, match=f"num_clients was {K}, expected at most {K - 1}"):
        few.resume(path)
    assert not few.has_model


def test_more_clients_need_the_weights_of_before(tmp_path: Path, model: dict[str, bytes]) -> None:
    path = tmp_path / "run"
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    first = AggregationServer("stale", num_clients=K, checkpoint_path=path, client_weights=weights)
    first.set_model(model)
    run_round(first, range(K))
    again = AggregationServer("stale", num_clients=K + 1, client_weights=[*weights, 9.0])
    assert again.resume(path) == [f"num_clients was {K}, is {K + 1}"]
    for other in ([9.0, *weights], None):
        again = AggregationServer("stale", num_clients=K + 1, client_weights=other)
        with pytest.raises(ValueError, match="client_weights was"):
            again.resume(path)


def test_a_checkpoint_waits_for_the_model_that_is_sent(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    server = AggregationServer("mifa", num_clients=K, checkpoint_path=path)
    server.set_model(model)
    sent = server.arrays()
    server.open_round(["n0", "n1"])
    server.close_round([Answer(f"n{k}", trained(sent, 1, k), k) for k in (0, 1)], settled=False)
    server.save_if_due()  # as on a signal
    assert not path.exists()
    noised = dict(server.arrays())
    noised["b"] = pack(np.load(io.BytesIO(noised["b"])) + np.float32(0.5))
    server.set_model(noised)
    assert server.settle_round() is None
    assert server.settle_round() is None  # it is settled
    again = AggregationServer("mifa", num_clients=K)
    again.resume(path)
    assert again.arrays() == noised
    server.checkpoint_path = tmp_path / "missing" / "run"
    server.open_round(["n0"])
    server.close_round([Answer("n0", trained(noised, 2, 0), 0)], settled=False)
    assert "missing" in str(server.settle_round())


def test_a_checkpoint_that_does_not_load_leaves_the_rule(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    server = AggregationServer("mifa", num_clients=K, max_norm=7.0, checkpoint_path=path)
    server.set_model(model)
    run_round(server, range(K))
    _, content, state = checkpoint.read(path)
    state["rule.seen"] = state.pop("rule.total")
    checkpoint.write(path, "integrations.server", content, state)
    other = AggregationServer("mifa", num_clients=K)
    other.set_model(model)
    run_round(other, [0, 1])
    before, norm = other.aggregator.state_dict(), other.aggregator.max_norm
    with pytest.raises(ValueError, match="seen"):
        other.resume(path)
    after = other.aggregator.state_dict()
    assert other.aggregator.max_norm == norm
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value)


SHAPE = ["w", [4, 5], "float32"]
FORGED: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "no rounds": ({"rounds": None}, {}, "rounds: expected int"),
    "text as rounds": ({"rounds": "3"}, {}, "rounds: expected int"),
    "a negative round": ({"rounds": -1}, {}, r"rounds: expected a number in \[0, "),
    "far too many rounds": ({"rounds": 10**30}, {}, r"rounds: expected a number in \[0, "),
    "the last round of an int64": ({"rounds": 2**62}, {}, r"rounds: expected a number in \[0, "),
    "no layout": ({"layout": None}, {}, "layout: expected list"),
    "numbers as layout": ({"layout": [1, 2]}, {}, "layout: expected a list of names"),
    "half a slot": ({"layout": [["w", [4, 5]]]}, {}, "layout: expected a list of names"),
    "a negative shape": ({"layout": [["w", [-24], "float32"]]}, {}, "layout: expected a list"),
    "enormous strides": (
        {"layout": [SHAPE, ["v", [0, 2**48, 2**48], "float32"]]},
        {},
        "layout: expected a list of names",
    ),
    "an array twice": ({"layout": [SHAPE, SHAPE]}, {}, "layout: expected distinct names"),
    "another layout": ({"layout": [SHAPE]}, {}, r"params: expected \[20\] float32, got \[24\]"),
    "no ids": ({"ids": []}, {}, "ids: expected dict"),
    "flags as ids": (
        {"ids": {"known": {"n0": True}, "given": []}},
        {},
        "expected a map of clients",
    ),
    "one id for two": ({"ids": {"known": {"a": 1, "b": 1}, "given": []}}, {}, "distinct ids"),
    "lists as senders": ({"ids": {"known": {}, "given": [[]]}}, {}, "expected a map of clients"),
    "no rule": ({"rule": ["mifa"]}, {}, "rule: expected str"),
    "no options": ({"rule_options": [1]}, {}, "rule_options: expected dict"),
    "other sizes": ({"rule_options": {"num_clients": 10**9}}, {}, "num_clients was 1000000000"),
    "no model": ({}, {"params": None}, "expected tensors"),
    "another tensor": ({}, {"more": torch.zeros(1)}, "expected tensors"),
    "params of float64": ({}, {"params": torch.zeros(24, dtype=torch.float64)}, "float64"),
    "NaN": ({}, {"params": torch.full((24,), math.nan)}, "expected finite values"),
    "no array": ({}, {"carried.n": None}, r"carried: expected the arrays \['n'\]"),
    "no npy": ({}, {"carried.n": torch.zeros(9, dtype=torch.uint8)}, "array 'n'"),
    "a state of another size": ({}, {"rule.total": torch.zeros(9)}, "state: expected 768 bytes"),
    "a state of another dtype": ({}, {"rule.total": torch.zeros(48)}, r"state\['total'\]"),
}


@pytest.mark.parametrize("which", FORGED)
def test_a_forged_checkpoint_is_refused_and_changes_nothing(
    which: str, tmp_path: Path, model: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    server = AggregationServer("mifa", num_clients=K, max_norm=None, checkpoint_path=path)
    server.set_model(model)
    run_round(server, range(K))
    _, content, state = checkpoint.read(path)
    changes, tensors, match = FORGED[which]
    if which == "other sizes":
        changes = {"rule_options": {**content["rule_options"], **changes["rule_options"]}}
    content = {**content, **changes}
    state = {k: v for k, v in {**state, **tensors}.items() if v is not None}
    checkpoint.write(path, "integrations.server", content, state)
    with pytest.raises(CheckpointError, match=match) as raised:
        AggregationServer("mifa", num_clients=K, max_norm=None).resume(path)
    assert str(raised.value).startswith(str(path))

    server.checkpoint_path = None
    run_round(server, [0, 1])
    before, arrays, ids = server.aggregator.state_dict(), server.arrays(), server.ids.to_json()
    with pytest.raises(CheckpointError):
        server.resume(path)
    assert server.rounds == 2
    assert server.ids.to_json() == ids
    assert server.arrays() == arrays
    assert all(torch.equal(v, before[k]) for k, v in server.aggregator.state_dict().items())


def test_a_checkpoint_that_cannot_be_written_is_reported_and_tried_again(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(FileNotFoundError, match="checkpoint_path: there is no folder for"):
        AggregationServer("fedavg", num_clients=K, checkpoint_path=folder / "run")
    folder.mkdir()
    path = folder / "run"
    server = AggregationServer("fedavg", num_clients=K, checkpoint_path=path, checkpoint_every=2)
    server.set_model(model)
    folder.rmdir()
    assert run_round(server, [0]).checkpoint_error is None
    report = run_round(server, [0])
    assert str(folder) in str(report.checkpoint_error)
    assert report.active == (0,)
    assert report.moved
    assert run_round(server, [0]).checkpoint_error is not None  # not due, but tried again
    folder.mkdir()
    assert run_round(server, [0]).checkpoint_error is None
    again = AggregationServer("fedavg", num_clients=K)
    again.resume(path)
    assert again.rounds == 4
    assert torch.equal(again.params, server.params)


def test_the_last_checkpoints_are_kept(tmp_path: Path, model: dict[str, bytes]) -> None:
    path = tmp_path / "run"
    server = AggregationServer("fedavg", num_clients=K, checkpoint_path=path, checkpoint_keep=3)
    server.set_model(model)
    for _ in range(5):
        run_round(server, [0, 1])
    assert {file.name for file in tmp_path.iterdir()} == {"run", "run.1", "run.2"}
    for name, rounds in (("run", 5), ("run.1", 4), ("run.2", 3)):
        again = AggregationServer("fedavg", num_clients=K)
        again.resume(tmp_path / name)
        assert again.rounds == rounds


def test_the_id_map_survives_a_restart(tmp_path: Path, model: dict[str, bytes]) -> None:
    path = tmp_path / "run"
    server = AggregationServer("mifa", num_clients=K, checkpoint_path=path)
    server.set_model(model)
    server.open_round(["900", "80", "7"])
    server.close_round([Answer(s, trained(model, 1, 0)) for s in ("900", "80")])
    server = AggregationServer("mifa", num_clients=K)
    server.resume(path)
    server.open_round(["900", "7"])
    report = server.close_round([Answer("7", trained(model, 1, 1))])
    assert report.ids == {"7": 2}  # 80 has 0 and 900 has 1, which neither reported
    assert report.absent == {"900": 1}


def test_checkpoints_are_written_when_due(tmp_path: Path, model: dict[str, bytes]) -> None:
    path = tmp_path / "run"
    server = AggregationServer("fedavg", num_clients=K, checkpoint_path=path, checkpoint_every=3)
    server.set_model(model)
    seen = []
    for _ in range(7):
        run_round(server, [0, 1])
        seen.append(path.exists() and path.stat().st_mtime_ns)
    assert seen[:2] == [False, False]
    assert len({*seen[2:5]}) == len({*seen[5:]}) == 1
    server.save_if_due()
    saved = path.stat().st_mtime_ns
    assert saved != seen[-1]
    server.save_if_due()  # nothing has happened since
    assert path.stat().st_mtime_ns == saved
    other = AggregationServer("fedavg", num_clients=K)
    other.resume(path)
    assert other.rounds == 7


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, model: dict[str, bytes]) -> None:
    path = tmp_path / "run"
    server = AggregationServer("centered-clip", num_clients=K, checkpoint_path=path, tau="inf")
    server.set_model(model)
    run_round(server, [0, 1])
    for other, message in [
        (AggregationServer("mifa", num_clients=K), "rule 'centered-clip'"),
        (AggregationServer("centered-clip", num_clients=K, tau=3.0), "tau was 'inf', is 3.0"),
        (AggregationServer("centered-clip", num_clients=K - 1, tau="inf"), "num_clients"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.resume(path)
        assert not other.has_model
        assert other.rounds == 0
    server.aggregator.save(path)
    with pytest.raises(ValueError, match="checkpoint of a server"):
        AggregationServer("centered-clip", num_clients=K, tau="inf").resume(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="damaged"):
        AggregationServer("centered-clip", num_clients=K, tau="inf").resume(path)


def test_client_weights_in_the_checkpoint(tmp_path: Path, model: dict[str, bytes]) -> None:
    path = tmp_path / "run"
    weights = torch.arange(1.0, K + 1)
    server = AggregationServer(
        "fedavg", num_clients=K, checkpoint_path=path, client_weights=weights
    )
    server.set_model(model)
    run_round(server, [0, 1])
    AggregationServer("fedavg", num_clients=K, client_weights=weights).resume(path)
    with pytest.raises(ValueError, match="client_weights"):
        AggregationServer("fedavg", num_clients=K).resume(path)


def test_an_aggregator_instead_of_a_name(model: dict[str, bytes]) -> None:
    agg = fastagg.FDMS(num_clients=K, num_params=24, nonfinite="drop")
    server = AggregationServer(agg)
    server.set_model(model)
    run_round(server, range(3))
    assert server.aggregator is agg
    assert server.num_clients == K


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: AggregationServer("fdsm", num_clients=K), ValueError, "fdms"),
        (lambda: AggregationServer("fdms", num_clients=K, mu=1), TypeError, "mu"),
        (lambda: AggregationServer("fdms"), TypeError, "num_clients"),
        (
            lambda: AggregationServer("scaffold", num_clients=K, local_work=1.0),
            ValueError,
            "control variates",
        ),
        (
            lambda: AggregationServer("mimic", num_clients=K, mode="client"),
            ValueError,
            "keep corrections",
        ),
        (lambda: AggregationServer("mifa-client", num_clients=K), ValueError, "keep rows"),
        (lambda: AggregationServer("fdms", num_clients=0), ValueError, "num_clients"),
        (lambda: AggregationServer(7, num_clients=K), TypeError, "rule"),  # type: ignore[arg-type]
        (
            lambda: AggregationServer("fdms", num_clients=K, nonfinite="raise"),
            ValueError,
            "nonfinite",
        ),
        (
            lambda: AggregationServer(fastagg.FedAvg(num_clients=K, num_params=24)),
            ValueError,
            "nonfinite",
        ),
        (
            lambda: AggregationServer(
                fastagg.FedAvg(num_clients=K, num_params=24, nonfinite="drop"), num_clients=K + 1
            ),
            ValueError,
            "num_clients",
        ),
        (
            lambda: AggregationServer(
                fastagg.FedAvg(num_clients=K, num_params=24, nonfinite="drop"), server_lr=1.0
            ),
            TypeError,
            "server_lr",
        ),
    ],
)
def test_wrong_arguments(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_models_that_do_not_fit(npy: Npy, model: dict[str, bytes]) -> None:
    server = AggregationServer("fedavg", num_clients=K)
    with pytest.raises(RuntimeError, match="no model"):
        server.arrays()
    server.set_model(model)
    with pytest.raises(ValueError, match="expected the model of the run"):
        server.set_model({"w": npy([1.0], np.float32)})
    agg = fastagg.FedAvg(num_clients=K, num_params=5, nonfinite="drop")
    with pytest.raises(ValueError, match="5 parameters"):
        AggregationServer(agg).set_model(model)


def test_a_rule_that_cannot_be_saved_is_found_before_the_first_round(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    server = AggregationServer(
        "fdms", num_clients=K, elimination=lambda t: 0.5, checkpoint_path=tmp_path / "run"
    )
    with pytest.raises(ValueError, match="elimination"):
        server.set_model(model)


def test_samples_do_not_depend_on_names(model: dict[str, bytes]) -> None:
    draws = []
    for prefix, shift in (("", 0), ("x", 1)):
        server = AggregationServer("fedavg", num_clients=K)
        server.set_model(model)
        names = [f"{prefix}{(k * 5 + shift) % 13}" for k in range(K)]  # in no order
        server.open_round(names)
        server.close_round([Answer(n, trained(model, 1, k), k) for k, n in enumerate(names)])
        drawn = [server.sample(names[::-1], 3, seed) for seed in range(20)]
        draws.append([[names.index(n) for n in sample] for sample in drawn])
    assert draws[0] == draws[1]
    assert len({tuple(sorted(sample)) for sample in draws[0]}) > 5
    assert sorted(server.sample(["a", "b"], 9, 0)) == ["a", "b"]


# --- options of every rule ---------------------------------------------------------------------


def test_a_server_optimizer_moves_the_model_and_is_kept(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    path, options = tmp_path / "run", {"server_optimizer": "adam", "server_lr": 0.1}
    whole = AggregationServer("fdms", num_clients=K, **options)
    first = AggregationServer("fdms", num_clients=K, checkpoint_path=path, **options)
    for server in (whole, first):
        server.set_model(model)
        run_round(server, range(3))
    again = AggregationServer("fdms", num_clients=K, **options)
    again.resume(path)
    for server in (whole, again):
        run_round(server, range(1, 4))
    assert torch.equal(whole.params, again.params)
    assert whole.aggregator.state_dict()["s"].any()
    other = AggregationServer("fdms", num_clients=K, server_optimizer="yogi", server_lr=0.1)
    with pytest.raises(ValueError, match=r"server_optimizer was .*'adam'.*, is .*'yogi'"):
        other.resume(path)


def test_a_round_with_fewer_than_min_active_says_so(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    path = tmp_path / "run"
    server = AggregationServer("fedavg", num_clients=K, min_active=3, checkpoint_path=path)
    server.set_model(model)
    before = server.params.clone()
    report = run_round(server, range(2))
    reason = "too few active clients: 2 of min_active = 3"
    assert report.active == () and not report.moved and torch.equal(server.params, before)
    assert report.rejected == {f"n{k}": f"update of client {k}: {reason}" for k in range(2)}
    assert report.lines()[-1] == f"the model stays as it was: {reason}"
    assert run_round(server, range(3)).moved
    other = AggregationServer("fedavg", num_clients=K, min_active=2)
    assert other.resume(path) == ["min_active was 3, is 2"]


@pytest.mark.parametrize(
    ("message", "reported"),
    [("DefaultCPUAllocator: can't allocate memory", True), ("something else", False)],
)
def test_a_round_has_its_report_whatever_the_checkpoint_raises(
    tmp_path: Path,
    model: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    message: str,
    reported: bool,
) -> None:
    """torch's allocator raises RuntimeError."""
    server = AggregationServer("fedavg", num_clients=K, checkpoint_path=tmp_path / "run")
    server.set_model(model)

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("fastagg.integrations._server.write_run", fail)
    if reported:
        assert run_round(server, [0]).checkpoint_error == message
    else:
        with pytest.raises(RuntimeError, match=message):
            run_round(server, [0])
    assert server.last_report is not None and server.last_report.active == (0,)
    assert server.rounds == 1
