# SPDX-License-Identifier: Apache-2.0
"""The covariance of vectors, by way of their distances: what its largest eigenvalue says.

The covariance ``sum_i p_i (x_i - mu)(x_i - mu)^T`` [d, d], with shares p of sum 1 and mean mu, has
the same eigenvalues as ``sqrt(p_i) sqrt(p_j) <x_i - mu, x_j - mu>`` [n, n], besides zeros, and
those products follow from squared distances. So nothing here has size d.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fastagg.rules.gram_policy import check_majority, square_distances, times

_BATCH = 1 << 11  # subsets whose eigenvalues are computed at a time


def calmest_subset(gram: Tensor, f: int) -> list[int]:
    """The n - f vectors whose covariance has the smallest largest eigenvalue, the first on ties.

    Tries all of them.

    Args:
        gram: [n, n] float64.
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
        members = torch.tensor(batch)  # [b, n - f]
        within = distances[members[:, :, None], members[:, None, :]]
        shares = torch.full((size - f,), 1.0 / (size - f), dtype=torch.float64)
        largest = torch.linalg.eigvalsh(_centered(within, shares))[:, -1]
        first = int((largest == largest.min()).nonzero()[0])
        if float(largest[first]) < smallest:
            best, smallest = list(batch[first]), float(largest[first])
    return best


def filtered_shares(gram: Tensor, f: int) -> Tensor:
    """The shares [n], of sum 1, at which the filter of CAF has seen the least covariance.

    Each step takes weight from the vectors that are far from the mean along the covariance's first
    eigenvector v, all of it from the farthest that has some: at most 2f steps.

    Args:
        gram: [n, n] float64.
        f: less than half of n.

    Raises:
        ValueError: f is half of n or more.
    """
    size = len(gram)
    check_majority(size, f)
    distances = _relative_distances(gram)
    weights = torch.ones(size, dtype=torch.float64)
    best, smallest = weights / size, math.inf
    while float(weights.sum()) > size - 2 * f:
        shares = weights / weights.sum()
        products = _centered(distances, shares)
        roots = shares.sqrt()
        values, vectors = torch.linalg.eigh(roots[:, None] * products * roots)
        if float(values[-1]) < smallest:
            best, smallest = shares, float(values[-1])
        along = times(products, roots * vectors[:, -1])  # <x_i - mu, v>, up to a factor
        excess = torch.where(weights > 0, along.square(), 0.0)
        if not bool(excess.any()):  # those that count are copies of one vector
            break
        weights = weights * (1.0 - excess / excess.max())
    return best


def _relative_distances(gram: Tensor) -> Tensor:
    """Squared distances [n, n], divided by the largest, so that their scale does not matter."""
    distances = square_distances(gram)
    largest = distances.max()
    return distances / largest if bool(largest > 0) else distances


def _centered(distances: Tensor, shares: Tensor) -> Tensor:
    """``<x_i - mu, x_j - mu>`` [..., n, n] from squared distances, for the mean with ``shares``."""
    to_mean = (distances * shares).sum(dim=-1)  # |x_i - mu|^2 + the spread
    spread = (to_mean * shares).sum(dim=-1)
    return (to_mean[..., :, None] + to_mean[..., None, :] - spread[..., None, None] - distances) / 2
