# SPDX-License-Identifier: Apache-2.0
"""FDMS with several friends per absent client. Not from a paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from fastagg.aggregator import CommonOptions
from fastagg.costs import Cost, Sizes
from fastagg.ops.memory import tensor_of
from fastagg.options import read_count, read_positive
from fastagg.registry import register
from fastagg.rules._share_cap import Proposal
from fastagg.rules.fdms import FDMS
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BLOCK = 256
"""Number of absent clients whose scores (256 x S numbers) are sorted at a time."""


@register("fdms-soft")
class FDMSSoft(FDMS):
    """The m most similar active clients together substitute for an absent one.

    **Not from a paper.** FL-FDMS uses the single best friend, so the noise of one update is counted
    twice or more. Here the share of an absent client is divided among the m best active clients
    that have a score with it, in proportion to ``exp(score / temperature)``. Scores and the
    treatment of clients without a friend are those of :class:`fastagg.FDMS`; ``friends=1`` equals
    FDMS. ``StepReport.friends`` holds the best friend. There is no candidate elimination, because
    it would remove the other m - 1 friends.

    Args:
        friends: m, >= 1.
        temperature: > 0, in units of the scores. Large: friends have similar parts. Small: FDMS.
        similarity: "cosine" or "distance".
        precision: "highest", "high" or, with "cosine", "tf32"; see :class:`fastagg.FDMS`.
        sketch, seed: similarities from random projections; see :class:`fastagg.FDMS`.
        max_share: largest factor of a row, in [1/K, 1]; None: no limit. See :class:`fastagg.FDMS`:
            what a row has no room for is divided among the m best friends that have room.
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    not_saved = FDMS.not_saved | {"elimination"}
    refused: ClassVar[Mapping[str, str]] = {"elimination": "use the rule fdms"}

    def __init__(
        self,
        *,
        friends: int = 3,
        temperature: float = 0.1,
        similarity: str = "cosine",
        precision: str = "high",
        sketch: int | None = None,
        seed: int = 0,
        max_share: float | None = None,
        client_weights: Any = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        if "elimination" in options:
            reason = self.refused["elimination"]
            raise TypeError(f"elimination: not an option of fdms-soft; {reason}")
        super().__init__(
            similarity=similarity,
            precision=precision,
            sketch=sketch,
            seed=seed,
            max_share=max_share,
            client_weights=client_weights,
            **options,
        )
        self.friends = read_count("friends", friends, least=1)
        self.temperature = read_positive("temperature", temperature)

    def _weights(self, cohort: Cohort, friends: Tensor) -> Tensor:
        """Return factors [S] float64: own shares, and those of absent clients, divided."""
        # In NumPy, which uses one thread: torch would wait for all of its threads, which takes
        # milliseconds if another process occupies a core.
        shares, size = self._round_shares(cohort).numpy(), len(cohort)
        orphaned = friends.numpy() < 0
        befriended = ~orphaned
        befriended[cohort.ids] = False
        weights = shares[cohort.ids] + math.fsum(shares[orphaned]) / size
        absent = np.flatnonzero(befriended)
        for begin in range(0, len(absent), _BLOCK):
            some = absent[begin : begin + _BLOCK]
            positions, parts = self._spread(some, cohort.clients.numpy())  # [A, m]
            divided = shares[some, None] * parts
            weights += np.bincount(positions.ravel(), divided.ravel(), size)
        return tensor_of(weights)

    def _proposals(self, clients: list[int], rows: list[int], ids: list[int]) -> list[Proposal]:
        if not rows:
            return []
        open_ids = np.array([ids[position] for position in rows])
        proposals = []
        for begin in range(0, len(clients), _BLOCK):
            absent = np.array(clients[begin : begin + _BLOCK])
            absent = absent[np.max(_block(self.counts, absent, open_ids), axis=1) > 0]  # scored
            positions, parts = self._spread(absent, open_ids)
            scores = np.take_along_axis(_block(self.scores, absent, open_ids), positions, axis=1)
            for client, *columns in zip(absent.tolist(), positions, parts, scores, strict=True):
                listed = zip(*(column.tolist() for column in columns), strict=True)
                proposals += [
                    Proposal(score, client, rows[position], part)
                    for position, part, score in listed
                    if part > 0.0
                ]
        return proposals

    def _spread(self, absent: np.ndarray, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the best m of ``clients`` for each of A ``absent``.

        Returns:
            Positions in ``clients`` [A, m] int64, and parts [A, m] float64, of sum 1 per row.
        """
        scores = _block(self.scores, absent, clients).astype(np.float64)  # [A, S]
        scores[_block(self.counts, absent, clients) <= 0] = -math.inf
        m = min(self.friends, len(clients))
        best = np.argsort(-scores, axis=1, kind="stable")[:, :m]  # on ties the lowest id first
        values = np.take_along_axis(scores, best, axis=1)
        parts = np.exp((values - values[:, :1]) / self.temperature)
        return best, parts / parts.sum(axis=1, keepdims=True)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # that of FDMS, plus scores and counts of blocks of absent clients with the active ones
        K, S = sizes.K, sizes.S
        base = super().cost(sizes, options)
        scratch = 48 * min(_BLOCK, K - S) * S
        moved = base.moved + 6 * (K - S) * S
        return dataclasses.replace(base, scratch=base.scratch + scratch, moved=moved)


def _block(matrix: Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return a copy of ``matrix[rows][:, columns]`` on the CPU."""
    if matrix.device.type != "cpu":
        places = tensor_of(rows)[:, None], tensor_of(columns)
        return matrix[places].cpu().numpy()
    return matrix.numpy()[rows[:, None], columns]
