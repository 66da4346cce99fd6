# SPDX-License-Identifier: Apache-2.0
"""The loop of a server without a framework: rounds with deadlines, answers from many threads.

:class:`Server` is for a transport of one's own. Rounds open and close here; what a round does with
its answers is in :mod:`fastagg.integrations._server`, which the Flower strategies use, too.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastagg.aggregator import Aggregator
from fastagg.integrations import _tensors
from fastagg.integrations._hosted_rule import check_option_names
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer
from fastagg.integrations._wire import Received, WireError
from fastagg.options import MOST, read_positive
from fastagg.tensor_file import TensorFileError
from fastagg.updates.layout import FlatLayout
from fastagg.updates.roles import Roles

_ANSWERS = ("weights", "updates")
_IDS = {"number": "trusted", "name": "node"}  # -> the source of AggregationServer
_MOST_IGNORED = 1000  # senders of ignored answers in a report

Client = int | str


class Task(NamedTuple):
    """What a client needs in a round.

    Attributes:
        round: number of the round, from 1.
        key: the round, and a checksum of its model. The client returns it with its answer.
        model: the global model: the bytes of a safetensors file.
    """

    round: int
    key: str
    model: bytes


@dataclass
class _Round:
    """An open round.

    Attributes:
        task: what clients get.
        asked: senders of whom an answer is expected.
        deadline: when the round ends, on the monotonic clock.
        answers: the answers so far, by sender.
        ended: whether the answers are being aggregated; no other is taken then.
    """

    task: Task
    asked: frozenset[str]
    deadline: float
    answers: dict[str, Answer] = field(default_factory=dict)
    ended: bool = False

    @property
    def over(self) -> bool:
        """Whether no answer is taken in time any more."""
        return self.ended or time.monotonic() > self.deadline


class Server:
    """A server's loop without a framework: tensors or safetensors bytes in, and out.

    ::

        server = fastagg.Server("fdms", model, num_clients=20)
        for _ in range(100):
            task = server.begin_round()
            # send task.model and task.key to all clients, and
            # call server.submit_bytes with each answer
            report = server.finish_round()

    A round ends when all clients that were asked have answered, or ``round_seconds`` after its
    beginning. Clients without a usable answer are absent. All methods may be called from any
    thread; :meth:`submit` and :meth:`task` do not wait for an aggregation.

    A client has one answer per round, and the first counts. An answer that cannot be used changes
    neither model nor rule. The server does not know who calls: the transport must authenticate
    clients.

    With the options ``staleness`` and ``max_staleness`` of the rule, an answer with the key of an
    earlier round counts in the open one, with its age: the number of steps of the rule since then,
    at most ``max_staleness``. If no round is open, it waits for the next one. Of several answers of
    a client the newest counts.

    Args:
        rule: the name of a rule, or an aggregator made with ``nonfinite="drop"``.
        initial_model: the first global model, a module or a state dict. Its values are copied.
            Running statistics of a module are found by the types of layers, those of a state dict
            by their names.
        num_clients: K; may be left out if ``rule`` is an aggregator.
        round_seconds: seconds from the beginning of a round to its end, at most.
        min_answers: a round with fewer usable answers does not change the model.
        answers: what clients send: "weights", their trained model, or "updates", its difference
            from the model of the round. Running statistics are sent as they are in both cases.
        ids: "number": clients are ints in [0, K). "name": clients are strings; each is assigned an
            id at its first answer, which it keeps. More than K names (or ``max_clients``) are
            refused. Rules that do not tell clients apart (``fedavg``, ``krum``) assign ids anew in
            each round: any names may answer, at most K in a round.
        max_clients: with ``ids="name"``, K grows up to this number when more names answer. None: it
            does not grow by itself.
        checkpoint_path: file for checkpoints; its folder must exist. None writes none. See
            :meth:`resume`. One that cannot be written is named in the report, and tried again after
            the next round. With ``max_staleness``, it also has the models of up to so many earlier
            rounds, 4 d bytes each; with ``answers="updates"``, it has none of them.
        inbox_path: folder in which late answers wait for a round, made if it does not exist. They
            survive the process: each counts exactly once in the model of ``checkpoint_path``. None:
            they wait in memory.
        checkpoint_every: number of rounds from one checkpoint to the next.
        checkpoint_keep: number of checkpoints to keep: ``checkpoint_path``, and the older ones with
            ".1", ".2", ... after its name.
        max_empty_rounds: number of rounds in a row without an active client after which
            :meth:`finish_round` raises an error.
        roles: patterns of names of arrays and their roles: "rule", "mean", "server" or "local", as
            for :class:`FlatLayout`. A "local" array is not sent.
        weighted: answers have weights, such as the numbers of samples that clients have trained on;
            the rule must take weights of a round (:meth:`fastagg.Aggregator.step`). A client that
            lies has as much influence as it likes.
        **options: options of the rule, if it is given by name.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
        FileNotFoundError: there is no folder for ``checkpoint_path``.
    """

    def __init__(
        self,
        rule: str | Aggregator,
        initial_model: nn.Module | Mapping[str, Tensor],
        *,
        num_clients: int | None = None,
        max_clients: int | None = None,
        round_seconds: float = 600.0,
        min_answers: int = 0,
        answers: str = "weights",
        ids: str = "number",
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        checkpoint_keep: int = 2,
        max_empty_rounds: int = 10,
        roles: Roles = "auto",
        weighted: bool = False,
        inbox_path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.round_seconds = read_positive("round_seconds", round_seconds)
        if answers not in _ANSWERS:
            raise ValueError(f"answers: expected one of {_ANSWERS}, got {answers!r}")
        if ids not in _IDS:
            raise ValueError(f"ids: expected one of {[*_IDS]}, got {ids!r}")
        self._sends_updates = answers == "updates"
        self._numbered = ids == "number"
        state = initial_model
        if isinstance(initial_model, nn.Module):
            roles = FlatLayout.from_module(initial_model, roles=roles, convert=True).roles
            state = initial_model.state_dict()
        if not isinstance(state, Mapping):
            raise TypeError(
                f"initial_model: expected a module or a state dict, got "
                f"{type(initial_model).__name__}"
            )
        check_option_names(rule, options, host=Server)
        self._core = AggregationServer(
            rule,
            num_clients=num_clients,
            max_clients=max_clients,
            checkpoint_path=checkpoint_path,
            checkpoint_every=checkpoint_every,
            checkpoint_keep=checkpoint_keep,
            min_answers=min_answers,
            max_empty_rounds=max_empty_rounds,
            ids=_IDS[ids],
            release_after=None,
            roles=roles,
            weighted=weighted,
            sends_updates=self._sends_updates,
            saves_earlier=True,
            inbox_path=inbox_path,
            **options,
        )
        self._core.set_model(_tensors.pack(state))
        self._layout = self._core.layout
        self._turn = threading.Lock()  # of whoever uses the model; taken before _changed
        self._changed = threading.Condition()  # guards what follows
        self._round: _Round | None = None
        self._closed = False
        self._ignored: dict[str, str] = {}
        self._last_report: RoundReport | None = None

    @property
    def num_clients(self) -> int:
        """K."""
        return self._core.num_clients

    @property
    def rounds(self) -> int:
        """Number of finished rounds, those before a restart included."""
        return self._core.rounds

    @property
    def last_report(self) -> RoundReport | None:
        """The report of the last round of this process."""
        return self._last_report

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def answer_limit(self) -> int:
        """The largest size in bytes of an answer for :meth:`submit_bytes`.

        A transport should not receive more.
        """
        return _tensors.answer_limit(self._layout)

    def model(self) -> dict[str, Tensor]:
        """Return a copy of the global model, without arrays with the role "local".

        Waits while answers are aggregated.
        """
        with self._turn:
            return _tensors.unpack(self._layout, self._core.arrays())

    def model_bytes(self) -> bytes:
        """Return the global model as the bytes of a safetensors file; see :meth:`model`."""
        with self._turn:
            return self._bytes()

    def resume(self, path: str | os.PathLike[str]) -> list[str]:
        """Continue from a checkpoint; with the same answers, later rounds are bit-identical.

        Late answers to rounds before the restart count, if the rule has ``max_staleness``: the
        checkpoint has what they need. Late answers that waited for a round count, too, if they are
        in ``inbox_path``; otherwise they are lost with the process.

        ``server_lr``, ``max_norm`` and ``min_active`` may be others than before, and
        ``num_clients`` larger.

        Returns:
            The options that are others than before, as text.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or has another rule, other options, another model or
                more clients. The server is unchanged.
            RuntimeError: a round is open, or the server is closed.
        """
        with self._turn:
            self._check_idle("resume")
            return self._core.resume(path)

    def grow(self, num_clients: int, **options: Any) -> None:
        """Go on with more clients, between two rounds; see :meth:`fastagg.Aggregator.grow`.

        The new K may be above ``max_clients``; then it does not grow further by itself. The next
        round writes a checkpoint, and so does :meth:`close`. :meth:`resume` from it needs a server
        with the new ``num_clients``.

        Raises:
            TypeError, ValueError, MemoryError, OSError: as for the rule. The server is unchanged.
            RuntimeError: a round is open, or the server is closed.
        """
        with self._turn:
            self._check_idle("grow")
            self._core.grow(num_clients, **options)

    def forget(self, clients: Iterable[Client]) -> None:
        """Forget clients that have left for good; their ids are free for others.

        Their late answers do not count any more. A checkpoint is written at once: after a restart
        from an older one, the clients would be back.

        Raises:
            TypeError, ValueError, IndexError: they are not clients. Nothing has changed.
            OSError: a late answer in the folder ``inbox_path`` cannot be deleted: the clients are
                not forgotten. Or the checkpoint could not be written: they are forgotten in this
                process, and the next round tries again.
            RuntimeError: a round is open, or the server is closed.
        """
        senders = [self._sender(client) for client in clients]
        with self._turn:
            self._check_idle("forget")
            known = self._core.ids.known
            if not self._numbered and not known.keys() >= set(senders):
                raise ValueError(
                    f"clients: expected clients that have answered, got {sorted(senders)[:10]}"
                )
            self._core.forget([int(s) if self._numbered else known[s] for s in senders], senders)

    def begin_round(self, clients: Iterable[Client] | None = None) -> Task:
        """Begin a round: from now on, answers of ``clients`` are taken.

        Args:
            clients: those that are asked. None: all, which needs ``ids="number"``.

        Returns:
            What to send to the clients. :meth:`task` returns the same to those that ask for it.

        Raises:
            TypeError, ValueError: ``clients`` are not clients, or repeat one.
            RuntimeError: a round is open, or the server is closed.
        """
        if clients is None:
            if not self._numbered:
                raise ValueError('clients: expected names, because of ids="name"; got None')
            clients = range(self.num_clients)
        senders = [self._sender(client) for client in clients]
        if len(set(senders)) < len(senders):
            raise ValueError(f"clients: expected different ones, got {senders}")
        for sender in senders:
            if self._numbered and not 0 <= int(sender) < self.num_clients:
                raise ValueError(f"clients: expected ids in [0, {self.num_clients}), got {sender}")
        with self._turn:
            self._check_idle("begin_round")
            model, number = self._bytes(), self._core.rounds + 1
            task = Task(number, f"{number}-{zlib.crc32(model):08x}", model)
            with self._changed:
                if self._closed:
                    raise RuntimeError("begin_round: the server is closed")
                self._core.open_round(senders, key=task.key)
                deadline = time.monotonic() + self.round_seconds
                self._round = _Round(task, frozenset(senders), deadline)
        return task

    def task(self, client: Client) -> Task | None:
        """Return what a client must do now; None: nothing.

        A client has a task from the beginning of a round until it has answered, or the round has
        ended.
        """
        sender = self._sender(client)
        with self._changed:
            current = self._round
            if current is None or self._refusal(sender, None) is not None:
                return None
            return current.task

    def submit(
        self,
        client: Client,
        tensors: Mapping[str, Tensor],
        key: str | None = None,
        *,
        weight: float | None = None,
    ) -> str | None:
        """Take the answer of a client for the open round, or a late one.

        Args:
            client: who answers, as the transport has made sure.
            tensors: its weights, or its update. They are copied. Arrays with the roles "server" and
                "local" may be missing.
            key: :attr:`Task.key` of the round for which the answer is; None: the open one. With
                ``max_staleness``, that of an earlier round makes the answer a late one.
            weight: how much the answer counts, finite, >= 0, for a server with ``weighted=True``;
                others ignore it.

        Returns:
            None if the answer was taken, or why it was not. The values are read when the round
            ends: NaN, or an update that is too long, is in the report, and so are late answers that
            do not count because a newer one of their client does.

        Raises:
            TypeError, ValueError: ``client`` or ``key`` is of another type, or ``client`` is a
                number that no id can be.
        """
        return self._submit(
            client, key, weight, lambda: _tensors.pack_answer(tensors, self._layout)
        )

    def submit_bytes(
        self,
        client: Client,
        data: bytes | bytearray | memoryview,
        key: str | None = None,
        *,
        weight: float | None = None,
    ) -> str | None:
        """Take the answer of a client, as the bytes of a safetensors file; see :meth:`submit`.

        Sizes are checked before anything is copied, and nothing is unpickled.
        """
        return self._submit(
            client, key, weight, lambda: _tensors.from_safetensors(data, self._layout)
        )

    def finish_round(self) -> RoundReport:
        """Wait until all clients have answered, or the deadline; aggregate, and write a checkpoint.

        If this raises another error than those below (MemoryError, say), model and rule are
        unchanged, and the round may be begun again.

        Returns:
            The report: who was active, who was absent, which answers were rejected, and why.

        Raises:
            RuntimeError: no round is open, it was aborted while this waited, or this is the last of
                ``max_empty_rounds`` rounds in a row without an active client; :attr:`last_report`
                is its report then.
        """
        ending: _Round | None = None  # the round, once this thread ends it
        try:
            with self._changed:
                current = self._round
                if current is None or current.ended:
                    raise RuntimeError("finish_round: no round is open; call begin_round first")
                self._changed.wait_for(
                    lambda: (
                        self._round is not current or len(current.answers) == len(current.asked)
                    ),
                    min(max(0.0, current.deadline - time.monotonic()), threading.TIMEOUT_MAX),
                )
                if self._round is not current or current.ended:
                    raise RuntimeError(
                        f"finish_round: round {current.task.round} was aborted, or is finished by "
                        "another thread"
                    )
                ending = current
                current.ended = True
            with self._turn:
                self._aggregate([*current.answers.values()])
        finally:  # after the round, too, if a signal handler has raised an exception
            if ending is not None:
                self._close(ending)
        assert self._last_report is not None
        return self._last_report

    def _close(self, ended: _Round) -> None:
        """Close a round that has been aggregated, or could not be."""
        with self._changed:
            self._round = None
            ignored, self._ignored = self._ignored, {}
            number = ended.task.round
            if self._core.rounds < number:  # it has not happened, and may be begun again
                self._core.discard_late(number)
            else:
                self._last_report = self._reported(ignored)

    def _reported(self, ignored: dict[str, str]) -> RoundReport:
        """Return the report of the last round, with the answers that were not taken."""
        report = self._core.last_report
        assert report is not None
        if self._numbered:
            report = replace(report, absent={sender: int(sender) for sender in report.absent})
        return replace(report, ignored=ignored)

    def run_round(self, clients: Iterable[Client] | None = None) -> RoundReport:
        """Call :meth:`begin_round` and :meth:`finish_round`, for clients that ask for tasks."""
        self.begin_round(clients)
        return self.finish_round()

    def abort_round(self) -> None:
        """Discard the open round with its answers, if there is one; it may be begun again.

        Late answers to earlier rounds wait for the next one. A thread that waits in
        :meth:`finish_round` gets a RuntimeError. A round whose answers are being aggregated is not
        aborted.

        Raises:
            OSError: a late answer to this round, in the folder ``inbox_path``, cannot be deleted.
                The round is aborted; a server that opens the folder again deletes the answer.
        """
        with self._changed:
            if self._round is not None and not self._round.ended:
                number, self._round = self._round.task.round, None
                self._changed.notify_all()
                self._core.discard_late(number)

    def close(self) -> None:
        """Abort the open round, take no more answers, and write a checkpoint if one is missing.

        Another server may use ``inbox_path`` then.

        Raises:
            OSError: the checkpoint could not be written, or as for :meth:`abort_round`. The server
                is closed.
            ValueError: its header is larger than a reader accepts: there are too many clients.
        """
        with self._changed:
            self._closed = True
        try:
            self.abort_round()
        finally:
            with self._turn:
                try:
                    self._core.save_if_due()
                finally:
                    self._core.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sender(self, client: Client) -> str:
        """Return the name of a client, which is its id in decimal digits if clients are numbers."""
        kind = int if self._numbered else str
        if not isinstance(client, kind) or isinstance(client, bool):
            raise TypeError(f"client: expected {kind.__name__}, got {type(client).__name__}")
        if isinstance(client, int) and abs(client) > MOST:  # perhaps too long for a text
            raise ValueError(
                f"client: expected an id in [0, {self.num_clients}), got one far outside of it"
            )
        return str(client)

    def _check_idle(self, call: str) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{call}: the server is closed")
            if self._round is not None:
                raise RuntimeError(
                    f"{call}: round {self._round.task.round} is open; call finish_round or "
                    "abort_round first"
                )

    def _bytes(self) -> bytes:
        tensors = _tensors.unpack(self._layout, self._core.arrays())
        return _tensors.to_safetensors(tensors, self._layout)

    def _aggregate(self, answers: list[Answer]) -> RoundReport:
        """Close the round; Ctrl-C in the main thread waits until it has happened completely."""
        guard = self._core.guard
        guard.install()
        try:
            return self._core.close_round(answers)
        finally:
            guard.uninstall()

    def _submit(
        self,
        client: Client,
        key: str | None,
        weight: float | None,
        read: Callable[[], Received],
    ) -> str | None:
        """Take an answer, if it can count; ``read`` makes it, outside of the lock."""
        sender = self._sender(client)
        if not isinstance(key, str | None):
            raise TypeError(f"key: expected a str or None, got {type(key).__name__}")
        with self._changed:
            if key is None and self._round is not None:
                key = self._round.task.key
            number, reason = self._place(sender, key)
        if reason is None:
            answer = Answer(
                sender,
                {},
                client if self._numbered else None,
                is_update=self._sends_updates,
                weight=weight,
            )
            answer = replace(answer, problem=self._core.weighing.problem(answer))
            try:
                arrays = read()
                self._layout.check(arrays)
                answer = replace(answer, arrays=arrays)
            except (WireError, TensorFileError) as error:
                answer = replace(answer, problem=str(error))
            with self._changed:
                number, reason = self._place(sender, key)  # the round may have ended meanwhile
                if reason is None:
                    return self._take(replace(answer, round=number))
        with self._changed:
            if sender in self._ignored or len(self._ignored) < _MOST_IGNORED:
                self._ignored[sender] = reason
        return reason

    def _place(self, sender: str, key: str | None) -> tuple[int | None, str | None]:
        """Return the number of the earlier round that an answer is for, and why it is not taken.

        None for the number: it is for the open round. None for the reason: it can be taken.
        """
        number = self._late_round(key)
        if number is None:
            return None, self._refusal(sender, key)
        if self._closed:
            return number, "the server is closed"
        current = self._round
        answered = self._core.late_senders(number)
        if current is not None and current.task.round == number:
            answered |= current.answers.keys()
        if sender in answered:
            return number, f"has answered in round {number} already"
        return number, self._core.earlier.problem(number, sender)

    def _late_round(self, key: str | None) -> int | None:
        """Return the number of the round of a key, if a late answer to it may count; else None."""
        current = self._round
        if key is None or not self._core.takes_late_answers:
            return None
        if current is not None and key == current.task.key:
            return current.task.round if current.over else None
        number = self._core.earlier.find(key)
        return None if number is None or number > self._core.rounds else number

    def _take(self, answer: Answer) -> str | None:
        """Keep an answer that has a place (:meth:`_place`); return why it cannot be used."""
        if answer.round is not None:
            return self._core.put_late(answer)
        assert self._round is not None  # otherwise there is no place
        self._round.answers[answer.sender] = answer
        self._changed.notify_all()
        return answer.problem

    def _refusal(self, sender: str, key: str | None) -> str | None:
        """Return why an answer is not one for the open round, in time; None: it is one."""
        current = self._round
        if self._closed:
            return "the server is closed"
        if current is None:
            return "late: no round is open"
        task = current.task
        if key is not None and key != task.key:
            most = self._core.earlier.most
            before = f", or for one of at most {most} steps before" if most else ""
            return f"expected an answer for the model {task.key}{before}, got one for {key[:40]!r}"
        if current.over:
            return f"late: round {task.round} has ended"
        if sender not in current.asked:
            return f"was not asked in round {task.round}"
        if sender in current.answers:
            return f"has answered in round {task.round} already"
        return None
