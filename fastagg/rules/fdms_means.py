# SPDX-License-Identifier: Apache-2.0
"""Friends by the mean directions of clients' updates: FL-FDMS without a K x K matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg.aggregator import CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.options import read_choice, read_count, read_part
from fastagg.registry import register
from fastagg.report import Plan, Reading
from fastagg.rules._mean_sketches import DOUBTFUL, Means, Rows, check_means
from fastagg.rules._share_cap import Proposal
from fastagg.rules._similarity import read_sketch, round_seed, settle_squares
from fastagg.rules._substitution import SubstitutionRule
from fastagg.staleness import discounted
from fastagg.updates.cohort import Cohort
from fastagg.updates.small import flags_of, root

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOST_COLUMNS = 1024  # of ops.most_similar
_CLUSTERED_FROM = 2048
"""Number of active clients from which ``search="auto"`` divides them into clusters."""
_CLUSTERED_ROWS = 500
"""Estimated number of rows and centers that most queries are compared with, if S = 10,000."""


@dataclass
class Renewal(Reading):
    """The means of the active clients after this round."""

    means: Means  # [S]


@register("fdms-means")
class FDMSMeans(SubstitutionRule[Plan, Renewal]):
    """The active client with the most similar mean update substitutes for an absent one.

    FL-FDMS remembers the mean similarity of every pair of clients. This rule remembers, per client,
    the mean direction of its updates: a random projection to k numbers (a sketch, see
    :func:`fastagg.ops.sketch_`), scaled to length 1, averaged over the rounds in which it was
    active, and stored as int8. The friend of an absent client is the active client whose mean
    direction has the highest cosine with that of the absent one. This round's updates are included.
    As in ``fdms``, the client weight of the absent client is added to that of its friend's row.
    Client weights of clients without a mean, which were never active, are divided evenly among all
    rows.

    The state takes K (k + 8) bytes. Any two clients that were ever active can be compared, while
    ``fdms`` needs a round in which both were active. But the similarity is that of means, over all
    rounds, and not the mean similarity in common rounds; docs/rules.md says what it estimates.

    A late row is one more direction of its client, since the means compare different rounds anyway;
    its factor is multiplied by s(age).

    Because the means of all rounds are compared, the projection is always the same one. Its noise
    does not average out: a cosine c has a standard deviation of about (1 - c^2) / sqrt(k).

    Not from a paper.

    Args:
        sketch: number k of buckets, a power of two from 64 to 1024.
        seed: of the sketches, >= 0. A client that knows it can make its update seem similar to
            others; so choose one that clients cannot know.
        min_weight: least weight in [0, 1] of a new direction in the mean of its client. Direction
            number n of a client has weight max(1/n, min_weight): 0 gives the mean of all rounds,
            1 the last direction.
        search: "exact" compares each absent client with all S active ones. "clusters" divides these
            into about 2 sqrt(S) clusters, and compares an absent client with those to which its
            cluster is one of the six nearest; a friend may then be the second best. Of the absent
            clients, the one in 50 with the least similar friends are compared with all. "auto":
            "clusters" if S is at least 2048.
        max_share: largest factor of a row, in [1/K, 1]; None: no limit. See
            :class:`fastagg.FDMS`.
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        means: [K, k] int8; ``scales[i] * means[i]`` is the mean direction of client i.
        scales: [K] float32.
        counts: [K] int32, number of rounds in which each client had a direction (its update was not
            zero).
    """

    norms_known = True
    refused = MappingProxyType(
        {
            "elimination": "candidate sets are sets of pairs, which this rule does not have",
            "similarity": "means of directions are compared, so it is always the cosine",
        }
    )

    state_options = frozenset({"seed"})  # of the sketches of which means are remembered

    def __init__(
        self,
        *,
        sketch: int = 256,
        seed: int = 0,
        min_weight: float = 0.2,
        search: str = "auto",
        max_share: float | None = None,
        client_weights: Any = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(max_share=max_share, client_weights=client_weights, **options)
        self.sketch = _read_columns(sketch)
        self.seed = read_count("seed", seed, least=0)
        self.min_weight = read_part("min_weight", min_weight)
        self.search = read_choice("search", search, ["auto", "exact", "clusters"])
        self._means = Means.zeros(self.num_clients, self.sketch, self.device)

    @property
    def means(self) -> Tensor:
        """[K, k] int8; ``scales[i] * means[i]`` is the mean direction of client i."""
        return self._means.numbers

    @property
    def scales(self) -> Tensor:
        """[K] float32, of ``means``; zero where a mean is zero."""
        return self._means.scales

    @property
    def counts(self) -> Tensor:
        """[K] int32, number of rounds in which each client had a direction."""
        return self._means.counts

    def _plan(self, cohort: Cohort) -> Plan:
        return Plan(self._round_shares(cohort)[cohort.clients])  # friends depend on the rows

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True  # directions do not change with the lengths of rows

    def _read(self, params: Tensor, cohort: Cohort, plan: Plan) -> Renewal:
        sketches, squares = self.columns.sketch(cohort.rows, self.sketch, round_seed(self.seed, 0))
        squares = cohort.scaled(cohort.scaled(squares))
        squares = settle_squares(self.columns, cohort, squares, self.max_norm)
        self._check_squares(cohort, squares.tolist())
        clients = cohort.clients.to(self.device)
        means = self._means.renewed(clients, sketches.to(self.device), self.min_weight)
        weights, friends = self._substitute(cohort, means)
        weights = discounted(weights, cohort, self.staleness)
        factors = cohort.scaled(weights)
        self.columns.weighted_sum_(self._aggregate, cohort.rows, factors, beta=0.0)
        return Renewal(weights, self._check_aggregate(params, cohort, plan), means, friends=friends)

    def _commit(self, cohort: Cohort, plan: Plan, reading: Renewal) -> None:
        self._means.put_(cohort.clients.to(self.device), reading.means)

    def _substitute(self, cohort: Cohort, means: Means) -> tuple[Tensor, Tensor]:
        """Return factors [S] float64 and friends [K], given the means of the active clients."""
        if self.max_share is not None:
            propose = partial(self._proposals, means=means)
            return self._capped(cohort, propose, self.max_share)
        friends = torch.full((self.num_clients,), -1, device="cpu")
        friends[cohort.clients] = cohort.clients
        absent = self._comparable(flags_of(cohort.ids, self.num_clients).logical_not_())
        rows = (means.scales > 0.0).nonzero().flatten()
        if len(absent) and len(rows):
            found, _ = self._search(means).nearest(self.means, absent, rows)
            friends[absent.cpu()] = cohort.clients[found.cpu()]
        return self._weights(cohort, friends), friends

    def _proposals(self, clients: list[int], rows: list[int], means: Means) -> list[Proposal]:
        """Return the proposal of each of ``clients`` to its best friend among ``rows``.

        Args:
            clients: ids of absent clients.
            rows: positions of the rows with room.
            means: of the active clients.
        """
        absent = self._comparable(flags_of(clients, self.num_clients))
        places = torch.tensor(rows, dtype=torch.int64, device=self.device)
        places = places[means.scales[places] > 0.0]
        if not len(absent) or not len(places):
            return []
        found, similarity = self._search(means).nearest(self.means, absent, places)
        # Proposals of different clients are compared, so these are cosines.
        lengths = root(self.means[absent].float().square_().sum(dim=1))
        cosines = (similarity / lengths).tolist()
        listed = zip(cosines, absent.tolist(), found.tolist(), strict=True)
        return [Proposal(cosine, client, position, 1.0) for cosine, client, position in listed]

    def _comparable(self, flags: Tensor) -> Tensor:
        """Return which of the clients ``flags`` [K] bool have a mean: ids, ascending."""
        return (flags.to(self.device) & (self.scales > 0.0)).nonzero().flatten()

    def _search(self, means: Means) -> Rows:
        many = len(means.numbers) >= _CLUSTERED_FROM
        return Rows(means.numbers, self.search == "clusters" or (self.search == "auto" and many))

    def _forget(self, ids: list[int]) -> None:
        self._means.forget_(torch.tensor(ids, device=self.device))

    def _skip(self) -> Tensor:
        return torch.full((self.num_clients,), -1, device="cpu")

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        check_means(state)

    def _state(self) -> State:
        return {"means": self.means, "scales": self.scales, "counts": self.counts}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # Rows are read for their sketches and again for the sum. Sketches in float64 are written,
        # and read for their lengths and directions; the means of active clients are float32 while
        # they change. A search reads the means of absent clients.
        K, S, d = sizes.K, sizes.S, sizes.d
        k = _read_columns(options.get("sketch", 256))
        search = options.get("search", "auto")
        clustered = search == "clusters" or (search == "auto" and S >= _CLUSTERED_FROM)
        compared = min(S, _CLUSTERED_ROWS + S // DOUBTFUL) if clustered else S
        base = super().cost(sizes, options)
        return Cost(
            state=K * (k + 8),
            scratch=base.scratch + 40 * S * k + 64 * K,
            moved=base.moved + 4 * S * d + 80 * S * k + (K - S) * k,
            flops=base.flops + 4 * S * d + 2 * (K - S) * compared * k,
            reduced=8 * S * (k + 1),
            sketched=S * d,
        )


def _read_columns(value: object) -> int:
    """Return the option ``sketch``: a power of two from 64 to 1024."""
    columns = read_sketch(value)
    if columns is None or columns > _MOST_COLUMNS:
        raise ValueError(f"sketch: expected a power of two from 64 to {_MOST_COLUMNS}, got {value}")
    return columns
