# SPDX-License-Identifier: Apache-2.0
"""Stale: use the last update of an absent client again (FL-FDMS)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fastagg.aggregator import State
from fastagg.checkpoint import invariants
from fastagg.costs import Cost, Sizes
from fastagg.registry import register
from fastagg.rules._memory_rule import MemoryOptions, MemoryPlan, MemoryRule, Remembered
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack


_SMALLEST_SHARE = 1e-30
"""Minimum share of the clients seen; below it rounding errors would dominate the mean."""


@register("stale")
class Stale(MemoryRule):
    """``params += server_lr * (weighted mean of m_k over the clients k seen so far)``.

    m_k is client k's last update. A client is seen once it has been active; others are left out of
    the mean (FL-FDMS section 6.1.3, "Stale").

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        **options: ``memory_dtype``, ``memory_folder``, ``max_age`` (:class:`MemoryRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    Attributes:
        seen: [K] bool, whether the client has been active.

    A step raises ValueError if all clients seen so far have weight 0.
    """

    no_noise = ""

    def __init__(self, **options: Unpack[MemoryOptions]) -> None:
        super().__init__(**options)
        self.seen = torch.zeros(self.num_clients, dtype=torch.bool, device="cpu")

    def _norm(self, clients: Tensor) -> float:
        seen = self.seen.numpy().copy()
        seen[self._expired()] = False
        seen[clients.numpy()] = True
        share = math.fsum(self._shares.numpy()[seen].tolist())
        if share < _SMALLEST_SHARE:
            raise ValueError(
                "client_weights: expected a weight > 0 among the clients seen so far, got "
                f"{share:.3g} of the sum of all weights"
            )
        return 1.0 / share

    def _commit(self, cohort: Cohort, plan: MemoryPlan, reading: Remembered) -> None:
        super()._commit(cohort, plan, reading)
        seen = self.seen.numpy()
        for client in plan.expired:
            seen[client] = False
        for client in cohort.ids:
            seen[client] = True

    def _forget(self, ids: list[int]) -> None:
        super()._forget(ids)
        seen = self.seen.numpy()
        for client in ids:
            seen[client] = False

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        seen = cast(Tensor, state["seen"])
        invariants.check_blank_rows("memory", state["memory"], ~seen, "it was not seen")
        if self.ages is not None:
            last = cast(Tensor, state["last"])
            invariants.require(
                torch.equal(seen, last >= 0), "seen", "the clients with a last round"
            )

    def _largest_norm(self, state: State) -> float:
        if self.ages is not None:  # clients that are seen now may expire
            return 1.0 / max(float(self._shares[self._shares > 0].min()), _SMALLEST_SHARE)
        seen = cast(Tensor, state["seen"])
        return 1.0 / max(math.fsum(self._shares[seen.cpu()].tolist()), _SMALLEST_SHARE)

    def _state(self) -> State:
        return {**super()._state(), "seen": self.seen}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        cost = super().cost(sizes, options)
        return dataclasses.replace(cost, state=cost.state + sizes.K)
