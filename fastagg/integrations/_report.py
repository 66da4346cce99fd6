# SPDX-License-Identifier: Apache-2.0
"""The input and the result of a server's round: clients' answers, and the report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fastagg.integrations._untrusted import cut, small
from fastagg.integrations._wire import Received
from fastagg.report import StepReport

_LISTED = 20  # at most this many clients are listed in a line of text


@dataclass(frozen=True)
class Answer:
    """The answer of one client.

    Attributes:
        sender: the framework's name of the client.
        arrays: the client's weights: .npy bytes or arrays by name. They must not change before the
            round is closed.
        partition: the partition id that the client reported, None if it reported none.
        problem: why the answer cannot be used; None if no problem was found yet. Cut to the length
            of a line, because it may have names that the client chose.
        is_update: whether the arrays of the rule are an update, and not weights.
        round: number of the round whose model the client got, from 1; None: the present one.
        weight: how much the answer counts, such as the client's number of samples, if the server
            weighs answers; None: the client did not say.
        note: what the framework needs again if the answer counts in another round, such as metrics:
            a dict of numbers, texts, bytes, and lists and dicts of these.
        row: [d + m] float32, the update and then the statistics, of a late answer that has waited;
            its ``arrays`` are gone.
    """

    sender: str
    arrays: Received
    partition: object | None = None
    problem: str | None = None
    is_update: bool = False
    round: int | None = None
    weight: object | None = None
    note: Mapping[str, Any] | None = None
    row: Tensor | None = None

    def __post_init__(self) -> None:
        # Messages quote these values.
        object.__setattr__(self, "partition", small(self.partition))
        object.__setattr__(self, "weight", small(self.weight))
        if self.problem is not None:
            object.__setattr__(self, "problem", cut(self.problem))

    @property
    def label(self) -> str:
        """The sender, and the round if it is an earlier one, for a report."""
        return self.sender if self.round is None else f"{self.sender} (of round {self.round})"


@dataclass(frozen=True)
class RoundReport:
    """The report of one round.

    Attributes:
        round: number of the round, from 1.
        active: ids of the clients whose updates were used, ascending.
        absent: senders that were asked and did not answer, each with its id, or None if the id is
            not known.
        rejected: senders whose answer was not used, each with the reason, cut to the length of a
            line.
        friends: absent clients, each with the active client whose update is the substitute.
        ids: senders of the active clients, each with its id.
        reassigned: ids whose sender has left: the old and the new sender.
        forgotten: ids of which the rule forgot what it remembered: another client has them now.
        ignored: senders of answers that were not taken, each with the reason: late ones that cannot
            count, second ones, and those of clients that were not asked. :class:`fastagg.Server`
            alone fills it.
        late: senders of the active clients whose answers were of earlier rounds, each with the age.
        late_notes: what the framework has noted with these answers, by sender.
        step: the rule's report; None if the rule refused the step.
        error: why the rule refused the step, None if it did not.
        checkpoint_error: why the checkpoint that was due could not be written; None if it was.
    """

    round: int
    active: tuple[int, ...]
    absent: dict[str, int | None]
    rejected: dict[str, str]
    friends: dict[int, int]
    ids: dict[str, int]
    step: StepReport | None = None
    error: str | None = None
    checkpoint_error: str | None = None
    reassigned: dict[int, tuple[str, str]] = field(default_factory=dict)
    forgotten: tuple[int, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    late_notes: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rejected", "ignored"):  # reasons may have texts that clients chose
            reasons = {sender: cut(why) for sender, why in getattr(self, name).items()}
            object.__setattr__(self, name, reasons)

    @property
    def moved(self) -> bool:
        """Whether the rule took a step; a rule may do so without active clients (``mifa``)."""
        return self.step is not None and not self.step.skipped

    def lines(self) -> list[str]:
        """Return the report as lines of text, for a log."""
        return [line for _, line in self.leveled_lines()]

    def leveled_lines(self) -> list[tuple[int, str]]:
        """Return the lines, each after its level of :mod:`logging`.

        A rejected answer is a warning, and a checkpoint that was not written an error.
        """
        found = [(logging.INFO, line) for line in self._clients_lines()]
        for level, what, reasons in (
            (logging.WARNING, "rejected", self.rejected),
            (logging.INFO, "ignored", self.ignored),
        ):
            found += [(level, f"{what} {cut(s)}: {why}") for s, why in sorted(reasons.items())]
        if self.error is not None:
            found.append((logging.INFO, f"the model stays as it was: {self.error}"))
        elif not self.moved:
            reason = "there is no update" if self.step is None else self.step.reason
            found.append((logging.INFO, f"the model stays as it was: {reason}"))
        elif not self.active:
            text = "there is no update: the rule applied what it remembers"
            found.append((logging.INFO, text))
        if self.checkpoint_error is not None:
            found.append((logging.ERROR, not_written(self.checkpoint_error)))
        return found

    def _clients_lines(self) -> list[str]:
        """Return who was active, absent and late, and what happened to clients and their ids."""
        lines = [f"round {self.round}: {len(self.active)} active: {listed(self.active)}"]
        if self.absent:
            order = sorted((c is None, c or 0, str(s), s) for s, c in self.absent.items())
            names = [_name(sender, self.absent[sender]) for *_, sender in order]
            lines.append(f"absent: {listed(names)}")
        if self.late:
            names = [
                f"{_name(sender, self.ids.get(sender))}, age {age}"
                for sender, age in sorted(self.late.items())
            ]
            lines.append(f"late: {listed(names)}")
        if self.friends:
            stands = [f"{friend} for {client}" for client, friend in sorted(self.friends.items())]
            lines.append(f"stood in: {listed(stands)}")
        if self.step is not None and self.step.clipped is not None and len(self.step.clipped):
            clipped = listed(self.step.clipped.tolist())
            lines.append(f"scaled down to norm {self.step.clip_norm:.6g}: {clipped}")
        for client, (old, new) in sorted(self.reassigned.items()):
            lines.append(f"client {client}: {cut(old)} has left, it is {cut(new)} now")
        if self.forgotten:
            lines.append(f"the rule forgot what it remembered of: {listed(self.forgotten)}")
        return lines


def substitutions(step: StepReport | None) -> dict[int, int]:
    """Return the absent clients of a step, each with the client whose update is the substitute."""
    if step is None or step.friends is None:
        return {}
    active = set(step.active.tolist())
    pairs = enumerate(step.friends.tolist())
    return {client: friend for client, friend in pairs if friend >= 0 and client not in active}


def _name(sender: str, client: int | None) -> str:
    """Return sender and client id as text."""
    name = cut(str(sender))
    return f"{name} (not known)" if client is None else f"client {client} ({name})"


def not_written(error: str) -> str:
    """Return the line of a log for a checkpoint that could not be written."""
    return f"the checkpoint was not written, the next round tries again: {error}"


def listed(values: Sequence[object]) -> str:
    """Return the first values as text, and how many more there are."""
    shown = ", ".join(str(value) for value in values[:_LISTED])
    return shown + (f" and {len(values) - _LISTED} more" if len(values) > _LISTED else "")
