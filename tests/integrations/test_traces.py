# SPDX-License-Identifier: Apache-2.0
"""A rejected answer leaves no trace: the round is as if its sender had not answered."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg import AdaptiveNorm
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer
from fastagg.ops.memory import reserve
from fastagg.report import RefusedUpdates

D = 5
LONG = 1000.0  # of the rows of bad answers; those of others have norms of about 2


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(values, np.float32))
    return stream.getvalue()


MODEL = {"w": npy(np.zeros(D)), "norm.running_var": npy(np.ones(2))}


def update(sender: str, number: int) -> np.ndarray:
    rng = np.random.default_rng([number, *sender.encode()])
    return rng.uniform(0.5, 1.5, D) * rng.choice([-1.0, 1.0], D)


BAD: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "garbage": lambda good: {**good, "w": b"garbage"},
    "names": lambda good: {"w": good["w"]},
    "shape": lambda good: {**good, "w": npy(np.zeros(D + 1))},
    "NaN": lambda good: {**good, "w": npy([math.nan] * D)},
    "Inf": lambda good: {**good, "w": npy([0.0] * (D - 1) + [math.inf])},
    "huge": lambda good: {**good, "w": npy([1e35] * D)},
    "long": lambda good: {**good, "w": npy([LONG] * D)},
    "NaN in statistics": lambda good: {**good, "norm.running_var": npy([math.nan, 1.0])},
    "variance": lambda good: {**good, "norm.running_var": npy([-1.0, 1.0])},
}


def answer(
    server: AggregationServer,
    sender: str,
    partition: int | None,
    bad: str | None = None,
    **fields: Any,
) -> Answer:
    number = server.rounds + 1
    values = server.params.numpy() + update(sender, number).astype(np.float32)
    variance = 1.0 + 0.5 * np.abs(update(sender, number)[:2])
    good = {"w": npy(values), "norm.running_var": npy(variance)}
    return Answer(sender, good if bad is None else BAD[bad](good), partition, **fields)


def made(rule: str, num_clients: int, **options: Any) -> AggregationServer:
    server = AggregationServer(rule, num_clients=num_clients, **{"max_norm": 100.0, **options})
    server.set_model(MODEL)
    return server


@dataclass
class Sender:
    """What a sender does in a round: its claim, and how its answer is bad, or None."""

    partition: int | None
    bad: str | None


def play(
    server: AggregationServer, senders: Mapping[str, Sender], away: Collection[str], bad: bool
) -> RoundReport:
    """Run a round; all are asked and connected, but those with bad answers may be silent."""
    present = [*senders, *("still here",)]
    server.open_round(present, [name for name in present if name not in away])
    return server.close_round(
        [
            answer(server, name, sender.partition, sender.bad)
            for name, sender in senders.items()
            if name not in away and (bad or sender.bad is None)
        ]
    )


def everything(server: AggregationServer) -> dict[str, Any]:
    state = {
        name: value.numpy().tobytes() for name, value in server.aggregator.state_dict().items()
    }
    return {
        "ids": server.ids.to_json(),
        "K": (server.num_clients, server.ids.num_clients, server.aggregator.num_clients),
        "params": server.params.numpy().tobytes(),
        "arrays": server.arrays(),
        **state,
    }


def assert_same(
    one: AggregationServer, two: AggregationServer, without: Collection[str] = ()
) -> None:
    first, second = everything(one), everything(two)
    assert first.keys() == second.keys()
    for name in first.keys() - set(without):
        assert first[name] == second[name], name


RULES = ["mifa", "fdms", "fedavg", "stale", "mimic", "fedau", "krum", "median", "geometric-median"]
NAMES = st.sampled_from([*"abcdefgh", "1", "20"])
SENDERS = st.builds(
    Sender,
    st.one_of(st.none(), st.integers(0, 5), st.sampled_from([7, 10**6])),
    st.one_of(st.none(), st.none(), st.sampled_from([*BAD])),
)


@given(data=st.data())
def test_rounds_with_bad_answers_are_rounds_without_them(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(RULES))
    options: dict[str, Any] = {"krum": {"num_byzantine": 0}}.get(rule, {})
    num_clients = data.draw(st.integers(2, 5))
    options |= {
        "max_clients": data.draw(st.sampled_from([None, 8])),
        "ids": data.draw(st.sampled_from(["partition", "partition", "node"])),
        "release_after": data.draw(st.sampled_from([0, 1, None])),
        "min_answers": data.draw(st.sampled_from([0, 0, 2])),
        "min_active": data.draw(st.sampled_from([1, 1, 2])),
        "max_empty_rounds": 100,
    }
    with_them, without = (made(rule, num_clients, **options) for _ in range(2))
    for _ in range(data.draw(st.integers(1, 5))):
        senders = data.draw(st.dictionaries(NAMES, SENDERS, max_size=7))
        away = data.draw(st.sets(NAMES, max_size=4))
        one = play(with_them, senders, away, bad=True)
        two = play(without, senders, away, bad=False)
        assert_same(with_them, without)
        for name in ("active", "ids", "friends", "forgotten", "reassigned"):
            assert getattr(one, name) == getattr(two, name), name
        assert (one.error is None) == (two.error is None)
        if one.error is None:  # otherwise no row has been read
            wrong = {n for n, s in senders.items() if s.bad is not None and n not in away}
            assert one.rejected.keys() == two.rejected.keys() | wrong


@pytest.mark.parametrize("bad", BAD)
def test_the_rule_does_not_forget_an_absent_client_for_a_bad_answer(bad: str) -> None:
    with_it, without = made("mifa", 2), made("mifa", 2)
    for server in (with_it, without):
        play(server, {"a": Sender(None, None), "b": Sender(None, None)}, (), True)
    senders = {"a": Sender(None, None), "new": Sender(None, bad)}
    report = play(with_it, senders, ("b",), bad=True)
    play(without, senders, ("b",), bad=False)
    assert report.forgotten == () and list(report.rejected) == ["new"]
    assert_same(with_it, without)
    play(with_it, {"a": Sender(None, None), "b": Sender(None, None)}, (), True)
    assert with_it.ids.known == {"a": 0, "b": 1}


def test_a_wrong_claim_does_not_keep_an_id_from_another_sender() -> None:
    """fedavg's ids are for one round; e, who is client 1, claims to be client 0."""
    server = made("fedavg", 2)
    senders = {"a": Sender(None, None), "b": Sender(None, None), "e": Sender(1, None)}
    assert play(server, senders, (), True).ids == {"a": 0, "e": 1}
    report = play(server, senders | {"e": Sender(0, "NaN")}, (), True)
    assert report.ids == {"a": 0, "b": 1} and list(report.rejected) == ["e"]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_does_not_take_the_last_id(bad: str) -> None:
    """Names are ordered, and that of the bad one comes first."""
    for claims in ((None, None), (None, 1), (1, None), (1, 1)):
        server = made("mifa", 2)
        play(server, {"z": Sender(None, None)}, (), True)
        senders = {
            "a": Sender(claims[0], bad),
            "b": Sender(claims[1], None),
            "z": Sender(None, None),
        }
        report = play(server, senders, (), True)
        assert list(report.rejected) == ["a"] and report.active == (0, 1)
        assert server.ids.known == {"z": 0, "b": 1}


@pytest.mark.parametrize("bad", BAD)
def test_the_rule_does_not_grow_for_a_bad_answer(bad: str) -> None:
    server = made("mifa", 2, max_clients=8000)
    senders = {"a": Sender(0, None), "b": Sender(7999, bad), "c": Sender(None, None)}
    assert list(play(server, senders, (), True).rejected) == ["b"]
    assert server.num_clients == server.aggregator.num_clients == 2
    senders["d"] = Sender(None, None)
    assert play(server, senders, (), True).active == (0, 1, 2)
    assert server.num_clients == server.aggregator.num_clients == 3


def test_the_rule_does_not_grow_for_claims_that_are_refused() -> None:
    server = made("mifa", 2, max_clients=50)
    play(server, {"a": Sender(0, None)}, (), True)
    senders = {"a": Sender(30, None), "b": Sender(40, None), "c": Sender(40, None)}
    report = play(server, senders, (), True)
    assert report.rejected.keys() == {"a", "b", "c"} and server.num_clients == 2


ADAPTIVE = {"max_norm": AdaptiveNorm(window=16, warmup=3)}
ADAPTING = {"norms", "norm_count"}


def test_an_adaptive_limit_takes_norms_that_it_rejects_into_account() -> None:
    """Also those of new senders, who get no id: the rest is as if they had not answered."""
    for rule in ("mifa", "fedavg"):
        servers = [made(rule, 3, **ADAPTIVE) for _ in range(2)]
        for server in servers:
            for _ in range(3):
                play(server, {"x": Sender(None, None), "y": Sender(None, None)}, (), True)
        senders = {"a": Sender(None, "long"), "x": Sender(None, None), "z": Sender(None, None)}
        reports = [
            play(server, senders, ("y",), bad)
            for server, bad in zip(servers, (True, False), strict=True)
        ]
        assert reports[0].ids == reports[1].ids == {"x": 0, "z": 2}
        assert list(reports[0].rejected) == ["a"] and not reports[1].rejected
        assert_same(*servers, without=ADAPTING)
        counts = [int(server.aggregator.live_state()["norm_count"]) for server in servers]
        assert counts[0] == counts[1] + 1


def test_a_contested_id_goes_to_the_sender_whose_answer_is_within_an_adaptive_limit() -> None:
    server = made("mifa", 3, **ADAPTIVE)
    for _ in range(3):
        play(server, {"x": Sender(0, None)}, (), True)
    report = play(server, {"a": Sender(2, "long"), "b": Sender(2, None)}, (), True)
    assert report.ids == {"b": 2} and "update of client 2: norm" in report.rejected["a"]
    report = play(server, {"c": Sender(1, None), "d": Sender(1, None)}, (), True)
    assert report.rejected == dict.fromkeys("cd", "id: c, d claim to be client 1")


def test_the_norms_of_new_senders_may_grow() -> None:
    """All senders of each round are new, and most of them train for longer from some round on."""
    server = made("fedavg", 4, **ADAPTIVE, max_empty_rounds=100)
    for number in range(20):
        names = [f"{number}-{k}" for k in range(4)]
        senders = {
            name: Sender(None, "long" if number > 3 and name[-1] != "3" else None) for name in names
        }
        report = play(server, senders, (), True)
    assert len(report.active) == 4


def test_a_refused_step_gives_no_ids() -> None:
    server = made("krum", 6, num_byzantine=1, max_clients=9, client_weights=[1.0] * 6)
    report = play(server, {"a": Sender(2, None), "b": Sender(8, None)}, (), True)
    assert report.error is not None and report.ids == {}
    assert server.ids.known == {} and server.num_clients == server.aggregator.num_clients == 6
    server = made("mifa", 2, min_answers=2)
    play(server, {"a": Sender(None, None), "b": Sender(None, None)}, (), True)
    before = everything(server)
    report = play(server, {"c": Sender(None, None)}, ("a", "b"), True)
    assert report.error is not None and report.forgotten == () and report.reassigned == {}
    after = everything(server)
    assert {n for n in before if before[n] != after[n]} == {"ids"}  # which have the round's number
    assert server.ids.known == {"a": 0, "b": 1}


@pytest.mark.parametrize("bad", BAD)
def test_bad_answers_are_not_enough(bad: str) -> None:
    """With min_answers=1, a rule that moves without clients does not."""
    server = made("mifa", 2, min_answers=1)
    play(server, {"a": Sender(None, None), "b": Sender(None, None)}, (), True)
    params = server.params.clone()
    report = play(server, {"a": Sender(None, bad)}, ("b",), True)
    assert report.error == "min_answers: expected at least 1, got 0"
    assert list(report.rejected) == ["a"] and torch.equal(server.params, params)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, OSError])
def test_a_round_that_fails_leaves_no_trace(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, twin = (made("mifa", 2, max_clients=6) for _ in range(2))
    for one in (server, twin):
        play(one, {"a": Sender(None, None), "b": Sender(None, None)}, (), True)
    senders = {"a": Sender(None, None), "c": Sender(None, None), "d": Sender(4, None)}
    calls: list[int] = []

    def fail(size: int) -> None:
        calls.append(size)
        if len(calls) == 2:  # just before the commit
            raise error
        reserve(size)

    with monkeypatch.context() as patch:
        patch.setattr("fastagg.aggregator.reserve", fail)
        with pytest.raises(error):
            play(server, senders, ("b",), True)
    assert server.rounds == 1 and len(calls) == 2
    assert server.aggregator.num_clients == server.num_clients == 2
    for one in (server, twin):  # the round is begun again
        report = play(one, senders, ("b",), True)
        assert report.ids == {"a": 0, "c": 2, "d": 4}
    assert_same(server, twin)


def test_an_update_that_is_rejected_under_one_id_does_not_count_under_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = made("mifa", 4, max_norm=None)
    play(server, {"x": Sender(None, None), "y": Sender(None, None)}, (), True)
    read, tried = type(server.aggregator)._read, []

    def reading(self: Any, params: Any, cohort: Any, plan: Any) -> Any:
        tried.append(cohort.ids)
        if len(tried) == 1:
            raise RefusedUpdates({2: "no client 2"})
        return read(self, params, cohort, plan)

    monkeypatch.setattr(type(server.aggregator), "_read", reading)
    senders = {name: Sender(None, None) for name in ("a", "b", "x", "y")}
    report = play(server, senders, (), True)
    assert report.rejected == {"a": "update of client 2: no client 2"}
    assert report.ids == {"x": 0, "y": 1, "b": 2}
    assert tried == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2]]


def test_a_late_answer_counts_if_that_of_its_client_in_time_does_not() -> None:
    options = {"staleness": "constant", "max_staleness": 3}
    for bad in ("garbage", "NaN", "long", "huge"):
        servers = [made("mifa", 3, **options) for _ in range(2)]
        for server, both in zip(servers, (True, False), strict=True):
            senders = {"a": Sender(0, None), "b": Sender(1, None), "c": Sender(2, None)}
            play(server, senders, (), True)
            server.open_round(["a", "b", "c"], ["a", "b", "c"])
            late = answer(server, "b", 1, round=2)
            server.close_round([answer(server, "a", 0)])
            assert server.put_late(late) is None
            server.open_round(["a", "b2"], ["a", "b2"])  # b has another name now
            bad_one = [answer(server, "b2", 1, bad)] if both else []
            report = server.close_round([answer(server, "a", 0), *bad_one])
            assert report.late == {"b": 1} and report.ids == {"a": 0, "b": 1}
            assert list(report.rejected) == ["b2"] * both
        assert_same(*servers)
