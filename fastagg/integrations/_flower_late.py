# SPDX-License-Identifier: Apache-2.0
"""Ask Flower's nodes, and pull replies that came after the end of their round.

``Grid.send_and_receive`` forgets a message when its time is over; Flower keeps the reply until it
is pulled or expires. So the identifiers of the messages are remembered here, and pulled again in
later rounds. What was pulled is gone at Flower's; so a late reply goes at once to whoever keeps it.
After a restart of the server Flower has another run, and replies that were not pulled are lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

_PAUSE = 0.2  # seconds between two pulls


def from_those_asked(asked: Iterable[Message], replies: Iterable[Message]) -> list[Message]:
    """Return the replies of the nodes that were asked; log the others.

    The SuperLink knows which node sends a reply. But Flower's grid reads the name of the node from
    the message that the node has written, and this may be another node's name.

    Args:
        asked: the messages that were sent. A grid that gives them no ids proves nothing: then all
            replies are returned.
        replies: to these messages.
    """
    nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in asked if m.metadata.message_id}
    return [m for m in replies if not nodes or _is_from(m, nodes.get(_question(m)))]


def _question(reply: Message) -> str:
    return reply.metadata.reply_to_message_id


def _is_from(reply: Message, node: int | None) -> bool:
    """Return whether a reply is from the node that was asked, None: nobody was; log if not."""
    source = reply.metadata.src_node_id
    if source != node:
        whom = "no node" if node is None else f"node {node}"
        why = f"it answers a message to {whom}"
        log(logging.WARNING, "\t> Ignored a reply in the name of node %s: %s", source, why)
    return source == node


class LateReplies:
    """The messages that have no reply yet.

    Args:
        keep: is called with each late reply and the number of its round.
    """

    def __init__(self, keep: Callable[[Message, int], None]) -> None:
        self._keep = keep
        self._open: dict[str, tuple[int, int]] = {}  # round and node, by message id

    def exchange(
        self, grid: Grid, messages: Iterable[Message], timeout: float, number: int, oldest: int
    ) -> list[Message]:
        """Send the messages of a round and return their replies; late ones of others are kept.

        Args:
            grid: sends and pulls.
            messages: of the round.
            timeout: seconds to wait for the replies of the round.
            number: of the round.
            oldest: the first round whose replies are still wanted.
        """
        end = time.monotonic() + timeout
        self._open = {key: asked for key, asked in self._open.items() if asked[0] >= oldest}
        given = list(messages)
        sent = {
            key: (number, message.metadata.dst_node_id)
            for key, message in zip(grid.push_messages(given), given, strict=False)
            if key is not None
        }
        self._open |= sent
        replies: list[Message] = []
        while True:
            found = list(grid.pull_messages(list(self._open))) if self._open else []
            for message in found:
                asked, node = self._open.pop(_question(message), (number, None))
                if not _is_from(message, node):
                    continue
                if asked == number:
                    replies.append(message)
                else:
                    self._keep(message, asked)
            left = end - time.monotonic()
            if not self._open.keys() & sent.keys() or left <= 0.0:
                return replies
            time.sleep(min(_PAUSE, left))
