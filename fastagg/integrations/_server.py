# SPDX-License-Identifier: Apache-2.0
"""The server's part of a federated run, for any framework: the model, the rule and the client ids.

A framework sends the model to some clients and passes their answers to the server. Clients send
*weights*, so the server keeps the model that the round started from and computes updates itself. A
client that was asked and did not answer, for any reason, is absent: absent = asked - answered.

If the rule has ``staleness`` and ``max_staleness``, answers to earlier rounds count with their age:
:meth:`AggregationServer.put_late` puts them into an inbox, from which a round takes them when it
closes. The newest answer of a client is used.

The model is a :class:`fastagg.integrations._model.GlobalModel`. What a checkpoint has is in
:mod:`fastagg.integrations._run_checkpoint`; here is when it is written.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator
from fastagg.integrations._closing import ClosingRound, Counted
from fastagg.integrations._empty_rounds import EmptyCount
from fastagg.integrations._history import MetricHistory
from fastagg.integrations._hosted_rule import check_aggregator, refuse_needy
from fastagg.integrations._ids import ClientIds, Resolved, by_number
from fastagg.integrations._late import EarlierRounds
from fastagg.integrations._late_answers import LateAnswers
from fastagg.integrations._model import GlobalModel
from fastagg.integrations._report import Answer, RoundReport, substitutions
from fastagg.integrations._run_checkpoint import Host, Run, read_run, write_run
from fastagg.integrations._selection import Selection
from fastagg.integrations._signals import SignalGuard
from fastagg.integrations._weighing import Weighing
from fastagg.integrations._wire import Arrays, WireError, WireLayout
from fastagg.making import make
from fastagg.ops.memory import memory_errors
from fastagg.options import read_count, read_size
from fastagg.registry import RuleName
from fastagg.signals import SignalsDeferred
from fastagg.updates.cohort import read_ids
from fastagg.updates.roles import Roles, read_roles
from fastagg.updates.row_pool import RowPool


class AggregationServer:
    """The rule, the global model and the client ids of a run, across rounds and restarts.

    Call :meth:`set_model` (or :meth:`resume`) once. Then in each round call :meth:`open_round` with
    the clients that are asked, send them :meth:`arrays`, and call :meth:`close_round` with the
    answers.

    Args:
        rule: the name of a rule, or an aggregator. An aggregator must have been made with
            ``nonfinite="drop"``, so that a single client cannot stop the run.
        num_clients: K; may be left out if ``rule`` is an aggregator.
        checkpoint_path: file for checkpoints, in a folder that exists; None writes none. A
            checkpoint that cannot be written is reported and tried again after the next round.
        checkpoint_every: number of rounds from one checkpoint to the next. Another checkpoint is
            written when one of the signals of ``guard`` arrives.
        checkpoint_keep: number of checkpoints to keep: ``checkpoint_path``, and the older ones with
            ".1", ".2", ... after its name.
        min_answers: with fewer answers that count, a round does not change the model.
        max_clients: while answers need more ids than there are, K grows, up to this number; see
            :meth:`grow`. None: K does not grow by itself.
        max_empty_rounds: number of rounds in a row without an active client after which
            :meth:`close_round` raises an error.
        ids, release_after: where client ids come from, and when they may go to others; see
            :class:`fastagg.integrations._ids.ClientIds`.
        selection: how :meth:`sample` chooses those that train; see
            :class:`fastagg.integrations._selection.Selection`.
        roles: patterns of names of arrays and their roles, see :mod:`fastagg.updates.roles`.
        weighted: whether answers count by their weights; see
            :class:`fastagg.integrations._weighing.Weighing`.
        sends_updates: whether all answers are updates; late ones need no models of their rounds.
        returns_updates: whether the framework gets the difference of the new model from that of the
            round. A float16 model must then have room for it, too.
        saves_earlier: whether a checkpoint has the rounds to which late answers can still count,
            with their models: 4 d bytes for each of up to ``max_staleness``.
        inbox_path: folder for late answers that wait for a round, which survive the process; made
            if it does not exist. It needs a ``checkpoint_path``, and ``max_staleness``. None: they
            are in memory only.
        **options: options of the rule, if it is given by name.

    Attributes:
        rounds: number of finished rounds.
        last_report: of the last finished round of this process; None before it.
        ids: ids of the clients.
        history: metrics of the rounds, for the checkpoint.
        example: an aggregator with the options of the rule, perhaps for another model.
        weighing: whether answers count by their weights, and why not.
        guard: saves on SIGINT and SIGTERM while it is installed.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
        FileNotFoundError: there is no folder for ``checkpoint_path``.
    """

    def __init__(
        self,
        rule: str | Aggregator,
        *,
        num_clients: int | None = None,
        max_clients: int | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        checkpoint_keep: int = 2,
        min_answers: int = 0,
        max_empty_rounds: int = 10,
        ids: str = "partition",
        release_after: int | None = 0,
        selection: str = "random",
        roles: Roles = "auto",
        weighted: bool | None = False,
        sends_updates: bool = False,
        returns_updates: bool = False,
        saves_earlier: bool = False,
        inbox_path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self._rule = rule
        self._options = options
        if isinstance(rule, Aggregator):
            self.num_clients = check_aggregator(rule, num_clients, options)
            example = rule
        elif isinstance(rule, str):
            if num_clients is None:
                raise TypeError("num_clients: required with the name of a rule, got None")
            self.num_clients = read_size("num_clients", num_clients)
            # Raises for wrong options now, not in the first round.
            example = self._make(num_params=1)
        else:
            raise TypeError(f"rule: expected a name or an aggregator, got {type(rule).__name__}")
        self.example = example
        self._lasting = example.tells_clients_apart
        self.weighing = Weighing(weighted, example)
        if checkpoint_path is not None and not Path(checkpoint_path).absolute().parent.is_dir():
            raise FileNotFoundError(f"checkpoint_path: there is no folder for {checkpoint_path}")
        self.checkpoint_path = checkpoint_path
        _check_inbox_path(inbox_path, checkpoint_path, example)
        self.checkpoint_keep = read_size("checkpoint_keep", checkpoint_keep)
        self.checkpoint_every = read_size("checkpoint_every", checkpoint_every)
        self.min_answers = read_count("min_answers", min_answers, least=0)
        self._empty = EmptyCount(read_size("max_empty_rounds", max_empty_rounds))
        self.selection = Selection(selection)
        self.roles = read_roles(roles)
        self.rounds = 0
        self.last_report: RoundReport | None = None
        self._id_options: dict[str, Any] = {"source": ids, "release_after": release_after}
        self.ids = self._new_ids()
        self.history = MetricHistory()
        self.guard = SignalGuard(self.save_if_due)
        self._saved_rounds: int | None = None
        self._overdue = False  # whether the last checkpoint could not be written
        self._clients_changed = False  # whether a `forget` or `grow` is in no checkpoint yet
        self._settled = True  # whether the model is that which is sent next
        self._sent: set[str] = set()
        self._open = False
        self._sends_updates, self._saves_earlier = sends_updates, saves_earlier
        self._returns_updates = returns_updates
        self._late = LateAnswers(inbox_path)
        self._trains = True
        self._model: GlobalModel | None = None
        self._aggregator: Aggregator | None = rule if isinstance(rule, Aggregator) else None
        self._rows: RowPool | None = None
        self.max_clients = max_clients
        if max_clients is not None:
            read_count("max_clients", max_clients, least=self.num_clients)
            self._check_alike()

    def _check_alike(self) -> None:
        """Raise ValueError if new clients would need options of their own."""
        options = (self._aggregator or self._make(num_params=1)).options()
        each = [v for v in options.values() if isinstance(v, Tensor) and v.dim() == 1]
        if any(bool((value != value[0]).any()) for value in each):
            raise ValueError(
                "max_clients: expected equal options of all clients, because nobody says those of "
                "new ones; got others, so call grow instead"
            )

    @property
    def empty_rounds(self) -> int:
        """Rounds without an active client since the last one with one, in this process."""
        return self._empty.in_a_row

    @property
    def rule_name(self) -> str:
        return self._rule if isinstance(self._rule, str) else self._rule.name

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @property
    def has_open_round(self) -> bool:
        """Whether a round was opened and not closed yet."""
        return self._open

    @property
    def takes_late_answers(self) -> bool:
        """Whether answers to earlier rounds count; False before there is a model."""
        return self.earlier.most > 0

    @property
    def earlier(self) -> EarlierRounds:
        """The rounds to which late answers can still count, and the open one."""
        return self._late.earlier

    @property
    def oldest(self) -> int:
        """The number of the first round to which a late answer can still count."""
        return self.earlier.oldest(self.rounds + 1)

    @property
    def params(self) -> Tensor:
        """The global model, [d] float32; empty before :meth:`set_model`."""
        if self._model is None:
            return torch.zeros(0, dtype=torch.float32, device="cpu")
        return self._model.params

    @property
    def aggregator(self) -> Aggregator:
        """The rule with its state.

        Raises:
            RuntimeError: the rule was given by name and there is no model yet.
        """
        if self._aggregator is None:
            raise RuntimeError("there is no aggregator yet: call set_model or resume first")
        return self._aggregator

    @property
    def model(self) -> GlobalModel:
        """The global model.

        Raises:
            RuntimeError: there is no model yet.
        """
        if self._model is None:
            raise RuntimeError("there is no model yet: call set_model or resume first")
        return self._model

    @property
    def layout(self) -> WireLayout:
        """The arrays of the model.

        Raises:
            RuntimeError: there is no model yet.
        """
        return self.model.layout

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run signal handlers after this context; nothing is saved for them until it ends."""
        # The first delays all handlers if this is the main thread. In another thread it does
        # nothing, and the guard's handlers run in the main thread: they must not save now.
        with SignalsDeferred(), self.guard.held():
            yield

    def set_model(self, arrays: Arrays) -> None:
        """Set the global model. The rule's state, the client ids and the rounds do not change.

        Args:
            arrays: the model: .npy bytes by name.

        Raises:
            WireError: an array cannot be read or holds NaN or Inf, a variance is negative, or
                names, shapes or dtypes differ from those of the previous model.
            ValueError: the aggregator is for another number of parameters, or a pattern of
                ``roles`` matches no array.
        """
        model = self._model or GlobalModel(WireLayout.of(arrays, self.roles))
        try:
            content = model.read(arrays)
        except WireError as error:
            if self._model is None:
                raise
            raise WireError(f"arrays: expected the model of the run: {error}") from error
        num_params = model.layout.num_params
        aggregator = self._aggregator or self._make(num_params)
        if aggregator.num_params != num_params:
            raise ValueError(
                f"rule: expected an aggregator for {num_params} parameters, like the model, got "
                f"one for {aggregator.num_params} parameters"
            )
        model.check_covered(aggregator)
        if self.checkpoint_path is not None:
            aggregator.options()  # raises for options that cannot be saved now, not after a round
        with self.held():
            model.take(content)
            self._model = model
            if self._aggregator is None or not self.earlier.most:
                earlier = EarlierRounds(aggregator.max_staleness, not self._sends_updates)
                self._late.restart(earlier, run=self._late.run)
            self._aggregator = aggregator

    def arrays(self) -> dict[str, bytes]:
        """Return the global model: .npy bytes by name, with the first model's dtypes and shapes.

        Arrays with the role "local" are missing.
        """
        return self.model.arrays()

    def array_types(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return a dict from the names of :meth:`arrays` to NumPy's dtype name and the shape."""
        return self.model.array_types()

    def names(self, count: int | None = None) -> list[str]:
        """Return the names of arrays that a framework sends without names, in the model's order.

        Args:
            count: their number; see :meth:`GlobalModel.names`.
        """
        return self.model.names(count)

    def sample(
        self, candidates: Iterable[str], count: int, seed: int, purpose: str = "train"
    ) -> list[str]:
        """Draw the clients for the next round, as a function of seed, round and candidates.

        With another ``selection`` than "random" it also depends on who was asked before. Draws for
        other purposes than training are always random.

        Candidates are ordered by id before the draw, so names do not matter for those whose id is
        known. Candidates without a known id come last, ordered by name: after a restart in which
        all nodes get new names, other clients may be drawn, because which client a node is shows
        only in its first answer.

        Args:
            candidates: senders to draw from.
            count: number of senders to draw; all are drawn if there are fewer.
            seed: seed of the run.
            purpose: what the draw is for; each purpose has draws of its own.

        Returns:
            ``count`` different senders, or all of them if there are fewer.
        """
        known = self.ids.known
        order = sorted(candidates, key=lambda s: (known.get(s, self.num_clients), by_number(s)))
        # Draws for training have the streams that older checkpoints continue.
        stream = "" if purpose == "train" else f"/{purpose}"
        rng = random.Random(f"fastagg/{seed}/{self.rounds}{stream}")
        selection = self.selection if purpose == "train" else Selection()
        return selection.draw(order, count, rng)

    def grow(self, num_clients: int, **options: Any) -> None:
        """Go on with more clients, between two rounds; clients keep their ids.

        A checkpoint is due after the next round. ``max_clients`` may be less: then K does not grow
        further by itself.

        Args:
            num_clients: the new K.
            **options: of the rule, see :meth:`fastagg.Aggregator.grow`.

        Raises:
            TypeError, ValueError, MemoryError, OSError: as for the rule. The server is unchanged.
        """
        with self.held():
            if self._aggregator is None:
                number = read_count("num_clients", num_clients, least=self.num_clients)
                before, self._options = self._options, {**self._options, **options}
                try:
                    self._make(num_params=1, num_clients=number)
                except BaseException:
                    self._options = before
                    raise
            else:
                self._aggregator.grow(num_clients, **options)
            self._resize(num_clients)
            self._clients_changed = self.has_model

    def _resize(self, num_clients: int) -> None:
        self.num_clients = self.ids.num_clients = num_clients
        self._rows = None  # it has room for clients of before

    def forget(self, clients: Sequence[int], senders: Iterable[str] = ()) -> None:
        """Free the ids of clients that have left for good, and forget what the rule remembers.

        Their late answers do not count any more. A checkpoint is written at once: after a restart
        from an older one, the clients would be back.

        Args:
            clients: ids.
            senders: their names, beside those that are known from answers.

        Raises:
            TypeError, ValueError, IndexError: as for :meth:`fastagg.Aggregator.forget`. Nothing has
                changed.
            OSError: a late answer in the folder ``inbox_path`` cannot be deleted: the clients are
                not forgotten. Or the checkpoint could not be written: they are forgotten in this
                process, and the next round tries again.
        """
        with self.held():
            rule = self._aggregator or self._make(num_params=1)  # to check the ids
            left = set(read_ids(clients, rule.num_clients))
            names = {sender for sender, client in self.ids.known.items() if client in left}
            self._late.forget(names.union(senders))
            rule.forget([*left])
            self.ids.forget(left)
            self._clients_changed |= self.has_model and bool(left)
            problem = self._try_to_save() if self._clients_changed else None
        if problem is not None:
            raise OSError(f"forget: the clients are forgotten, but in no checkpoint: {problem}")

    def open_round(
        self,
        senders: Iterable[str] | None,
        connected: Iterable[str] | None = None,
        key: str = "",
    ) -> None:
        """Begin a round.

        Args:
            senders: those that are asked; None: the round is without training.
            connected: those that are connected now; None: nobody has left.
            key: by which late answers name the round, see :attr:`earlier`.

        Raises:
            ValueError: the folder ``inbox_path`` has answers of another run, or is used by another
                server.
            OSError: the folder cannot be used.
        """
        asked = set(senders or ())
        if self.takes_late_answers:
            self._open_inbox()
            self._late.open_round(self.rounds, asked, self.params, key)
        self._trains, self._sent, self._open = senders is not None, asked, True
        present = None if connected is None else set(connected)
        self.ids.open_round(self.rounds + 1, present)
        lasting = None if present is None else present | self.ids.known.keys()
        self.selection.note(self.rounds + 1, self._sent, lasting)

    def _open_inbox(self) -> None:
        self._late.open(self.rounds, self.layout, max(self.num_clients, self.max_clients or 0))

    def close(self) -> None:
        """Let other servers use ``inbox_path``, after the last round of this one."""
        self._late.close()

    def put_late(self, answer: Answer) -> str | None:
        """Keep a late answer until a round closes; may be called from any thread.

        Args:
            answer: with its ``round``, which is an earlier one, or the open one.

        Returns:
            None if it waits now, or why it does not. The next report has that, too.
        """
        problem = self.weighing.problem(answer) or answer.problem
        return self._late.put(self.weighing.kept(answer), problem)

    def late_senders(self, number: int) -> set[str]:
        """Return the senders whose late answers to a round wait."""
        return {sender for sender, of in self._late.waiting() if of == number}

    def discard_late(self, number: int) -> None:
        """Drop the late answers to a round that did not happen; it may be begun again."""
        self._late.discard(number)

    def close_round(self, answers: Sequence[Answer], *, settled: bool = True) -> RoundReport:
        """Aggregate the answers, given in any order, and write a checkpoint if one is due.

        Answers that cannot be used are reported. Ids, the rule and the model are as if they had not
        come; only an adaptive limit of norms takes what it rejects into account. If the rule
        refuses the step (too few rows for a robust rule, numbers beyond the range of float32), or
        there are fewer than ``min_answers``, nothing changes and the report has the reason; late
        answers that were not rejected wait for the next round. So they do if the rule leaves them
        out because of its ``min_active``. A round without training has no step.

        Args:
            answers: of the clients that were asked, and perhaps of others. Late ones have been put
                by :meth:`put_late`.
            settled: whether the new model is sent as it is. If somebody may still change it (add
                noise), pass False; no checkpoint is written until :meth:`settle_round`.

        Raises:
            EmptyRounds: this is the last of ``max_empty_rounds`` rounds in a row without an active
                client. The round is finished, and the error has its report. Its checkpoint is
                written, unless the model moved and the round is not settled.
        """
        rejected = {a.label: a.problem for a in answers if a.problem is not None}
        if not self._trains:
            self._asked_once(answers, rejected)
            return self._close_idle(rejected, None)
        with self.held():
            rule = self.aggregator
            before = rule.committed
            closing = ClosingRound(
                rule,
                self.params,
                self.layout,
                self.model.statistics,
                self.weighing,
                self.min_answers,
                self._row_pool(),
                self._returns_updates,
            )
            in_time = closing.read(self._asked_once(answers, rejected), rejected)
            taken, reasons = self._late.take(self.rounds, {a.sender for a in in_time})
            rejected |= reasons
            done = False
            again: list[str] = []
            try:
                late = closing.read(taken.usable, rejected)
                counted = closing.count(self.ids, in_time, late, taken.ages, self.max_clients)
                report = self._finish(answers, counted, taken.ages, rejected)
                done, again = True, counted.waiting
            finally:  # a step that has taken effect has used them up, whatever comes after it
                taken.finish(happened=done or rule.committed != before, again=again)
                if rule.num_clients != self.num_clients:
                    self._resize(rule.num_clients)
            asked, self._sent, self._open = len(self._sent), set(), False
            self._settled = settled or not report.moved
            self.last_report = report  # also if writing the checkpoint raises an exception
            if self._settled:
                report = replace(report, checkpoint_error=self._end_round())
            self.last_report = report  # a handler may raise an exception in the place of a return
            self._end_if_empty(report, asked)
        return report

    def skip_round(self, reason: str) -> RoundReport:
        """Close a round that a framework does not aggregate, because nobody was asked, say.

        It counts as one without an active client. The rule takes no step, not even from what it
        remembers: the framework would not get the model. Late answers wait for the next round.

        Args:
            reason: why, for the report.

        Raises:
            EmptyRounds: as for :meth:`close_round`.
        """
        return self._close_idle({}, reason)

    def _close_idle(self, rejected: Mapping[str, str], error: str | None) -> RoundReport:
        """Close a round without a step, and write a checkpoint if one is due."""
        with self.held():
            self._late.close_round(self.rounds + 1, (), 0)
            self.rounds += 1
            asked, self._sent = self._sent, set()
            self._open, self._settled = False, True
            report = RoundReport(
                round=self.rounds,
                active=(),
                absent={sender: self.ids.known.get(sender) for sender in sorted(asked)},
                rejected=dict(rejected),
                friends={},
                ids={},
                error=error,
                checkpoint_error=self._end_round(),
            )
            self.last_report = report
            self._end_if_empty(report, len(asked))
        return report

    def _finish(
        self,
        answers: Sequence[Answer],
        counted: Counted,
        ages: Mapping[str, int],
        rejected: Mapping[str, str],
    ) -> RoundReport:
        """Count a round and remember its ids; return its report.

        Args:
            answers: all that came in time.
            counted: what the step made of them.
            ages: of late ones, by sender.
            rejected: reasons of those that could not be read.
        """
        step, ids, found = counted.step, counted.ids, counted.admitted.found
        usable = counted.admitted.answers
        late = {} if step is None else {sender: usable[sender] for sender in counted.late}
        waiting = set(counted.waiting)
        not_counted = {s: why for s, why in counted.rejected.items() if s not in waiting}
        found = Resolved() if step is None else replace(found, ids=ids)
        if step is not None:
            if found.num_clients != self.num_clients:
                self._resize(found.num_clients)
            self.ids.remember(found, {sender: usable[sender].partition for sender in ids})
        answered = {a.sender for a in answers}
        silent = self._sent - answered - late.keys()
        self._late.close_round(self.rounds + 1, answered, int(step is not None))
        self.rounds += 1
        return RoundReport(
            round=self.rounds,
            active=() if step is None else tuple(step.active.tolist()),
            absent={sender: self.ids.known.get(sender) for sender in sorted(silent, key=str)},
            rejected={**rejected, **not_counted},
            friends=substitutions(step),
            ids=found.ids,
            step=step,
            error=counted.error,
            reassigned={k: pair for k, pair in found.reassigned.items() if pair[1] in ids},
            forgotten=tuple(sorted(found.fresh.intersection(ids.values()))),
            late={sender: ages[sender] for sender in late},
            late_notes={s: a.note for s, a in late.items() if a.note is not None},
        )

    def settle_round(self) -> str | None:
        """Write the checkpoint of the last round, if it is due and the round was not settled.

        Before, :meth:`set_model` must have got the model, if somebody has changed it.

        Returns:
            Why the checkpoint could not be written, None if it was, or none was due.
        """
        if self._settled:
            return None
        with self.held():
            self._settled = True
            return self._end_round()

    def _end_round(self) -> str | None:
        due = self._overdue or self._clients_changed or self.rounds % self.checkpoint_every == 0
        return self._try_to_save() if due else None

    def check_not_empty(self, since: int) -> None:
        """Check that a run had an active client.

        Args:
            since: the first round of the run.

        Raises:
            RuntimeError: the run has had rounds, and no client was active in any of them.
        """
        self._empty.check_run(self.rounds - since + 1)

    def _end_if_empty(self, report: RoundReport, asked: int) -> None:
        """Count rounds without an active client; raise an error if there are too many in a row."""
        error = self._empty.add(report, asked, trains=self._trains)
        if error is not None:
            self._try_to_save()
            raise error

    def save_if_due(self) -> None:
        """Write a checkpoint if the last one is missing something, and the last round is settled.

        That is a finished round, or a :meth:`forget` or :meth:`grow`.

        Raises:
            OSError: it could not be written.
            ValueError: its header is larger than a reader accepts: there are too many clients.
        """
        if self.checkpoint_path is None or not self.has_model:
            return
        if self._saved_rounds == self.rounds and not self._clients_changed:
            return
        if not self._settled:  # a model without the noise, say, must never be sent
            return
        self.save(self.checkpoint_path)
        self._late.saved(self.rounds, self.checkpoint_keep)
        self._saved_rounds, self._clients_changed = self.rounds, False

    def _try_to_save(self) -> str | None:
        """Do what :meth:`save_if_due` does; return why the checkpoint could not be written."""
        try:
            self.save_if_due()
        except (OSError, ValueError, MemoryError) as error:
            self._overdue = True
            return str(error) or type(error).__name__
        self._overdue = False
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything that later rounds depend on to one file, atomically, without pickle.

        Raises:
            ValueError: an option of the rule cannot be stored, or the header is larger than a
                reader accepts. An older file is unchanged.
            OSError: the folder does not exist or is not writable. An older file is unchanged.
            MemoryError: memory ran out. An older file is unchanged.
        """
        run = Run(
            rounds=self.rounds,
            model=self.model,
            rule=self.aggregator,
            ids=self.ids,
            selection=self.selection,
            history=self.history,
            earlier=self.earlier,
            steps=self._late.steps,
            name=self._late.run,
        )
        with memory_errors():
            write_run(path, run, saves_earlier=self._saves_earlier, keep=self.checkpoint_keep)

    def resume(self, path: str | os.PathLike[str]) -> list[str]:
        """Continue from a file that :meth:`save` wrote; later rounds are bit-identical.

        The rule's ``server_lr``, ``max_norm`` and ``min_active`` may be others than before.
        ``num_clients`` may be larger: new ids follow the old ones. It may be smaller, too, if the
        run had grown to at most ``max_clients`` and the rule was given by name.

        Returns:
            The options that are others than before, as text.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged or not a server's checkpoint, or has another rule, other
                options, other roles of arrays or more clients. The server is unchanged.
        """
        most = self.max_clients if isinstance(self._rule, str) else None
        host = Host(
            rule_name=self.rule_name,
            num_clients=self.num_clients,
            max_clients=most or self.num_clients,
            roles=self.roles,
            layout=None if self._model is None else self._model.layout,
            selection=self.selection.kind,
            keeps_models=not self._sends_updates,
            saves_earlier=self._saves_earlier,
            make_ids=self._new_ids,
            rule_for=self._rule_for,
        )
        with self.held():  # a signal must not save a rule without its model
            run, changed = read_run(path, host)
            self.history, self._model, self._aggregator = run.history, run.model, run.rule
            self.ids, self.selection = run.ids, run.selection
            self._late.restart(run.earlier, run.steps, run.name)
            self._resize(run.rule.num_clients)
            self.rounds = self._saved_rounds = run.rounds
            self._open = False
            self._clients_changed = False
        if self.takes_late_answers:  # they may come before the next round opens
            with suppress(OSError, ValueError):  # open_round tries again, and raises it
                self._open_inbox()
        return changed

    def _rule_for(self, num_params: int, num_clients: int) -> Aggregator:
        """Return the rule of the run if it has K clients, or a new one."""
        rule = self._aggregator
        if rule is None or rule.num_clients != num_clients:
            rule = self._make(num_params, num_clients)
        return rule

    def _new_ids(self, num_clients: int | None = None) -> ClientIds:
        number = num_clients or self.num_clients
        return ClientIds(number, lasting=self._lasting, **self._id_options)

    def _make(self, num_params: int, num_clients: int | None = None) -> Aggregator:
        """Make the rule that was given by name."""
        refuse_needy(self.rule_name)
        options = {"nonfinite": "drop", **self._options}
        number = num_clients or self.num_clients
        aggregator = make(
            RuleName(self.rule_name), num_clients=number, num_params=num_params, **options
        )
        check_aggregator(aggregator, number, {})
        return aggregator

    def _asked_once(self, answers: Sequence[Answer], rejected: dict[str, str]) -> list[Answer]:
        """Return the answers without a problem, of senders that were asked and answered once.

        The other answers are added to ``rejected``, each with the reason.
        """
        usable = []
        counts = Counter(answer.sender for answer in answers)
        for answer in answers:
            if answer.sender not in self._sent:
                rejected[answer.sender] = "was not asked in this round"
            elif counts[answer.sender] > 1:
                rejected[answer.sender] = f"answered {counts[answer.sender]} times"
            elif (problem := self.weighing.problem(answer)) is not None:
                rejected.setdefault(answer.sender, problem)
            elif answer.problem is None:
                usable.append(answer)
        return usable

    def _row_pool(self) -> RowPool | None:
        """Return the rows for updates; None for a rule that needs no rows."""
        if self.aggregator.reads_streams_once:
            return None
        if self._rows is None:
            room = max(self.num_clients, self.max_clients or 0)
            self._rows = RowPool(room, self.layout.num_params, self.aggregator.device)
        return self._rows


def _check_inbox_path(folder: object, checkpoint_path: object, rule: Aggregator) -> None:
    """Raise ValueError if late answers in a folder could not count, or would stay there."""
    if folder is None:
        return
    if checkpoint_path is None:
        raise ValueError(
            "inbox_path: expected a checkpoint_path, too, because answers in the folder count in "
            "the model of a checkpoint, got None"
        )
    if not rule.max_staleness:
        raise ValueError(
            "inbox_path: expected the options staleness and max_staleness, without which no late "
            f"answer counts, got max_staleness={rule.max_staleness}"
        )
