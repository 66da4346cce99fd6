# SPDX-License-Identifier: Apache-2.0
"""The end of a round: which answers can be read, and the step with those that count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator, Confirm
from fastagg.churn import newcomers
from fastagg.integrations._admission import Admission, Admitted, Unsettled
from fastagg.integrations._ids import ClientIds
from fastagg.integrations._received import ReceivedModels
from fastagg.integrations._report import Answer
from fastagg.integrations._statistics import Statistics
from fastagg.integrations._weighing import Weighing
from fastagg.integrations._wire import WireError, WireLayout
from fastagg.modes import plain_modes
from fastagg.report import TOO_FEW, StepReport
from fastagg.updates.cohort import Updates
from fastagg.updates.row_pool import RowPool


@dataclass(frozen=True)
class Counted:
    """What a step made of answers.

    Attributes:
        admitted: the answers with ids.
        rejected: the reasons of all that did not count, by sender, or by label for late answers.
        step: the report of the rule; None if there was no step.
        error: why there was none.
    """

    admitted: Admitted
    rejected: dict[str, str]
    step: StepReport | None
    error: str | None

    @property
    def ids(self) -> dict[str, int]:
        """The ids of the senders that were not rejected."""
        found = self.admitted.found.ids
        return {sender: client for sender, client in found.items() if sender not in self.rejected}

    @property
    def late(self) -> list[str]:
        """The senders in ``ids`` whose answers are late ones."""
        answers = self.admitted.answers
        return [sender for sender in self.ids if answers[sender].round is not None]

    @property
    def waiting(self) -> list[str]:
        """The senders whose late answers wait for the next round.

        They are those that no step has used: all in ``late`` without a step; with one, those that
        it left out because too few clients were active.
        """
        if self.step is None:
            return self.late
        answers, reasons = self.admitted.answers, self.step.reasons
        few = {client for client, reason in reasons.items() if reason.startswith(TOO_FEW)}
        ids = self.admitted.found.ids.items()
        return [s for s, client in ids if client in few and answers[s].round is not None]


class ClosingRound:
    """The answers of one round.

    Args:
        rule: the rule.
        params: [d], the model; the step changes it in place.
        layout: its arrays.
        statistics: its running statistics.
        weighing: whether answers count by their weights.
        min_answers: with fewer answers that count, there is no step.
        pool: rows for rules that need them; None: updates are not written.
        returns_updates: whether the framework gets the difference from the model, not the new one.
    """

    def __init__(
        self,
        rule: Aggregator,
        params: Tensor,
        layout: WireLayout,
        statistics: Statistics,
        weighing: Weighing,
        min_answers: int,
        pool: RowPool | None,
        returns_updates: bool = False,
    ) -> None:
        self._rule, self._params, self._layout = rule, params, layout
        self._base = params if returns_updates else None
        self._statistics, self._weighing = statistics, weighing
        self._min_answers, self._pool = min_answers, pool
        self._received = ReceivedModels(layout, params)
        self._answers: dict[str, Answer] = {}  # those that can be read
        statistics.begin(rule.max_norm)

    def read(self, answers: Sequence[Answer], rejected: dict[str, str]) -> list[Answer]:
        """Return the answers whose arrays are like those of the model, with valid statistics.

        Args:
            answers: of different senders.
            rejected: gets the reasons of the others.
        """
        size, usable = self._layout.num_params, []
        for answer in answers:
            try:
                if answer.row is None:
                    self._received.add(answer.sender, answer.arrays, answer.is_update)
                    self._statistics.read(answer.sender, answer.arrays)
                else:
                    self._received.add_row(answer.sender, answer.row[:size])
                    self._statistics.take(answer.sender, answer.row[size:])
                usable.append(answer)
            except WireError as error:
                rejected[answer.sender] = str(error)
        self._answers |= {answer.sender: answer for answer in usable}
        return usable

    def count(
        self,
        ids: ClientIds,
        in_time: Sequence[Answer],
        late: Sequence[Answer],
        ages: Mapping[str, int],
        most: int | None,
    ) -> Counted:
        """Run the step. If the rule takes none with the late answers, run it without them.

        Otherwise a late answer, which goes on waiting, could prevent the steps of all later rounds.
        Unless a step takes effect, the rule is as before. Ids and K are to be updated by the
        caller.

        Args:
            ids: ids of the clients; not changed.
            in_time: answers of this round that can be read.
            late: others that can.
            ages: of these, by sender.
            most: the number of clients up to which the rule may grow; None: it does not.
        """
        counted = self._count(ids, in_time, late, ages, most, self._min_answers)
        if counted.step is not None or not counted.late:
            return counted
        least = max(1, self._min_answers)  # a step without any answer would be a skipped one
        alone = self._count(ids, in_time, (), ages, most, least)
        if alone.step is None:
            return counted
        names = {name for answer in late for name in (answer.sender, answer.label)}
        found = {name: why for name, why in counted.rejected.items() if name in names}
        found |= dict.fromkeys(counted.late, f"no step with late answers: {counted.error}")
        return replace(alone, rejected=found | alone.rejected)

    def _count(
        self,
        ids: ClientIds,
        in_time: Sequence[Answer],
        late: Sequence[Answer],
        ages: Mapping[str, int],
        most: int | None,
        least: int,
    ) -> Counted:
        """Run the step with at least ``least`` answers.

        It is run again if others have other ids because of what it rejects.
        """
        forgets = self._rule.remembers_clients
        admission = Admission(
            ids, self._weighing, in_time, late, most, forgets, self._surely_rejected
        )
        again: list[str] | None = None
        while True:
            admitted = admission.admit()
            spare = admission.spare(admitted, again or ())
            try:
                counted = self._try(admission, admitted, spare, ages, least)
            except Unsettled as found:
                admission.out |= found.rejected
                again = [*found.rejected] if again is None else []
                continue
            return counted

    def _try(
        self,
        admission: Admission,
        admitted: Admitted,
        spare: Mapping[str, int],
        ages: Mapping[str, int],
        least: int,
    ) -> Counted:
        """Run the step for answers with ids; nothing changes if it raises an exception.

        Args:
            admission: all answers.
            admitted: those that have ids.
            spare: ids of senders whose answers the step must reject.
            ages: of late ones, by sender.
            least: with fewer answers that count, there is no step.

        Raises:
            Unsettled: without answers that are rejected, others would have other ids, or the rule
                would forget or grow less; or one with a spare id is not rejected.
        """
        found, rule = admitted.found, self._rule
        every = {**found.ids, **spare}
        far = self._statistics.far(every)
        rejected: dict[str, str] = {}

        def confirm(reasons: Mapping[int, str]) -> None:
            rejected.clear()
            for sender, client in found.ids.items():
                if sender in far:
                    rejected[sender] = far[sender]
                elif client in reasons:
                    rejected[sender] = f"update of client {client}: {reasons[client]}"
            left = [s for s, client in spare.items() if s not in far and client not in reasons]
            few = {s for s, c in found.ids.items() if reasons.get(c, "").startswith(TOO_FEW)}
            # The others may have been too few because of those that are rejected.
            for bad in ({s: why for s, why in rejected.items() if s not in few}, rejected):
                if left or not admission.is_settled(admitted, bad):
                    raise Unsettled(bad)
            _check_enough(len(found.ids) - len(rejected), least)

        own = {sender: far[sender] for sender in found.ids if sender in far}
        if not admission.is_settled(admitted, own):
            raise Unsettled(own)
        clients = {client: s for s, client in sorted(every.items(), key=_client) if s not in far}
        weights = {k: self._weighing.read(self._answers[s]) for k, s in clients.items()}
        late = {k: ages[s] for k, s in clients.items() if self._answers[s].round is not None}
        step, error = None, None
        try:
            _check_enough(len(found.ids) - len(own), least)
            with newcomers(rule, found.num_clients, sorted(found.fresh)):
                step = self._step(clients, late, weights, confirm)
        except _NoStep as problem:
            error = str(problem)
            rejected.update(own)
        if step is not None:
            shares = self._weighing.merged(rule, weights)
            self._statistics.average(step.active.tolist(), shares, step.reasons)
        return Counted(admitted, admitted.refused | admission.out | rejected, step, error)

    def _step(
        self,
        senders: Mapping[int, str],
        ages: Mapping[int, int],
        weights: Mapping[int, float],
        confirm: Confirm,
    ) -> StepReport:
        """Run a step; return the rule's report.

        Args:
            senders: dict from clients, in order, to senders.
            ages: of late answers, by client.
            weights: by client.
            confirm: as for :meth:`fastagg.Aggregator.step`.

        Raises:
            _NoStep: the rule refuses the step.
            Unsettled: from ``confirm``.
        """
        clients = [*senders]
        late = [ages.get(client, 0) for client in clients] if ages else None
        counts = self._weighing.of(clients, weights) if clients else None
        try:
            rows: Updates = []
            if self._pool is not None:
                self._received.write(self._pool, senders)
                rows = self._pool
            elif clients:
                rows = self._received.streams([*senders.values()])
            accept = self._check_range if self._layout.is_narrow else None
            return self._rule.step(
                self._params,
                rows,
                clients,
                ages=late,
                weights=counts,
                confirm=confirm,
                accept=accept,
            )
        except ValueError as error:  # parameters and state are as before
            raise _NoStep(str(error)) from error
        finally:
            if self._pool is not None:
                self._pool.release()

    def _check_range(self, params: Tensor) -> None:
        """Raise WireError if the model could not be sent after the step."""
        self._layout.check_range(params, self._base)

    def _surely_rejected(self, clients: Mapping[str, int], contested: bool) -> dict[str, str]:
        """Return senders whose updates every step would reject, with the reasons.

        Args:
            clients: dict from senders to the clients that they would be.
            contested: whether others claim to be the same clients. A step never sees such updates,
                so an adaptive limit counts here. Otherwise it is left to the step, which takes the
                norms into account.
        """
        limit = self._rule.norm_limit(adaptive=contested)
        with plain_modes(), torch.no_grad():
            rows = self._received.streams([*clients]).rows
            squares: list[float] = self._rule.columns.square_norms(rows).tolist()
        found = {}
        for (sender, client), norm in zip(clients.items(), map(math.sqrt, squares), strict=True):
            if not norm <= limit or math.isinf(norm):
                reason = f"norm {norm:.6g}, but the limit is {limit:.6g}"
                reason = reason if math.isfinite(norm) else "NaN or Inf"
                found[sender] = f"update of client {client}: {reason}"
        return found


class _NoStep(Exception):
    """Raised if there is no step; the text is the reason."""


def _client(item: tuple[str, int]) -> int:
    return item[1]


def _check_enough(count: int, least: int) -> None:
    if count < least:
        raise _NoStep(f"min_answers: expected at least {least}, got {count}")
