# SPDX-License-Identifier: Apache-2.0
"""MIFA with rows that clients keep: the server's rule, and the client's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, State
from fastagg.checkpoint import invariants
from fastagg.costs import Cost, Sizes
from fastagg.modes import plain_modes
from fastagg.ops.memory import picked
from fastagg.options import FLOAT32_LIMIT, read_size
from fastagg.registry import register
from fastagg.report import Plan, Reading
from fastagg.rules._client_weights import read_client_weights
from fastagg.signals import SignalsDeferred
from fastagg.staleness import no_late_rows
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.buffer import Clients
from fastagg.updates.cohort import Cohort, check_vector, read_ids, read_integers
from fastagg.updates.small import copy_in_pieces_, pieces, uninitialized

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class _Credited(Plan):
    """The plan of :class:`MIFADifferences`, with ``answers`` after the round."""

    answers: Tensor = field(kw_only=True)


@register("mifa-client")
class MIFADifferences(Aggregator[_Credited, Reading]):
    """``mifa`` for clients that keep their last update and send the difference to it.

    ::

        delta_s = u_s - m_s, then m_s = u_s     # at the client
        total += sum_s w_s delta_s
        params += server_lr * total / sum_k w_k

    So the state is one vector, where ``mifa`` has K, and the server needs only the weighted sum of
    the differences, as secure aggregation gives it. A round without active clients moves the
    parameters again, as under ``mifa``. Source: Gu et al. 2021.

    A client must know which of its differences are in the total. The server sends it
    ``answers[k]`` with the model, and :class:`fastagg.MIFAClient` does the rest: a difference that
    was lost, or rejected by the server, leaves no trace at the client, and one whose
    acknowledgement was lost is counted once.

    ``max_norm`` limits the norms of differences. There is no ``clip_norm``, and late differences
    are refused: a client would have another row than the total. ``forget`` of a client needs its
    row, which only the client has: see :meth:`withdraw`.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        empty_rounds: "apply" moves the parameters in a round without active clients; "skip" leaves
            them unchanged.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        total: [d] float64, the sum of all clients' rows, each times its weight (1 if all are
            equal).
        answers: [K] int64, the number of differences of each client in the total.
    """

    column_state = frozenset({"total"})
    state_options = frozenset({"client_weights"})  # those of the rows in the total
    refused_staleness = no_late_rows(
        "a client that was asked again has discarded the difference that it sent before"
    )
    no_clipping = (
        "its clients add the whole difference to their rows; max_norm rejects long differences, "
        "and their clients learn of it"
    )
    collects_streams = False
    no_weights = (
        "it keeps a total of the clients' rows with constant shares, so the weight of a client "
        "cannot change; client_weights are the weights of all rounds"
    )

    def __init__(
        self,
        *,
        client_weights: Any = None,
        empty_rounds: str = "apply",
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**options)
        if empty_rounds not in ("apply", "skip"):
            raise ValueError(f'empty_rounds: expected "apply" or "skip", got {empty_rounds!r}')
        self.empty_rounds = empty_rounds
        self.moves_without_clients = empty_rounds == "apply"
        self.client_weights = read_client_weights(client_weights, self.num_clients)  # [K]
        self._weights = self.client_weights  # in the total, which must not depend on K
        if bool((self._weights == self._weights[0]).all()):
            self._weights = torch.ones_like(self._weights)
        self._norm = 1.0 / float(self._weights.sum())
        self.answers = torch.zeros(self.num_clients, dtype=torch.int64, device="cpu")
        self.total = allocate_vector(self.num_params, self.device, torch.float64)
        self._next_total = allocate_vector(self.num_params, self.device, torch.float64)  # scratch
        self._zeros = torch.zeros(self.num_params, dtype=torch.float32, device=self.device)  # [d]

    @torch.no_grad()
    def withdraw(self, rows: Tensor, clients: Clients) -> None:
        """Take the rows of clients that leave out of the total, and forget the clients.

        Args:
            rows: [n, d] float64 or float32, finite, ``MIFAClient.row`` of each of ``clients``:
                zeros for a client of which the total holds nothing (``answers`` is 0). Of the
                others, only the total without them is checked: it must be in the range of float32.
            clients: n distinct ids in [0, K).

        Raises:
            TypeError, ValueError, IndexError: an argument is not as described. Nothing has changed.
        """
        with self._alone("withdraw"), plain_modes():
            ids = read_ids(clients, self.num_clients)
            shape = (len(ids), self.num_params)
            kinds = (torch.float32, torch.float64)
            if not isinstance(rows, Tensor) or rows.shape != shape or rows.dtype not in kinds:
                found = [*rows.shape] if isinstance(rows, Tensor) else type(rows).__name__
                raise ValueError(f"rows: expected {[*shape]} float64 or float32, got {found}")
            if not bool(torch.isfinite(rows).all()):
                raise ValueError("rows: expected finite values, got NaN or Inf")
            self._leave(ids, self._without(rows.to(self.device, torch.float64), ids))

    def _without(self, rows: Tensor, ids: list[int]) -> Tensor:
        """Return the total without the rows of clients.

        Raises:
            ValueError: these rows cannot be in the total.
        """
        given = zip(ids, rows, strict=True)
        foreign = [client for client, row in given if not self.answers[client] and bool(row.any())]
        if foreign:
            raise ValueError(
                "rows: expected zeros for clients of which the total holds nothing, got others for "
                f"{foreign[:10]}"
            )
        total = self.total - self._weights[ids].to(self.device) @ rows
        most = FLOAT32_LIMIT / self._norm
        if not bool((total.abs() <= most).all()):  # NaN is not, either
            raise ValueError(
                f"rows: expected rows without which the total is within {most:.9g}, got others"
            )
        return total

    def _leave(self, ids: list[int], total: Tensor) -> None:
        answers = self.answers.index_fill(0, torch.tensor(ids, dtype=torch.int64, device="cpu"), 0)
        if not bool(answers.any()):
            total = torch.zeros_like(total)  # no rounding errors remain
        with SignalsDeferred():
            self.answers, self.total = answers, total

    def _forget(self, ids: list[int]) -> None:
        others = self.answers.clone()
        others[ids] = 0
        counted = [client for client in ids if self.answers[client] > 0]
        if counted and bool(others.any()):
            raise ValueError(
                f"clients: {self.name} cannot forget {counted[:10]}, because only these clients "
                "have their rows; get MIFAClient.row from them and call withdraw, or forget all "
                "clients"
            )
        self._leave(ids, self.total)

    def _check_growth(self, grown: MIFADifferences) -> None:
        if self._scale(grown) is None:
            raise ValueError(
                "client_weights: expected the same weights for the present clients, which only "
                "they could apply to their rows in the total, got others"
            )

    def _keep_others(self, before: MIFADifferences) -> None:
        scale = before._scale(self)
        if scale is not None:  # equal weights, whatever they are, are ones in the total of `before`
            self.total.mul_(scale)

    def _scale(self, grown: MIFADifferences) -> float | None:
        """Return the factor of the total for the weights of ``grown``; None if no factor fits."""
        present = grown._weights[: self.num_clients]
        if torch.equal(present, self._weights):
            return 1.0
        alike = bool((present == present[0]).all()) and bool((self._weights == 1.0).all())
        return float(present[0]) if alike else None

    def _receive(self, cohort: Cohort) -> Cohort:
        return cohort  # rows need not be in memory

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True  # by their weights, because no row is remembered

    def _plan(self, cohort: Cohort) -> _Credited:
        weights = self._norm * picked(self._weights, cohort.clients)
        answers = self.answers.clone()
        answers[cohort.clients] += 1
        return _Credited(weights, answers=answers)

    def _read(self, params: Tensor, cohort: Cohort, plan: _Credited) -> Reading:
        peak = self._known_peak(params, plan)
        if cohort.ids:
            peaks = uninitialized([len(cohort)], self.device)
            self.columns.memory_total_(
                self._next_total,
                peaks,
                self.total,
                [self._zeros] * len(cohort),
                cohort.rows,
                cohort.clients,
                cohort.scaled(picked(self._weights, cohort.clients)),
                [],
                None,
            )
            self._check_peaks(cohort, cohort.scaled(self.columns.join_peaks(peaks)))
        else:
            copy_in_pieces_(self._next_total, self.total)
        ends = map(torch.aminmax, pieces(self._next_total))
        parts = [torch.maximum(-least, most) for least, most in ends]
        largest = parts[0] if len(parts) == 1 else torch.stack(parts).max()
        largest = largest.mul_(self._norm).to("cpu", torch.float32)
        aggregate = float(self.columns.join_peaks(largest.view(1)))
        aggregate *= 1.0 + 2.0**-23  # it was rounded
        v = self._total(plan, peak, self._next_total, aggregate, self._norm)
        return Reading(plan.weights, v)

    def _commit(self, cohort: Cohort, plan: _Credited, reading: Reading) -> None:
        self.total, self._next_total = self._next_total, self.total
        self.answers = plan.answers

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        total, answers = cast(Tensor, state["total"]), cast(Tensor, state["answers"])
        invariants.check_rounds("answers", answers)
        most = FLOAT32_LIMIT / self._norm
        invariants.check_range("total", total, -most, most)
        if not bool(answers.any()):
            invariants.require(not bool(total.any()), "total", "zeros before the first answer")

    def _state(self) -> State:
        return {"total": self.total, "answers": self.answers}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # abs_max reads params; rows and total are read, the new total is written and read again
        # for its largest magnitude; then it is added to params
        S, d = sizes.S, sizes.d
        return Cost(8 * d + 8 * sizes.K, 12 * d, 4 * S * d + 44 * d, 3 * S * d + 4 * d)


class MIFAClient:
    """Keep the row of one client, for a server with the rule ``mifa-client``.

    In each round in which it is asked, the client gets ``answers[k]`` of the server's rule with the
    model, and calls ``learn(answers)``. It trains, and sends ``difference_(update)``.

    The server's total holds ``row``, bit for bit but for the roundings of the float64 total. It
    differs from the last update by the rounding of its last difference to float32: errors do not
    accumulate.

    Args:
        num_params: d.
        device: where the row lives.

    Attributes:
        row: [d] float64, what the server's total holds of this client; zeros at first.
        answers: number of this client's differences that are in the total.
        pending: [d] float32, the difference that was sent last, until :meth:`learn`; else None.

    These three are the client's state. A client that loses it cannot go on under its id.
    """

    def __init__(self, num_params: int, device: str | torch.device = "cpu") -> None:
        size = read_size("num_params", num_params)
        self.row = torch.zeros(size, device=device, dtype=torch.float64)
        self.answers = 0
        self.pending: Tensor | None = None

    def learn(self, answers: int) -> None:
        """Find out whether the last difference counted, and keep or discard it.

        Args:
            answers: the server's ``answers`` for this client. 0: the server's total has nothing of
                this client, so its row is zero.

        Raises:
            TypeError: ``answers`` is no integer. Nothing has changed.
            ValueError: the server's count is neither that of this client nor one more. The server
                has gone back to an earlier checkpoint, or another client has this id. Nothing has
                changed.
        """
        (answers,) = read_integers("answers", [answers], 1)  # a tensor may change later
        if answers == self.answers + 1 and self.pending is not None:
            self.row = self.row + self.pending  # exact but for the last bits of float64
            self.answers = answers
        elif answers == 0:
            self.row = torch.zeros_like(self.row)
            self.answers = 0
        elif answers != self.answers:
            more = "" if self.pending is None else f" or {self.answers + 1}"
            raise ValueError(
                f"answers: expected {self.answers}{more}, got {answers}; the server's total is not "
                "that to which this client's row belongs"
            )
        self.pending = None

    @torch.no_grad()
    def difference_(self, update: Tensor) -> Tensor:
        """Subtract the row from ``update`` [d] float32 in place; return it, to be sent.

        Raises:
            RuntimeError: nothing is known of the last difference; call :meth:`learn`.
            TypeError, ValueError: ``update`` is not as described.
        """
        if self.pending is not None:
            raise RuntimeError(
                "difference_: call learn first: the last difference may have counted"
            )
        check_vector("update", update, len(self.row), self.row.device)
        ops.add_total_(update, self.row, -1.0, 1.0)
        self.pending = update.clone()
        return update
