# SPDX-License-Identifier: Apache-2.0
"""Policies of SMEA and CAF: eigenvalues of the vectors' covariance, from squared distances.

The covariance ``sum_i p_i (x_i - mu)(x_i - mu)^T`` [d, d], with shares p of sum 1 and mean mu, has
the same nonzero eigenvalues as ``sqrt(p_i) sqrt(p_j) <x_i - mu, x_j - mu>`` [n, n]. These inner
products follow from squared distances, so nothing here has size d.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fastagg.rules.gram_policy import check_majority, square_distances, times

_BATCH = 1 << 11  # subsets per call of eigvalsh


def calmest_subset(gram: Tensor, f: int) -> list[int]:
    """Return the n - f vectors whose covariance has the smallest maximum eigenvalue (SMEA).

    Tries all subsets; on ties the first one wins.

    Args:
        gram: Gram matrix [n, n] float64.
        f: less than half of n.

    Raises:
        ValueError: f is half of n or more.
    """
    size = len(gram)
    check_majority(size, f)
    distances = _relative_distances(gram)
    best, smallest = list(range(size - f)), math.inf
    subsets = itertools.combinations(range(size), size - f)
    while batch := list(itertools.islice(subsets, _BATCH)):
        members = torch.tensor(batch, device="cpu")  # [b, n - f]
        within = distances[members[:, :, None], members[:, None, :]]
        shares = torch.full((size - f,), 1.0 / (size - f), dtype=torch.float64, device="cpu")
        largest = torch.linalg.eigvalsh(_centered(within, shares))[:, -1]
        first = int((largest == largest.min()).nonzero()[0])
        if float(largest[first]) < smallest:
            best, smallest = list(batch[first]), float(largest[first])
    return best


def filtered_shares(gram: Tensor, f: int) -> Tensor:
    """Return the shares [n], of sum 1, for which the filter of CAF found the smallest covariance.

    Each step reduces the weights of vectors that are far from the mean along the covariance's first
    eigenvector v. The farthest vector that still has weight loses all of it, so there are at most
    2f steps.

    Args:
        gram: Gram matrix [n, n] float64.
        f: less than half of n.

    Raises:
        ValueError: f is half of n or more.
    """
    size = len(gram)
    check_majority(size, f)
    distances = _relative_distances(gram)
    weights = torch.ones(size, dtype=torch.float64, device="cpu")
    best, smallest = weights / size, math.inf
    while float(weights.sum()) > size - 2 * f:
        shares = weights / weights.sum()
        products = _centered(distances, shares)
        roots = shares.sqrt()
        values, vectors = torch.linalg.eigh(roots[:, None] * products * roots)
        if float(values[-1]) < smallest:
            best, smallest = shares, float(values[-1])
        along = times(products, roots * vectors[:, -1])  # <x_i - mu, v>, up to a factor
        along = torch.where(weights > 0, along, 0.0)
        if not bool(along.any()):  # all vectors that have weight are equal
            break
        excess = (along * _reciprocal_power(float(along.abs().max()))).square()
        weights = weights * (1.0 - excess / excess.max())
    return best


def _reciprocal_power(value: float) -> float:
    """Return a power of two whose product with ``value`` > 0 is about 1, so that squares are."""
    return 2.0 ** min(-math.frexp(value)[1], 1000)


def _relative_distances(gram: Tensor) -> Tensor:
    """Return squared distances [n, n] divided by the largest, so that their scale is 1."""
    distances = square_distances(gram)
    largest = distances.max()
    return distances / largest if bool(largest > 0) else distances


def _centered(distances: Tensor, shares: Tensor) -> Tensor:
    """Return ``<x_i - mu, x_j - mu>`` [..., n, n], where mu is the mean with weights ``shares``."""
    to_mean = (distances * shares).sum(dim=-1)  # |x_i - mu|^2 + spread
    spread = (to_mean * shares).sum(dim=-1)
    return (to_mean[..., :, None] + to_mean[..., None, :] - spread[..., None, None] - distances) / 2
