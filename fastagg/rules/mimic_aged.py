# SPDX-License-Identifier: Apache-2.0
"""MimiC with corrections that fade with age. Ours: no paper has it."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Prepared, State
from fastagg.costs import Cost, Sizes
from fastagg.options import FLOAT32_LIMIT
from fastagg.registry import register
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROUNDING = 1.0 + 2.0**-20
"""Covers the float32 roundings of v and c."""


@register("mimic-aged")
class MimiCAged(Aggregator):
    """``v = mean_s(u_s + fading^(age_s - 1) c_s)``, ``params += server_lr * v``, ``c_s = v - u_s``.

    **Not from a paper**: one way to do what MimiC's authors name as future work, to make the
    correction aware of its staleness. age_s is the number of rounds, skipped ones included, since
    client s was last active: 1 if it was in the round before. A correction is as old as the global
    model that it refers to; the older, the less is left of it, down to FedAvg's plain update.
    ``fading=1`` is MimiC, ``fading=0`` corrects only clients active twice in a row.

    Args:
        fading: in [0, 1].
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    Attributes:
        corrections: [K, d] float32, c; zeros for clients never active.
        last: [K] int64, the round in which the client was last active; -1: never.
        rounds: [] int64, rounds so far, skipped ones included.
    """

    column_state = frozenset({"corrections"})

    def __init__(self, *, fading: float = 0.9, **options: Unpack[CommonOptions]) -> None:
        super().__init__(**options)
        self.fading = _read_fading(fading)
        self.corrections = torch.zeros(self.num_clients, self.num_params, device=self.device)
        self.last = torch.full((self.num_clients,), -1, dtype=torch.int64)
        self.rounds = torch.zeros((), dtype=torch.int64)
        self._scratch = torch.zeros(self.num_params, device=self.device)  # [d]

    def _prepare(self, params: Tensor, cohort: Cohort) -> Prepared:
        clients, size = cohort.clients, len(cohort)
        own = [self.corrections[client] for client in cohort.ids]
        refuse_shared_memory(cohort, [self.corrections])
        row_peaks = self._row_peaks(cohort)  # [S]
        weights = torch.full((size,), 1.0 / size, dtype=torch.float64)
        ages = (self.rounds - self.last[clients]).to(torch.float64)
        faded = weights * self.fading ** (ages - 1.0)  # [S]; 0^0 is 1
        ops.weighted_sum_(
            self._scratch, [*cohort.tensors, *own], torch.cat([weights, faded]), beta=0.0
        )
        peak, aggregate = self._peaks_with(params, [self._scratch])
        self._check_range(peak, aggregate)
        new_peaks = (aggregate + row_peaks) * _ROUNDING
        if not bool((new_peaks <= FLOAT32_LIMIT).all()):
            raise ValueError("updates: too large, corrections could leave the range of float32")

        def commit() -> None:
            ops.weighted_sum_(params, [self._scratch], self._rate)
            difference = torch.tensor([1.0, -1.0], dtype=torch.float64)
            for correction, row in zip(own, cohort.tensors, strict=True):
                ops.weighted_sum_(correction, [self._scratch, row], difference, beta=0.0)
            self.last[clients] = self.rounds
            self.rounds += 1

        return Prepared(weights, commit)

    def _skip(self) -> None:
        self.rounds += 1

    def _state(self) -> State:
        return {"corrections": self.corrections, "last": self.last, "rounds": self.rounds}

    def options(self) -> dict[str, Any]:
        return super().options() | {"fading": self.fading}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # abs_max of params and rows; rows and corrections to v, abs_max of v, v to params; rows and
        # v to corrections
        K, S, d = sizes.K, sizes.S, sizes.d
        return Cost(4 * K * d + 8 * K + 8, 4 * d, 24 * S * d + 24 * d, 6 * S * d + 2 * d)


def _read_fading(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"fading: expected a number, got {value!r} ({type(value).__name__})")
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"fading: expected a number in [0, 1], got {number}")
    return number
