# SPDX-License-Identifier: Apache-2.0
"""Ask Flower's nodes, and pull replies that came after the end of their round.

``Grid.send_and_receive`` forgets a message when its time is over; Flower keeps the reply until it
is pulled or expires. So the identifiers of the messages are remembered here, and pulled again in
later rounds. What was pulled is gone at Flower's; so a late reply goes at once to whoever keeps it.
After a restart of the server Flower has another run, and replies that were not pulled are lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from fastagg.integrations._flower_senders import is_from, question

_PAUSE = 0.2  # seconds between two pulls


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
                asked, node = self._open.pop(question(message), (number, None))
                if not is_from(message, node):
                    continue
                if asked == number:
                    replies.append(message)
                else:
                    self._keep(message, asked)
            left = end - time.monotonic()
            if not self._open.keys() & sent.keys() or left <= 0.0:
                return replies
            time.sleep(min(_PAUSE, left))
