# SPDX-License-Identifier: Apache-2.0
"""Late answers of a server's clients: they wait in an inbox until a round closes.

Senders have names here. Whose update an answer is shows only when a round closes, with the other
claims of the round, so an answer waits under the name of its sender, with the client id that it
reports. What it keeps is an update: the model of its round is needed only until it arrives.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastagg.inbox import Answers, Inbox, LargeNote
from fastagg.integrations._late import EarlierRounds
from fastagg.integrations._report import Answer
from fastagg.integrations._wire import WireError, WireLayout

NEWER = "a newer answer of this client counts"  # why a late one does not

_KEPT = ("partition", "weight", "note")  # of an answer, beside its row


@dataclass(frozen=True)
class Taken:
    """Late answers that were taken for a round.

    Attributes:
        usable: those that can count, each with its ``row``.
        ages: the age of each of them, by sender.
    """

    usable: list[Answer]
    ages: dict[str, int]
    _answers: Answers | None
    _settled: Callable[[], None]

    def finish(self, *, happened: bool, again: Collection[str] = ()) -> None:
        """End the round.

        Args:
            happened: whether it has happened: answers are used up then, or wait again otherwise.
            again: senders whose answers wait again also if it has.
        """
        if self._answers is not None:
            senders, waiting = self._answers.clients, set(again)
            self._answers.finish(used=[happened and sender not in waiting for sender in senders])
        if happened:
            self._settled()


class LateAnswers:
    """The earlier rounds of a run, and the late answers to them that have arrived.

    Of several answers of a sender the newest waits. With a folder they survive the process: an
    answer counts exactly once in the model of a checkpoint, whenever the process ends.

    :meth:`put` may be called from any thread; the other methods from that of the rounds.

    Args:
        folder: folder for the files of answers; None: they are in memory only.

    Attributes:
        earlier: the rounds to which answers can still count.
        steps: number of steps of the rule in the rounds of this run.
        run: name of the run, by which files of others are recognized; empty without a folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.earlier = EarlierRounds(None)
        self.steps = 0
        self.folder = folder
        self.run = "" if folder is None else secrets.token_hex(8)
        self._layout: WireLayout | None = None
        self._inbox: Inbox | None = None
        self._rejected: dict[tuple[str, int], str] = {}  # by sender and round
        self._saved: list[int] = []  # finished rounds of the last checkpoints of this process
        self._damaged: dict[str, str] = {}  # files in the folder, for the first report
        self._lock = threading.RLock()  # RLock: a signal may save a checkpoint while it is held

    def restart(self, earlier: EarlierRounds, steps: int = 0, run: str = "") -> None:
        """Go on with another run, or with the same one as of a checkpoint.

        Args:
            earlier: its earlier rounds.
            steps: of the rule so far.
            run: its name; empty: it gets a new one.
        """
        with self._lock:
            self.close()
            self._rejected, self._saved = {}, []
            self.earlier, self.steps = earlier, steps
            if self.folder is not None:
                self.run = run or secrets.token_hex(8)

    def open(self, rounds: int, layout: WireLayout, room: int) -> None:
        """Make the inbox, or open its folder, if that is not done yet.

        Args:
            rounds: number of finished rounds.
            layout: of the model.
            room: largest number of answers that can count in one round.

        Raises:
            ValueError: the folder has answers of another run, or is used by another server.
            OSError: the folder cannot be used.
        """
        with self._lock:
            self._layout = layout
            # A round that closes has as many answers as can count, while others arrive.
            capacity = 2 * room
            if self._inbox is None:
                inbox = Inbox(
                    num_clients=None,
                    num_params=layout.num_params + layout.num_statistics,
                    capacity=capacity,
                    full="oldest",
                    folder=self.folder,
                    round=rounds,
                    # The next round asks its clients anew; the models of later ones will be others.
                    lost_from=rounds,
                    run=self.run,
                )
                for sender, number in inbox.lost:
                    again = "its round is begun again, after a restart"
                    after = "its round is after that of the checkpoint"
                    self._rejected[sender, number + 1] = again if number == rounds else after
                self._damaged = {f"file {name}": why for name, why in inbox.damaged.items()}
                self._inbox = inbox
            self._inbox.capacity = max(self._inbox.capacity, capacity)

    def close(self) -> None:
        """Let other servers use the folder. No answer waits then; those in memory are gone."""
        with self._lock:
            if self._inbox is not None:
                self._inbox.close()
            self._inbox = None

    def open_round(
        self, rounds: int, senders: Collection[str], params: torch.Tensor, key: str
    ) -> None:
        """Begin a round after ``rounds`` others.

        Args:
            rounds: number of finished rounds.
            senders: those that are asked.
            params: [d], the model that they get.
            key: by which answers name the round.
        """
        with self._lock:
            self.earlier.begin(rounds + 1, senders, params, self.steps, key)

    def put(self, answer: Answer, problem: str | None) -> str | None:
        """Let a late answer wait for the end of a round.

        Args:
            answer: with its ``round``.
            problem: why it cannot be used; None if that is not known yet.

        Returns:
            None if it waits now, or why it does not; the next report has that, too.
        """
        number, sender = answer.round, answer.sender
        assert number is not None  # it is late
        with self._lock:
            reason = self.earlier.problem(number, sender)
            if reason is None:
                inbox, layout = self._inbox, self._layout
                base, steps = self.earlier.model(number), self.earlier.steps(number)
                reason, final = problem, True
                if inbox is None or layout is None:
                    reason, final = "inbox: it is closed, or its folder cannot be used", False
                elif reason is None:
                    try:
                        row = _row(layout, answer, base)
                        reason = self._keep(inbox, answer, row, {"steps": steps})
                    except WireError as error:
                        reason = str(error)
                    except (OSError, RuntimeError) as error:  # of a disk, or no room
                        reason, final = f"inbox: {error}", False
                if final:
                    # Not before there is a file: a checkpoint that is written meanwhile must let
                    # the answer come again if the process is killed.
                    self.earlier.end(number, [sender])
            if reason is not None:
                self._rejected[sender, number] = reason
        return reason

    def _keep(
        self, inbox: Inbox, answer: Answer, row: torch.Tensor, note: dict[str, Any]
    ) -> str | None:
        """Put an answer into the inbox; return why it does not wait there."""
        assert answer.round is not None  # it is late
        before = dict(inbox.waiting())
        note |= {name: getattr(answer, name) for name in _KEPT}
        try:
            if not self._put(inbox, answer, row, note):
                return NEWER
        except (TypeError, ValueError, RecursionError) as error:  # a note that no file may have
            return str(error)
        now = dict(inbox.waiting())
        for sender, number in before.items():
            if now.get(sender) != number:
                same = sender == answer.sender
                why = NEWER if same else f"no room: {inbox.capacity} late answers wait"
                self._rejected[sender, number + 1] = why
        return None

    @staticmethod
    def _put(inbox: Inbox, answer: Answer, row: torch.Tensor, note: dict[str, Any]) -> bool:
        """Do what :meth:`fastagg.Inbox.put` does, without what is too large for a note.

        That are the metrics: the update counts without them.
        """
        assert answer.round is not None  # it is late
        number = answer.round - 1
        try:
            return inbox.put(answer.sender, row, round=number, note=_packed(note))
        except LargeNote:
            smaller = _packed(note | {"note": None})
            return inbox.put(answer.sender, row, round=number, note=smaller)

    def take(self, rounds: int, given: Collection[str]) -> tuple[Taken, dict[str, str]]:
        """Take the answers to earlier rounds that wait, for a round after ``rounds`` others.

        One to this round, which came after its deadline, waits for the next one.

        Args:
            rounds: number of finished rounds.
            given: senders of usable answers in time; late ones of theirs do not count.

        Returns:
            The answers, and why others cannot be used, by their labels.
        """
        with self._lock:
            said = dict(self._rejected)
            reasons = self._damaged | {
                Answer(s, {}, round=n).label: why for (s, n), why in said.items()
            }
            taken = None
            try:
                if self._inbox is not None and rounds:
                    taken = self._inbox.take(round=rounds, until=rounds - 1)
            except OSError as error:  # the round goes on without them
                reasons["inbox"] = f"late answers wait for another round: {error}"
        usable: list[Answer] = []
        ages: dict[str, int] = {}
        rows = zip(*_columns(taken), strict=True)
        for row, sender, back, note in rows:
            number = rounds + 1 - back
            answer = Answer(sender, {}, round=number, row=row)
            try:
                fields = _unpacked(note)
                answer = replace(answer, **{name: fields[name] for name in _KEPT})
                ages[sender] = self.steps - int(fields["steps"])
                if not isinstance(answer.note, dict | None):
                    raise TypeError
            except (TypeError, ValueError, LookupError, RecursionError):
                reasons[answer.label] = "its file in the inbox has a damaged note"
                continue
            if not 0 <= ages[sender] <= self.earlier.most:
                reasons[answer.label] = self.earlier.too_old(number)
            elif sender in given:
                reasons[answer.label] = NEWER
            else:
                usable.append(answer)

        def settled() -> None:
            with self._lock:
                self._damaged = {}
                for key in said:
                    self._rejected.pop(key, None)

        return Taken(usable, ages, taken, settled), reasons

    def close_round(self, number: int, answered: Collection[str], steps: int) -> None:
        """Note that a round has ended, with those who have answered in time, after more steps."""
        with self._lock:
            self.earlier.end(number, answered)
            self.steps += steps
            self.earlier.prune(self.steps)

    def discard(self, number: int) -> None:
        """Drop the answers to a round that did not happen; it may be begun again."""
        with self._lock:
            if self._inbox is not None:
                self._inbox.discard(lambda _, of: of == number - 1)
            self._rejected = {key: why for key, why in self._rejected.items() if key[1] != number}

    def forget(self, senders: Collection[str]) -> None:
        """Note that senders have left: their answers do not count any more.

        Raises:
            OSError: the file of an answer cannot be deleted. It waits on.
        """
        with self._lock:
            if self._inbox is not None:
                self._inbox.discard(lambda sender, _: sender in senders)
            self.earlier.forget(senders)
            self._rejected = {k: why for k, why in self._rejected.items() if k[0] not in senders}

    def waiting(self) -> list[tuple[str, int]]:
        """Return senders and rounds of the answers that wait."""
        with self._lock:
            found = [] if self._inbox is None else self._inbox.waiting()
        return [(sender, number + 1) for sender, number in found]

    def saved(self, rounds: int, keep: int) -> None:
        """Note that a checkpoint was written, and delete the files that no kept one needs.

        These are the files of the answers that the oldest one contains. While this process has not
        written all that are kept, it does not know the oldest one, and deletes none.

        Args:
            rounds: the number of finished rounds in the checkpoint.
            keep: the number of checkpoints that are kept, this one included.

        Raises:
            OSError: a file cannot be deleted.
        """
        self._saved = [*self._saved, rounds][-keep:]
        if self._inbox is not None and len(self._saved) == keep:
            self._inbox.settle(self._saved[0])


def _columns(taken: Answers | None) -> tuple[list[Any], ...]:
    if taken is None:
        return [], [], [], []
    return taken.updates, taken.clients, taken.ages, taken.notes


def to_save(run: str, steps: int) -> dict[str, Any]:
    """Return what a checkpoint stores, so that a restart can use the folder of late answers.

    Args:
        run: name of the run; empty: there is no folder, and nothing is stored.
        steps: number of steps of the rule in the rounds of the run.
    """
    return {"inbox": {"run": run, "steps": steps}} if run else {}


def read_saved(content: Mapping[str, Any]) -> tuple[str, int]:
    """Return the run and the steps in a checkpoint of a server with a folder, or of another one.

    Raises:
        ValueError: they are not from :func:`to_save`.
    """
    saved = content.get("inbox", {"run": "", "steps": 0})
    if isinstance(saved, dict) and saved.keys() == {"run", "steps"}:
        run, steps = saved["run"], saved["steps"]
        if isinstance(run, str) and type(steps) is int and 0 <= steps <= content["rounds"]:
            return run, steps
    raise ValueError(f"inbox: expected a run and its steps, got {str(saved)[:200]}")


def _row(layout: WireLayout, answer: Answer, base: torch.Tensor | None) -> torch.Tensor:
    """Return the update of an answer and then its statistics, [d + m] float32.

    Raises:
        WireError: its arrays do not match the layout, or statistics cannot be used.
    """
    row = torch.empty(layout.num_params + layout.num_statistics, dtype=torch.float32, device="cpu")
    update = row[: layout.num_params]
    layout.subtract(answer.arrays, None if answer.is_update else base, update)
    layout.copy_statistics(answer.arrays, row[layout.num_params :])
    return row


def _packed(value: Any) -> Any:
    """Return a value of metrics as JSON has it exactly; what it lacks is an object.

    NaN and Inf are not in JSON, and clients may send them.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        return {"dict": [[str(name), _packed(item)] for name, item in value.items()]}
    if isinstance(value, Sequence):
        return [_packed(item) for item in value]
    if isinstance(value, int):
        return int(value)
    try:
        return {"float": float(value).hex()}
    except (TypeError, ValueError):  # of another type, whose text a report may show
        return repr(value)


def _unpacked(value: Any) -> Any:
    """Return what :func:`_packed` got."""
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "float":
        return float.fromhex(inner)
    return {name: _unpacked(item) for name, item in inner}
