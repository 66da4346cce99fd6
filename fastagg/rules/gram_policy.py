# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation as a function of the Gram matrix: who gets which factor.

Every robust rule here is a combination of the rows it is given, and what it needs to know about
them are their distances. So a policy maps the Gram matrix [n, n] of n rows to one factor per row,
and a policy that first averages rows (buckets, neighbours) wraps another: the averages' Gram
matrix is ``W G W^T``. Nothing of size d is touched until the factors are known.

Sums are float64 and along rows of a matrix: torch adds each row in one thread, so the result does
not depend on the number of threads, as that of a matrix product could.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor


class Policy(ABC):
    """A pure function from the Gram matrix of rows to their factors in the aggregate.

    Attributes:
        uses_previous: whether the last row is the aggregate of the round before.
        uses_round: whether the result depends on the round.
    """

    uses_previous: bool = False
    uses_round: bool = False

    @abstractmethod
    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        """The factors, >= 0, of sum 1 up to rounding.

        Args:
            gram: [n + e, n + e] float64 of n rows and, if ``uses_previous``, of e = 1 further
                one, the previous aggregate.
            weights: [n] float64, > 0, of sum 1: the say of each row.
            t: the round, 0, 1, ...

        Returns:
            [n + e] float64.

        Raises:
            ValueError: the policy is not defined for so few rows.
        """


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """``matrix @ vector``: [m, n], [n] -> [m], with the same bits for any number of threads."""
    return (matrix * vector).sum(dim=1)


def square_distances(gram: Tensor, own: float = 0.0) -> Tensor:
    """``|x_i - x_j|^2`` for all pairs: [n, n] -> [n, n]. Copies of a row are exactly 0 apart.

    Args:
        own: what a row's distance to itself is set to.
    """
    squares = gram.diagonal()
    distances = (squares[:, None] + squares).sub_(gram, alpha=2.0).clamp_min_(0.0)
    return distances.fill_diagonal_(own)


def nearest(distances: Tensor, count: int) -> Tensor:
    """The ``count`` smallest of each row, the first ones on ties: [n, n] -> [n, n] bool."""
    numbers = distances.numpy()
    bounds = np.partition(numbers, count - 1, axis=1)[:, count - 1 : count]  # [n, 1], the largest
    chosen, last = numbers < bounds, numbers == bounds
    missing = count - chosen.sum(axis=1, keepdims=True)
    chosen |= last & (last.cumsum(axis=1) <= missing)
    return torch.from_numpy(chosen)


def all_times(matrix: Tensor, vectors: Tensor) -> Tensor:
    """``matrix @ v`` for each of k vectors, as :func:`times`: [m, n], [k, n] -> [k, m]."""
    products = torch.empty_like(matrix)  # one for all: fresh memory would cost more than the sums
    result = matrix.new_empty(len(vectors), len(matrix))
    for vector, sums in zip(vectors, result, strict=True):
        torch.sum(torch.mul(matrix, vector, out=products), dim=1, out=sums)
    return result


class Around(Policy):
    """A policy that averages rows before another one judges the averages.

    Args:
        policy: the other one.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.uses_previous = policy.uses_previous
        self.uses_round = policy.uses_round


def check_majority(num_rows: int, num_byzantine: int) -> None:
    """Refuse rounds in which the rows not to be trusted are half of all or more."""
    if num_rows <= 2 * num_byzantine:
        raise ValueError(
            f"updates: expected more than {2 * num_byzantine} rows, twice num_byzantine, "
            f"got {num_rows}"
        )
