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


def square_distances(gram: Tensor) -> Tensor:
    """``|x_i - x_j|^2`` for all pairs: [n, n] -> [n, n]. Copies of a row are exactly 0 apart."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares - 2.0 * gram).clamp_min(0.0)
    return distances.fill_diagonal_(0.0)


def distances_to(gram: Tensor, factors: Tensor) -> Tensor:
    """``|x_i - z|`` of every row to the combination ``z = factors @ rows``: [n] -> [n].

    A Gram matrix knows squares to 1e-8 of the rows' squared norms, so distances below 1e-4 of the
    norms are noise; the policies here are continuous in them.
    """
    products = times(gram, factors)  # <x_i, z>
    square = (factors * products).sum()  # |z|^2
    return (gram.diagonal() - 2.0 * products + square).clamp_min(0.0).sqrt()


def mix(gram: Tensor, mixing: Tensor) -> Tensor:
    """``W G W^T``, the Gram matrix of ``mixing @ rows``: [n, n], [m, n] -> [m, m], symmetric."""
    half = torch.stack([times(gram, row) for row in mixing])  # [m, n], gram is symmetric
    mixed = torch.stack([times(mixing, row) for row in half])  # [m, m]
    return (mixed + mixed.T) / 2.0


class Mixed(Policy):
    """Averages rows before another policy judges them: ``policy(W G W^T) @ W``.

    Args:
        policy: what judges the averages.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.uses_previous = policy.uses_previous
        self.uses_round = policy.uses_round

    @abstractmethod
    def mixing(self, gram: Tensor, weights: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """The averages, W [m, n] with rows of sum 1, and the weight of each [m], of sum 1.

        Arguments as of a call, without the row of the previous aggregate.
        """

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        size = len(weights)
        mixing, mixed_weights = self.mixing(gram[:size, :size], weights, t)
        others = torch.eye(len(gram) - size, dtype=gram.dtype)  # the previous aggregate stays
        mixing = torch.block_diag(mixing, others)
        factors = self.policy(mix(gram, mixing), mixed_weights, t)
        return times(mixing.T.contiguous(), factors)


def check_majority(num_rows: int, num_byzantine: int) -> None:
    """Refuse rounds in which the rows not to be trusted are half of all or more."""
    if num_rows <= 2 * num_byzantine:
        raise ValueError(
            f"updates: expected more than {2 * num_byzantine} rows, twice num_byzantine, "
            f"got {num_rows}"
        )
