# SPDX-License-Identifier: Apache-2.0
"""The base class of all rules: a step in three phases."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from fastagg import ops
from fastagg.calls import CallLock
from fastagg.churn import ChangingClients
from fastagg.clipped_steps import ClippedSteps
from fastagg.clipping import AdaptiveClip, Clipping, check_noise, read_clip_norm
from fastagg.costs import Cost, Sizes
from fastagg.description import describe
from fastagg.memory.rows import check_apart
from fastagg.modes import MadeInPlainModes, NoGradients, plain_modes, writable
from fastagg.norm_bound import (
    AdaptiveNorm,
    MaxNorm,
    RecentNorms,
    read_max_norm,
    resolve_max_norm,
)
from fastagg.ops.memory import reserve
from fastagg.ops.row_lists import RowList
from fastagg.options import (
    FLOAT32_LIMIT,
    read_count,
    read_device,
    read_factor,
    read_size,
)
from fastagg.report import (
    TOO_FEW,
    Aggregate,
    BrokenUpdates,
    Plan,
    Reading,
    RefusedUpdates,
    RowSum,
    StepReport,
    Unchecked,
    list_reasons,
)
from fastagg.saved_state import SavedState
from fastagg.saved_state import State as State
from fastagg.server_optimizer import (
    Moments,
    ServerOptimizer,
    read_server_optimizer,
)
from fastagg.signals import SignalsDeferred
from fastagg.staleness import Staleness, late_positions, read_max_staleness, read_staleness
from fastagg.updates.allocation import allocate_rows
from fastagg.updates.buffer import Clients
from fastagg.updates.cohort import (
    Ages,
    Cohort,
    Updates,
    check_readable,
    read_cohort,
)
from fastagg.updates.columns import Columns, segment_columns
from fastagg.updates.small import factors_tensor, ids_tensor, rounded, uninitialized

if TYPE_CHECKING:
    from typing_extensions import Required
    from typing_extensions import TypeVar as TypeVarWithDefault


_RESERVE = 1 << 17
_RESERVE_ROW = 1 << 10
"""Heap that must be free before a commit, in bytes: a fixed part, and a part for each active
client. A commit allocates less."""


Confirm = Callable[[Mapping[int, str]], object]
"""A function of the clients whose rows a step leaves out, and the reasons."""

Accept = Callable[[Tensor], object]
"""A function of the parameters [d] that a step leads to."""

if TYPE_CHECKING:  # so that users may write Aggregator without arguments
    P = TypeVarWithDefault("P", bound=Plan, default=Any)
    R = TypeVarWithDefault("R", bound=Reading, default=Any)
else:
    P = TypeVar("P", bound=Plan)
    R = TypeVar("R", bound=Reading)


class CommonOptions(TypedDict, total=False):
    """Options of every rule; :class:`Aggregator` describes them."""

    num_clients: Required[int]
    num_params: Required[int]
    server_lr: float
    device: str | torch.device
    nonfinite: str
    max_norm: float | str | AdaptiveNorm | Mapping[str, Any] | None
    server_optimizer: str | ServerOptimizer | Mapping[str, Any]
    min_active: int
    staleness: str | Staleness | Mapping[str, Any] | None
    max_staleness: int | None
    clip_norm: float | str | AdaptiveClip | Mapping[str, Any] | None
    noise_multiplier: float


class Aggregator(
    ClippedSteps, SavedState, ChangingClients, Generic[P, R], metaclass=MadeInPlainModes
):
    """Base class of all rules: a server-side aggregation rule with its state.

    A step has three phases. Each is one method of the rule:

    1. ``_plan`` decides from the state alone how much each row counts. It reads no row.
    2. ``_read`` passes over the rows and makes every check that can fail. It writes only to scratch
       and spare rows.
    3. ``_commit`` exchanges rows and writes the state. It cannot fail. A signal that arrives during
       it is delivered after it.

    At the beginning of the commit, the server optimizer moves the parameters along the aggregate,
    which ``_read`` returned.

    So after any exception, parameters and state have the same bits as before the step.

    Several threads may call one aggregator: a call waits until the one before has returned. A step
    within another step of the same thread, from an iterator of updates or a signal handler, raises
    RuntimeError. Different aggregators work at the same time. Results do not depend on torch's
    modes: inference mode, gradients, default dtype and device, flushing of denormals.

    Args:
        num_clients: K; client ids are in [0, K).
        num_params: d, the length of the flat parameter vector.
        server_lr: server learning rate, finite, >= 0; may be changed between steps.
        device: where parameters, updates and state live: "cpu", or "cuda" if
            :func:`fastagg.ops.devices` lists it.
        nonfinite: what to do with an update that holds NaN or Inf or cannot be read. "raise": raise
            a ValueError. "drop": treat its client as absent and list it in ``rejected``. "drop"
            also leaves out finite updates above about 1e30; otherwise one client could make every
            step overflow float32 (docs/security.md states the limit of each rule).
        max_norm: largest Euclidean norm of an update, > 0, in units of the updates; None: no limit.
            "adaptive", an :class:`fastagg.AdaptiveNorm` or a mapping of its arguments: a multiple
            of the running median of the norms. "auto": "adaptive" with ``nonfinite="drop"``, None
            with "raise" or with noise. May be changed between steps; an adaptive one then begins
            without known norms, unless it is equal to the present one. The client of a longer
            finite update is treated as absent and listed in ``rejected``, with either value of
            ``nonfinite`` (norm thresholding). Rules that compute the Gram matrix take the norms
            from it; others read the rows once more.
        server_optimizer: how a step moves the parameters along its aggregate: "sgd", "momentum",
            "nesterov", "adam", "yogi" or "adagrad", a :class:`fastagg.ServerOptimizer` or a mapping
            of its arguments. The learning rate is ``server_lr``. A skipped round changes no moment.
        min_active: the least number of active clients, in [1, num_clients]; may be changed between
            steps. If fewer are left after rejections, all of them count as absent: they are listed
            in ``rejected``, and the round is one without active clients.
        staleness: how much late rows count (``ages`` of :meth:`step`, docs/rules.md): "constant",
            "polynomial", "hinge", a :class:`fastagg.Staleness` or a mapping. None: they are errors.
        max_staleness: the largest age of a row, >= 0; older ones are rejected. None: no limit.
        clip_norm: a longer update is scaled down to this Euclidean norm, > 0, in units of the
            updates; None: none is. "adaptive", an :class:`fastagg.AdaptiveClip` or a mapping of its
            arguments: a bound that follows a quantile of the norms. May be changed between steps;
            an adaptive one then begins anew, unless it is equal to the present one. Rows are
            rejected by ``max_norm`` before. Every row is read once more, for its norm.
        noise_multiplier: z >= 0; Gaussian noise of the standard deviation z times the sensitivity
            is added to the aggregate (:class:`fastagg.noise.Noise`), for central differential
            privacy (docs/privacy.md). It needs ``clip_norm``, a rule of which the sensitivity is
            known (``no_noise``), and no ``max_norm``. Steps are then not reproducible.

    Attributes:
        columns: applies ops to rows; :mod:`fastagg.distributed` replaces it by one for its shards.
        committed: number of steps of this object that have taken effect, skipped rounds included.
            It changes with parameters and state, even if a signal handler then raises an exception.
        last_report: the report of the last of these steps; None before the first one.

    Raises:
        TypeError, ValueError: the message names the argument, what was expected and what came.
    """

    name: ClassVar[str]
    """The name under which the rule is registered."""
    column_state: ClassVar[frozenset[str]] = frozenset()
    """Names of the state whose last dimension is d; other state does not depend on d."""
    column_blocks: ClassVar[Mapping[str, int]] = {}
    """Names of ``column_state`` that has one element for a block of columns, and their number."""
    norms_known: ClassVar[bool] = False
    """Whether ``_read`` computes the norms of all rows and calls ``_check_squares``."""
    computes_gram: ClassVar[bool] = False
    """Whether ``_read`` computes a Gram matrix, of rows or of sketches (for
    :func:`fastagg.plan`)."""
    reads_streams_once: bool = False
    """Whether a step reads streamed rows once, and checks their norms in this pass."""
    moves_at_once: ClassVar[bool] = False
    """Whether a step moves the parameters in its pass over rows in memory (``RowSum``)."""
    gathers_rows: bool = False
    """Whether small rows may be copied: the rule writes no memory that rows may share."""
    moves_without_clients: bool = False
    """Whether a round without active clients moves the parameters; otherwise it is skipped."""
    collects_streams: ClassVar[bool] = True
    """Whether ``_receive`` reads streamed rows into S scratch rows (for :func:`fastagg.plan`)."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Options of other rules that this one cannot have, with the reasons."""
    refused_staleness: Mapping[str, str] = {}
    """Functions of ages that the rule cannot have as ``staleness``, with the reasons."""
    own_defaults: Mapping[str, Any] = {}
    """Defaults of options that are not those of the constructor."""
    repeats_clients: ClassVar[bool] = False
    """Whether a step takes several rows of a client, of different ages."""

    def __init__(
        self,
        *,
        num_clients: int,
        num_params: int,
        server_lr: float = 1.0,
        device: str | torch.device = "cpu",
        nonfinite: str = "raise",
        max_norm: float | str | AdaptiveNorm | Mapping[str, Any] | None = "auto",
        server_optimizer: str | ServerOptimizer | Mapping[str, Any] = "sgd",
        min_active: int = 1,
        staleness: str | Staleness | Mapping[str, Any] | None = None,
        max_staleness: int | None = None,
        clip_norm: float | str | AdaptiveClip | Mapping[str, Any] | None = None,
        noise_multiplier: float = 0.0,
    ) -> None:
        self._lock = CallLock()
        self.num_clients = read_size("num_clients", num_clients)
        self.num_params = read_size("num_params", num_params)
        self._set_server_lr(read_factor("server_lr", server_lr))
        self.device = read_device(device)
        if nonfinite not in ("raise", "drop"):
            raise ValueError(f'nonfinite: expected "raise" or "drop", got {nonfinite!r}')
        self.nonfinite = nonfinite
        self._norms: RecentNorms | None = None
        self._clipping: Clipping | None = None
        self._noise_multiplier = 0.0
        self.clip_norm = read_clip_norm(clip_norm)
        self.max_norm = read_max_norm(resolve_max_norm(max_norm, nonfinite, noise_multiplier))
        self.noise_multiplier = noise_multiplier
        self.server_optimizer = read_server_optimizer(server_optimizer)
        self._moments: Moments | None = None
        if self.server_optimizer.name != "sgd":
            self._moments = Moments(self.server_optimizer, self.num_params, self.device)
        self.min_active = min_active
        self.staleness = read_staleness(staleness, self.refused_staleness)
        self.max_staleness = read_max_staleness(max_staleness, self.staleness)
        self.columns = Columns(segment_columns(self.num_params))
        self.committed = 0
        self.last_report: StepReport | None = None

    @property
    def server_lr(self) -> float:
        """The server learning rate: finite, >= 0. Setting it waits for calls of other threads.

        Raises:
            RuntimeError: it is set within a call of this aggregator (in ``confirm``, say), which
                has checked already how far the parameters will move.
        """
        return self._server_lr

    @server_lr.setter
    def server_lr(self, value: float) -> None:
        rate = read_factor("server_lr", value)
        with self._alone("server_lr"):
            self._set_server_lr(rate)

    def _set_server_lr(self, rate: float) -> None:
        self._server_lr = rate
        self._rate = factors_tensor([rate])  # as a weight

    @property
    def max_norm(self) -> MaxNorm:
        """The largest norm that a row may have; None: no limit."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | str | AdaptiveNorm | Mapping[str, Any] | None) -> None:
        max_norm = read_max_norm(resolve_max_norm(value, self.nonfinite, self._noise_multiplier))
        check_noise(self, self._noise_multiplier, max_norm=max_norm)
        if not isinstance(max_norm, AdaptiveNorm):
            self._norms = None
        elif self._norms is None or self._norms.options != max_norm:
            with plain_modes():
                self._norms = RecentNorms(max_norm)
        self._max_norm: MaxNorm = max_norm

    @torch.no_grad()
    def load_state_with(self, state: Mapping[str, Tensor], max_norm: MaxNorm) -> None:
        """Do what :meth:`load_state_dict` does, for an aggregator that had another ``max_norm``.

        That of this aggregator does not change. Norms are kept if both are equal.

        Args:
            state: the state of the other aggregator.
            max_norm: its option of this name.

        Raises:
            TypeError, ValueError: ``max_norm`` is not as described, or is not possible here.
            Exception: as :meth:`load_state_dict` does.

        After an exception nothing has changed.
        """
        with self._alone("load_state_dict"), plain_modes():
            wanted, norms = self._max_norm, self._norms
            fresh = RecentNorms(wanted) if isinstance(wanted, AdaptiveNorm) else None
            try:
                self.max_norm = max_norm
                self._load_state_dict(state)
            except BaseException:
                self._max_norm, self._norms = wanted, norms
                raise
            if self._max_norm != wanted:
                self._max_norm, self._norms = wanted, fresh

    @property
    def min_active(self) -> int:
        """The least number of active clients of a round."""
        return self._min_active

    @min_active.setter
    def min_active(self, value: int) -> None:
        self._min_active = read_count("min_active", value, least=1, most=self.num_clients)

    def step(
        self,
        params: Tensor,
        updates: Updates,
        clients: Clients,
        *,
        ages: Ages | None = None,
        weights: Any = None,
        confirm: Confirm | None = None,
        accept: Accept | None = None,
    ) -> StepReport:
        """Apply one round of updates to ``params``, in place.

        The result is invariant to arrival order: any permutation of (updates, clients, ages) gives
        the same bits. If no client is active, or fewer than ``min_active``, the round is skipped
        and ``params`` do not change, unless the rule says otherwise (``mifa``).

        If ``updates`` is an :class:`fastagg.UpdateBuffer`, a rule with a memory may take ownership
        of its rows of ``clients``: it keeps them and gives the buffer other rows in exchange,
        instead of copying. Results have the same bits. After the step, the content of these rows of
        the buffer is undefined, and earlier views of them must not be used: call ``buffer.row`` and
        ``FlatLayout.bind`` again in every round. After an exception, and for rejected clients, the
        rows are unchanged.

        Args:
            params: [d] float32, contiguous, finite; changed in place. A vector that was copied from
                a model, as by ``torch.nn.utils.parameters_to_vector``, must be written back to it;
                ``FlatLayout.bind`` makes the model's tensors views of the vector instead.
            updates: the updates ``local_model - global_model``, in one of these forms. A tensor
                [S, d] float32 with any row stride, or a sequence of S tensors [d] float32, whose
                row s is that of client ``clients[s]``; never changed. An ``UpdateBuffer``, whose
                row k is that of client k. Or a stream of S rows that need not fit into memory, see
                :mod:`fastagg.updates.streams`.
            clients: S distinct ids in [0, K): a tensor or NumPy array of integers, or a sequence of
                ints. ``fedbuff`` takes several rows of a client, of different ages.
            ages: of the rows, >= 0, in the same forms as ``clients``: rounds (calls of ``step``,
                skipped ones included) since the model that a row started from; above 0 only with
                the option ``staleness``. None: zeros.
            weights: S finite numbers >= 0, not all zero: relative weights of ``clients`` in this
                round, for instance the samples that each has trained on. They replace the
                ``client_weights`` of these clients. None: those count. ``no_weights`` says why a
                rule takes none.
            confirm: is called before anything changes, with the clients whose rows are left out and
                the reasons. If it raises an exception, the step has no effect and raises it, too.
                It may be called several times, the last time with those of the report; and, under
                ``fedavg``, ``amplified``, ``fedau`` and ``fedbuff``, before a step that fails. It
                must not call this aggregator.
            accept: is called after ``confirm`` with the parameters that the step leads to, [d], in
                a tensor of its own; not if the round is skipped. If it raises an exception, the
                step has no effect and raises it, too. It must not call this aggregator. The step
                then computes the parameters, and the moments of a server optimizer, twice, the
                first time in copies.

        Returns:
            The report of the step.

        Raises:
            TypeError, ValueError, IndexError: an argument is not as described, an update is
                not finite (unless dropped), or the step would leave the range of float32.
                Parameters and state then have the same bits as before.
            RuntimeError: this thread is within another call of this aggregator, or this process was
                forked from one that had used it (docs/threads.md).

        If a signal handler raises an exception out of this call, ``committed`` tells whether the
        step has taken effect, and ``last_report`` is then its report.
        """
        with self._alone("step"), plain_modes(), NoGradients():
            try:
                reserve(_RESERVE)
                return self._step(params, updates, clients, ages, weights, confirm, accept)
            except MemoryError as error:
                raise MemoryError(
                    f"step: not enough memory ({error or 'allocation failed'}); parameters "
                    "and state have not changed"
                ) from error

    def _step(
        self,
        params: Tensor,
        updates: Updates,
        clients: Clients,
        ages: Ages | None,
        weights: object,
        confirm: Confirm | None,
        accept: Accept | None,
        *,
        commit_checks: bool = True,
    ) -> StepReport:
        """Run one step.

        Args:
            params, updates, clients, ages, weights, confirm, accept: as for :meth:`step`.
            commit_checks: whether the aggregate may be :class:`fastagg.report.Unchecked`.
        """
        if weights is not None and self.refuses_weights:
            raise ValueError(f"weights: {self.name} takes none: {self.refuses_weights}")
        cohort = read_cohort(
            params,
            updates,
            clients,
            num_clients=self.num_clients,
            num_params=self.num_params,
            device=self.device,
            gather=self.gathers_rows,
            ages=ages,
            repeats=self.repeats_clients,
            weights=weights,
        )
        if self.column_state or self._moments is not None:
            vectors = [*self._whole_state().values(), getattr(self, "aggregate", None)]
            check_apart(params, vectors)
        params = writable(params)
        if self._norms is not None:
            self._norms.begin()
        cohort, reasons = self._without_late(cohort)
        reason, readable = "no client was active", False
        commit_checks = commit_checks and self._moments is None and accept is None
        commit_checks = commit_checks and params.is_cpu and self.columns.whole
        while True:
            if self._clipping is not None:
                self._clipping.begin()  # the next bound follows from the rows that are left
            active = len(set(cohort.ids)) if self.repeats_clients else len(cohort)
            if 0 < active < self.min_active:
                reason = f"{TOO_FEW}: {active} of min_active = {self.min_active}"
                reasons |= dict.fromkeys(cohort.ids, reason)
                cohort = cohort.without(cohort.ids)
            if len(cohort) == 0 and not self.moves_without_clients:
                self._params_peak(params)  # raises for parameters that are not finite
                if confirm is not None:
                    confirm(reasons)
                return self._skip_round(cohort, reasons, reason)
            try:
                if cohort.streamed and not readable:
                    check_readable(cohort, self.columns)
                    readable = True
                clipped, factors = self._clip(cohort)
                received = self._receive(clipped)
                known = self.norms_known or (received.streamed and self.reads_streams_once)
                known = known or self._clipping is not None
                if self.max_norm is not None and not known and received.ids:
                    squares = self.columns.square_norms(received.rows)
                    self._check_squares(received, squares.tolist())
                plan = self._plan_without_bad(received)
                noise = self._noise(received, plan)
                if factors is not None and self.sums_rows_by_plan:
                    plan.weights = plan.weights * factors
                # A step that begins again reads a stream again.
                plan.commit_checks = commit_checks and noise is None and not cohort.streamed
                try:
                    reading = self._read(params, received, plan)
                except (ValueError, BrokenUpdates):
                    if plan.commit_checks:
                        self._params_peak(params)  # raises if non-finite parameters are the cause
                    raise
                break
            except RefusedUpdates as found:
                if isinstance(found, BrokenUpdates) and self.nonfinite == "raise":
                    self._params_peak(params)  # raises if non-finite parameters are the cause
                    raise ValueError(f'{found}; use nonfinite="drop" to leave them out') from None
                reasons |= found.reasons
                cohort = cohort.without(found.reasons)
            except ValueError as error:
                if type(error) is not ValueError or not reasons:
                    raise
                rejected = list_reasons(dict(sorted(reasons.items())), most=5)
                raise ValueError(f"{error} (rejected: {rejected})") from error
        if noise is not None:
            reading.aggregate = self._noised(params, reading.aggregate, noise.std)
        counted = reading.weights
        if factors is not None and not self.sums_rows_by_plan:
            counted = counted * factors
        report = StepReport(
            cohort.clients,
            ids_tensor(sorted(reasons)),
            rounded(counted),
            reading.friends,
            plan.pairs,
            reasons=reasons,
            ages=cohort.ages,
            clip_norm=None if self._clipping is None else float(self._clipping.bound),
            clipped=None if factors is None else cohort.clients[factors < 1.0],
            noise=noise,
        )
        room = _RESERVE + _RESERVE_ROW * len(received)
        reserve(room)  # before other ranks commit
        self.columns.agree([report.active, report.rejected, report.weights, report.friends])
        # Whoever confirms a step expects that it happens, as far as that is known without the pass.
        checked = confirm is not None and plan.commit_checks
        if not checked or self._in_range(params, reading.aggregate):
            if confirm is not None:
                confirm(reasons)
            if accept is not None:
                accept(self._moved(params, reading.aggregate))
            if confirm is not None or accept is not None:
                reserve(room)  # they may have taken it
            with SignalsDeferred():
                if self._move(params, reading.aggregate, self._moments):
                    self._commit(received, plan, reading)
                    self._note_commit(report)
                    return report
        # Nothing has changed. If the read phase checks everything, the step finds out why: it
        # leaves rows out or raises.
        del clipped, received, reading, plan  # their scratch memory
        return self._step(
            params, updates, clients, ages, weights, confirm, accept, commit_checks=False
        )

    def _plan_without_bad(self, cohort: Cohort) -> P:
        """Return the plan. If there is none, find out whether that is because of bad rows.

        Most rules see only as they read rows which ones they must reject. But a rule that needs
        more rows, or refuses so many, refuses them before.

        Raises:
            RefusedUpdates: rows must be rejected.
            ValueError: no plan for the other rows.
        """
        try:
            return self._plan(cohort)
        except ValueError:
            if cohort.ids and (self.max_norm is not None or self.nonfinite == "drop"):
                self._check_squares(cohort, self.columns.square_norms(cohort.rows).tolist())
            raise

    def _without_late(self, cohort: Cohort) -> tuple[Cohort, dict[int, str]]:
        """Return the cohort without rows that are too late, and why, by client id.

        Raises:
            ValueError: the rule was not told what to do with late rows, or an age is too large.
        """
        if cohort.ages is None:
            return cohort, {}
        found = late_positions(cohort, self.staleness, self.max_staleness, self.name)
        reasons = {cohort.ids[position]: reason for position, reason in found.items()}
        left = cohort.without_rows(found) if found else cohort
        if left.ages is None:
            return left, reasons
        found = self._too_late(left, left.ages)
        reasons |= {left.ids[position]: reason for position, reason in found.items()}
        return left.without_rows(found) if found else left, reasons

    def _move(self, params: Tensor, aggregate: Aggregate, moments: Moments | None) -> bool:
        """Move the parameters along the aggregate. Cannot fail after :meth:`_check_range`.

        Args:
            params: [d], changed in place.
            aggregate: the aggregate.
            moments: of the server optimizer, changed in place; None without.

        Returns:
            Whether they have moved; False only for an aggregate that is
            :class:`fastagg.report.Unchecked`.
        """
        vector = aggregate.vector
        if isinstance(aggregate, Unchecked):
            return self._move_checked(params, aggregate)
        if moments is not None:
            moments.move_(params, aggregate, self.server_lr)
        elif vector.dtype == torch.float32:
            ops.weighted_sum_(params, [vector], self._rate)
        else:
            ops.add_total_(params, vector, self.server_lr, aggregate.norm, aggregate.models)
        return True

    def _move_checked(self, params: Tensor, aggregate: Unchecked) -> bool:
        """Move the parameters if the step stays in range; return whether it does."""
        vector, lr, peak = aggregate.vector, self.server_lr, aggregate.peak
        applied = uninitialized((), params.device, torch.bool)
        if isinstance(aggregate, RowSum):
            rows, weights = aggregate.rows, aggregate.weights
            ops.apply_weighted_sum_(params, vector, applied, rows, weights, lr, peak, FLOAT32_LIMIT)
        else:
            ops.apply_aggregate_(params, applied, vector, lr, aggregate.norm, peak, FLOAT32_LIMIT)
        return bool(applied)

    def _moved(self, params: Tensor, aggregate: Aggregate) -> Tensor:
        """Return where :meth:`_move` takes the parameters, with the same bits; nothing changes."""
        moved = params.clone()
        self._move(moved, aggregate, copy.deepcopy(self._moments))
        return moved

    def _note_commit(self, report: StepReport) -> None:
        """Count the step, within its commit, so that an interrupted caller sees that it counts."""
        if self._norms is not None:
            self._norms.add()
        if self._clipping is not None:
            self._clipping.commit()
        self.last_report = report
        self.committed += 1

    def _alone(self, call: str) -> AbstractContextManager[object]:
        """Return the lock for a call that changes the state.

        Raises:
            RuntimeError: this thread is within a call of this aggregator, or as :meth:`_held`.
        """
        if self._lock._is_owned():
            raise RuntimeError(
                f"{call}: expected no other call of this aggregator in this thread; wait until it "
                "has returned"
            )
        return self.held(call)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = CallLock()

    # --- the three phases ---------------------------------------------------------------------

    @abstractmethod
    def _plan(self, cohort: Cohort) -> P:
        """Decide how much each row counts. Reads the state and the ids, no row; writes nothing.

        Args:
            cohort: S >= 1 active clients; S >= 0 if ``moves_without_clients``.

        Raises:
            ValueError: the rule is not defined for these clients.
        """

    @abstractmethod
    def _read(self, params: Tensor, cohort: Cohort, plan: P) -> R:
        """Pass over the rows into scratch, and check everything that could fail.

        If ``plan.commit_checks``, a rule may leave checks of the parameters, and even the pass, to
        the commit (:class:`fastagg.report.Unchecked`, :class:`fastagg.report.RowSum`).

        Args:
            params: [d] float32, not changed. The rule must check that they are finite, with
                ``_params_peak`` or ``_peaks_with``, if its aggregate is not ``Unchecked``.
            cohort: the active clients and their rows, as returned by ``_receive``.
            plan: the result of ``_plan``.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf; the exception names all of them.
            ValueError: parameters are not finite, or the step would leave the range of float32.
        """

    def _commit(self, cohort: Cohort, plan: P, reading: R) -> None:
        """Write the state. Must not fail, and must not allocate anything large.

        The parameters have moved along ``reading.aggregate`` before. By default, a rule has no
        state to write.

        Args:
            cohort, plan: as for ``_read``.
            reading: the result of ``_read``.
        """

    # --- further methods that a rule may override ---------------------------------------------

    def _too_late(self, cohort: Cohort, ages: Tensor) -> dict[int, str]:
        """Return, by position, why late rows cannot be used any more. By default, all can.

        Args:
            cohort: the active clients, with late rows, of which none is above ``max_staleness``.
            ages: [S] int64, those of the cohort.

        Raises:
            ValueError: a row is older than the rule.
        """
        return {}

    def _receive(self, cohort: Cohort) -> Cohort:
        """Return the cohort with rows that ``_read`` can use. By default, all are in memory.

        Raises:
            ValueError: a row cannot be read.
        """
        if not cohort.streamed:
            return cohort
        rows = allocate_rows(len(cohort), self.num_params, self.device)
        self.columns.copy_(rows, cohort.rows)
        return cohort.with_rows(RowList(rows))

    def _skip(self) -> Tensor | None:
        """Update the state for a round without active clients; return ``StepReport.friends``."""
        return None

    @classmethod
    @abstractmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        """Return memory in bytes and work of a step, for :func:`fastagg.plan`.

        Args:
            sizes: K, S, d, and whether the rule may take ownership of rows.
            options: the arguments of the constructor; those with a default may be missing.
        """

    def _skip_round(self, cohort: Cohort, reasons: Mapping[int, str], reason: str) -> StepReport:
        reserve(_RESERVE)
        with SignalsDeferred():
            report = StepReport(
                cohort.clients,
                ids_tensor(sorted(reasons)),
                torch.empty(0, dtype=torch.float32, device="cpu"),
                self._skip(),
                skipped=True,
                reasons=reasons,
                reason=reason,
            )
            self._note_commit(report)
        return report

    def __repr__(self) -> str:
        return describe(self)
