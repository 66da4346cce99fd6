# SPDX-License-Identifier: Apache-2.0
"""Late answers at the framework-free server: updates from the model of their round, and ages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer

K, D = 4, 12
Npy = Callable[..., bytes]
Sent = dict[str, Tensor]


@pytest.fixture
def served(npy: Npy) -> Callable[..., AggregationServer]:
    def make(rule: str, **options: Any) -> AggregationServer:
        options = {"staleness": "constant", "max_staleness": 2} | options
        server = AggregationServer(rule, num_clients=K, **options)
        server.set_model({"w": npy(np.arange(D) / 8, np.float32)})
        return server

    return make


def open_round(server: AggregationServer) -> Tensor:
    """Ask all clients; return the model that they get."""
    server.open_round(f"n{k}" for k in range(K))
    return server.params.clone()


def noise(client: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + client)
    return torch.randn(D, generator=generator)


def answer(sent: Tensor, client: int, number: int, late: bool, **changes: Any) -> Answer:
    """Return the answer of a client to the model that was sent in a round."""
    model = {"w": (sent + noise(client, number)).numpy()}
    return Answer(f"n{client}", model, client, round=number if late else None, **changes)


def close(server: AggregationServer, answers: Iterable[Answer]) -> RoundReport:
    """Close a round, before which the late ones of the answers have arrived."""
    listed = [*answers]
    for late in [a for a in listed if a.round is not None]:
        server.put_late(late)
    return server.close_round([a for a in listed if a.round is None])


# What arrives in each round: (client, round that it answers to).
SCRIPT = [
    [(0, 1), (1, 1), (2, 1)],
    [(0, 2), (3, 1), (2, 2)],
    [(0, 3), (1, 2)],
    [],
    [(3, 3), (2, 4), (1, 5)],
]


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("fedavg", {"staleness": "polynomial"}),
        ("fedbuff", {"staleness": "polynomial"}),
        ("fdms", {"staleness": "hinge"}),
        ("mifa", {}),
        ("stale", {}),
        ("mimic", {}),
        ("geometric-median", {}),
        ("median", {}),
    ],
)
def test_same_bits_as_the_rule(
    served: Callable[..., AggregationServer], rule: str, options: dict[str, Any]
) -> None:
    server = served(rule, **options)
    every = {"staleness": "constant", "max_staleness": 2} | options
    agg = fastagg.make(rule, num_clients=K, num_params=D, nonfinite="drop", **every)
    params, models, late = server.params.clone(), {}, 0
    for number, arrived in enumerate(SCRIPT, start=1):
        models[number] = open_round(server)
        assert torch.equal(models[number], params)
        answers = [answer(models[r], k, r, r < number) for k, r in arrived]
        report = close(server, answers)
        rows = [(models[r] + noise(k, r)) - models[r] for k, r in arrived]
        ages = [number - r for _, r in arrived]
        expected = agg.step(params, rows, [k for k, _ in arrived], ages=ages)
        assert torch.equal(server.params, params)
        assert report.active == tuple(expected.active.tolist()) and not report.rejected
        assert report.late == {f"n{k}": number - r for k, r in arrived if r < number}
        late += len(report.late)
        in_time = {f"n{k}" for k, r in arrived if r == number}
        assert report.absent.keys() == {f"n{k}" for k in range(K)} - in_time - report.late.keys()
    assert late == 4


def test_ages_count_steps_of_the_rule(served: Callable[..., AggregationServer]) -> None:
    """A round with too few answers has no step, and the model of the next one is the same."""
    server = served("mifa", min_answers=2)
    first = open_round(server)
    report = close(server, [answer(first, 0, 1, late=False)])
    assert report.error is not None
    open_round(server)
    report = close(server, [answer(first, k, 1, late=True) for k in (1, 2)])
    assert report.error is None and report.late == {"n1": 0, "n2": 0}
    expected = first + (noise(1, 1) + noise(2, 1)) / K
    torch.testing.assert_close(server.params, expected, rtol=1e-5, atol=1e-5)  # of float32


def test_what_cannot_count_is_rejected(served: Callable[..., AggregationServer]) -> None:
    server = served("fedavg")
    sent = {}
    for number in range(1, 5):
        sent[number] = open_round(server)
        close(server, [answer(sent[number], 0, number, late=False)])
    sent[5] = open_round(server)
    report = close(
        server,
        [
            answer(sent[5], 1, 5, late=False),
            answer(sent[4], 1, 4, late=True),  # older than the other one
            answer(sent[4], 0, 4, late=True),  # has answered
            answer(sent[2], 2, 2, late=True),  # too old
            answer(sent[4], 2, 4, late=True),
            answer(sent[3], 2, 3, late=True),
            answer(sent[4], 3, 4, late=True, problem="no number of examples"),
        ],
    )
    assert report.active == (1, 2) and report.late == {"n2": 1}
    assert report.rejected == {
        "n1 (of round 4)": "a newer answer of this client counts",
        "n0 (of round 4)": "was not asked in round 4, or has answered already",
        "n2 (of round 2)": "late: round 2 is too old, max_staleness is 2",
        "n2 (of round 3)": "a newer answer of this client counts",
        "n3 (of round 4)": "no number of examples",
    }
    assert "late: client 2 (n2), age 1" in report.lines()
    open_round(server)
    report = close(server, [answer(sent[4], 2, 4, late=True)])
    why = "was not asked in round 4, or has answered already"
    assert report.rejected == {"n2 (of round 4)": why}


def test_a_late_answer_with_nan_is_left_out(served: Callable[..., AggregationServer]) -> None:
    server = served("mifa")
    first = open_round(server)
    close(server, [answer(first, 0, 1, late=False)])
    open_round(server)
    bad = Answer("n1", {"w": np.full(D, math.nan, np.float32)}, 1, round=1)
    report = close(server, [bad])
    assert report.rejected == {"n1": "update of client 1: NaN or Inf"} and not report.late


def test_without_max_staleness_late_answers_do_not_count(
    served: Callable[..., AggregationServer],
) -> None:
    for options in ({"staleness": None, "max_staleness": None}, {"max_staleness": None}):
        server = served("fedavg", **options)
        assert not server.takes_late_answers
        first = open_round(server)
        close(server, [answer(first, 0, 1, late=False)])
        second = open_round(server)
        report = close(server, [answer(first, 1, 1, True), answer(second, 0, 2, False)])
        assert report.active == (0,)
        assert report.rejected == {"n1 (of round 1)": "late: round 1 has ended"}


CLAIMS: dict[str, list[tuple[str, int, float]]] = {  # sender, partition, what the model is off by
    "a known client": [("n1", 3, 1.0)],
    "two new nodes": [("x", 3, 1.0), ("y", 3, 1.0)],
    "a new node with NaN": [("x", 3, math.nan)],
}


@pytest.mark.parametrize("case", CLAIMS)
def test_a_claim_that_is_rejected_costs_nobody_a_late_answer(
    served: Callable[..., AggregationServer], case: str
) -> None:
    """Client 3 has disconnected when its answer arrives, and others claim to be client 3."""
    ends = []
    for claims in (CLAIMS[case], []):
        server = served("mifa", max_norm=None)
        for number in (1, 2):
            sent = open_round(server)
            answering = range(K) if number == 1 else range(K - 1)
            close(server, [answer(sent, k, number, late=False) for k in answering])
        asked = ["n0", "n1", "x", "y"]
        server.open_round(asked, asked)
        now = server.params.clone()
        liars = [Answer(s, {"w": (now + off).numpy()}, k) for s, k, off in claims]
        report = close(
            server, [answer(sent, 3, 2, late=True), answer(now, 0, 3, late=False), *liars]
        )
        assert report.ids == {"n0": 0, "n3": 3} and report.late == {"n3": 1}
        assert report.rejected.keys() == {s for s, *_ in claims}
        ends.append((server.params, server.aggregator.state_dict()["memory"], server.ids.known))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]


def test_ids_by_node_ignore_what_others_report(served: Callable[..., AggregationServer]) -> None:
    server = served("mifa", ids="node")
    sent = open_round(server)
    close(server, [answer(sent, k, 1, late=False) for k in range(K)])
    sent = open_round(server)
    close(server, [answer(sent, 0, 2, late=False)])
    asked = ["n0", "n1"]
    server.open_round(asked, asked)
    liar = Answer("n1", {"w": server.params.numpy()}, 3)
    report = close(server, [answer(sent, 3, 2, late=True), liar])
    assert report.ids == {"n1": 1, "n3": 3} and not report.rejected


def test_late_answers_wait_until_the_rule_takes_a_step(
    served: Callable[..., AggregationServer],
) -> None:
    """Krum with f = 1 needs three rows."""
    server = served("krum", num_byzantine=1)
    first = open_round(server)
    close(server, [answer(first, k, 1, late=False) for k in (0, 1, 2)])
    second = open_round(server)
    report = close(server, [answer(first, 3, 1, late=True), answer(second, 0, 2, late=False)])
    assert "more than 2 rows" in str(report.error)
    assert report.late == report.ids == report.rejected == {}
    third = open_round(server)
    assert torch.equal(second, third)
    report = close(server, [answer(third, k, 3, late=False) for k in (0, 1)])
    assert report.active == (0, 1, 3) and report.late == {"n3": 1}


def test_a_late_answer_that_allows_no_step_delays_no_other(npy: Npy) -> None:
    """Without room for the model in float16 there is no step; the late answer does not wait on."""
    server = AggregationServer(
        "fedavg", num_clients=K, staleness="constant", max_staleness=9, max_norm=None, server_lr=4.0
    )
    server.set_model({"w": npy(np.zeros(D), np.float16)})
    first = open_round(server)
    huge = Answer("n3", {"w": npy(np.full(D, 60000.0), np.float16)}, 3, round=1)
    close(server, [])
    for number in (2, 3):  # nobody else answers in round 2: there is no step in any case
        sent = open_round(server)
        assert torch.equal(sent, first)
        fine = Answer("n0", {"w": npy(np.ones(D), np.float16)}, 0)
        report = close(server, [huge] if number == 2 else [fine])
        assert report.active == (() if number == 2 else (0,))
    assert report.rejected["n3"].startswith("no step with late answers: ")
    assert server.params.tolist() == [4.0] * D
    open_round(server)
    assert close(server, []).rejected == {}


def test_after_a_restart_older_rounds_are_closed(
    served: Callable[..., AggregationServer], tmp_path: Path
) -> None:
    server = served("mimic", checkpoint_path=tmp_path / "run")
    for number in (1, 2):
        sent = open_round(server)
        close(server, [answer(sent, k, number, late=False) for k in (0, 1)])
    again = served("mimic", checkpoint_path=tmp_path / "run")
    again.resume(tmp_path / "run")
    for _ in range(2):
        models = [open_round(s) for s in (server, again)]
        number = server.rounds + 1
        for s, model in zip((server, again), models, strict=True):
            close(s, [answer(model, 2, number, late=False)])
        assert torch.equal(server.params, again.params)
    open_round(again)
    report = close(again, [answer(sent, 3, 2, late=True), answer(models[1], 1, 4, late=True)])
    assert report.rejected == {"n3 (of round 2)": "late: round 2 is too old, max_staleness is 2"}
    assert report.late == {"n1": 1}
