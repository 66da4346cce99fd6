# SPDX-License-Identifier: Apache-2.0
"""Ask Flower's nodes, and pull replies that came after the end of their round.

``Grid.send_and_receive`` forgets a message when its time is over; Flower keeps the reply until it
is pulled or expires. So the identifiers of the messages are remembered here, and pulled again in
later rounds. After a restart of the server Flower has another run, and older replies are lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

_PAUSE = 0.2  # seconds between two pulls


class LateReplies:
    """The messages that have no reply yet, and the rounds of those that have."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}  # rounds by message id
        self._answered: dict[str, int] = {}  # of the last exchange

    def exchange(
        self, grid: Grid, messages: Iterable[Message], timeout: float, number: int, oldest: int
    ) -> list[Message]:
        """Send the messages of a round, and return their replies and late ones of earlier rounds.

        Args:
            grid: sends and pulls.
            messages: of the round.
            timeout: seconds to wait for the replies of the round.
            number: of the round.
            oldest: the first round whose replies are still wanted.
        """
        end = time.monotonic() + timeout
        self._open = {key: asked for key, asked in self._open.items() if asked >= oldest}
        self._answered = {}
        sent = {key: number for key in grid.push_messages(messages) if key is not None}
        self._open |= sent
        replies: list[Message] = []
        while True:
            found = list(grid.pull_messages(list(self._open))) if self._open else []
            for message in found:
                key = message.metadata.reply_to_message_id
                if key in self._open:
                    self._answered[key] = self._open.pop(key)
            replies += found
            left = end - time.monotonic()
            if not self._open.keys() & sent.keys() or left <= 0.0:
                return replies
            time.sleep(min(_PAUSE, left))

    def round_of(self, message: Message) -> int | None:
        """Return the round of a reply of the last exchange; None: the reply is of no exchange."""
        if not self._answered:  # there was none, and replies may lack this field
            return None
        return self._answered.get(message.metadata.reply_to_message_id)
