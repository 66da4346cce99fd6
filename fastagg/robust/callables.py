# SPDX-License-Identifier: Apache-2.0
"""The classes of :mod:`fastagg.robust`. What all of them share is documented there."""

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
from fastagg.robust.row_units import (
    common_unit,
    divided,
    divisors,
    headroom,
    in_unit,
    multiplied,
    own_units,
)
from fastagg.robust.vectors import Products, Vectors, combine, peak_of
from fastagg.rules.bucketing import draw_buckets
from fastagg.rules.gram_policy import square_distances
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


def _check_minority(size: int, f: int) -> None:
    """Raise ValueError unless ``f`` is less than half of the vectors."""
    if size <= 2 * f:
        raise ValueError(f"vectors: expected more than {2 * f}, twice f, got {size}")


class _Mixing(_Callable, ABC):
    """Results are linear combinations of the vectors; the factors follow from inner products."""

    @abstractmethod
    def _factors(self, products: Products) -> Tensor:
        """Compute the factors [m, n] float64 of m results from the products of n vectors."""


class _Aggregator(_Mixing):
    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors into one of the same kind, dtype and shape; see the module."""
        given = self._read(vectors)
        return given.pack(given.mean(self._factors(given.products())))[0]


class _PreAggregator(_Mixing):
    def __call__(self, vectors: VectorsLike) -> Array:
        """Turn n vectors into m vectors of the same kind, stacked: [m, ...]; see the module."""
        given = self._read(vectors)
        return given.pack(given.mean(self._factors(given.products())))


class Average(_Aggregator):
    """The mean of the vectors."""

    def _factors(self, products: Products) -> Tensor:
        return _mean_of(range(len(products)), len(products))


class GeometricMedian(_Callable):
    """The geometric median, by T steps of the smoothed Weiszfeld algorithm from zero (RFA).

    Args:
        nu: smoothing parameter, > 0, in the unit of the vectors.
        T: number of steps, >= 0. A step costs n x n operations, whatever d is. With 0 steps the
            result is zero.
    """

    def __init__(self, nu: float = 0.1, T: int = 3, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.nu = read_positive("nu", nu)
        self.T = read_count("T", T, least=0)

    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors into one of the same kind, dtype and shape; see the module."""
        given = self._read(vectors)
        unit = common_unit(given.peaks, self.nu)
        rows = divided(given.rows, divisors(given.peaks, unit))
        # A long row adds its direction times a number, so it may be shortened in the sum as well.
        factors = self._factors(Products(rows), in_unit(self.nu, unit))
        return given.pack(multiplied(combine(rows, factors), unit))[0]

    def _factors(self, products: Products, nu: float) -> Tensor:
        equal = torch.ones(len(products), dtype=torch.float64, device="cpu")
        if self.T == 0:
            return torch.zeros_like(equal)[None]
        # The first step needs the distances from zero, which are norms; the others need distances
        # from a mean of the vectors, which do not change if one vector is subtracted from all.
        first = 1.0 / products.gram.diagonal().sqrt().clamp_min(nu)
        first /= first.sum()
        return ops.weiszfeld(products.translated, equal, first, nu, self.T - 1)[None]


class _WithMinority(_Mixing):
    """A callable with an argument ``f``.

    Args:
        f: number of vectors that may be faulty, >= 0. A call raises ValueError unless f is less
            than half of the vectors.
    """

    def __init__(self, f: int = 0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.f = read_count("f", f, least=0)

    def _read(self, vectors: VectorsLike) -> Vectors:
        given = super()._read(vectors)
        _check_minority(len(given.rows), self.f)
        return given


class Krum(_WithMinority, _Aggregator):
    """The vector with the smallest sum of squared distances to its n - f - 2 nearest others.

    This is the definition of Blanchard et al. and of ``fastagg.make("krum")``. ByzFL counts one
    neighbour more, so ``Krum(f + 1)`` of ByzFL is ``Krum(f)`` here. On ties the first vector wins.

    Args:
        f: number of vectors that may be faulty, >= 0 and less than half of them.
    """

    def _factors(self, products: Products) -> Tensor:
        best = int(krum_scores(products.translated, self.f).sort(stable=True).indices[0])
        return _mean_of([best], len(products))


class MultiKrum(_WithMinority, _Aggregator):
    """The mean of the n - f vectors with the lowest scores of :class:`Krum`.

    Args:
        f: number of vectors that may be faulty, >= 0 and less than half of them.
    """

    def _factors(self, products: Products) -> Tensor:
        order = krum_scores(products.translated, self.f).sort(stable=True).indices
        return _mean_of(order[: len(products) - self.f].tolist(), len(products))


class MDA(_WithMinority, _Aggregator):
    """The mean of the n - f vectors with the smallest diameter; on ties, of the first such subset.

    Tries all subsets: 15,504 for n = 20 and f = 5, 30 million for n = 30 and f = 10.

    Args:
        f: number of vectors that may be faulty, >= 0 and less than half of them.
    """

    def _factors(self, products: Products) -> Tensor:
        size = len(products)
        _check_minority(size, self.f)
        distances = square_distances(products.translated).tolist()
        best, smallest = tuple(range(size - self.f)), math.inf
        for members in itertools.combinations(range(size), size - self.f):
            pairs = itertools.combinations(members, 2)
            diameter = max((distances[i][j] for i, j in pairs), default=0.0)
            if diameter < smallest:
                best, smallest = members, diameter
        return _mean_of(best, size)


class SMEA(_WithMinority, _Aggregator):
    """The mean of the n - f vectors whose covariance has the smallest maximum eigenvalue.

    Smallest maximum eigenvalue averaging of Allouah, Guerraoui, Gupta, Pinot and Stephan, "On the
    privacy-robustness-utility trilemma in distributed learning" (2023)::

        argmin_{|S| = n - f}  lambda_max( 1/|S| sum_{i in S} (x_i - x_S)(x_i - x_S)^T )

    where x_S is the mean over S. On ties the first such subset wins. LAPACK computes the
    eigenvalues, of matrices [n - f, n - f]. ByzFL instead takes one step of the power method from a
    random vector, so its result changes from call to call.

    Tries all subsets: 15,504 for n = 20 and f = 5, 30 million for n = 30 and f = 10.

    Args:
        f: number of vectors that may be faulty, >= 0 and less than half of them.
    """

    def _factors(self, products: Products) -> Tensor:
        return _mean_of(calmest_subset(products.translated, self.f), len(products))


class CAF(_WithMinority, _Aggregator):
    """A weighted mean, with weights from a filter along the covariance's first eigenvector.

    The covariance-bound agnostic filter of Allouah, Guerraoui and Stephan, "Towards trustworthy
    federated learning with untrusted participants" (2025)::

        c_i = 1
        while sum c > n - 2f:
            mu, C = mean and covariance of the vectors with weights c_i / sum c
            lambda, v = largest eigenvalue of C and its eigenvector
            c_i *= 1 - <x_i - mu, v>^2 / max_{j: c_j > 0} <x_j - mu, v>^2
        return the mu that had the smallest lambda

    This takes at most 2f steps, because each step removes all weight of one vector. There are two
    differences from ByzFL. Its maximum includes vectors without weight; if one of these is far
    away, its loop may not end. And its v is one step of the power method from a random vector. With
    f = 0, or if all vectors are equal, the result is the mean, where ByzFL returns None.

    Args:
        f: number of vectors that may be faulty, >= 0 and less than half of them.
    """

    def _factors(self, products: Products) -> Tensor:
        return filtered_shares(products.translated, self.f)[None]


class MoNNA(_Callable):
    """The mean of the n - f vectors nearest to a trusted one, which is included.

    Args:
        f: number of vectors that may be faulty, >= 0 and less than half of them.
        idx: position of the trusted vector in the input, before non-finite vectors are dropped.
    """

    def __init__(self, f: int = 0, idx: int = 0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.f = read_count("f", f, least=0)
        self.idx = read_count("idx", idx, least=0)

    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors into one of the same kind, dtype and shape; see the module."""
        given = self._read(vectors)
        if self.idx not in given.kept:
            raise ValueError(f"idx: expected the position of a finite vector, got {self.idx}")
        products, size = given.products(), len(given.rows)
        _check_minority(size, self.f)
        distances = square_distances(products.translated)[given.kept.index(self.idx)]
        nearest = distances.sort(stable=True).indices[: size - self.f]
        return given.pack(given.mean(_mean_of(nearest.tolist(), size)))[0]


class CenteredClipping(_Callable):
    """L steps of centered clipping, starting from the result of the previous call.

    Args:
        m: [d] starting point of the first call; copied. None starts from zero. After a call, the
            attribute is the last result, which is the starting point of the next call. Assign to it
            to start again.
        L: number of steps, >= 0. A step costs n x n operations, whatever d is.
        tau: clipping radius, > 0, in the unit of the vectors.

    A call raises ValueError, and leaves ``m`` as it was, if ``m`` or the result is out of the range
    of the vectors' dtype.
    """

    def __init__(
        self, m: Array | None = None, L: int = 1, tau: float = 100.0, *, nonfinite: str = "raise"
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self._m: Tensor | None = None
        self.m = m
        self.L = read_count("L", L, least=0)
        self.tau = read_positive("tau", tau, infinite=True)

    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors into one of the same kind, dtype and shape; see the module."""
        given = self._read(vectors)
        size = len(given.rows)
        start = self._start(given.rows[0], given.dtype)
        unit = common_unit(given.peaks, self.tau, peak_of(start))
        # A long vector adds its direction times tau, so it may be shortened in the sum as well.
        rows = divided([*given.rows, start], [*divisors(given.peaks, unit), unit])
        equal = torch.full((size,), 1.0 / size, dtype=torch.float64, device="cpu")
        gram = Products(rows, size).translated
        factors = ops.clip_towards(gram, equal, in_unit(self.tau, unit), self.L)
        result = multiplied(combine(rows, factors[None]), unit)
        if not math.isfinite(peak_of(result[0].to(given.dtype))):
            raise ValueError(f"vectors: the result is out of the range of {given.dtype}")
        self._m = result[0]
        return given.pack(result.clone())[0]

    def _start(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the starting point in the dtype of ``row`` [d]; ``dtype`` is that of vectors."""
        if self._m is None:
            return torch.zeros_like(row)
        if self._m.shape != row.shape:
            raise ValueError(
                f"vectors: expected {self._m.numel()} numbers each, as in m, the starting point, "
                f"got {row.numel()}; set m = None to start again from zero"
            )
        start = self._m.to(row)
        if not math.isfinite(peak_of(start.to(dtype))):
            raise ValueError(
                f"m: expected numbers in the range of {dtype}, as the vectors, got up to "
                f"{peak_of(self._m):.3g}; set m = None to start again from zero"
            )
        return start

    @property
    def m(self) -> Tensor | None:
        """[d] the starting point of the next call; None: zero."""
        return self._m

    @m.setter
    def m(self, value: Array | None) -> None:
        self._m = None if value is None else Vectors.read([value]).rows[0].clone()


# --- one coordinate at a time ---------------------------------------------------------------


class _Coordinatewise(_Callable, ABC):
    """Sorts the n values of each coordinate.

    Vectors of float64, which the ops do not take, are sorted by torch, ``_BLOCK`` coordinates at a
    time to bound memory.
    """

    _BLOCK = 1 << 16

    def __call__(self, vectors: VectorsLike) -> Array:
        """Aggregate n vectors into one of the same kind, dtype and shape; see the module."""
        given = self._read(vectors)
        self._check(len(given.rows))
        out = torch.empty_like(given.rows[0])
        if out.dtype == torch.float32:
            self._write(out, torch.empty(1, dtype=torch.float32, device="cpu"), given.rows)
        else:
            room = headroom(max(given.peaks))
            for start in range(0, out.numel(), self._BLOCK):
                rows = [row[start : start + self._BLOCK] for row in given.rows]
                block = torch.stack(divided(rows, [room] * len(rows)))
                out[start : start + self._BLOCK] = self._of(block.sort(dim=0).values)
            multiplied(out, room)
        return given.pack(out[None])[0]

    def _check(self, size: int) -> None:
        """Raise ValueError if the callable needs more than ``size`` vectors."""

    @abstractmethod
    def _write(self, out: Tensor, peak: Tensor, rows: list[Tensor]) -> None:
        """Aggregate rows [d] float32 into ``out`` [d]; ``peak`` [1] is scratch."""

    @abstractmethod
    def _of(self, ascending: Tensor) -> Tensor:
        """Aggregate b coordinates [n, b] float64, sorted along dim 0, to [b]."""


class Median(_Coordinatewise):
    """The median of each coordinate; for even n, the mean of the two middle values."""

    def _write(self, out: Tensor, peak: Tensor, rows: list[Tensor]) -> None:
        ops.trimmed_mean_(out, peak, rows, (len(rows) - 1) // 2)

    def _of(self, ascending: Tensor) -> Tensor:
        return _median(ascending)


class TrMean(_Coordinatewise):
    """The trimmed mean: of each coordinate, without its f largest and f smallest values.

    Args:
        f: number of values trimmed at each end, >= 0 and less than half of the vectors.
    """

    def __init__(self, f: int = 0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.f = read_count("f", f, least=0)

    def _check(self, size: int) -> None:
        _check_minority(size, self.f)

    def _write(self, out: Tensor, peak: Tensor, rows: list[Tensor]) -> None:
        ops.trimmed_mean_(out, peak, rows, self.f)

    def _of(self, ascending: Tensor) -> Tensor:
        return ascending[self.f : len(ascending) - self.f].mean(dim=0)


class Meamed(TrMean):
    """The mean of the n - f values of each coordinate that are nearest to its median.

    Of two values at the same distance, the smaller one is nearer.

    Args:
        f: number of values left out in each coordinate, >= 0 and less than half of the vectors.
    """

    def _write(self, out: Tensor, peak: Tensor, rows: list[Tensor]) -> None:
        ops.meamed_(out, peak, rows, len(rows) - self.f)

    def _of(self, ascending: Tensor) -> Tensor:
        size, count = ascending.shape
        middle = _two_sum(ascending[(size - 1) // 2], ascending[size // 2])
        left = torch.zeros(1, count, dtype=torch.int64, device="cpu")
        right = left + size - 1
        for _ in range(self.f):  # leave out the end that is farther from the median
            total, error = _two_sum(ascending.gather(0, left)[0], ascending.gather(0, right)[0])
            above = (total > middle[0]) | ((total == middle[0]) & (error >= middle[1]))
            right -= above.to(torch.int64)
            left += (~above).to(torch.int64)
        window = left + torch.arange(size - self.f, device="cpu")[:, None]
        return ascending.gather(0, window).mean(dim=0)


# --- pre-aggregators ------------------------------------------------------------------------


class NNM(_WithMinority, _PreAggregator):
    """Nearest-neighbour mixing: each vector becomes the mean of its n - f nearest, itself included.

    ByzFL takes any f < n.

    Args:
        f: number of vectors that may be faulty, >= 0 and less than half of them.
    """

    def _factors(self, products: Products) -> Tensor:
        size = len(products)
        equal = torch.ones(size, dtype=torch.float64, device="cpu")
        return ops.nearest_means(products.translated, equal, size - self.f)[1]


class Bucketing(_PreAggregator):
    """The means of random buckets of s vectors; the last bucket may be smaller.

    Args:
        s: number of vectors per bucket, >= 1.
        seed: seed of the random buckets. Every call draws new ones, as a function of the seed and
            the number of previous calls.
    """

    def __init__(self, s: int = 1, *, seed: int = 0, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.s = read_count("s", s, least=1)
        self.seed = read_count("seed", seed, least=0)
        self._calls = 0

    def _factors(self, products: Products) -> Tensor:
        buckets = draw_buckets(len(products), self.s, self.seed, self._calls)
        self._calls += 1
        return torch.cat([_mean_of(bucket, len(products)) for bucket in buckets])


class _Clipping(_Callable, ABC):
    """Scales each vector whose norm is above a bound to this norm."""

    def __call__(self, vectors: VectorsLike) -> Array:
        """Turn n vectors into n vectors of the same kind, stacked: [n, ...]; see the module."""
        given = self._read(vectors)
        # No distances are needed, so each long or short row has a unit of its own.
        own = own_units(given.peaks)
        rows, units = divided(given.rows, own), torch.tensor(own, dtype=torch.float64, device="cpu")
        room = headroom(max(given.peaks))  # a norm may be beyond float64
        divided_norms = Products(rows).gram.diagonal().sqrt()
        norms = divided_norms * (units / room)
        bounds = self._bounds(norms, room)
        factors = torch.where(norms > bounds, bounds / divided_norms * room, units)
        return given.pack(combine(rows, torch.diag(factors)))

    @abstractmethod
    def _bounds(self, norms: Tensor, unit: float) -> Tensor:
        """Return the bound of each norm, [n] float64; norms and bounds are divided by ``unit``."""


class Clipping(_Clipping):
    """Static clipping: vectors with a norm above c are scaled to norm c.

    Args:
        c: largest norm, > 0, in the unit of the vectors.
    """

    def __init__(self, c: float = 2.0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.c = read_positive("c", c)

    def _bounds(self, norms: Tensor, unit: float) -> Tensor:
        return torch.full_like(norms, self.c / unit)


class ARC(_Clipping):
    """Adaptive robust clipping: the longest vectors are scaled to the norm of the next longest.

    The floor(2f (n - f) / n) longest vectors are clipped (Allouah et al. 2024).

    Args:
        f: number of vectors that may be faulty, 0 <= f <= n.
    """

    def __init__(self, f: int = 0, *, nonfinite: str = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.f = read_count("f", f, least=0)

    def _bounds(self, norms: Tensor, unit: float) -> Tensor:
        size = len(norms)
        if self.f > size:
            raise ValueError(f"vectors: expected at least {self.f} (argument f), got {size}")
        clipped = 2 * self.f * (size - self.f) // size  # at most size / 2
        return norms.sort().values[size - clipped - 1].expand(size)


def _mean_of(members: Sequence[int], size: int) -> Tensor:
    """Return the factors [1, size] of the mean of the vectors ``members``."""
    factors = torch.zeros(1, size, dtype=torch.float64, device="cpu")
    factors[0, list(members)] = 1.0 / len(members)
    return factors


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and its error: their exact sum is that of ``a`` and ``b`` (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _median(ascending: Tensor) -> Tensor:
    """Return the median along dim 0 of sorted values."""
    size = len(ascending)
    return (ascending[(size - 1) // 2] + ascending[size // 2]) / 2.0
