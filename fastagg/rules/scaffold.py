# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: control variates against client drift (Karimireddy et al. 2020)."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, State
from fastagg.checkpoint import invariants
from fastagg.costs import Cost, Sizes
from fastagg.memory.overlap import refuse_shared_memory
from fastagg.memory.rows import RowMemory
from fastagg.ops.memory import picked
from fastagg.options import FLOAT32_LIMIT
from fastagg.registry import register
from fastagg.report import Plan, Reading
from fastagg.staleness import no_late_rows
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import factors_tensor, uninitialized

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LEAST_WORK = 1.0 / FLOAT32_LIMIT

_ROUNDING = 1.0 + 2.0**-20
"""Margin for the float32 roundings of a round's control variates, each of relative size 2^-24."""


@dataclass
class Controlled(Reading):
    """Results of the pass over the rows; new parameters and control variates are in scratch."""

    peaks: Tensor  # [K] float64, >= |controls[k]| after the step
    mean_peak: float  # >= |mean_control| after the step


@register("scaffold")
class Scaffold(Aggregator[Plan, Controlled]):
    """The server's part of SCAFFOLD (Algorithm 1, option II), in one pass over the updates.

    Every client i has a control variate c_i, and the server their mean c; all are zero at first.
    In its K_i local steps at learning rate eta_l, an active client adds ``control(i) = c - c_i`` to
    each gradient. The server then computes, with i over the active clients::

        params += server_lr * mean_i u_i
        c_i    += d_i,   d_i = -c - u_i / (K_i eta_l)   # its mean local gradient
        c      += 1/K sum_i d_i

    In the paper, client i keeps c_i and uploads both u_i and d_i. Here the server computes d_i from
    u_i, so clients have no state and upload one vector, but the server must know K_i eta_l. To
    compare communication with the paper, count two uploads per client and round.

    Option I of the paper, where c_i is the gradient at the global model, is not available: it needs
    another pass over the clients' data and a second row from each of them.

    The rule takes no late rows: d_i of a late row has the c of the round in which its client
    started, which the server does not keep.

    Args:
        local_work: K_i eta_l > 0, the number of local steps times the local learning rate, or the
            sum of the rates if they change within the round: one number for all clients, or [K].
            May be changed between steps; change it whenever the learning rate changes. The
            attribute is a tensor, [K] float64; assigning one number sets all of them.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        controls: [K, d] float32, c_i; ``controls[k]`` returns a copy of row k,
            ``controls.clone()`` of all.
        mean_control: [d] float32, c.
    """

    column_state = frozenset({"controls", "mean_control"})
    refused_staleness = no_late_rows(
        "the client trained with the control variates of its own round, and the server keeps only "
        "the present ones"
    )
    uploads_per_client: ClassVar[int] = 2
    """Number of vectors [d] that a client sends per round in the paper."""

    def __init__(
        self, *, local_work: float | Sequence[float] | Tensor, **options: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**options)
        self.local_work = local_work
        self.controls = RowMemory(self.num_clients, self.num_params, self.device)
        self.mean_control = allocate_vector(self.num_params, self.device)
        self._next_mean = allocate_vector(self.num_params, self.device)  # scratch
        self._aggregate = allocate_vector(self.num_params, self.device, torch.float64)  # scratch
        # >= |controls[k]|
        self._peaks = torch.zeros(self.num_clients, dtype=torch.float64, device="cpu")
        self._mean_peak = 0.0  # >= |mean_control|

    @property
    def local_work(self) -> Tensor:
        """K_i eta_l of every client, [K] float64, > 0."""
        return self._local_work

    @local_work.setter
    def local_work(self, value: float | Sequence[float] | Tensor) -> None:
        self._local_work = _read_work(value, self.num_clients)

    @torch.no_grad()
    def control(self, client: int, out: Tensor | None = None) -> Tensor:
        """Return c - c_i, which client i adds to each gradient in the next round.

        Args:
            client: its id i.
            out: [d] float32, contiguous, overwritten; None: a new tensor.

        Returns:
            ``out``.

        Raises:
            IndexError: there is no such client.
        """
        client = operator.index(client)
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client: expected an id in [0, {self.num_clients}), got {client}")
        if out is None:
            out = torch.empty_like(self.mean_control)
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64, device="cpu")
        return ops.weighted_sum_(
            out, [self.mean_control, self.controls.rows[client]], signs, beta=0.0
        )

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True  # by their weights and steps

    def _plan(self, cohort: Cohort) -> Plan:
        return Plan(factors_tensor([1.0 / len(cohort)] * len(cohort)))

    def _read(self, params: Tensor, cohort: Cohort, plan: Plan) -> Controlled:
        peak, clients = self._known_peak(params, plan), cohort.clients
        own, new = self.controls.of(cohort.ids), self.controls.spares.rows(cohort.ids)
        refuse_shared_memory(cohort, [*own, *new, self.mean_control, self._next_mean])
        work = picked(self.local_work, clients)  # [S]
        found = uninitialized([len(cohort)], self.device)
        ops.scaffold_mean_(
            self._aggregate,
            self._next_mean,
            found,
            self.mean_control,
            cohort.tensors(),
            own,
            clients,
            cohort.scaled(plan.weights),
            cohort.scaled(-1.0 / work),
            1.0 / self.num_clients,
            new,
        )
        largest = self._largest_row() * work.clamp(max=1.0)  # of u_i, so that of u_i / (K_i eta_l)
        found = cohort.scaled(self.columns.join_peaks(found))
        row_peaks = factors_tensor(self._check_peaks(cohort, found, largest))  # [S]
        aggregate = row_peaks.mean().item()
        v = self._total(plan, peak, self._aggregate, aggregate)
        gradients = row_peaks / work  # [S], bounds of u_i / (K_i eta_l)
        if not self._fits(clients, gradients):
            self._measure()
            if not self._fits(clients, gradients):
                raise ValueError(
                    "updates: too large, control variates could leave the range of float32 "
                    f"(updates up to {row_peaks.max().item():.3g}, local_work from "
                    f"{work.min().item():.3g})"
                )
        rest = 1.0 - len(cohort) / self.num_clients
        mean_peak = rest * self._mean_peak + gradients.sum().item() / self.num_clients
        peaks = self._peaks.index_copy(0, clients, self._bounds(clients, gradients))
        return Controlled(plan.weights, v, peaks, _ROUNDING * mean_peak)

    def _commit(self, cohort: Cohort, plan: Plan, reading: Controlled) -> None:
        self.controls.exchange(cohort.ids, None)
        self.mean_control, self._next_mean = self._next_mean, self.mean_control
        self._peaks, self._mean_peak = reading.peaks, reading.mean_peak

    def _bounds(self, clients: Tensor, gradients: Tensor) -> Tensor:
        """Return bounds [S] of the new |c_i| of ``clients``: |c_i| + |c| + |u_i / (K_i eta_l)|."""
        return (picked(self._peaks, clients) + self._mean_peak + gradients) * _ROUNDING

    def _fits(self, clients: Tensor, gradients: Tensor) -> bool:
        """Return whether the new control variates, and differences of any two, fit into float32."""
        bounds = self._bounds(clients, gradients)
        mean = self._mean_peak + gradients.sum().item() / self.num_clients
        return bool((2.0 * (bounds + mean) <= FLOAT32_LIMIT).all())

    def _measure(self) -> None:
        self._peaks = self.columns.abs_max(self.controls.rows).to(torch.float64)
        self._mean_peak = self.columns.abs_max([self.mean_control]).item()

    def _forget(self, ids: list[int]) -> None:
        peaks = self._peaks.index_fill(0, torch.tensor(ids, device="cpu"), 0.0)
        mean = self.mean_control.to(torch.float64)
        for client in sorted(ids):  # the order of subtractions shows in the bits
            mean.sub_(self.controls.rows[client], alpha=1.0 / self.num_clients)
        rest = mean.to(torch.float32) if bool(peaks.any()) else torch.zeros_like(self.mean_control)
        mean_peak = self.columns.abs_max([rest]).item()
        self.controls.forget(ids)
        self.mean_control, self._peaks, self._mean_peak = rest, peaks, mean_peak

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        mean, controls = cast(Tensor, state["mean_control"]), state["controls"]
        invariants.check_range("mean_control", mean, -FLOAT32_LIMIT / 2, FLOAT32_LIMIT / 2)
        for row in invariants.rows_of(controls):  # so that any two have a difference
            invariants.check_range("controls", row, -FLOAT32_LIMIT / 2, FLOAT32_LIMIT / 2)

    def _widened(self, state: dict[str, Tensor | RowMemory]) -> dict[str, Tensor | RowMemory]:
        mean = torch.zeros(self.num_params, dtype=torch.float64, device=self.device)
        for row in invariants.rows_of(state["controls"]):
            mean.add_(row, alpha=1.0 / self.num_clients)
        return {**state, "mean_control": mean.to(torch.float32)}

    def _state(self) -> State:
        return {"controls": self.controls, "mean_control": self.mean_control}

    def _state_loaded(self) -> None:
        self._measure()

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # abs_max reads params; one pass reads rows and c_i and writes the new c_i; c is read, the
        # next c and the aggregate are written; the aggregate is added to params
        K, S, d = sizes.K, sizes.S, sizes.d
        scratch = 12 * d + 4 * S * d  # aggregate, the next c, spare rows
        return Cost(4 * K * d + 4 * d, scratch, 12 * S * d + 36 * d, 6 * S * d + 6 * d)


def _read_work(value: object, num_clients: int) -> Tensor:
    if isinstance(value, bool):
        raise TypeError(f"local_work: expected one number or {num_clients} numbers, got {value}")
    try:
        work = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"local_work: expected one number or {num_clients} numbers, got {value!r}: {error}"
        ) from error
    if work.shape not in ((), (num_clients,)):
        raise ValueError(
            f"local_work: expected one number or shape [{num_clients}], got {list(work.shape)}"
        )
    if not bool(((work > 0) & torch.isfinite(work)).all()):
        raise ValueError(f"local_work: expected finite numbers > 0, got {work.tolist()}")
    if float(work.min()) < _LEAST_WORK:  # 1 / work would be infinite in float32, and 0 / work NaN
        raise ValueError(
            f"local_work: expected at least {_LEAST_WORK:.3g}, got {float(work.min()):.3g}"
        )
    return work.expand(num_clients).clone(memory_format=torch.contiguous_format)
