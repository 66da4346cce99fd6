# SPDX-License-Identifier: Apache-2.0
"""Compare the node that a reply names as its source with the node that was asked.

The SuperLink knows which node sends a reply. But Flower's grid takes the name of the node from the
message that the node has written, and a node can write another one's name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import Message
from flwr.common.logger import log


def from_those_asked(asked: Iterable[Message], replies: Iterable[Message]) -> list[Message]:
    """Return the replies of the nodes that were asked; log the others.

    Args:
        asked: the messages that were sent. If the grid has given them no ids, replies cannot be
            compared with them, and all are returned.
        replies: to these messages.
    """
    nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in asked if m.metadata.message_id}
    return [m for m in replies if not nodes or is_from(m, nodes.get(question(m)))]


def question(reply: Message) -> str:
    """Return the id of the message that a reply answers."""
    return reply.metadata.reply_to_message_id


def is_from(reply: Message, node: int | None) -> bool:
    """Return whether a reply names ``node`` as its source; log if it does not.

    Args:
        reply: a reply.
        node: the node that got the message which it answers; None: no node did.
    """
    source = reply.metadata.src_node_id
    if source != node:
        whom = "no node" if node is None else f"node {node}"
        text = "\t> Ignored a reply in the name of node %s: it answers a message to %s"
        log(logging.WARNING, text, source, whom)
    return source == node
