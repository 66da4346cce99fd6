# SPDX-License-Identifier: Apache-2.0
"""Collect the answers of clients between steps: thread-safe, bounded, and durable if wanted.

::

    inbox = fastagg.Inbox(num_clients=K, num_params=d, capacity=1000, policy="queue")
    inbox.put(client, update, round=r)  # any thread; r: the round of its model

    answers = inbox.take(10, round=t, timeout=60.0)
    if answers is not None:
        report = answers.step(aggregator, params)
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.answer_files import MOST_NOTE, AnswerFiles, StoredAnswer
from fastagg.modes import plain_modes
from fastagg.options import MOST, as_float, read_choice, read_count, read_size
from fastagg.report import StepReport
from fastagg.signals import SignalsDeferred

if TYPE_CHECKING:
    from fastagg.aggregator import Aggregator

_FOREVER = threading.TIMEOUT_MAX


class InboxFull(RuntimeError):
    """Raised by :meth:`Inbox.put` if there is no room for another answer."""


class LargeNote(ValueError):
    """Raised by :meth:`Inbox.put` if the note takes more than 256 KiB as JSON."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers that were taken from an inbox for a step.

    :meth:`step` makes the step. For another use, it is a context manager: after an exception the
    answers wait again, otherwise they are used up::

        with answers as (updates, clients, ages):
            ...

    Attributes:
        updates: M tensors [d] float32.
        clients: M ids, or names if the inbox has names.
        ages: M ages: the round for which they were taken, minus the round of each.
        notes: M notes of :meth:`Inbox.put`.
    """

    updates: list[Tensor]
    clients: list[Any]
    ages: list[int]
    notes: list[dict[str, Any]]
    _inbox: Inbox = field(repr=False)
    _taken: list[StoredAnswer] = field(repr=False)
    _round: int = field(repr=False)

    def __len__(self) -> int:
        return len(self.clients)

    def step(self, aggregator: Aggregator, params: Tensor) -> StepReport:
        """Run ``aggregator.step`` with these answers.

        They are used up if the step has taken effect, also if a signal handler raised an exception
        after it; otherwise they wait again. No other thread may step the aggregator meanwhile.

        Args:
            aggregator: a rule with ``staleness``, unless all ages are 0.
            params: [d] float32; changed in place.

        Raises:
            RuntimeError: the step of these answers has ended. Those that were not used wait in the
                inbox, from where they can be taken again.
            TypeError: ``aggregator`` is something else.
            Exception: what :meth:`fastagg.Aggregator.step` raises.
        """
        self._check_open()
        used = False
        try:
            before = getattr(aggregator, "committed", None)
            if not isinstance(before, int):
                raise TypeError(
                    "aggregator: expected an aggregator of fastagg.make, got "
                    f"{type(aggregator).__name__}; for others, write `with answers as (updates, "
                    "clients, ages):` around the step"
                )
            try:
                return aggregator.step(params, self.updates, self.clients, ages=self.ages)
            finally:
                used = aggregator.committed != before
        finally:
            self.finish(used=used)

    def _check_open(self) -> None:
        if not self._taken:
            raise RuntimeError("answers: their step has ended; take answers from the inbox again")

    def finish(self, *, used: bool | Sequence[bool]) -> None:
        """End the step, if a caller makes it itself; a second call does nothing.

        Args:
            used: whether the answers are used up, or whether each of them is; others wait again.

        Raises:
            ValueError: there are not as many flags as answers.
        """
        each = list(used) if isinstance(used, Sequence) else [used] * len(self)
        if len(each) != len(self):
            raise ValueError(f"used: expected {len(self)} flags, one per answer, got {len(each)}")
        self._inbox._finish(self._taken, self._round, each)

    def __enter__(self) -> tuple[list[Tensor], list[Any], list[int]]:
        self._check_open()
        return self.updates, self.clients, self.ages

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(used=kind is None)


class Inbox:
    """Answers of clients that wait for a step, in the order of their arrival.

    Any number of threads may call :meth:`put` and :meth:`take`.

    **Rounds.** A round is the number of steps of the aggregator, skipped ones included, when a
    model was sent. The age of an answer in a step is the difference of the two rounds.

    **On disk.** With ``folder``, every answer has a file, which is written before :meth:`put`
    returns, has a digest, and survives the end of the process. A forked child must not use the
    inbox. An answer counts exactly once in the model of a checkpoint, whenever the process ends, if
    each checkpoint holds model, rule and the number of rounds t, and

    1. after it was written, ``settle(t)`` is called, with the t of the oldest checkpoint from which
       a restart shall be possible;
    2. after a restart from it, the inbox is made with ``round=t`` and ``lost_from=t + 1``: models
       that came after the checkpoint are lost, so answers to them are removed.

    The files of used answers are kept until then, because a restart from an older checkpoint needs
    them again. A damaged file is reported in ``damaged`` and stays where it is.

    Args:
        num_clients: K; client ids are in [0, K). None: clients have names, which are texts, and
            whoever takes answers decides whose they are.
        num_params: d.
        capacity: the largest number of answers, >= 1, those of a step in progress included. Their
            rows take 4 d bytes each, in memory, and with ``folder`` as much on disk. The attribute
            may be raised.
        policy: "newest": a client has one answer; one of a newer round, or of the same one,
            replaces it. "queue": a client may have several, of different rounds, for ``fedbuff``.
        full: what :meth:`put` does without room. "refuse": raise :class:`InboxFull`. "oldest": drop
            the answer that came first.
        finite: refuse rows with NaN or Inf. (A step checks this in any case.)
        folder: folder for the files; created if it does not exist. Only one inbox may use it. None:
            answers are in memory only.
        round: the number of rounds so far; see above.
        lost_from: with ``folder``: answers in it to this round and later ones are deleted, before
            one of them replaces another answer of its client; see above. None: all wait.
        run: text that names the run, with ``folder``: one with answers of another run is refused.

    Attributes:
        dropped: number of answers that ``full="oldest"`` dropped, in this process.
        lost: client and round of the answers that ``lost_from`` deleted, in the order of their
            arrival.
        damaged: why files could not be read, by name.

    Raises:
        TypeError, ValueError: an argument is not as described, another inbox uses the folder, or it
            has answers of another run.
        OSError: the folder cannot be used.
    """

    def __init__(
        self,
        *,
        num_clients: int | None,
        num_params: int,
        capacity: int,
        policy: str = "newest",
        full: str = "refuse",
        finite: bool = False,
        folder: str | os.PathLike[str] | None = None,
        round: int = 0,
        lost_from: int | None = None,
        run: str = "",
    ) -> None:
        self.num_clients = None if num_clients is None else read_size("num_clients", num_clients)
        self.num_params = read_size("num_params", num_params)
        self.capacity = read_size("capacity", capacity)
        self.policy = read_choice("policy", policy, ["newest", "queue"])
        self.full = read_choice("full", full, ["refuse", "oldest"])
        if not isinstance(finite, bool):
            raise TypeError(f"finite: expected True or False, got {finite!r}")
        self.finite = finite
        if not isinstance(run, str):
            raise TypeError(f"run: expected a str, got {run!r}")
        self.run = run
        rounds = _read_round(round)
        first_lost = (
            None if lost_from is None else read_count("lost_from", lost_from, least=0, most=MOST)
        )
        self.dropped = 0
        self.lost: list[tuple[Any, int]] = []
        self.damaged: dict[str, str] = {}
        self._changed = threading.Condition()
        self._waiting: dict[int, StoredAnswer] = {}  # by serial number, ascending
        self._out = 0  # answers of steps in progress
        self._next = 0
        self._closed = False
        self._files: AnswerFiles | None = None
        if folder is not None:
            self._files = AnswerFiles(folder)
            try:
                self._load(self._files, rounds, first_lost)
            except BaseException:
                self._files.close()
                raise

    def _load(self, files: AnswerFiles, rounds: int, first_lost: int | None) -> None:
        found, self.damaged, self._next = files.load(
            self.num_clients, self.num_params, rounds, self.run
        )
        if first_lost is not None:
            lost = [answer for answer in found if answer.round >= first_lost]
            files.delete(lost)
            self.lost = [(answer.client, answer.round) for answer in lost]
            found = [answer for answer in found if answer.round < first_lost]
        # Two of a client are there if the process ended between two calls, or if steps used them
        # after the checkpoint.
        for answer in found:
            older = self._replaced_by(answer)
            if older is None:
                files.delete([answer])
                continue
            files.delete(older)
            for old in older:
                del self._waiting[old.serial]
            self._waiting[answer.serial] = answer
        while self.full == "oldest" and len(self._waiting) > self.capacity:
            first = next(iter(self._waiting.values()))
            files.delete([first])
            del self._waiting[first.serial]
            self.dropped += 1
        if len(self._waiting) > self.capacity:
            raise ValueError(
                f"capacity: expected room for the {len(self._waiting)} answers in {files.folder}, "
                f"got {self.capacity}"
            )

    def __len__(self) -> int:
        """Return the number of answers that wait."""
        return len(self._waiting)

    def waiting(self) -> list[tuple[Any, int]]:
        """Return client and round of the answers that wait, in the order of their arrival."""
        with self._changed:
            return [(answer.client, answer.round) for answer in self._waiting.values()]

    def put(
        self,
        client: int | str,
        update: Tensor,
        *,
        round: int,
        note: Mapping[str, Any] | None = None,
    ) -> bool:
        """Add an answer; copies ``update``.

        Args:
            client: its id, or its name if the inbox has names.
            update: [d] float32 on the CPU, any stride; the local model minus the model that the
                client started from.
            round: the round of that model.
            note: what else is kept of the answer: values that JSON represents exactly, by name.

        Returns:
            Whether the answer waits now; False: the client has one of a newer round ("newest").

        Raises:
            TypeError, ValueError, IndexError: an argument is not as described.
            InboxFull: there is no room.
            OSError: the file cannot be written.
            RuntimeError: the inbox is closed, or it has a folder, and this process was forked from
                the one that made it.

        After an exception, nothing has changed.
        """
        client = _read_client(client, self.num_clients)
        rounds = _read_round(round)
        kept = _read_note(note)
        row = self._read_row(update)
        self._check_process()
        with self._changed:
            self._check_open()
            answer = StoredAnswer(self._next, client, rounds, row, kept, self.run)
            gone = self._replaced_by(answer)
            if gone is None:
                return False
            dropped = 0
            if len(self._waiting) - len(gone) + self._out >= self.capacity:
                first = next(iter(self._waiting.values()), None)
                if self.full == "refuse" or first is None:
                    raise InboxFull(
                        f"inbox: {len(self._waiting)} answers wait and {self._out} are in a step, "
                        f"of capacity = {self.capacity}"
                    )
                gone, dropped = [first], 1
            with SignalsDeferred():
                if self._files is not None:
                    self._replace_files(self._files, answer, gone)
                for old in gone:
                    del self._waiting[old.serial]
                self._waiting[answer.serial] = answer
                self._next += 1
                self.dropped += dropped
                self._changed.notify_all()
        return True

    def _replace_files(
        self, files: AnswerFiles, answer: StoredAnswer, gone: list[StoredAnswer]
    ) -> None:
        """Write the file of an answer and delete those of others, or leave all as they were."""
        files.write(answer)
        try:
            files.delete(gone)
        except BaseException:
            with suppress(OSError):
                files.delete([answer])
            raise

    def _replaced_by(self, answer: StoredAnswer) -> list[StoredAnswer] | None:
        """Return the answers that another one replaces; None: it is older than one of them."""
        same = [other for other in self._waiting.values() if other.client == answer.client]
        if self.policy == "queue":
            return [other for other in same if other.round == answer.round]
        return None if any(other.round > answer.round for other in same) else same

    def _read_row(self, update: object) -> Tensor:
        if not isinstance(update, Tensor):
            raise TypeError(f"update: expected a torch.Tensor, got {type(update).__name__}")
        if update.layout != torch.strided or update.dtype != torch.float32:
            raise TypeError(
                f"update: expected a dense float32 tensor, got {update.dtype}, {update.layout}"
            )
        if update.shape != (self.num_params,) or update.device.type != "cpu":
            raise ValueError(
                f"update: expected shape [{self.num_params}] on the CPU, got {[*update.shape]} on "
                f"{update.device}"
            )
        with plain_modes():
            row = update.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
            if self.finite and not bool(torch.isfinite(row).all()):
                raise ValueError("update: expected finite values, got NaN or Inf")
        return row

    def take(
        self,
        count: int | None = None,
        *,
        round: int,
        timeout: float | None = 0.0,
        least: int | None = None,
        until: int | None = None,
    ) -> Answers | None:
        """Take answers for a step: those that came first.

        Args:
            count: wait until this many are there, and take this many; None: wait for one, and take
                all.
            round: the present round, from which ages are counted.
            timeout: seconds to wait, >= 0; None: as long as it takes.
            least: after the timeout, take what is there if it is at least this many; None: all of
                ``count``.
            until: leave the answers of later rounds than this one; at most ``round``; None: this is
                ``round``. Answers of later rounds wait: :meth:`discard` removes them.

        Returns:
            The answers; None if there are too few. They count towards ``capacity`` until their step
            has ended.

        Raises:
            TypeError, ValueError: an argument is not as described.
            OSError: a file cannot be renamed. Nothing was taken.
            RuntimeError: as for :meth:`put`.
        """
        self._check_process()
        rounds = _read_round(round)
        wanted = 1 if count is None else read_size("count", count)
        fewest = wanted if least is None else read_count("least", least, least=1, most=wanted)
        latest = rounds if until is None else _read_round(until)
        if latest > rounds:
            raise ValueError(f"until: expected at most round, which is {rounds}, got {latest}")
        end = time.monotonic() + _read_timeout(timeout)
        with self._changed:
            # Listed anew after every wait, in which others may have taken what was there.
            self._check_open()
            while len(listed := self._until(latest)) < wanted:
                left = end - time.monotonic()
                if left <= 0.0:
                    break
                self._changed.wait(min(left, _FOREVER))
                self._check_open()
            if len(listed) < fewest:
                return None
            taken = listed if count is None else listed[:wanted]
            answers = Answers(
                [answer.row for answer in taken],
                [answer.client for answer in taken],
                [rounds - answer.round for answer in taken],
                [answer.note for answer in taken],
                self,
                taken,
                rounds,
            )
            left = len(self._waiting) - len(taken)
            try:
                with SignalsDeferred():
                    if self._files is not None:
                        self._files.mark(taken, rounds)
                    for answer in taken:
                        del self._waiting[answer.serial]
                    self._out += len(taken)
            except BaseException:
                if len(self._waiting) == left:  # a signal handler raised it, at the end
                    answers.finish(used=False)
                raise
        return answers

    def _until(self, rounds: int) -> list[StoredAnswer]:
        return [answer for answer in self._waiting.values() if answer.round <= rounds]

    def _finish(self, taken: list[StoredAnswer], rounds: int, used: Sequence[bool]) -> None:
        """End the step of answers; those that were not used wait again. A second call does nothing.

        If a newer answer has come meanwhile, it replaces one that would wait again.
        """
        self._check_process()
        with self._changed, SignalsDeferred():
            again = [answer for answer, gone in zip(taken, used, strict=False) if not gone]
            self._out -= len(taken)
            taken.clear()
            if again:
                if self._files is not None:
                    self._files.unmark(again, rounds)
                for answer in again:
                    self._put_back(answer)
                self._waiting = dict(sorted(self._waiting.items()))
                self._changed.notify_all()

    def _put_back(self, answer: StoredAnswer) -> None:
        """Let an answer wait again, unless one that came later takes its place."""
        for other in self._waiting.values():
            same_round = other.round == answer.round
            newer = other.round >= answer.round and self.policy == "newest"
            if other.client == answer.client and (same_round or newer):
                self._delete_file(answer)
                return
        for other in self._replaced_by(answer) or []:
            self._delete_file(other)
            del self._waiting[other.serial]
        self._waiting[answer.serial] = answer

    def _delete_file(self, answer: StoredAnswer) -> None:
        """Delete the file of a replaced answer. One that stays is replaced again at a restart."""
        if self._files is not None:
            with suppress(OSError):
                self._files.delete([answer])

    def discard(self, which: Callable[[Any, int], bool]) -> list[tuple[Any, int]]:
        """Delete answers that wait.

        Args:
            which: whether the answer of a client and a round is deleted.

        Returns:
            Client and round of the deleted answers, in the order of their arrival.

        Raises:
            OSError: a file cannot be deleted. Its answer and those after it wait on.
            RuntimeError: as for :meth:`put`.
        """
        self._check_process()
        gone = []
        with self._changed:
            self._check_open()
            for answer in [*self._waiting.values()]:
                if which(answer.client, answer.round):
                    if self._files is not None:
                        self._files.delete([answer])
                    del self._waiting[answer.serial]
                    gone.append((answer.client, answer.round))
        return gone

    def settle(self, round: int) -> None:
        """Delete the files of the answers that were used before ``round``.

        Args:
            round: the number of rounds of the oldest checkpoint from which a restart shall be
                possible.

        Raises:
            OSError: a file cannot be deleted.
            RuntimeError: as for :meth:`put`.
        """
        rounds = _read_round(round)
        self._check_process()
        with self._changed:
            self._check_open()
            files = self._files  # another thread may close the inbox
        if files is not None:
            files.settle(rounds)

    def _check_process(self) -> None:
        """Raise RuntimeError if this process was forked and the files are those of its parent."""
        if self._files is not None:
            self._files.check_process()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("inbox: it is closed; make another one")

    def close(self) -> None:
        """Let another inbox use the folder. The files stay.

        Later calls of :meth:`put`, :meth:`take`, :meth:`discard` and :meth:`settle` raise
        RuntimeError, and so do calls that are waiting in other threads. If a step is in progress,
        its end changes no file: after a restart, the number of rounds tells which answers it used.
        Closing twice does nothing more.
        """
        with self._changed:
            self._closed = True
            if self._files is not None:
                self._files.close()
                self._files = None
            self._changed.notify_all()


def _read_client(value: object, num_clients: int | None) -> int | str:
    if num_clients is None:
        if not isinstance(value, str):
            raise TypeError(f"client: expected a name, got {value!r} ({type(value).__name__})")
        return value
    client = read_count("client", value, least=-MOST, most=MOST)
    if not 0 <= client < num_clients:
        raise IndexError(f"client: expected an id in [0, {num_clients}), got {client}")
    return client


def _read_round(value: object) -> int:
    return read_count("round", value, least=0, most=MOST)


def _read_note(value: object) -> dict[str, Any]:
    """Return a copy of a note, as it comes back from a file."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"note: expected a dict with names, got {value!r}")
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"note: expected values that JSON represents: {error}") from error
    if len(text) > MOST_NOTE:
        raise LargeNote(f"note: expected at most {MOST_NOTE} bytes as JSON, got {len(text)}")
    note: dict[str, Any] = json.loads(text)
    return note


def _read_timeout(value: object) -> float:
    """Return seconds; None: as long as a lock can wait."""
    if value is None:
        return _FOREVER
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"timeout: expected seconds or None, got {value!r}")
    seconds = as_float(value)
    if math.isnan(seconds) or seconds < 0.0:
        raise ValueError(f"timeout: expected a number >= 0, got {seconds:g}")
    return min(seconds, _FOREVER)
