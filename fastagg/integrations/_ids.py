# SPDX-License-Identifier: Apache-2.0
"""Stable client ids in [0, K) for the senders of a framework.

A framework chooses the names of its clients, often new ones in every run, but a rule with a memory
must recognize a client in every round. A client that reports its partition of the data has that
number as its id. A client that reports none is assigned the lowest free id and keeps it as long as
its name does not change.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastagg.options import read_size


class ClientIds:
    """A map from senders, the names of a framework's nodes, to ids in [0, K).

    Args:
        num_clients: K.

    Attributes:
        known: dict from senders to the last id of each, reported or assigned.
        given: the senders in ``known`` whose ids were assigned here, not reported.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = read_size("num_clients", num_clients)
        self.known: dict[str, int] = {}
        self.given: set[str] = set()

    def resolve(
        self, reported: Mapping[str, object | None]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Determine the ids of the senders of one round, without changing this map.

        The result is invariant to the order of the senders.

        Args:
            reported: dict from senders to the partition id that each reported, None if it reported
                none.

        Returns:
            ids: dict from senders to distinct ids.
            refused: dict from the other senders to the reason why they have no id.
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
                    "none; either all clients must report their partition id or none"
                )
            else:
                ids[sender] = partition
        taken = {*self.known.values(), *ids.values()}
        free = (client for client in range(self.num_clients) if client not in taken)
        for sender in sorted(set(reported) - ids.keys() - refused.keys(), key=by_number):
            client = next(free, None)
            if client is None:
                refused[sender] = (
                    f"id: all {self.num_clients} are taken; num_clients must be the number of all "
                    "clients of the run"
                )
            else:
                ids[sender] = client
        return self._without_doubles(ids, refused)

    def _without_doubles(
        self, ids: dict[str, int], refused: dict[str, str]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Move senders that claim the same id from ``ids`` to ``refused``."""
        senders: dict[int, list[str]] = {}
        for sender, client in ids.items():
            senders.setdefault(client, []).append(sender)
        for client, same in senders.items():
            if len(same) > 1:  # any of them may be wrong, so all are refused
                for sender in same:
                    del ids[sender]
                    refused[sender] = f"id: {len(same)} senders claim to be client {client}"
        return ids, refused

    def remember(self, ids: Mapping[str, int], reported: Mapping[str, object | None]) -> None:
        """Store ids that :meth:`resolve` returned.

        Args:
            ids: dict from senders to ids.
            reported: as for :meth:`resolve`.
        """
        for sender, client in ids.items():
            if reported[sender] is not None:
                self.given.discard(sender)
                # One sender per client: an older name of the client is no longer in use.
                for other in [name for name, id in self.known.items() if id == client]:
                    del self.known[other]
            elif sender not in self.known:
                self.given.add(sender)
            self.known[sender] = client

    def to_json(self) -> dict[str, object]:
        """Return the map as values that JSON represents, for :meth:`from_json`."""
        return {"known": dict(sorted(self.known.items())), "given": sorted(self.given)}

    @classmethod
    def from_json(cls, num_clients: int, content: Mapping[str, object]) -> ClientIds:
        """Make the map that :meth:`to_json` returned.

        Raises:
            ValueError: ``content`` is not from :meth:`to_json`, or its ids are not in
                [0, num_clients).
        """
        ids = cls(num_clients)
        known, given = content.get("known"), content.get("given")
        if not isinstance(known, dict) or not isinstance(given, list):
            raise ValueError(f"ids: expected a map of clients, got {content!r}")
        if not all(isinstance(k, int) and 0 <= k < num_clients for k in known.values()):
            raise ValueError(f"ids: expected ids in [0, {num_clients}), got {known}")
        if not set(given) <= set(known):
            raise ValueError(
                f"ids: expected assigned ids of known senders only, got unknown senders "
                f"{sorted(set(given) - set(known))}"
            )
        ids.known = dict(known)
        ids.given = set(given)
        return ids


def by_number(sender: str) -> tuple[int, int, str]:
    """Return a sort key that orders numbers by value and puts other names after them."""
    return (0, int(sender), "") if sender.isdecimal() else (1, 0, sender)
