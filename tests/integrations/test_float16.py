# SPDX-License-Identifier: Apache-2.0
"""Models with float16 arrays, and rounds after which they would be beyond the range of float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastagg
from fastagg import Server
from fastagg.integrations._report import RoundReport

LARGEST = 65504.0


def serve(rule: str, **options: Any) -> Server:
    model = {"b": torch.zeros(2), "w": torch.zeros(3, dtype=torch.float16)}
    given = {"num_clients": 2, "ids": "name", "answers": "updates", "max_norm": None}
    return Server(rule, model, **{**given, **options})


def play(server: Server, **answers: float) -> RoundReport:
    """Run a round in which the clients answer with these numbers, those of ``b`` ten times."""
    task = server.begin_round(answers)
    for client, number in answers.items():
        update = {"b": torch.full((2,), 10 * number), "w": torch.full((3,), number).half()}
        assert server.submit(client, update, task.key) is None
    return server.finish_round()


RULES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavg", {"server_optimizer": "momentum"}),
    ("fedavg", {"server_optimizer": "adam"}),
    ("mifa", {"server_optimizer": "adagrad"}),
    ("mifa", {}),
    ("fdms", {}),
    ("median", {}),
]


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_round_beyond_the_range_changes_nothing(
    rule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Not even with a new client, for which the rule would grow."""
    paths = [tmp_path / "run", tmp_path / "twin"]
    run, twin = (serve(rule, max_clients=3, checkpoint_path=p, **options) for p in paths)
    for server in (run, twin):
        assert play(server, ann=100.0, bob=300.0).moved
    before = run.model()
    run._core.aggregator.server_lr = 1e6
    report = play(run, ann=900.0, cat=900.0)
    assert report.step is None and report.active == () and report.ids == {}
    assert report.error is not None and "array 'w': expected values in the range" in report.error
    assert f"the model stays as it was: {report.error}" in report.lines()
    assert run.num_clients == 2 and run._core.ids.known == {"ann": 0, "bob": 1}
    run._core.aggregator.server_lr = 1.0
    again = serve(rule, max_clients=3, **options)
    again.resume(paths[0])
    for server in (run, again):
        assert all(torch.equal(value, before[name]) for name, value in server.model().items())
    for server in (twin, run, again):
        assert len(play(server, cat=7.0, bob=1.0).active) == 2
        assert torch.equal(server._core.params, twin._core.params)
    states = [server._core.aggregator.state_dict() for server in (run, again, twin)]
    for name, value in states[2].items():
        assert all(torch.equal(state[name], value) for state in states)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_rounds_within_the_range_have_the_bits_of_the_rule(
    rule: str, options: dict[str, Any]
) -> None:
    server = serve(rule, **options)
    agg = fastagg.make(rule, num_clients=2, num_params=5, **options)
    params = torch.zeros(5)
    for number in (1.0, -3.0, 0.5):
        report = play(server, ann=number, bob=2 * number)
        row = torch.tensor([10 * number] * 2 + [number] * 3)
        agg.step(params, [row, 2 * row], [0, 1])
        assert report.moved and torch.equal(server._core.params, params)


def test_numbers_that_are_rounded_to_the_largest_are_in_the_range() -> None:
    server = serve("fedavg")
    play(server, ann=LARGEST)
    assert play(server, ann=15.0).moved  # 65519 is rounded to 65504, and 65520 to infinity
    assert server.model()["w"].tolist() == [LARGEST] * 3
    assert not play(server, ann=1.0).moved
    assert play(server, ann=-20.0).moved
