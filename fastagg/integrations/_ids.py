# SPDX-License-Identifier: Apache-2.0
"""Who is who: stable client ids in [0, K) for the senders that a framework knows.

A framework names its clients as it likes, often anew in every run, whereas a rule with a memory
must know them again. A client that reports which partition of the data it has is known by that
number. One that does not gets the lowest free id, and keeps it as long as its name stays.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastagg.options import read_size


class ClientIds:
    """The ids of senders: names of a framework's nodes -> ids in [0, K).

    Args:
        num_clients: K.

    Attributes:
        known: senders -> the id under which each was last heard, reported or given.
        given: the part of ``known`` whose ids were given here, not reported.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = read_size("num_clients", num_clients)
        self.known: dict[str, int] = {}
        self.given: set[str] = set()

    def resolve(
        self, reported: Mapping[str, object | None]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """The ids of the senders of one round; remembers nothing.

        The result does not depend on the order of the senders.

        Args:
            reported: senders -> the partition id that each reported, None if it did not.

        Returns:
            ids: senders -> ids, all different.
            refused: the other senders -> why they have none.
        """
        ids: dict[str, int] = {}
        refused: dict[str, str] = {}
        owners = {self.known[sender]: sender for sender in self.given}
        for sender, partition in reported.items():
            if partition is None:
                if sender in self.known:
                    ids[sender] = self.known[sender]
            elif isinstance(partition, bool) or not isinstance(partition, int):
                refused[sender] = f"partition id: expected an int, got {partition!r}"
            elif not 0 <= partition < self.num_clients:
                refused[sender] = (
                    f"partition id: expected one in [0, {self.num_clients}), got {partition}"
                )
            elif owners.get(partition, sender) != sender:
                refused[sender] = (
                    f"partition id: {partition} was given to {owners[partition]}, which reported "
                    "none; let all clients report theirs or none"
                )
            else:
                ids[sender] = partition
        taken = {*self.known.values(), *ids.values()}
        free = (client for client in range(self.num_clients) if client not in taken)
        for sender in sorted(set(reported) - ids.keys() - refused.keys(), key=by_number):
            client = next(free, None)
            if client is None:
                refused[sender] = f"id: all {self.num_clients} are taken; is num_clients right?"
            else:
                ids[sender] = client
        return self._without_doubles(ids, refused)

    def _without_doubles(
        self, ids: dict[str, int], refused: dict[str, str]
    ) -> tuple[dict[str, int], dict[str, str]]:
        senders: dict[int, list[str]] = {}
        for sender, client in ids.items():
            senders.setdefault(client, []).append(sender)
        for client, same in senders.items():
            if len(same) > 1:  # nobody can tell which of them is right
                for sender in same:
                    del ids[sender]
                    refused[sender] = f"id: {len(same)} senders claim to be client {client}"
        return ids, refused

    def remember(self, ids: Mapping[str, int], reported: Mapping[str, object | None]) -> None:
        """Keep what :meth:`resolve` found for these senders."""
        for sender, client in ids.items():
            if reported[sender] is not None:
                self.given.discard(sender)
                # One sender per client: the one before is gone, or it is the same process anew.
                for other in [name for name, id in self.known.items() if id == client]:
                    del self.known[other]
            elif sender not in self.known:
                self.given.add(sender)
            self.known[sender] = client

    def to_json(self) -> dict[str, object]:
        """What :meth:`from_json` makes the same map of."""
        return {"known": dict(sorted(self.known.items())), "given": sorted(self.given)}

    @classmethod
    def from_json(cls, num_clients: int, content: Mapping[str, object]) -> ClientIds:
        """Raises ValueError if ``content`` is not from :meth:`to_json` for so many clients."""
        ids = cls(num_clients)
        known, given = content.get("known"), content.get("given")
        if not isinstance(known, dict) or not isinstance(given, list):
            raise ValueError(f"ids: expected a map of clients, got {content!r}")
        if not all(isinstance(k, int) and 0 <= k < num_clients for k in known.values()):
            raise ValueError(f"ids: expected ids in [0, {num_clients}), got {known}")
        if not set(given) <= set(known):
            raise ValueError(f"ids: {sorted(set(given) - set(known))} are given but not known")
        ids.known = dict(known)
        ids.given = set(given)
        return ids


def by_number(sender: str) -> tuple[int, int, str]:
    """A sort key: numbers by their value, before other names."""
    return (0, int(sender), "") if sender.isdecimal() else (1, 0, sender)
