# SPDX-License-Identifier: Apache-2.0
"""Base of the Gram rules that can judge rows by sketches of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import State
from fastagg.costs import Cost, Sizes
from fastagg.options import read_count
from fastagg.rules._gram_rule import SQUARES, Compared, GramPlan, GramRule, ReuseOptions
from fastagg.rules._similarity import read_sketch, round_seed, settle_squares
from fastagg.rules.gram_policy import Policy
from fastagg.updates.any_rows import AnyRows
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import MIN_SEGMENT, Columns
from fastagg.updates.small import on_cpu, quotients

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SketchedGramRule(GramRule):
    """A Gram rule that depends on distances of two rows alone, so that sketches can give them.

    With ``sketch=k`` the Gram matrix is that of the rows' random projections to k numbers
    (:func:`fastagg.ops.sketch_`), with a new seed in every round. The square of a distance then has
    the right mean and a standard deviation of at most sqrt(2 / k) times itself. This takes one pass
    over the rows instead of S^2 d products. Not from a paper.

    Args:
        policy: computes the factors.
        sketch: number k of buckets, a power of two from 64 to 16384; None: exact distances. Not
            with ``reuse``, which keeps the products of remembered rows from round to round.
        seed: of the sketches, >= 0. A client that knows it can make its update seem close to
            others; so choose one that clients cannot know.
        **options: see :class:`GramRule`.

    Attributes:
        rounds: part of the state with ``sketch``, because seeds depend on it.
    """

    refused = MappingProxyType({})

    def __init__(
        self,
        policy: Policy,
        *,
        sketch: int | None = None,
        seed: int = 0,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        super().__init__(policy, reuse=reuse, client_weights=client_weights, **options)
        self.sketch, self.seed = read_sketch(sketch), read_count("seed", seed, least=0)
        if reuse and sketch is not None:
            raise ValueError(
                "sketch: expected None with reuse=True, which keeps the products of remembered "
                f"rows from round to round, got {sketch}"
            )

    def _compared(
        self, rows: AnyRows, scales: Tensor | None, cohort: Cohort, plan: GramPlan
    ) -> Compared:
        if self.sketch is None:
            return super()._compared(rows, scales, cohort, plan)
        seed = round_seed(self.seed, int(self.rounds) + 1)
        sketches, squares = self.columns.sketch(rows, self.sketch, seed)
        if scales is not None:  # a sketch is linear
            factors = scales.to(sketches.device)
            sketches, squares = sketches * factors[:, None], squares * factors.square()
        squares = settle_squares(self.columns, cohort, squares, self.max_norm)
        self._check_squares(cohort, squares.tolist())
        # In units of the largest norm, so that the squares of large rows stay in the range of
        # float32. The policy compares distances, so it does not depend on the unit.
        largest = squares.max().sqrt()
        short = on_cpu(quotients(sketches, torch.where(largest > 0.0, largest, 1.0)))
        columns = Columns(MIN_SEGMENT)
        return Compared(columns.gram(short), short, columns)

    def _state(self) -> State:
        state = super()._state()
        return state if self.sketch is None else {**state, "rounds": self.rounds}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        sketch = read_sketch(options.get("sketch"))
        own = {key: value for key, value in options.items() if key not in ("sketch", "seed")}
        exact = super().cost(sizes, own)
        if sketch is None:
            return exact
        # Sketches in float64 are written and read; scaled, they are copied to float32. Few rows are
        # close enough for another pass over their sketches.
        S, d = sizes.S, sizes.d
        return dataclasses.replace(
            exact,
            state=8,
            scratch=4 * d + 8 * SQUARES * S * S + 24 * S * sketch,
            moved=exact.moved + 40 * S * sketch,
            flops=6 * S * d + S * (S + 1) * sketch,
            reduced=8 * S * (sketch + 1),
            sketched=S * d,
        )
