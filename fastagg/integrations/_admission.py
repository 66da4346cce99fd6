# SPDX-License-Identifier: Apache-2.0
"""Which answers of a round may count, and as which clients.

An answer that does not count leaves no trace: it takes no id, no other client is forgotten for it,
and the rule does not grow for it. What one answer alone shows is checked before ids are assigned.
What shows only in the step (norms against those of others) may come too late: then ids are assigned
again, without the answers that the step has rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fastagg.integrations._ids import ClientIds, Resolved
from fastagg.integrations._late_answers import NEWER
from fastagg.integrations._report import Answer
from fastagg.integrations._weighing import Weighing


class Unsettled(Exception):
    """Raised if answers turn out not to count, so that others may be other clients.

    Attributes:
        rejected: reasons by sender.
    """

    def __init__(self, rejected: Mapping[str, str]) -> None:
        super().__init__(rejected)
        self.rejected = dict(rejected)


@dataclass(frozen=True)
class Admitted:
    """Answers with ids.

    Attributes:
        answers: by sender.
        found: their ids; nobody is refused.
        refused: reasons why others have none: by sender, or by label for late answers.
        contested: senders that are refused because others claim the same ids, with these.
    """

    answers: dict[str, Answer]
    found: Resolved
    refused: dict[str, str]
    contested: dict[str, int]


class Admission:
    """Assigns ids to the answers of one round, until those that count have theirs.

    Args:
        ids: ids of the clients; not changed.
        weighing: whether answers count by their weights.
        in_time: answers of this round; senders are different, also from those of late ones.
        late: others.
        most: the number of clients up to which K may grow; None: it does not.
        remembers: whether the rule forgets clients whose ids go to others.
        examine: returns, of senders with the clients that they would be, those whose answers the
            step would reject, with the reasons. The flag says whether the claim is contested.

    Attributes:
        out: senders that do not count, each with the reason.
    """

    def __init__(
        self,
        ids: ClientIds,
        weighing: Weighing,
        in_time: Sequence[Answer],
        late: Sequence[Answer],
        most: int | None,
        remembers: bool,
        examine: Callable[[Mapping[str, int], bool], dict[str, str]],
    ) -> None:
        self._ids, self._weighing, self._most = ids, weighing, most
        self._in_time, self._late = in_time, late
        self._remembers, self._examine = remembers, examine
        self._examined: set[str] = set()
        self.out: dict[str, str] = {}

    def admit(self) -> Admitted:
        """Assign ids to the answers of senders that are not ``out``.

        Answers for which others would lose something are examined before: those that contest an id,
        for which the rule would forget a client, or grow. Such senders may be ``out`` afterwards.
        """
        while True:
            admitted = self._resolved(())
            found = admitted.found
            costly = {
                sender: client
                for sender, client in found.ids.items()
                if client >= self._ids.num_clients or (self._remembers and client in found.fresh)
            }
            if not (self._fails(admitted.contested, True) or self._fails(costly, False)):
                return admitted

    def _fails(self, clients: Mapping[str, int], contested: bool) -> bool:
        """Examine answers, each once; return whether senders are ``out`` now."""
        new = {s: client for s, client in clients.items() if s not in self._examined}
        self._examined |= new.keys()
        found = self._examine(new, contested) if new else {}
        self.out |= found
        return bool(found)

    def is_settled(self, admitted: Admitted, rejected: Collection[str]) -> bool:
        """Return whether the others would be the same clients without ``rejected``."""
        if not rejected:
            return True
        other, found = self._resolved(rejected).found, admitted.found
        return (
            other.ids == {s: client for s, client in found.ids.items() if s not in rejected}
            and other.num_clients == found.num_clients
            and (other.fresh == found.fresh or not self._remembers)
        )

    def spare(self, admitted: Admitted, senders: Iterable[str]) -> dict[str, int]:
        """Return ids that nobody has in this round for senders that are ``out``.

        There may be fewer. Under such an id a step rejects an answer again, without a trace but
        this: an adaptive limit takes its norm into account, as those of known clients.
        """
        taken = set(admitted.found.ids.values())
        free = (client for client in range(admitted.found.num_clients) if client not in taken)
        return dict(zip(senders, free, strict=False))

    def _resolved(self, without: Collection[str]) -> Admitted:
        """Assign ids to the answers of senders that are not ``out``, nor in ``without``."""
        out = {*self.out, *without}
        in_time = {a.sender: a for a in self._in_time if a.sender not in out}
        late, refused = self._usable_late(self._claimed(in_time), out)
        admitted = self._with_ids(in_time | late)
        return replace(admitted, refused=refused | admitted.refused)

    def _with_ids(self, present: dict[str, Answer]) -> Admitted:
        """Assign ids to answers, given by sender, until nobody else is refused."""
        refused: dict[str, str] = {}
        contested: dict[str, int] = {}
        while True:
            reported = {sender: answer.partition for sender, answer in present.items()}
            found = self._ids.resolve(reported, self._most)
            if not found.refused:
                return Admitted(present, found, refused, contested)
            contested |= found.contested
            # Senders with refused claims leave first: then there may be ids for the others.
            claimants = {s: why for s, why in found.refused.items() if s not in found.unplaced}
            gone = claimants or found.refused
            refused |= gone
            present = {s: answer for s, answer in present.items() if s not in gone}

    def _claimed(self, in_time: dict[str, Answer]) -> set[int]:
        """Return the ids that answers in time report and get.

        A claim that is refused must not cost the client that has the id its late answer.
        """
        if not self._late or self._ids.source == "node":
            return set()
        alone = self._with_ids(in_time)
        ids, answers = alone.found.ids, alone.answers
        return {client for s, client in ids.items() if answers[s].partition is not None}

    def _usable_late(
        self, claimed: Collection[int], out: Collection[str]
    ) -> tuple[dict[str, Answer], dict[str, str]]:
        """Return the late answers that may get ids, by sender, and why others do not, by label.

        After a restart, a client may have a new name, and the answer of its old one may wait.

        Args:
            claimed: ids of answers in time.
            out: senders that do not count.
        """
        late: dict[str, Answer] = {}
        refused: dict[str, str] = {}
        for answer in self._late:
            own = self._ids.known.get(answer.sender, answer.partition)
            problem = self._weighing.problem(answer)
            if isinstance(own, int) and own in claimed and self._ids.has_left(answer.sender):
                problem = NEWER
            if problem is not None:
                refused[answer.label] = problem
            elif answer.sender not in out:
                late[answer.sender] = answer
        return late, refused
