# SPDX-License-Identifier: Apache-2.0
"""The classes of :mod:`fastagg.robust`, which describes what they share."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import read_count, read_positive
from fastagg.robust.covariance import calmest_subset, filtered_shares
from fastagg.robust.vectors import Vectors, combine, gram_of
from fastagg.rules.bucketing import draw_buckets
from fastagg.rules.gram_policy import check_majority, nearest, square_distances
from fastagg.rules.krum import krum_scores

__all__ = [
    "ARC",
    "CAF",
    "MDA",
    "NNM",
    "SMEA",
    "Average",
    "Bucketing",
    "CenteredClipping",
    "Clipping",
    "GeometricMedian",
    "Krum",
    "Meamed",
    "Median",
    "MoNNA",
    "MultiKrum",
    "TrMean",
]

Array: TypeAlias = "np.ndarray[Any, Any] | Tensor"
VectorsLike: TypeAlias = "Array | Sequence[np.ndarray[Any, Any]] | Sequence[Tensor]"


class _Callable:
    def __init__(self, *, nonfinite: str = "raise") -> None:
        if nonfinite not in ("raise", "drop"):
            raise ValueError(f'nonfinite: expected "raise" or "drop", got {nonfinite!r}')
        self.nonfinite = nonfinite

    def _read(self, vectors: VectorsLike) -> Vectors:
        return Vectors.read(vectors, drop=self.nonfinite == "drop")


class _Mixing(_Callable, ABC):
    """What is a combination of the vectors, with factors that follow from their Gram matrix."""

    @abstractmethod
    def _factors(self, gram: Tensor) -> Tensor:
        """[n, n] float64 -> [m, n] float64, one row for each vector of the result."""


class _Aggregator(_Mixing):
    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors; see the module. Returns one in their kind, dtype and shape."""
        given = self._read(vectors)
        return given.pack(combine(given.rows, self._factors(gram_of(given.rows))))[0]


class _PreAggregator(_Mixing):
    def __call__(self, vectors: VectorsLike) -> Array:
        """Mix n vectors; see the module. Returns m of them, stacked: [m, ...]."""
        given = self._read(vectors)
        return given.pack(combine(given.rows, self._factors(gram_of(given.rows))))


class Average(_Aggregator):
    """The mean."""

    def _factors(self, gram: Tensor) -> Tensor:
        return _mean_of(range(len(gram)), len(gram))


class GeometricMedian(_Aggregator):
    """T steps of the smoothed Weiszfeld algorithm, from zero (RFA).

    Args:
        nu: smoothing, > 0, in units of the vectors.
        T: steps, >= 0; each touches n x n numbers. 0 gives zeros.
    """

    def __init__(self, nu: float = 0.1, T: int = 3, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.nu = read_positive("nu", nu)
        self.T = read_count("T", T, least=0)

    def _factors(self, gram: Tensor) -> Tensor:
        equal = torch.ones(len(gram), dtype=torch.float64)
        return ops.weiszfeld(gram, equal, torch.zeros_like(equal), self.nu, self.T)[None]


class _WithMinority(_Mixing):
    """Args: f: vectors not to be trusted, >= 0 and less than half (else ValueError)."""

    def __init__(self, f: int = 0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.f = read_count("f", f, least=0)


class Krum(_WithMinority, _Aggregator):
    """The vector with the smallest sum of squared distances to its n - f - 2 nearest others.

    As in Blanchard et al. and in ``fastagg.make("krum")``; ByzFL counts one neighbour more, so that
    its ``Krum(f + 1)`` is this with ``f``. The first one wins a tie.

    Args:
        f: vectors not to be trusted, >= 0 and less than half of them.
    """

    def _factors(self, gram: Tensor) -> Tensor:
        best = int(krum_scores(gram, self.f).sort(stable=True).indices[0])
        return _mean_of([best], len(gram))


class MultiKrum(_WithMinority, _Aggregator):
    """The mean of the n - f vectors with the lowest scores of :class:`Krum`.

    Args:
        f: vectors not to be trusted, >= 0 and less than half of them.
    """

    def _factors(self, gram: Tensor) -> Tensor:
        order = krum_scores(gram, self.f).sort(stable=True).indices
        return _mean_of(order[: len(gram) - self.f].tolist(), len(gram))


class MDA(_WithMinority, _Aggregator):
    """The mean of the n - f vectors with the smallest diameter, the first such set on ties.

    Tries all sets: n = 20, f = 5 are 15,504, n = 30, f = 10 are 30 million.

    Args:
        f: vectors not to be trusted, >= 0 and less than half of them.
    """

    def _factors(self, gram: Tensor) -> Tensor:
        size = len(gram)
        check_majority(size, self.f)
        distances = square_distances(gram).tolist()
        best, smallest = tuple(range(size - self.f)), math.inf
        for members in itertools.combinations(range(size), size - self.f):
            pairs = itertools.combinations(members, 2)
            diameter = max((distances[i][j] for i, j in pairs), default=0.0)
            if diameter < smallest:
                best, smallest = members, diameter
        return _mean_of(best, size)


class SMEA(_WithMinority, _Aggregator):
    """The mean of the n - f vectors whose covariance has the smallest largest eigenvalue.

    Smallest maximum eigenvalue averaging of Allouah, Guerraoui, Gupta, Pinot and Stephan, "On the
    privacy-robustness-utility trilemma in distributed learning" (2023)::

        argmin_{|S| = n - f}  lambda_max( 1/|S| sum_{i in S} (x_i - x_S)(x_i - x_S)^T )

    where x_S is the mean over S; the first such set on ties. Eigenvalues are LAPACK's, of matrices
    [n - f, n - f]. (ByzFL's are one step of the power method from a random vector: its result
    changes from call to call.)
    Tries all sets: n = 20, f = 5 are 15,504, n = 30, f = 10 are 30 million.

    Args:
        f: vectors not to be trusted, >= 0 and less than half of them.
    """

    def _factors(self, gram: Tensor) -> Tensor:
        return _mean_of(calmest_subset(gram, self.f), len(gram))


class CAF(_WithMinority, _Aggregator):
    """The weighted mean that a filter on the covariance's first eigenvector ends with.

    The covariance-bound agnostic filter of Allouah, Guerraoui and Stephan, "Towards trustworthy
    federated learning with untrusted participants" (2025)::

        c_i = 1
        while sum c > n - 2f:
            mu, C = mean and covariance of the vectors with weights c_i / sum c
            lambda, v = largest eigenvalue of C and its eigenvector
            c_i *= 1 - <x_i - mu, v>^2 / max_{j: c_j > 0} <x_j - mu, v>^2
        the mu of the smallest lambda

    which takes 2f steps at most, since each takes all weight from one vector. (ByzFL's maximum is
    over vectors without weight as well, one of which, far away, can keep it from ending; and its v
    is one step of the power method from a random vector.) With f = 0, and of copies of one vector,
    this is the mean, where ByzFL gives None.

    Args:
        f: vectors not to be trusted, >= 0 and less than half of them.
    """

    def _factors(self, gram: Tensor) -> Tensor:
        return filtered_shares(gram, self.f)[None]


class MoNNA(_Callable):
    """The mean of the n - f vectors nearest to one that is trusted, itself included.

    Args:
        f: vectors not to be trusted, >= 0 and less than half of them.
        idx: the position of the trusted one, counted before any are dropped.
    """

    def __init__(self, f: int = 0, idx: int = 0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.f = read_count("f", f, least=0)
        self.idx = read_count("idx", idx, least=0)

    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors; see the module. Returns one in their kind, dtype and shape."""
        given = self._read(vectors)
        if self.idx not in given.kept:
            raise ValueError(f"idx: expected the position of a finite vector, got {self.idx}")
        gram = gram_of(given.rows)
        check_majority(len(gram), self.f)
        distances = square_distances(gram)[given.kept.index(self.idx)]
        nearest = distances.sort(stable=True).indices[: len(gram) - self.f]
        return given.pack(combine(given.rows, _mean_of(nearest.tolist(), len(gram))))[0]


class CenteredClipping(_Callable):
    """L steps of centered clipping, from the result of the call before (zero at first).

    Args:
        m: [d] where to start from, None: zero. Copied.
        L: steps, >= 0; each touches n x n numbers.
        tau: clipping radius, > 0, in units of the vectors.

    Attributes:
        m: [d] where the next call starts from, None before the first; the caller's to reset.
    """

    def __init__(
        self, m: Array | None = None, L: int = 1, tau: float = 100.0, *, nonfinite: str = "raise"
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self.m = None if m is None else Vectors.read([m]).rows[0].clone()
        self.L = read_count("L", L, least=0)
        self.tau = read_positive("tau", tau, infinite=True)

    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors; see the module. Returns one in their kind, dtype and shape."""
        given = self._read(vectors)
        size = len(given.rows)
        start = torch.zeros_like(given.rows[0]) if self.m is None else self.m.to(given.rows[0])
        if start.shape != given.rows[0].shape:
            raise ValueError(
                f"vectors: expected {start.numel()} numbers each, as before, "
                f"got {given.rows[0].numel()}"
            )
        rows = [*given.rows, start]
        equal = torch.full((size,), 1.0 / size, dtype=torch.float64)
        self.m = combine(rows, ops.clip_towards(gram_of(rows), equal, self.tau, self.L)[None])[0]
        return given.pack(self.m[None].clone())[0]


# --- one coordinate at a time ---------------------------------------------------------------


class _Coordinatewise(_Callable, ABC):
    """Sorts each coordinate, some thousand of them at a time: memory is n times that."""

    _BLOCK = 1 << 16

    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors; see the module. Returns one in their kind, dtype and shape."""
        given = self._read(vectors)
        out = torch.empty_like(given.rows[0])
        for start in range(0, out.numel(), self._BLOCK):
            block = torch.stack([row[start : start + self._BLOCK] for row in given.rows])
            out[start : start + self._BLOCK] = self._of(block.double().sort(dim=0).values)
        return given.pack(out[None])[0]

    @abstractmethod
    def _of(self, ascending: Tensor) -> Tensor:
        """[n, b] float64, sorted along dim 0 -> [b]."""


class Median(_Coordinatewise):
    """The median of each coordinate; of an even number of vectors, the mean of the middle two.

    (ByzFL does so for arrays, and takes the lower of the two for tensors.)
    """

    def _of(self, ascending: Tensor) -> Tensor:
        return _median(ascending)


class TrMean(_Coordinatewise):
    """The mean of each coordinate without its f largest and f smallest values.

    Args:
        f: >= 0 and less than half of the vectors.
    """

    def __init__(self, f: int = 0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.f = read_count("f", f, least=0)

    def _of(self, ascending: Tensor) -> Tensor:
        check_majority(len(ascending), self.f)
        return ascending[self.f : len(ascending) - self.f].mean(dim=0)


class Meamed(TrMean):
    """The mean of the n - f values of each coordinate that are nearest to its median.

    Args:
        f: >= 0 and less than half of the vectors.
    """

    def _of(self, ascending: Tensor) -> Tensor:
        check_majority(len(ascending), self.f)
        distances = (ascending - _median(ascending)).abs()
        order = distances.sort(dim=0, stable=True).indices[: len(ascending) - self.f]
        return ascending.gather(0, order).mean(dim=0)


# --- before another rule --------------------------------------------------------------------


class NNM(_WithMinority, _PreAggregator):
    """Each vector becomes the mean of its n - f nearest ones, itself included.

    Args:
        f: vectors not to be trusted, >= 0 and less than half of them.
    """

    def _factors(self, gram: Tensor) -> Tensor:
        size = len(gram)
        check_majority(size, self.f)
        distances = square_distances(gram, own=-1.0)  # itself comes first
        return nearest(distances, size - self.f).to(torch.float64) / (size - self.f)


class Bucketing(_PreAggregator):
    """The means of random buckets of s vectors, the last one perhaps smaller.

    Args:
        s: >= 1.
        seed: of the buckets; each call draws anew, from the seed and the number of the call.
    """

    def __init__(self, s: int = 1, *, seed: int = 0, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.s = read_count("s", s, least=1)
        self.seed = read_count("seed", seed, least=0)
        self._calls = 0

    def _factors(self, gram: Tensor) -> Tensor:
        buckets = draw_buckets(len(gram), self.s, self.seed, self._calls)
        self._calls += 1
        return torch.cat([_mean_of(bucket, len(gram)) for bucket in buckets])


class Clipping(_PreAggregator):
    """Vectors longer than c are scaled down to that length.

    Args:
        c: > 0, in units of the vectors.
    """

    def __init__(self, c: float = 2.0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.c = read_positive("c", c)

    def _factors(self, gram: Tensor) -> Tensor:
        return torch.diag((self.c / gram.diagonal().sqrt()).clamp_max(1.0))


class ARC(_WithMinority, _PreAggregator):
    """The floor(2f (n - f) / n) longest vectors are scaled down to the length of the next.

    Adaptive robust clipping of Allouah et al. 2024.

    Args:
        f: vectors not to be trusted, 0 <= f <= n.
    """

    def _factors(self, gram: Tensor) -> Tensor:
        size = len(gram)
        if self.f > size:
            raise ValueError(f"vectors: expected at least {self.f}, as many as f, got {size}")
        norms = gram.diagonal().sqrt()
        order = norms.sort(stable=True).indices
        clipped = 2 * self.f * (size - self.f) // size
        if clipped == size:
            raise ValueError(f"f: {self.f} of {size} vectors leave none unclipped")
        longest = norms[order[size - clipped - 1]]
        factors = torch.ones(size, dtype=torch.float64)
        above = order[size - clipped :]
        factors[above] = torch.where(norms[above] > longest, longest / norms[above], 1.0)
        return torch.diag(factors)


def _mean_of(members: Sequence[int], size: int) -> Tensor:
    """[1, size]: the factors of the mean of some of the vectors."""
    factors = torch.zeros(1, size, dtype=torch.float64)
    factors[0, list(members)] = 1.0 / len(members)
    return factors


def _median(ascending: Tensor) -> Tensor:
    size = len(ascending)
    return (ascending[(size - 1) // 2] + ascending[size // 2]) / 2.0
