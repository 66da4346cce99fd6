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
from fastagg.buffer import RowExchange
from fastagg.cohort import Cohort
from fastagg.costs import Cost, Sizes
from fastagg.options import FLOAT32_LIMIT
from fastagg.registry import register
from fastagg.row_memory import RowMemory
from fastagg.row_store import read_store

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROUNDING = 1.0 + 2.0**-22
"""Covers the float32 rounding of v and c: two roundings of relative size 2^-24 each."""


@register("mimic")
class MimiC(Aggregator):
    """``v = mean_s(u_s + c_s)``, ``params += server_lr * v``, ``c_s = v - u_s`` (Algorithm 1).

    The mean is over the active clients s; an absent client's correction stays as it is.

    Rows that are handed over are kept instead of corrections: c_s = v - u_s is computed anew from
    the update and the v of its round, to the same bits. The server then also holds one v for each
    round in which a client was last active, at most K - S + 1 of them.

    A bound says before anything is written that nothing leaves the range of float32:
    |v| <= mean_s(|u_s| + |c_s|) and |c_s| <= |v| + |u_s|, with the largest magnitudes in place of
    the vectors. As |c_s| <= |v_old| + |u_old|, the bound of |v| grows by at most 2 max|u| a round:
    linearly, to 2e6 max|u| after a million rounds. Should it ever refuse a step, the corrections
    are measured and the bound starts again from there.

    Args:
        mode: "server", the server keeps the corrections; the only mode so far.
        memory_folder: keep the corrections in a file in this folder, mapped into memory; see
            :class:`fastagg.rules._memory.MemoryRule`.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active. ``corrections[k]`` is a copy
            of one, ``corrections.clone()`` a tensor.
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
        if mode != "server":
            raise ValueError(f'mode: expected "server", the only mode so far, got {mode!r}')
        self.mode = mode
        self.corrections = RowMemory(
            self.num_clients,
            self.num_params,
            self.device,
            sign=-1.0,
            store=read_store("float32", memory_folder),
        )
        self._mean: Tensor | None = None  # [d] float64, made when rows are first handed over
        self._peaks = torch.zeros(self.num_clients, dtype=torch.float64)  # >= |corrections[k]|

    def _prepare(self, params: Tensor, peak: float, cohort: Cohort) -> Prepared:
        clients, ids = cohort.clients, cohort.clients.tolist()
        mean = None
        buffer = cohort.buffer
        if buffer is None:
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
        return self.corrections.receive(cohort, self.columns)

    def _average(self, cohort: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """v, [d] float64; v as a reference for corrections; the rows' magnitudes [S]."""
        if self._mean is None:
            self._mean = torch.empty(self.num_params, dtype=torch.float64, device=self.device)
        rounded = self.corrections.new_reference()
        peaks = torch.empty(len(cohort), device=self.device)
        ids = cohort.clients.tolist()
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
        return {"corrections": self.corrections}

    def _state_loaded(self) -> None:
        self._peaks = self.columns.abs_max(self.corrections.rows).to(torch.float64)

    def options(self) -> dict[str, Any]:
        return super().options() | {"mode": self.mode}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        K, S, d = sizes.K, sizes.S, sizes.d
        flops = 5 * S * d + 3 * d
        if not sizes.adopting:
            # abs_max of params and rows; then rows, corrections read, corrections, params written
            return Cost(4 * K * d, 0, 16 * S * d + 12 * d, flops)
        # abs_max of params; rows, corrections and one v read, v written twice; v to params
        references = 4 * (K - S + 1) * d
        return Cost(4 * K * d + references, 12 * d, 8 * S * d + 36 * d, flops)
