# SPDX-License-Identifier: Apache-2.0
"""The state of ``fdms-means``: per client, the mean direction of its updates as int8 numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fastagg import ops
from fastagg.checkpoint import invariants
from fastagg.updates.small import by_row_pieces, root, rounded_, row_pieces

_MOST = 127  # largest magnitude in a row of means
_MOST_COUNT = (1 << 31) - 1
_BLOCK = 1 << 14  # rows that are checked at a time


@dataclass(frozen=True)
class Means:
    """Mean directions of n clients: row i is ``scales[i] * numbers[i]``.

    Attributes:
        numbers: [n, k] int8. The largest magnitude in a row is 127, or 0 if the mean is zero.
        scales: [n] float32, >= 0.
        counts: [n] int32, number of directions in each mean, at most 2^31 - 1.
    """

    numbers: Tensor
    scales: Tensor
    counts: Tensor

    @staticmethod
    def zeros(size: int, columns: int, device: torch.device) -> Means:
        return Means(
            torch.zeros((size, columns), dtype=torch.int8, device=device),
            torch.zeros(size, dtype=torch.float32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
        )

    def renewed(self, clients: Tensor, sketches: Tensor, min_weight: float) -> Means:
        """Return the means of S clients with one direction more, in new tensors.

        Args:
            clients: [S] int64.
            sketches: [S, k] float64, finite. A zero row has no direction and changes nothing.
            min_weight: least weight of a new direction; of mean number n it is at least 1/n.
        """
        pieces = row_pieces(sketches)
        if len(pieces) == 1:
            return self._renewed(clients, sketches, min_weight)
        parts = [self._renewed(clients[some], sketches[some], min_weight) for some in pieces]
        return Means(
            *(torch.cat(values) for values in zip(*(part.tensors for part in parts), strict=True))
        )

    def _renewed(self, clients: Tensor, sketches: Tensor, min_weight: float) -> Means:
        old = Means(*(value.index_select(0, clients) for value in self.tensors))
        lengths = root(sketches.square().sum(dim=1))  # [S]
        directed = lengths > 0.0
        directions = (sketches / torch.where(directed, lengths, 1.0)[:, None]).float()
        counts = old.counts + (directed & (old.counts < _MOST_COUNT)).int()
        weights = (1.0 / counts.clamp(min=1).double()).clamp_(min=min_weight).float()
        mean = old.scales[:, None] * old.numbers  # [S, k] float32
        mean += weights[:, None] * (directions - mean)
        scales = mean.abs().amax(dim=1) / _MOST
        # A denormal scale has few digits: what it is divided by would not be rounded to 127.
        scales = torch.where(scales >= torch.finfo(torch.float32).tiny, scales, 0.0)
        numbers = mean / torch.where(scales > 0.0, scales, 1.0)[:, None]
        new = rounded_(numbers).clamp_(-_MOST, _MOST).to(torch.int8)
        return Means(
            torch.where(directed[:, None], new, old.numbers),
            torch.where(directed, scales, old.scales),
            counts,
        )

    def put_(self, clients: Tensor, renewed: Means) -> None:
        """Replace the means of S clients."""
        for some in row_pieces(renewed.numbers):
            for value, new in zip(self.tensors, renewed.tensors, strict=True):
                value.index_copy_(0, clients[some], new[some])

    def forget_(self, clients: Tensor) -> None:
        """Set the means of clients to those of clients that were never active."""
        for value in self.tensors:
            value.index_fill_(0, clients, 0)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.numbers, self.scales, self.counts


def inverse_norms(numbers: Tensor) -> Tensor:
    """Return 1 / |row|, 0 for rows of zeros: [n, k] int8 -> [n] float32.

    Squares and their sum are whole numbers below 2^24, so their float32 sum is exact.
    """
    squares = by_row_pieces(numbers, lambda rows: rows.float().square_().sum(dim=1))
    return torch.where(squares > 0.0, 1.0 / root(squares), 0.0)


def check_means(state: invariants.State) -> None:
    """Check means, scales and counts of a state.

    Raises:
        ValueError: no steps lead to this state.
    """
    numbers, scales = cast(Tensor, state["means"]), cast(Tensor, state["scales"])
    counts = cast(Tensor, state["counts"])
    invariants.check_range("counts", counts, 0, _MOST_COUNT)
    # A mean of vectors of length 1 has no number above 1, up to rounding.
    invariants.check_range("scales", scales, 0.0, 1.0001 / _MOST)
    invariants.check_blank("scales", scales, counts == 0, "counts are 0")
    for begin in range(0, len(numbers), _BLOCK):
        block = numbers[begin : begin + _BLOCK]
        largest = torch.maximum(block.amax(dim=1).int(), -block.amin(dim=1).int())
        expected = torch.where(scales[begin : begin + _BLOCK] > 0.0, _MOST, 0)
        invariants.require(
            torch.equal(largest.long(), expected),
            "means",
            f"a largest magnitude of {_MOST} in rows with a scale above 0, and zeros in others",
        )


@dataclass(frozen=True)
class Rows:
    """The rows among which friends are searched: mean directions of the active clients.

    Args:
        numbers: [S, k] int8.
        clustered: whether a search compares a query with the rows of near clusters only. Those of
            the queries for which it found the least, one in 50, are then compared with all rows: a
            group of rows without a cluster of its own may have been missed.
    """

    numbers: Tensor
    clustered: bool

    def nearest(self, means: Tensor, queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row with the highest cosine for each query.

        Args:
            means: [K, k] int8.
            queries: [Q] int64, rows of ``means``.
            rows: [R] int64, ascending, the rows that can be found; R >= 1.

        Returns:
            The rows found [Q] int64, the lowest on ties, and inner products [Q] float32 of
            ``means`` and the rows, whose length is 1.
        """
        factors = inverse_norms(self.numbers)
        if not self.clustered:
            best, similarity = ops.most_similar(means, self.numbers, factors, queries, rows)
            return rows[best], similarity
        clusters = _Clusters.of(self.numbers.index_select(0, rows))
        near = clusters.nearest(means, queries)
        order = near.argsort(stable=True)
        splits = torch.zeros((len(clusters.sizes) + 1, 2), dtype=torch.int64, device="cpu")
        torch.cumsum(near.bincount(minlength=len(clusters.sizes)).cpu(), 0, out=splits[1:, 0])
        torch.cumsum(clusters.sizes, 0, out=splits[1:, 1])
        listed = rows[clusters.members.to(rows.device)]
        found, values = ops.most_similar(
            means, self.numbers, factors, queries[order], listed, splits
        )
        best, similarity = torch.empty_like(found), torch.empty_like(values)
        best[order], similarity[order] = listed[found], values
        doubtful = _smallest(similarity, -(-len(similarity) // DOUBTFUL))
        found, values = ops.most_similar(means, self.numbers, factors, queries[doubtful], rows)
        best[doubtful], similarity[doubtful] = rows[found], values
        return best, similarity


# What these numbers miss: `python -m benchmarks friends`. Fewer passes divide more groups.
DOUBTFUL = 50  # one query in this many is compared with all rows
_CENTERS = 2.0  # times sqrt(R), so that a query is compared with about as many rows as centers
_PASSES = 6  # of Lloyd's algorithm
_TRAINING = 1 << 14  # most rows that centers are computed from
_NEAR = 6  # clusters of each row


@dataclass(frozen=True)
class _Clusters:
    """Rows [R, k] int8 in at most about 2 sqrt(R) clusters, which depend on the rows alone.

    A row is in the six clusters whose centers are nearest to it. So if a group of similar rows is
    divided among several centers, a query near to one of these is compared with the whole group.
    """

    centers: Tensor  # [C, k] int8
    members: Tensor  # [L] int64 on the CPU: the rows of each cluster, ascending
    sizes: Tensor  # [C] int64 on the CPU, at least 1

    @staticmethod
    def of(rows: Tensor) -> _Clusters:
        """Find centers by Lloyd's algorithm, which begins from some of the rows."""
        count = min(len(rows), round(_CENTERS * len(rows) ** 0.5))
        some = _evenly(rows, min(len(rows), _TRAINING))
        centers, numbers = _evenly(rows, count), some.float()
        numbered = torch.arange(count, device=rows.device)
        for _ in range(_PASSES):
            places, _ = ops.most_similar(some, centers, inverse_norms(centers))
            member = numbered[:, None] == places  # [C, R]
            sums = member.float() @ numbers  # whole numbers below 2^24 are exact in float32
            largest = sums.abs().amax(dim=1, keepdim=True)
            scaled = rounded_(sums.double() * _MOST / largest.clamp(min=1.0)).to(torch.int8)
            centers = torch.where(largest > 0, scaled, centers)  # empty ones stay
        near = _nearest_centers(rows, centers)  # [R, 6]
        sizes = near.flatten().bincount(minlength=count)
        order = near.flatten().argsort(stable=True)
        kept = sizes > 0
        return _Clusters(centers[kept.to(rows.device)], order // near.shape[1], sizes[kept])

    def nearest(self, means: Tensor, queries: Tensor) -> Tensor:
        """Return the cluster of each query, [Q] int64."""
        return ops.most_similar(means, self.centers, inverse_norms(self.centers), queries)[0]


def _nearest_centers(rows: Tensor, centers: Tensor) -> Tensor:
    """Return the six centers with the highest cosines for each row, [R, 6] int64 on the CPU."""
    transposed, factors = centers.float().T, inverse_norms(centers)
    parts = []
    for some in rows.split(_TRAINING):
        products = some.float() @ transposed  # exact, as above
        parts.append((products * factors).topk(min(_NEAR, len(centers))).indices.cpu())
    return torch.cat(parts)


def _smallest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the smallest values, ties in ascending order: [n] -> [count] int64.

    The lengths of queries, which differ little, are left out: values are inner products.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    limit = values.kthvalue(count).values
    below = (values < limit).nonzero().flatten()
    return torch.cat([below, (values == limit).nonzero().flatten()[: count - len(below)]])


def _evenly(rows: Tensor, count: int) -> Tensor:
    """Return a copy of ``count`` of the rows, evenly spaced."""
    return rows.index_select(0, torch.arange(count, device=rows.device) * len(rows) // count)
