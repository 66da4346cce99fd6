# SPDX-License-Identifier: Apache-2.0
"""Replies that a node writes in another node's name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Message

from tests.integrations.test_flower import NODES, K, NodesGrid, SlowGrid, initial, reply, strategy

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("flower_identity")]

FORGER, VICTIM = K - 1, 1


def forged(message: Message, node: int, question: str | None = None) -> Message:
    message.metadata.__dict__["_src_node_id"] = node
    if question is not None:
        message.metadata.__dict__["_reply_to_message_id"] = question
    return message


class ForgingGrid(NodesGrid):
    """Messages have ids, as those of Flower. One client answers as another one, or to nothing."""

    def __init__(self, *, absent: bool, question: str | None = None) -> None:
        super().__init__(reply)
        self.absent, self.question = absent, question

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(message.metadata.dst_node_id * 10)
        replies = list(super().send_and_receive(messages))
        found = []
        for message in replies:
            client = self.nodes.index(message.metadata.src_node_id)
            if client == FORGER:
                message = forged(message, self.nodes[VICTIM], self.question)
            if client != VICTIM or not self.absent:
                found.append(message)
        return found


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("question", [None, "no message"])
def test_a_reply_in_anothers_name_is_ignored(
    absent: bool, question: str | None, logged: list[str]
) -> None:
    used = strategy("mifa", release_after=None)
    used.start(ForgingGrid(absent=absent, question=question), initial(), num_rounds=1)
    report = used.last_report
    assert report is not None and report.rejected == {}
    missing = {FORGER, VICTIM} if absent else {FORGER}
    assert report.active == tuple(sorted(set(range(K)) - missing))
    assert {str(NODES[client]) for client in missing} == report.absent.keys()
    to = "no node" if question else f"node {NODES[FORGER]}"
    said = f"Ignored a reply in the name of node {NODES[VICTIM]}: it answers a message to {to}"
    assert sum(said in line for line in logged) == 1


class LateForgingGrid(SlowGrid):
    """The late reply of a client is in another one's name, or to a message that nobody has sent."""

    def __init__(self, question: str | None) -> None:
        super().__init__(reply, {(1, FORGER): 1})
        self.question = question

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # type: ignore[override]
        found: list[Any] = list(super().pull_messages(message_ids))
        for message in found:
            if message.metadata.reply_to_message_id == f"1-{FORGER}":
                node = self.nodes[VICTIM if self.question is None else FORGER]
                forged(message, node, self.question)
        return found


@pytest.mark.parametrize("question", [None, "no message"])
def test_a_late_reply_in_anothers_name_is_ignored(question: str | None, logged: list[str]) -> None:
    used = strategy("mifa", staleness="constant", max_staleness=2)
    used.start(LateForgingGrid(question), initial(), num_rounds=2, timeout=0.01)
    report = used.last_report
    assert report is not None and report.active == tuple(range(K))
    assert report.late == {} and report.rejected == {}
    assert sum("Ignored a reply in the name of node" in line for line in logged) == 1
