# SPDX-License-Identifier: Apache-2.0
"""What comes into a round of a server, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastagg.aggregator import StepReport
from fastagg.integrations._wire import Arrays

_LISTED = 20  # clients named one by one in a line of text


@dataclass(frozen=True)
class Answer:
    """What came back from one client.

    Attributes:
        sender: the framework's name for it.
        arrays: its weights, .npy bytes by name.
        partition: the id that it reported for itself, if it did.
        problem: why the answer cannot be used, if the framework's part of it is wrong already.
    """

    sender: str
    arrays: Arrays
    partition: object | None = None
    problem: str | None = None


@dataclass(frozen=True)
class RoundReport:
    """What became of one round.

    Attributes:
        round: 1, 2, ...
        active: ids of the clients whose updates were used, ascending.
        absent: senders that were asked and did not answer -> their id, None if that is not known.
        rejected: senders whose answer was not used -> why.
        friends: absent clients -> the active client whose update stood in for theirs.
        ids: senders -> ids, of all ``active``.
        step: the rule's own report; None if it had nothing to do or failed.
        error: why the rule could not aggregate what came, None if it could.
    """

    round: int
    active: tuple[int, ...]
    absent: dict[str, int | None]
    rejected: dict[str, str]
    friends: dict[int, int]
    ids: dict[str, int]
    step: StepReport | None = None
    error: str | None = None

    def lines(self) -> list[str]:
        """The report as text, a line for each thing worth knowing."""
        lines = [f"round {self.round}: {len(self.active)} active: {_listed(self.active)}"]
        if self.absent:
            order = sorted((c is None, c or 0, sender) for sender, c in self.absent.items())
            names = [_name(sender, self.absent[sender]) for _, _, sender in order]
            lines.append(f"absent: {_listed(names)}")
        if self.friends:
            stands = [f"{friend} for {client}" for client, friend in sorted(self.friends.items())]
            lines.append(f"stood in: {_listed(stands)}")
        lines += [f"rejected {sender}: {why}" for sender, why in sorted(self.rejected.items())]
        if self.error is not None:
            lines.append(f"the model stays as it was: {self.error}")
        elif not self.active:
            lines.append("the model stays as it was: there is no update")
        return lines


def substitutions(step: StepReport | None) -> dict[int, int]:
    """Absent clients -> whose update stood in for theirs."""
    if step is None or step.friends is None:
        return {}
    active = set(step.active.tolist())
    pairs = enumerate(step.friends.tolist())
    return {client: friend for client, friend in pairs if friend >= 0 and client not in active}


def _name(sender: str, client: int | None) -> str:
    return f"{sender} (not known)" if client is None else f"client {client} ({sender})"


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(str(value) for value in values[:_LISTED])
    return shown + (f" and {len(values) - _LISTED} more" if len(values) > _LISTED else "")
