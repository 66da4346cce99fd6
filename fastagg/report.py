# SPDX-License-Identifier: Apache-2.0
"""What the phases of a step return, the report of a step, and why it rejects rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fastagg.noise import Noise
from fastagg.ops.row_lists import Rows

TOO_FEW = "too few active clients"
"""The beginning of the reason if all rows are left out because of ``min_active``."""


@dataclass(frozen=True, eq=False)
class StepReport:
    """The report of one step. All tensors are on the CPU and sorted by client id.

    Attributes:
        active: [S] int64, ids of the clients whose rows were used, ascending.
        rejected: [R] int64, ids of the clients whose rows were left out, ascending.
        weights: [S] float32, the factor of the row of each client in ``active`` in the aggregate,
            before ``server_lr``. In rules with a memory, the aggregate also contains memory rows.
            Rules that take every column by itself have no such factor: the weights are equal, of
            the clients that ``bulyan`` chooses, or of all under the others.
        friends: [K] int64, the client whose row was used for each client: its own id if it was
            active; -1 if it was absent and has no friend (the mean of the active rows was used).
            None for rules without substitution.
        pairs: number of ordered pairs (i, j) of active clients whose similarity the rule needed.
        skipped: True if the round was skipped; the parameters have not changed.
        reasons: for each client id in ``rejected``, why its row was left out.
        reason: why the round was skipped: no client was active, or fewer than ``min_active``.
            Empty if it was not skipped.
        ages: [S] int64, the age of each row of ``active``; None: no row was late. ``fedbuff`` takes
            several rows of a client: its id is then in ``active`` several times, in the order of
            ages, and also in ``rejected`` if one of its rows was too old.
        clip_norm: the norm to which longer rows were scaled down; None without ``clip_norm``.
        clipped: [C] int64, ids of the clients in ``active`` whose rows were scaled down. Their
            ``weights`` are the factors of the rows as they came. None without ``clip_norm``.
        noise: the noise in the aggregate; None without ``noise_multiplier``.
    """

    active: Tensor
    rejected: Tensor
    weights: Tensor
    friends: Tensor | None = None
    pairs: int = 0
    skipped: bool = False
    reasons: Mapping[int, str] = field(default_factory=dict)
    reason: str = ""
    ages: Tensor | None = None
    clip_norm: float | None = None
    clipped: Tensor | None = None
    noise: Noise | None = None


@dataclass
class Plan:
    """The result of the first phase of a step: how much each row counts, from the state alone.

    Attributes:
        weights: [S] float64, the weight of each active client's row.
        pairs: ``StepReport.pairs``.
        commit_checks: whether the commit can make checks: the aggregate may be
            :class:`Unchecked`.
    """

    weights: Tensor
    pairs: int = 0
    commit_checks: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The aggregate v of a step, along which the server optimizer moves the parameters.

    v is ``norm * vector``, or ``norm * vector - params`` with ``models``.

    Attributes:
        vector: [d] float32, with ``norm=1`` and without ``models``; or float64.
        peak: an upper bound of the magnitudes in v.
        norm: factor that makes ``vector`` a mean.
        models: ``vector`` is a sum of models, not of updates.
    """

    vector: Tensor
    peak: float
    norm: float = 1.0
    models: bool = False


@dataclass(frozen=True, eq=False)
class Unchecked(Aggregate):
    """An aggregate for which the commit finds out whether the step stays in the range of float32.

    If the parameters are not finite, or the step would leave the range, the parameters keep their
    bits, and the step begins again, with an aggregate that ``_read`` checks. It has no ``models``.

    Attributes:
        vector: [d] float32 or float64.
        peak: the largest magnitude in v that may be applied, if ``vector`` is float32; an upper
            bound of the magnitudes in v, if it is float64.
    """


@dataclass(frozen=True, eq=False)
class RowSum(Unchecked):
    """A sum of rows that no pass has computed: the commit reads the rows and moves the parameters.

    The commit then finds out whether the rows are finite as well.

    Attributes:
        vector: [d] float32, scratch for the parameters from before.
        peak: the largest magnitude in v that may be applied.
        rows: S rows in memory.
        weights: [S] float64.
    """

    rows: Rows = field(kw_only=True)
    weights: Tensor = field(kw_only=True)


@dataclass
class Reading:
    """The result of the second phase of a step, the pass over the rows. It is not yet state.

    Attributes:
        weights: [S] float64, ``StepReport.weights``.
        aggregate: the aggregate, in scratch.
        friends: ``StepReport.friends``.
    """

    weights: Tensor
    aggregate: Aggregate
    friends: Tensor | None = field(default=None, kw_only=True)


def list_reasons(reasons: Mapping[int, str], most: int | None = None) -> str:
    """Return why rows are rejected, as text.

    Args:
        reasons: by client id.
        most: how many are listed; None: all.
    """
    listed = [f"client {client}: {reason}" for client, reason in reasons.items()]
    more = [] if most is None or len(listed) <= most else [f"and {len(listed) - most} more"]
    return "; ".join(listed[:most] + more)


class RefusedUpdates(Exception):
    """Raised within a step to reject rows.

    Args:
        reasons: why each row is rejected, by client id.
        message: for the exception; empty: a list of the reasons.
    """

    def __init__(self, reasons: Mapping[int, str], message: str = "") -> None:
        super().__init__(f"updates: {message or list_reasons(reasons)}")
        self.reasons = reasons


class BrokenUpdates(RefusedUpdates):
    """Raised within a step if rows are damaged; ``nonfinite`` decides whether the step fails."""


class NonFiniteUpdates(BrokenUpdates):
    """Raised within a step if the rows of ``clients`` [R] int64 hold NaN or Inf."""

    def __init__(self, clients: Tensor) -> None:
        ids = clients.tolist()
        message = f"expected finite values, got NaN or Inf from client(s) {ids}"
        super().__init__(dict.fromkeys(ids, "NaN or Inf"), message)


class OversizedUpdates(RefusedUpdates):
    """Raised within a step with ``nonfinite="drop"`` if rows are near the end of float32.

    Args:
        sizes: what was measured of each row, by client id.
        measure: what it is.
        limits: the largest accepted values, by client id.
    """

    def __init__(
        self, sizes: Mapping[int, float], measure: str, limits: Mapping[int, float]
    ) -> None:
        super().__init__(
            {k: f"{measure} {size:.6g}, but at most {limits[k]:.6g} is accepted"
             for k, size in sizes.items()}
        )  # fmt: skip
