# SPDX-License-Identifier: Apache-2.0
"""FL-FDMS: friend discovery and model substitution (Wang and Xu; see docs/papers.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.ops import bits
from fastagg.ops.memory import count_of, count_up_
from fastagg.registry import register
from fastagg.report import Plan, Reading
from fastagg.rules._pair_state import check_pair_state
from fastagg.rules._share_cap import Proposal
from fastagg.rules._similarity import read_similarity, read_sketch, settle_squares
from fastagg.rules._substitution import SubstitutionRule
from fastagg.rules.thresholds import Threshold, read_threshold, value_at
from fastagg.staleness import discounted
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import both, count_true, either_way, equal_pairs, flags_of, on, on_cpu

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class Substitution(Plan):
    """The plan of FDMS: friends, the pairs to score, and the elimination threshold."""

    friends: Tensor = field(kw_only=True)  # [K] int64
    wanted: Tensor | None = field(kw_only=True)  # [S, S] bool, symmetric; None: all pairs
    t: int = field(kw_only=True)  # the round, from 1 on
    threshold: float = field(kw_only=True)  # Theta_t


@dataclass
class Scored(Reading):
    """The similarities of this round."""

    scores: Tensor  # [S, S] float64


@register("fdms")
class FDMS(SubstitutionRule[Substitution, Scored]):
    """The most similar active client substitutes for an absent one (FL-FDMS section 5).

    For every pair of clients, the rule keeps the mean similarity R of their updates over the N
    rounds in which both were active (eq. 15). The friend of an absent client is the active client
    with the highest R. The client weight of the absent client is added to that of its friend's row;
    no row is copied. An absent client without a scored friend is replaced by the mean of the active
    updates, as in eq. 5; so early rounds equal FedAvg.

    With ``elimination``, a friend is chosen from the candidates of client k. After the choice of
    round t, candidates whose score is Theta_t or more below the best one are removed permanently,
    so they cannot be chosen from round t + 1 on (section 5.3, steps 1 to 3). A pair is scored only
    if one of its clients is a candidate of the other.

    The row of a client that is the friend of many gets a large factor, and malicious clients can
    provoke this (docs/security.md). ``max_share`` is a cap c of the factor of a row. A row takes
    absent clients in descending order of similarity (ties: lowest id first) until its factor is c;
    it may take a part of the last one's share. The next best friend with room takes the rest. A
    share that no friend has room for is split evenly over all rows, up to c. A client's own share
    always counts in full. In a round with fewer than 1/c active clients the cap is 1/S. Not from
    the paper.

    With ``sketch=k``, the similarities of a round are estimated from random projections of the
    updates to k numbers (:func:`fastagg.ops.sketch_`), with a new seed in every round. This takes
    4 S d operations in the pass over the rows instead of S^2 d. An estimated cosine c has the right
    mean and a standard deviation of at most sqrt((1 + c^2) / k). Noise of different rounds is
    independent, so that of R falls with the square root of k N. Lengths are exact with "cosine";
    a distance is that of the two sketches. Not from the paper.

    A late row counts as its client and, like any other, as the friend of absent ones; its factor is
    then multiplied by s(age). Only rows of equal age are compared: a similarity is that of two
    updates of one model (eq. 14), and those of different models also differ by what happened
    between them. So a pair of different ages is no common round.

    A pair of clients takes 6 bytes, and one more bit with elimination. Counts stop at 32767: from
    then on a new similarity has weight 1/32767 in the mean.

    Args:
        similarity: "cosine", (cos + 1) / 2 in [0, 1] (eq. 14), or "distance", -|u_i - u_j|.
        elimination: None; "theorem2", "released_case1" or "released_case2" (see
            :func:`fastagg.rules.thresholds.named_threshold`); or a callable t -> Theta_t such
            as :class:`fastagg.Theorem2Threshold`. t = 1, 2, ... counts the rounds so far,
            skipped ones included.
        precision: of the Gram matrix on a GPU, "highest", "high" or "tf32"; see
            :func:`fastagg.ops.gram`. Friends are chosen by means of noisy cosines, for which the
            2^-16 of "high" is far more than enough. A short distance is the difference of large
            products: "highest" loses least of it, and "tf32" is refused.
        sketch: number k of buckets, a power of two from 64 to 16384; None: exact similarities.
        seed: of the sketches, >= 0. A client that knows it can make its update seem similar to
            others; so choose one that clients cannot know.
        max_share: largest factor of a row, in [1/K, 1]; None: no limit.
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        scores: [K, K] float32, R.
        counts: [K, K] int16, N.
        candidates: [K, ceil(K / 8)] uint8, row k is the candidate set of client k in the format of
            :func:`fastagg.bits.pack`; None without elimination.
        rounds: [] int64, steps so far, skipped ones included.
    """

    norms_known = True
    computes_gram = True
    state_options = frozenset({"similarity"})  # of which scores are means

    def __init__(
        self,
        *,
        similarity: str = "cosine",
        elimination: str | Threshold | Mapping[str, Any] | None = None,
        precision: str = "high",
        sketch: int | None = None,
        seed: int = 0,
        max_share: float | None = None,
        client_weights: Any = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(max_share=max_share, client_weights=client_weights, **options)
        self._similarity = read_similarity(similarity, precision, sketch, seed)
        self.similarity, self.precision = similarity, precision
        self.sums_rows_by_plan = similarity == "cosine"  # clipping a row changes no cosine
        self.sketch, self.seed = self._similarity.sketch, self._similarity.seed
        self.elimination, self._threshold = read_threshold(elimination, self.num_clients)
        square = (self.num_clients, self.num_clients)
        self.scores = torch.zeros(square, device=self.device, dtype=torch.float32)
        self.counts = torch.zeros(square, dtype=torch.int16, device=self.device)
        self.candidates: Tensor | None = None
        if self._threshold is not None:
            self.candidates = bits.ones(self.num_clients, self.num_clients, self.device)
        # Exact scores of some pairs take two passes: the sum, then the products.
        self.reads_streams_once = self.candidates is None or self.sketch is not None
        self.rounds = torch.zeros((), dtype=torch.int64, device="cpu")

    def _plan(self, cohort: Cohort) -> Substitution:
        # A round changes only scores of pairs of active clients, and friends of absent clients do
        # not depend on these. So friends can be chosen here, before the state changes.
        size, clients = len(cohort), cohort.clients
        needed = None  # [S, S] bool: j is another client, a candidate of i, and of the same age
        if self.candidates is not None:
            needed = bits.pick(self.candidates, clients, clients).fill_diagonal_(False)
        if cohort.ages is not None:
            of_one_model = equal_pairs(cohort.ages.to(self.device))
            needed = of_one_model if needed is None else both(needed, of_one_model)
        t = count_of(self.rounds) + 1
        weights, friends = self._substitute(cohort)
        return Substitution(
            discounted(weights, cohort, self.staleness),
            friends=friends,
            pairs=size * (size - 1) if needed is None else count_true(needed),
            wanted=None if needed is None else either_way(needed),  # scores are symmetric
            t=t,
            threshold=self.threshold(t),
        )

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True  # with distances; cosines leave the rows as they are

    def _read(self, params: Tensor, cohort: Cohort, plan: Substitution) -> Scored:
        scores, squares = self._similarity.read(
            self.columns,
            self._aggregate,
            cohort.rows,
            plan.weights,
            plan.t,
            plan.wanted,
            cohort.scales,
        )
        if self.sketch is not None:
            squares = settle_squares(self.columns, cohort, squares, self.max_norm)
        self._check_squares(cohort, squares.tolist())
        self._similarity.check(scores)
        aggregate = self._check_aggregate(params, cohort, plan)
        return Scored(plan.weights, aggregate, scores, friends=plan.friends)

    def _commit(self, cohort: Cohort, plan: Substitution, reading: Scored) -> None:
        ops.update_scores_(self.scores, self.counts, reading.scores, cohort.clients, plan.wanted)
        if self.candidates is not None:
            ops.eliminate_(self.candidates, self.scores, self.counts, plan.threshold)
        count_up_(self.rounds)

    def _substitute(self, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Return factors [S] float64 and the friends [K] that take a part of absent clients."""
        if self.max_share is not None:
            return self._capped(cohort, partial(self._proposals, ids=cohort.ids), self.max_share)
        friends = self._select(cohort.ids)
        return self._weights(cohort, friends), friends

    def _select(self, ids: list[int]) -> Tensor:
        """Return the friend of each client among the active clients ``ids``: [K] int64."""
        active = on(self.device, flags_of(ids, self.num_clients))
        return on_cpu(ops.select_friends(self.scores, self.counts, active, self.candidates))

    def _proposals(self, clients: list[int], rows: list[int], ids: list[int]) -> list[Proposal]:
        """Return the proposal of each of ``clients`` to its best friend among ``rows``.

        Args:
            clients: ids of absent clients.
            rows: positions of the rows with room.
            ids: of the active clients.
        """
        places = {ids[position]: position for position in rows}
        friends = self._select(list(places))
        chosen = friends.clamp(min=0)[:, None].to(self.device)
        best = self.scores.gather(1, chosen)[:, 0].tolist()
        found: list[int] = friends.tolist()
        return [
            Proposal(best[client], client, places[found[client]], 1.0)
            for client in clients
            if found[client] >= 0
        ]

    def threshold(self, t: int) -> float:
        """Return Theta_t of round t = 1, 2, ...; infinite without elimination."""
        return math.inf if self._threshold is None else value_at(self._threshold, t)

    def _forget(self, ids: list[int]) -> None:
        places = torch.tensor(ids, device=self.device)
        everyone = bits.ones(len(ids), self.num_clients, self.device)
        for matrix in (self.scores, self.counts):
            matrix.index_fill_(0, places, 0).index_fill_(1, places, 0)
        if self.candidates is not None:
            self.candidates[places] = everyone
            for client in ids:
                self.candidates[:, client // 8] |= 1 << client % 8

    def _skip(self) -> Tensor:
        friends = torch.full((self.num_clients,), -1, dtype=torch.int64, device="cpu")
        count_up_(self.rounds)
        return friends

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        check_pair_state(state, self.similarity)

    def _state(self) -> State:
        state = {"scores": self.scores, "counts": self.counts, "rounds": self.rounds}
        return state if self.candidates is None else state | {"candidates": self.candidates}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # A pair of the state takes 6 bytes: select_friends reads the rows of absent clients,
        # update_scores_ reads and writes those of active pairs. Of S x S float64 there are the Gram
        # matrix (written, read), and scores (written, read for their range and for the update).
        K, S, d = sizes.K, sizes.S, sizes.d
        base = super().cost(sizes, options)
        state, scratch = 6 * K * K + 8, base.scratch + 16 * S * S
        moved = base.moved + 6 * K * (K - S) + 52 * S * S  # one pass for the sum and all pairs
        sketch = read_sketch(options.get("sketch"))
        if options.get("elimination") is not None:
            # eliminate_ reads all pairs, and reads and writes their bits. select_friends reads bits
            # of absent clients. Needed pairs: S x S bool, twice. Exact scores of some pairs take
            # another pass over the rows.
            state += K * bits.packed_bytes(K)
            scratch += 2 * S * S
            moved += 6 * K * K + (3 * K - S) * bits.packed_bytes(K) + 6 * S * S
            moved += 4 * S * d if sketch is None else 0
        if sketch is None:
            products = S * (S + 1)
            return Cost(state, scratch, moved, base.flops + products * d, reduced=4 * products)
        # Sketches in float64 are written and read; scaled to length 1, they are copied to float32.
        return Cost(
            state,
            scratch=scratch + 20 * S * sketch,
            moved=moved + 40 * S * sketch,
            flops=base.flops + 4 * S * d + S * (S + 1) * sketch,
            reduced=8 * S * (sketch + 1),
            sketched=S * d,
        )
