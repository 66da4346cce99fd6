# SPDX-License-Identifier: Apache-2.0
"""Flower strategies whose nodes come and go: new ids, free ids, and restarts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import RecordDict

from tests.integrations.test_flower import K, NodesGrid, initial, legacy, reply, strategy

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("flower_identity")]
NODES = [1_000 + k for k in range(9)]


class Churn(NodesGrid):
    """In round t, the nodes of ``present[t - 1]`` are connected; only some report a partition."""

    def __init__(self, present: list[list[int]], first: int = 1, report: bool = False) -> None:
        def answer(content: RecordDict, round: int, client: int) -> RecordDict:
            return reply(content, round, client, report=report)

        super().__init__(answer, NODES)
        self.present, self.round = present, first - 1

    def get_node_ids(self) -> Iterable[int]:
        self.round += 1
        return [NODES[k] for k in self.present[self.round - 1]]


PRESENT = [[*range(K)], [*range(K + 2)], [0, 1, 2, 3, 6, 7]]


@pytest.mark.parametrize("rule", ["mifa", "fdms", "fedstale", "fedavg"])
def test_new_nodes_take_new_ids_and_then_free_ones(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    used = strategy(rule, max_clients=8, checkpoint_path=path)
    used.start(Churn(PRESENT), initial(), num_rounds=3)
    assert used.server.num_clients == K + 2
    assert used.last_report is not None and used.last_report.rejected == {}
    if rule != "fedavg":  # which needs no lasting ids
        ids = used.last_report.ids
        assert [ids[str(NODES[k])] for k in (0, 1, 2, 3, 6)] == [0, 1, 2, 3, 6]
        assert ids[str(NODES[7])] == 4  # nodes 4 and 5 have left
        assert used.last_report.forgotten == (4,)
    parts = strategy(rule, max_clients=8, checkpoint_path=path)
    parts.start(Churn(PRESENT), initial(), num_rounds=2)
    again = strategy(rule, max_clients=8)
    again.start(Churn(PRESENT, first=3), num_rounds=3, resume_from=path)
    assert torch.equal(again.server.params, used.server.params)


def test_without_a_limit_new_nodes_are_rejected() -> None:
    used = strategy("mifa")
    used.start(Churn(PRESENT[:2]), initial(), num_rounds=2)
    assert used.server.num_clients == K
    assert used.last_report is not None
    assert len(used.last_report.rejected) == 2


def test_a_partition_beyond_the_present_ones() -> None:
    used = strategy("mifa", max_clients=7)
    used.start(Churn([[0, 1], [0, 1, 6], [7, 0]], report=True), initial(), num_rounds=3)
    assert used.server.num_clients == 7
    assert used.last_report is not None
    assert "expected one in [0, 7)" in used.last_report.rejected[str(NODES[7])]


def test_growing_and_forgetting_between_rounds() -> None:
    used = strategy("mifa", client_weights=[1.0] * (K - 1) + [2.0])

    class Between(Churn):
        def get_node_ids(self) -> Iterable[int]:
            if self.round == 1:
                used.server.grow(K + 1, client_weights=[1.0] * (K - 1) + [2.0, 2.0])
                used.server.forget([2])
            return super().get_node_ids()

    used.start(Between([[*range(K)], [0, 1, 3, 4, 5, 6]]), initial(), num_rounds=2)
    assert used.last_report is not None
    assert sorted(used.last_report.ids.values()) == [*range(K + 1)]
    assert used.last_report.forgotten == ()


def test_the_legacy_strategy_grows_too() -> None:
    used = legacy({}, 2, rule="mifa", num_clients=2, max_clients=K)
    whole = legacy({}, 2, rule="mifa")
    assert used.server.num_clients == K
    assert torch.equal(used.server.params, whole.server.params)


def test_nodes_that_were_asked_the_longest_ago_come_first() -> None:
    used = strategy("mifa", selection="longest-absent", fraction_train=0.4)
    grid = Churn([[*range(K)]] * 10)
    used.start(grid, initial(), num_rounds=10)
    asked = [node for of_round in grid.asked for node in of_round]
    assert [len(of_round) for of_round in grid.asked] == [2] * 10
    assert len({*asked[:6]}) == K  # everybody within three rounds
    assert all(3 <= asked.count(node) <= 5 for node in range(K))
