# SPDX-License-Identifier: Apache-2.0
"""The contract of every aggregation rule, and the report of a step."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from torch import Tensor

from fastagg import checkpoint
from fastagg.costs import Cost, Sizes
from fastagg.memory.rows import RowMemory
from fastagg.options import FLOAT32_LIMIT, read_device, read_factor, read_positive, read_size
from fastagg.updates.allocation import allocate_rows
from fastagg.updates.buffer import Clients
from fastagg.updates.cohort import Cohort, Updates, read_cohort
from fastagg.updates.columns import Columns, segment_columns

if TYPE_CHECKING:
    from typing_extensions import Required


State = Mapping[str, Tensor | RowMemory]
"""The state of a rule, live: tensors by name, and what is remembered row by row."""


@dataclass(frozen=True, eq=False)
class StepReport:
    """What one server step did. Everything is on the CPU, in the order of client ids.

    Attributes:
        active: [S] int64, ids whose rows were used, ascending.
        rejected: [R] int64, ids whose rows were left out, ascending.
        weights: [S] float32, the factor of each row of ``active`` in this round's aggregate,
            before ``server_lr``. Rules with a memory add remembered rows to it.
        friends: [K] int64, whose row stood in for each client (an active client's own id, -1:
            nobody's, the mean of the active rows); None for rules without substitution.
        pairs: ordered pairs (i, j) of active clients whose similarity the rule needed.
        skipped: True if nobody was active: the parameters are as before.
        reasons: id -> why its row was left out, for all of ``rejected``.
    """

    active: Tensor
    rejected: Tensor
    weights: Tensor
    friends: Tensor | None = None
    pairs: int = 0
    skipped: bool = False
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to happen: its numbers, and the writing, which cannot fail."""

    weights: Tensor  # [S] float64
    commit: Callable[[], None]
    friends: Tensor | None = None  # [K] int64
    pairs: int = 0


class RefusedUpdates(Exception):
    """Raised inside a step when rows are not to be used; ``reasons`` says why, by client id."""

    def __init__(self, reasons: Mapping[int, str], message: str = "") -> None:
        listed = "; ".join(f"client {client}: {reason}" for client, reason in reasons.items())
        super().__init__(f"updates: {message or listed}")
        self.reasons = reasons


class BrokenUpdates(RefusedUpdates):
    """Raised inside a step when rows cannot be used."""


class NonFiniteUpdates(BrokenUpdates):
    """Raised inside a step when rows hold NaN or Inf; ``clients`` [R] int64: whose."""

    def __init__(self, clients: Tensor) -> None:
        ids = clients.tolist()
        message = f"expected finite values, got NaN or Inf from client(s) {ids}"
        super().__init__(dict.fromkeys(ids, "NaN or Inf"), message)


class CommonOptions(TypedDict, total=False):
    """The options that every rule has; :class:`Aggregator` describes them."""

    num_clients: Required[int]
    num_params: Required[int]
    server_lr: float
    device: str | torch.device
    nonfinite: str
    max_norm: float | None


class Aggregator(ABC):
    """A server-side aggregation rule with its state.

    A step has two phases. ``_prepare`` reads the rows, writes to private scratch only, and
    makes every check; the ``commit`` that it returns writes parameters and state. So after any
    exception parameters and state are what they were, bit for bit.

    Args:
        num_clients: K; client ids are in [0, K).
        num_params: d, the length of the flat parameter vector.
        server_lr: finite, >= 0; may be changed between steps.
        device: where parameters, updates and state live: "cpu", or "cuda" where
            :func:`fastagg.ops.devices` has it.
        nonfinite: what to do with an update that holds NaN or Inf, or whose file cannot be read:
            "raise" a ValueError, or "drop" it, that is, treat its client as inactive and list it in
            ``rejected``.
        max_norm: > 0, or None; may be changed between steps. A finite row whose Euclidean norm, in
            units of the updates, is larger is left out, whatever ``nonfinite`` says: its client
            counts as inactive and is listed in ``rejected`` (norm thresholding). Rules that have
            the Gram matrix of the rows read the norms there; others read the rows once more.

    Attributes:
        columns: where the d columns are: in this process, unless somebody else says so.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    name: ClassVar[str]
    """The name under which the rule is registered."""
    column_state: ClassVar[frozenset[str]] = frozenset()
    """Names of the state whose last dimension is d; all other state is the same for any d."""
    norms_known: ClassVar[bool] = False
    """Whether ``_prepare`` has the norms of all rows anyhow and calls ``_check_squares`` itself."""

    def __init__(
        self,
        *,
        num_clients: int,
        num_params: int,
        server_lr: float = 1.0,
        device: str | torch.device = "cpu",
        nonfinite: str = "raise",
        max_norm: float | None = None,
    ) -> None:
        self.num_clients = read_size("num_clients", num_clients)
        self.num_params = read_size("num_params", num_params)
        self.server_lr = server_lr
        self.device = read_device(device)
        if nonfinite not in ("raise", "drop"):
            raise ValueError(f'nonfinite: expected "raise" or "drop", got {nonfinite!r}')
        self.nonfinite = nonfinite
        self.max_norm = max_norm
        self.columns = Columns(segment_columns(self.num_params))

    @property
    def server_lr(self) -> float:
        """The server learning rate: finite, >= 0."""
        return self._server_lr

    @server_lr.setter
    def server_lr(self, value: float) -> None:
        self._server_lr = read_factor("server_lr", value)
        self._rate = torch.tensor([self._server_lr], dtype=torch.float64)  # as a weight

    @property
    def max_norm(self) -> float | None:
        """The largest norm that a row may have; None: any."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        self._max_norm = None if value is None else read_positive("max_norm", value)

    @torch.no_grad()
    def step(self, params: Tensor, updates: Updates, clients: Clients) -> StepReport:
        """Move ``params`` by one round of updates, in place.

        The order of the rows does not matter: any permutation of (updates, clients) gives the
        same bits. With no active client the round is skipped and ``params`` stay as they are.

        Passing an :class:`fastagg.UpdateBuffer` hands its rows of ``clients`` over: a rule with a
        memory keeps them and gives the buffer other storage in exchange, instead of copying.
        Results are the same to the bit. After the step the content of these rows is undefined, and
        views of them taken before must not be used (``buffer.row``, ``FlatLayout.bind``: again in
        every round). After an exception, and for rejected clients, the rows are as before.

        Args:
            params: [d] float32, contiguous, finite; changed in place.
            updates: [S, d] float32 (any row stride), or S tensors [d]; row s is
                ``local_model - global_model`` of client ``clients[s]``. Never changed. Or a buffer
                whose row k is that of client k. Or a :class:`fastagg.streaming.ColumnSource` to
                read S rows from, which need not fit into memory.
            clients: S distinct ids in [0, K): an int64 tensor or a sequence of ints.

        Returns:
            A report of what was done.

        Raises:
            TypeError, ValueError, IndexError: an argument is not as described, an update is
                not finite (unless dropped), or the step would leave the range of float32.
                Parameters and state are then bit-identical to before.
        """
        cohort = read_cohort(
            params,
            updates,
            clients,
            num_clients=self.num_clients,
            num_params=self.num_params,
            device=self.device,
        )
        reasons: dict[int, str] = {}
        prepared = None
        while len(cohort) > 0 and prepared is None:
            try:
                if cohort.streamed and not reasons:
                    self._check_readable(cohort)
                received = self._receive(cohort)
                if self.max_norm is not None and not self.norms_known:
                    squares = self.columns.square_norms(received.rows)
                    self._check_squares(received, squares.tolist())
                prepared = self._prepare(params, received)
            except RefusedUpdates as found:
                if isinstance(found, BrokenUpdates) and self.nonfinite == "raise":
                    self._params_peak(params)  # broken parameters break updates
                    raise ValueError(f'{found}; nonfinite="drop" would leave them out') from None
                reasons |= found.reasons
                cohort = cohort.without(found.reasons)
        rejected = torch.tensor(sorted(reasons), dtype=torch.int64)
        if prepared is None:
            self._params_peak(params)
            friends = self._skip()
            return StepReport(
                cohort.clients, rejected, torch.zeros(0), friends, skipped=True, reasons=reasons
            )
        report = StepReport(
            cohort.clients,
            rejected,
            prepared.weights.to(torch.float32),
            prepared.friends,
            prepared.pairs,
            reasons=reasons,
        )
        self.columns.agree([report.active, report.rejected, report.weights, report.friends])
        prepared.commit()
        return report

    @abstractmethod
    def _prepare(self, params: Tensor, cohort: Cohort) -> Prepared:
        """Do everything of a step but the writing.

        Args:
            params: [d] float32; must not be changed before the commit. The rule checks that they
                are finite, by ``_params_peak`` or ``_peaks_with``, when that is cheapest.
            cohort: S >= 1 active clients.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf; names all of them.
            ValueError: parameters are not finite, or the step would leave the range of float32.
        """

    def _receive(self, cohort: Cohort) -> Cohort:
        """The cohort as the rule needs it: with rows in memory, unless a rule can do without.

        Raises:
            ValueError: a row cannot be read.
        """
        if not cohort.streamed:
            return cohort
        rows = allocate_rows(len(cohort), self.num_params, self.device)
        self.columns.copy_(rows, cohort.rows)
        return Cohort(cohort.clients, rows)

    def _check_readable(self, cohort: Cohort) -> None:
        """Refuse streamed rows that cannot be read, here or on another rank.

        Raises:
            BrokenUpdates: names all of them.
        """
        problems = cohort.problems()
        flags = torch.zeros(len(cohort), dtype=torch.bool)
        flags[list(problems)] = True
        flags = self.columns.join_flags(flags)
        if bool(flags.any()):
            why = {
                client: f"cannot be read: {problems.get(position, 'on another rank')}"
                for position, client in enumerate(cohort.clients.tolist())
                if flags[position]
            }
            raise BrokenUpdates(why)

    @abstractmethod
    def _state(self) -> State:
        """What a checkpoint must hold, not copied."""

    @classmethod
    @abstractmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        """What the rule needs and does, for :func:`fastagg.plan`.

        Args:
            sizes: K, S, d, and whether rows are handed over.
            options: given to the constructor; those with a default may be missing.
        """

    def _state_loaded(self) -> None:  # noqa: B027 (a hook that rules may leave alone)
        """Rebuild what is derived from the state, after new state was copied in."""

    def _skip(self) -> Tensor | None:
        """Account for a round without active clients; returns ``StepReport.friends``."""
        return None

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, from which ``make(name, **options)`` makes a twin."""
        return {
            "num_clients": self.num_clients,
            "num_params": self.num_params,
            "server_lr": self.server_lr,
            "device": str(self.device),
            "nonfinite": self.nonfinite,
            "max_norm": self.max_norm,
        }

    @property
    def memory_bytes(self) -> int:
        """Bytes of the state."""
        return sum(value.nbytes for value in self._state().values())

    def live_state(self) -> dict[str, Tensor | RowMemory]:
        """The state itself, not copied: what a checkpoint holds."""
        return dict(self._state())

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state; later steps do not change it."""
        return {name: value.clone() for name, value in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of ``state``, as ``state_dict`` of the same rule gave it.

        Raises:
            TypeError, ValueError: names, shapes or dtypes do not fit, or values are not
                finite. The state is then as before.
        """
        own = self._state()
        if set(state) != set(own):
            raise ValueError(
                f"state: expected the tensors {sorted(own)} of rule {self.name!r}, "
                f"got {sorted(state)}"
            )
        for name, value in own.items():
            _check_state(name, state[name], value)
        for name, value in own.items():
            value.copy_(state[name])
        self._state_loaded()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write options and state to one file, replacing an older one atomically.

        Raises:
            ValueError: an option cannot be written (a custom threshold function).
            OSError: the folder is missing or not writable; an older file is then intact.
        """
        checkpoint.write(path, self.name, self.options(), self._state())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_clients={self.num_clients}, "
            f"num_params={self.num_params}, server_lr={self.server_lr})"
        )

    # --- for the rules: the checks that keep parameters and state finite, and rows short ------

    def _params_peak(self, params: Tensor) -> float:
        """The largest magnitude in the parameters.

        Raises:
            ValueError: they hold NaN or Inf.
        """
        return self._peaks_with(params, [])[0]

    def _peaks_with(self, params: Tensor, vectors: list[Tensor]) -> list[float]:
        """The largest magnitudes in the parameters, and in each of ``vectors`` [d], in one pass.

        Just before a commit, this also brings the parameters into the cache for it.

        Raises:
            ValueError: the parameters hold NaN or Inf.
        """
        peaks: list[float] = self.columns.abs_max([params, *vectors]).tolist()
        if not math.isfinite(peaks[0]):
            raise ValueError("params: expected finite values, got NaN or Inf")
        return peaks

    def _row_peaks(self, cohort: Cohort) -> Tensor:
        """The largest magnitude of each row, [S] float64.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf.
        """
        return self._check_peaks(cohort, self.columns.abs_max(cohort.rows))

    def _check_peaks(self, cohort: Cohort, peaks: Tensor) -> Tensor:
        """``peaks`` [S], the largest magnitude of each whole row, as float64.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf.
        """
        peaks = peaks.to("cpu", torch.float64)
        finite = torch.isfinite(peaks)
        if not bool(finite.all()):
            raise NonFiniteUpdates(cohort.clients[~finite])
        return peaks

    def _check_squares(self, cohort: Cohort, squares: Sequence[float]) -> None:
        """Refuse rows by their squared norms, one for each of the cohort.

        Raises:
            NonFiniteUpdates: rows hold NaN or Inf.
            RefusedUpdates: rows are longer than ``max_norm``.
        """
        if not all(map(math.isfinite, squares)):
            broken = [not math.isfinite(square) for square in squares]
            raise NonFiniteUpdates(cohort.clients[torch.tensor(broken)])
        if self.max_norm is None:
            return
        norms = zip(cohort.ids, map(math.sqrt, squares), strict=True)
        too_long = {k: norm for k, norm in norms if norm > self.max_norm}
        if too_long:
            bound = self.max_norm
            raise RefusedUpdates(
                {k: f"norm {norm:.6g}, but max_norm is {bound:.6g}" for k, norm in too_long.items()}
            )

    def _check_range(self, peak: float, aggregate: float) -> None:
        """Refuse a step that could leave the range of float32.

        Args:
            peak: the largest magnitude in the parameters.
            aggregate: an upper bound of the magnitudes in the aggregate.
        """
        if not peak + self.server_lr * aggregate <= FLOAT32_LIMIT:
            raise ValueError(
                f"updates: the step could leave the range of float32 (parameters up to "
                f"{peak:.3g}, aggregate up to {aggregate:.3g}, server_lr {self.server_lr:.3g})"
            )


def _check_state(name: str, value: object, own: Tensor | RowMemory) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"state[{name!r}]: expected a tensor, got {type(value).__name__}")
    if value.dtype != own.dtype:
        raise TypeError(f"state[{name!r}]: expected dtype {own.dtype}, got {value.dtype}")
    if value.shape != own.shape:
        raise ValueError(
            f"state[{name!r}]: expected shape {list(own.shape)}, got {list(value.shape)}"
        )
    if value.device.type == "meta":
        raise ValueError(f"state[{name!r}]: expected a tensor with data, got one on device meta")
    parts = value.reshape(-1).split(1 << 24) if value.is_floating_point() else ()
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        raise ValueError(f"state[{name!r}]: expected finite values, got NaN or Inf")
