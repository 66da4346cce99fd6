# SPDX-License-Identifier: Apache-2.0
"""MimiC: every client's update is corrected towards the global one (Sun, Mao and Zhang)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Prepared, State
from fastagg.costs import Cost, Sizes
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import read_store
from fastagg.options import FLOAT32_LIMIT
from fastagg.registry import register
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.buffer import RowExchange
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROUNDING = 1.0 + 2.0**-22
"""Covers the float32 rounding of v and c: two roundings of relative size 2^-24 each."""


@register("mimic")
class MimiC(Aggregator):
    """``v = mean_s(u_s + c_s)``, ``params += server_lr * v``, ``c_s = v - u_s`` (Algorithm 1).

    The mean is over the active clients s; an absent client's correction stays as it is.

    In mode "client" the clients keep their corrections (:class:`MimiCClient`) and send u_s + c_s.
    The server needs only the sum of what they send, which secure aggregation can give it, and has
    no state; it sends v back to the clients of the round. Both modes move the parameters alike, up
    to the rounding of u_s + c_s to float32.

    In mode "server", rows that are handed over are kept instead of corrections: c_s = v - u_s is
    computed anew from the update and the v of its round, to the same bits. The server then also
    holds one v for each round in which a client was last active, at most K - S + 1 of them.

    A bound says before anything is written that nothing leaves the range of float32:
    |v| <= mean_s(|u_s| + |c_s|) and |c_s| <= |v| + |u_s|, with the largest magnitudes in place of
    the vectors. As |c_s| <= |v_old| + |u_old|, the bound of |v| grows by at most 2 max|u| a round:
    linearly, to 2e6 max|u| after a million rounds. Should it ever refuse a step, the corrections
    are measured and the bound starts again from there.

    Args:
        mode: "server" or "client": who keeps the corrections.
        memory_folder: keep the corrections in a file in this folder, mapped into memory; see
            :class:`fastagg.rules._memory.MemoryRule`. Mode "server" only.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active. ``corrections[k]`` is a copy
            of one, ``corrections.clone()`` a tensor. Mode "server" only.
        aggregate: [d] float32, v of the last step with active clients, until the next one; zeros
            at first. Mode "client" only.
    """

    column_state = frozenset({"corrections"})

    def __init__(
        self,
        *,
        mode: str = "server",
        memory_folder: str | os.PathLike[str] | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**options)
        if mode not in ("server", "client"):
            raise ValueError(f'mode: expected "server" or "client", got {mode!r}')
        self.mode = mode
        if mode == "client":
            if memory_folder is not None:
                raise ValueError(
                    'memory_folder: expected None with mode "client", where the server remembers '
                    f"no rows, got {memory_folder!r}"
                )
            self.aggregate = torch.zeros(self.num_params, device=self.device)
            self._next = torch.zeros_like(self.aggregate)
            return
        self.corrections = RowMemory(
            self.num_clients,
            self.num_params,
            self.device,
            sign=-1.0,
            store=read_store("float32", memory_folder),
        )
        self._mean: Tensor | None = None  # [d] float64, made when rows are first handed over
        self._peaks = torch.zeros(self.num_clients, dtype=torch.float64)  # >= |corrections[k]|

    def _prepare(self, params: Tensor, cohort: Cohort) -> Prepared:
        peak = self._params_peak(params)
        if self.mode == "client":
            return self._prepare_sum(params, peak, cohort)
        return self._prepare_corrected(params, peak, cohort)

    def _prepare_sum(self, params: Tensor, peak: float, cohort: Cohort) -> Prepared:
        """Mode "client": rows are u_s + c_s."""
        refuse_shared_memory(cohort, [self.aggregate, self._next])
        self._check_range(peak, self._row_peaks(cohort).mean().item())
        weights = torch.full((len(cohort),), 1.0 / len(cohort), dtype=torch.float64)
        self.columns.weighted_sum_(self._next, cohort.rows, weights, beta=0.0)

        def commit() -> None:
            ops.weighted_sum_(params, [self._next], self._rate)
            self.aggregate, self._next = self._next, self.aggregate

        return Prepared(weights, commit)

    def _prepare_corrected(self, params: Tensor, peak: float, cohort: Cohort) -> Prepared:
        """Mode "server": rows are u_s."""
        clients, ids = cohort.clients, cohort.ids
        mean = None
        buffer = cohort.buffer
        if buffer is None:
            refuse_shared_memory(cohort, self.corrections.of(ids))
            row_peaks = self._row_peaks(cohort)  # [S]
        else:
            mean, rounded, row_peaks = self._average(cohort)
        if not self._fits(peak, clients, row_peaks):
            self.corrections.settle_(range(self.num_clients))
            self._peaks = self.columns.abs_max(self.corrections.rows).to(torch.float64)
            if not self._fits(peak, clients, row_peaks):
                raise ValueError(
                    "updates: too large, corrections or parameters could leave the range of "
                    f"float32 (updates up to {row_peaks.max().item():.3g}, corrections up to "
                    f"{self._peaks.max().item():.3g})"
                )
        aggregate = self._aggregate_bound(clients, row_peaks)

        def copy() -> None:
            self.corrections.settle_(ids)
            own = self.corrections.of(ids)
            ops.mimic_(params, cohort.tensors, own, clients, self.server_lr)

        def adopt(buffer: RowExchange, mean: Tensor, rounded: Tensor) -> None:
            ops.add_total_(params, mean, self.server_lr, 1.0)
            self.corrections.adopt(ids, buffer, rounded)

        def commit() -> None:
            if buffer is None or mean is None:
                copy()
            else:
                adopt(buffer, mean, rounded)
            self._peaks[clients] = (aggregate + row_peaks) * _ROUNDING

        weights = torch.full((len(clients),), 1.0 / len(clients), dtype=torch.float64)
        return Prepared(weights, commit)

    def _receive(self, cohort: Cohort) -> Cohort:
        if self.mode == "client":
            return cohort  # rows need not be in memory
        return self.corrections.receive(cohort, self.columns)

    def _average(self, cohort: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """v, [d] float64; v as a reference for corrections; the rows' magnitudes [S]."""
        if self._mean is None:
            self._mean = torch.empty(self.num_params, dtype=torch.float64, device=self.device)
        rounded = self.corrections.new_reference()
        peaks, ids = torch.empty(len(cohort), device=self.device), cohort.ids
        self.columns.mimic_mean_(
            self._mean,
            rounded,
            peaks,
            cohort.rows,
            self.corrections.of(ids),
            cohort.clients,
            self.corrections.references_of(ids),
        )
        return self._mean, rounded, self._check_peaks(cohort, self.columns.join_peaks(peaks))

    def _aggregate_bound(self, clients: Tensor, row_peaks: Tensor) -> float:
        """A bound of |v|; ``row_peaks`` [S] are those of the updates."""
        return float((row_peaks + self._peaks[clients]).mean()) * _ROUNDING

    def _fits(self, peak: float, clients: Tensor, row_peaks: Tensor) -> bool:
        """Whether the sum behind v, the new corrections and parameters fit into float32."""
        aggregate = self._aggregate_bound(clients, row_peaks)
        largest = max(
            aggregate * len(clients),
            aggregate + row_peaks.max().item(),
            peak + self.server_lr * aggregate,
        )
        return largest <= FLOAT32_LIMIT

    def _state(self) -> State:
        return {} if self.mode == "client" else {"corrections": self.corrections}

    def _state_loaded(self) -> None:
        if self.mode == "server":
            self._peaks = self.columns.abs_max(self.corrections.rows).to(torch.float64)

    def options(self) -> dict[str, Any]:
        return super().options() | {"mode": self.mode}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        K, S, d = sizes.K, sizes.S, sizes.d
        if options.get("mode") == "client":
            # abs_max of params and rows; rows to v, v to params
            return Cost(0, 8 * d, 8 * S * d + 20 * d, 2 * S * d + 2 * d)
        flops = 5 * S * d + 3 * d
        if not sizes.adopting:
            # abs_max of params and rows; then rows, corrections read, corrections, params written
            return Cost(4 * K * d, 0, 16 * S * d + 12 * d, flops)
        # abs_max of params; rows, corrections and one v read, v written twice; v to params
        references = 4 * (K - S + 1) * d
        return Cost(4 * K * d + references, 12 * d, 8 * S * d + 36 * d, flops)


class MimiCClient:
    """What a client does where it keeps its correction itself (``MimiC(mode="client")``).

    In a round in which it takes part it sends ``correct_(update)``; once the server has sent v
    back, it calls ``learn(sent, v)``. If v does not arrive, the correction stays that of the last
    round in which it did.

    Args:
        num_params: d.
        device: where the correction lives.

    Attributes:
        correction: [d] float32, c; zeros at first. The client's only state.
    """

    def __init__(self, num_params: int, device: str | torch.device = "cpu") -> None:
        self.correction = torch.zeros(num_params, device=device)

    @torch.no_grad()
    def correct_(self, update: Tensor) -> Tensor:
        """Add the correction to ``update`` [d] float32, in place; returns it, u + c, to be sent."""
        return ops.weighted_sum_(update, [self.correction], torch.ones(1))

    @torch.no_grad()
    def learn(self, sent: Tensor, aggregate: Tensor) -> None:
        """Replace the correction by ``v - u``, that is, by ``c + v - sent``.

        The rounding of ``sent`` is part of both c and it, so roundings do not add up over rounds.

        Args:
            sent: [d] float32, what :meth:`correct_` gave in this round; not changed.
            aggregate: [d] float32, v, the server's ``aggregate``; not changed.
        """
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
        ops.weighted_sum_(self.correction, [aggregate, sent], signs)
