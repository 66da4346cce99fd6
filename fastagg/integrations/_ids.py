# SPDX-License-Identifier: Apache-2.0
"""Stable client ids in [0, K) for the senders of a framework, and whose they are.

A framework chooses the names of its clients, often new ones in every run, but a rule with a memory
must recognize a client in every round. A client that reports its partition of the data has that
number as its id. A client that reports none is assigned a free id.

Names are trusted: the framework vouches for them. Reports are not: any client can claim any number.
So an id belongs to the first sender that used it, and a sender has one id. Another sender gets the
id only after its owner has left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fastagg.options import MOST, read_count, read_size, shown

_MOST_DIGITS = 20  # of a name that is a number
SOURCES = ("partition", "node", "trusted")


@dataclass
class Resolved:
    """The ids of the senders of one round.

    Attributes:
        ids: dict from senders to distinct ids.
        refused: dict from the other senders to the reason why they have no id.
        reassigned: dict from ids that go to another sender to the old and the new one.
        unplaced: the senders in ``refused`` that got no id because all are taken.
        contested: dict from senders to the id that each claims, as others do. They are refused.
        num_clients: K, with which all of them have ids.
        fresh: ids that go to a sender which is another client than those before. What a rule
            remembers of them must be forgotten.
    """

    ids: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    reassigned: dict[int, tuple[str, str]] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)
    contested: dict[str, int] = field(default_factory=dict)
    num_clients: int = 0
    fresh: set[int] = field(default_factory=set)


class ClientIds:
    """A map from senders, the names of a framework's nodes, to ids in [0, K).

    Args:
        num_clients: K.
        source: where ids come from. "partition": senders report them; those that report none are
            assigned one. "node": all are assigned one, and reports are ignored. "trusted": reports
            are those of a function of the server's owner: an id goes to the
            sender for which the function returns it.
        release_after: an id goes to another sender when its owner has not been connected for more
            than this number of rounds. 0: when it is not connected in this round. None: never.
        lasting: whether an id means the same client in every round. Otherwise (for rules that do
            not tell clients apart) senders without a report are assigned ids for one round.

    Attributes:
        known: dict from senders to the last id of each, reported or assigned.
        given: the senders in ``known`` whose ids were assigned here, not reported.
        seen: dict from the senders in ``known`` to the last round in which each was connected.
        used: ids that have had an owner.
    """

    def __init__(
        self,
        num_clients: int,
        *,
        source: str = "partition",
        release_after: int | None = 0,
        lasting: bool = True,
    ) -> None:
        self.num_clients = read_size("num_clients", num_clients)
        if source not in SOURCES:
            raise ValueError(f"source: expected one of {SOURCES}, got {source!r}")
        self.source = source
        if release_after is not None:
            release_after = read_count("release_after", release_after, least=0, most=MOST)
        self.release_after = release_after
        self.lasting = lasting
        self.known: dict[str, int] = {}
        self.given: set[str] = set()
        self.seen: dict[str, int] = {}
        self.used: set[int] = set()
        self._round = 0
        self._connected: set[str] | None = None  # None: nobody is known to have left

    def open_round(self, number: int, connected: Collection[str] | None) -> None:
        """Begin round ``number``, with the senders that are connected; None: all of them are."""
        self._round = number
        self._connected = None if connected is None else set(connected)
        for sender in self.known:
            if self._connected is None or sender in self._connected:
                self.seen[sender] = number

    def resolve(self, reported: Mapping[str, object | None], most: int | None = None) -> Resolved:
        """Determine the ids of the senders of one round, without changing this map.

        The result is invariant to the order of the senders.

        Args:
            reported: dict from senders to the partition id that each reported, None if it reported
                none.
            most: K may grow up to this number (:meth:`needed`); None: it does not.
        """
        number = self.num_clients if most is None else self.needed(reported, most)
        found = Resolved(num_clients=number)
        if self.source == "node":
            reported = dict.fromkeys(reported)
        owners = {client: sender for sender, client in self.known.items()}
        for sender, partition in reported.items():
            if partition is None:
                if sender in self.known:
                    found.ids[sender] = self.known[sender]
            elif isinstance(partition, bool) or not isinstance(partition, int):
                found.refused[sender] = f"partition id: expected an int, got {shown(partition)}"
            elif not 0 <= partition < number:
                found.refused[sender] = (
                    f"partition id: expected one in [0, {number}), got {shown(partition)}"
                )
            else:
                problem = self._claim(sender, partition, owners.get(partition), reported, found)
                if problem is not None:
                    found.refused[sender] = f"partition id: {problem}"
        self._refuse_doubles(found)
        self._assign(sorted(set(reported) - found.ids.keys() - found.refused.keys()), found)
        return found

    def _claim(
        self,
        sender: str,
        client: int,
        owner: str | None,
        reported: Mapping[str, object | None],
        found: Resolved,
    ) -> str | None:
        """Add the claim of a sender to ``found``, or return why it is refused."""
        own = self.known.get(sender)
        trusted = self.source == "trusted"
        if own is not None and own != client and sender not in self.given and not trusted:
            return f"{sender} is client {own}, and claims to be client {client}"
        if owner is not None and owner != sender:
            if not trusted and (owner in reported or not self.has_left(owner)):
                hint = ""
                if owner in self.given:
                    hint = ", which reported none; either all clients must report theirs or none"
                return f"{sender} claims to be client {client}, who is {owner}{hint}"
            found.reassigned[client] = (owner, sender)
        # Without an owner: it was assigned to a sender which has reported another one since.
        assigned = owner in self.given if owner is not None else not trusted
        if client in self.used and owner != sender and assigned:
            found.fresh.add(client)
        found.ids[sender] = client
        return None

    def has_left(self, sender: str) -> bool:
        """Return whether the id of a sender may go to another one."""
        if self._connected is None or sender in self._connected or self.release_after is None:
            return False
        # A round that was interrupted is begun again: its number may be that of `seen`.
        away = max(1, self._round - self.seen.get(sender, self._round))
        return away > self.release_after

    def _refuse_doubles(self, found: Resolved) -> None:
        """Move senders that claim the same id to ``refused``: any of them may be wrong."""
        senders: dict[int, list[str]] = {}
        for sender, client in found.ids.items():
            senders.setdefault(client, []).append(sender)
        for client, same in senders.items():
            if len(same) > 1:
                names = ", ".join(sorted(same, key=by_number))
                found.contested |= dict.fromkeys(same, client)
                for sender in same:
                    del found.ids[sender]
                    found.refused[sender] = f"id: {names} claim to be client {client}"
                found.reassigned.pop(client, None)
                found.fresh.discard(client)

    def _assign(self, senders: list[str], found: Resolved) -> None:
        """Assign ids to senders without one: first those never used, then those of who has left."""
        taken = set(found.ids.values())
        owners = {client: sender for sender, client in self.known.items()}
        open_ids = [client for client in range(found.num_clients) if client not in taken]
        free = [client for client in open_ids if client not in owners]
        free.sort(key=lambda client: (client in self.used, client))
        left = [c for c in open_ids if c in owners and self._may_reuse(owners[c], found)]
        if self.lasting:
            left.sort(key=lambda client: (self.seen.get(owners[client], 0), client))
        for sender in sorted(senders, key=by_number):
            if free:
                client = free.pop(0)
            elif left:
                client = left.pop(0)
                if self.lasting:
                    found.reassigned[client] = (owners[client], sender)
            else:
                found.refused[sender] = (
                    f"id: all {found.num_clients} are taken; num_clients must be the number of all "
                    "clients of the run"
                )
                found.unplaced.append(sender)
                continue
            found.ids[sender] = client
            if client in self.used:
                found.fresh.add(client)

    def _may_reuse(self, owner: str, found: Resolved) -> bool:
        if owner in found.ids or owner in found.refused:
            return False
        return not self.lasting or self.has_left(owner)

    def needed(self, reported: Mapping[str, object | None], most: int) -> int:
        """Return the number of clients, at most ``most``, with which all of ``reported`` get ids.

        It is never less than the present one, which may be above ``most``. Senders whose reported
        number is ``most`` or more do not count: they are refused anyway.
        """
        most = max(most, self.num_clients)
        claimed = {n for n in reported.values() if isinstance(n, int) and _ints([n], most)}
        claimed = {n for n in claimed if n >= self.num_clients and self.source != "node"}
        number = max([self.num_clients, *(n + 1 for n in claimed)])
        unclaimed = number - self.num_clients - len(claimed)
        return min(number + max(0, len(self.resolve(reported).unplaced) - unclaimed), most)

    def forget(self, clients: Collection[int]) -> None:
        """Free the ids of clients that have left for good."""
        for sender in [name for name, client in self.known.items() if client in clients]:
            self._drop(sender)
        self.used.difference_update(clients)

    def remember(self, found: Resolved, reported: Mapping[str, object | None]) -> None:
        """Store ids that :meth:`resolve` returned.

        Args:
            found: its result, of which ``ids`` may lack senders: these are not stored.
            reported: as for :meth:`resolve`.
        """
        for sender, client in found.ids.items():
            # One sender per client: an older name of the client is no longer in use.
            for other in [name for name, id in self.known.items() if id == client]:
                if other != sender:
                    self._drop(other)
            if self.source != "node" and reported[sender] is not None:
                self.given.discard(sender)
            elif sender not in self.known:
                self.given.add(sender)
            self.known[sender] = client
            self.seen[sender] = self._round
            self.used.add(client)

    def _drop(self, sender: str) -> None:
        del self.known[sender]
        self.given.discard(sender)
        self.seen.pop(sender, None)

    def to_json(self) -> dict[str, object]:
        """Return the map as values that JSON represents, for :meth:`from_json`."""
        return {
            "known": dict(sorted(self.known.items())),
            "given": sorted(self.given),
            "seen": dict(sorted(self.seen.items())),
            "used": sorted(self.used),
            "round": self._round,
        }

    def load_json(self, content: Mapping[str, object]) -> None:
        """Take the map that :meth:`to_json` returned; an older one has no ``seen`` and ``used``.

        Raises:
            ValueError: ``content`` is not from :meth:`to_json`, or its ids are not distinct or not
                in [0, num_clients). This map is unchanged.
        """
        known, given = content.get("known"), content.get("given")
        if not isinstance(known, dict) or not isinstance(given, list) or not _names(given):
            raise ValueError(f"ids: expected a map of clients, got {content!r}")
        used = content.get("used", sorted(known.values()) if _ints(known.values()) else None)
        number = content.get("round", 0)
        seen = content.get("seen", dict.fromkeys(known, number))
        if not isinstance(seen, dict) or not isinstance(used, list) or not _ints([number]):
            raise ValueError(f"ids: expected a map of clients, got {content!r}")
        if not _ints([*known.values(), *used], self.num_clients):
            raise ValueError(f"ids: expected ids in [0, {self.num_clients}), got {known}, {used}")
        if len(set(known.values())) != len(known):
            raise ValueError(f"ids: expected distinct ids, got {known}")
        if not set(given) <= set(known) or set(seen) != set(known) or not _ints(seen.values()):
            raise ValueError(
                f"ids: expected assigned ids and rounds of known senders only, got unknown senders "
                f"{sorted({*given, *seen} - set(known))} or no rounds"
            )
        self.known, self.given, self.seen = dict(known), set(given), dict(seen)
        self.used = {*used, *known.values()}
        self._round = number if isinstance(number, int) else 0


def _ints(values: Collection[object], end: int = MOST) -> bool:
    """Return whether all values are ints in [0, end)."""
    return all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < end for v in values)


def _names(values: Collection[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def by_number(sender: str) -> tuple[int, int, str]:
    """Return a sort key that orders numbers by value and puts other names after them.

    Numbers are names of at most 20 ASCII digits, as those of 64 bits; others may be anything.
    """
    is_number = len(sender) <= _MOST_DIGITS and sender.isascii() and sender.isdecimal()
    return (0, int(sender), sender) if is_number else (1, 0, sender)
