# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation as a function of the Gram matrix: compute the factor of each row.

The aggregate of every robust rule here is a linear combination of the rows, and its factors depend
only on distances, or on distances and norms. So a policy maps the Gram matrix [n, n] of n rows to
one factor per row. A policy that first averages rows (bucketing, nearest-neighbour mixing) wraps
another one: with averages ``W @ rows``, their Gram matrix is ``W G W^T``. No vector of length d is
read before the factors are known.

Sums are in float64 along rows of a matrix. torch adds each row in one thread, so the result is
invariant to the thread count; that of a matrix product need not be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastagg.ops.memory import tensor_of
from fastagg.updates.small import by_row_pieces


class Policy(ABC):
    """A pure function from the Gram matrix of rows to their factors in the aggregate.

    Attributes:
        uses_previous: whether the Gram matrix must include the previous aggregate, as its last row.
        uses_norms: whether the result depends on the norms of the rows. If not, it depends on their
            distances alone, and the Gram matrix may be that of the rows minus a common one
            (``fastagg.rules.common_row``).
        uses_round: whether the result depends on the round number.
    """

    uses_previous: bool = False
    uses_norms: bool = False
    uses_round: bool = False

    @abstractmethod
    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        """Return the factors, >= 0, of sum 1 up to rounding.

        Args:
            gram: [n + e, n + e] float64, of n rows and, if ``uses_previous``, of the previous
                aggregate as the last row (e = 1, otherwise 0).
            weights: [n] float64, > 0, of sum 1: the weight of each row.
            t: the round, 0, 1, ...

        Returns:
            [n + e] float64.

        Raises:
            ValueError: the policy needs more rows.
        """


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return ``matrix @ vector``, invariant to the thread count: [m, n], [n] -> [m]."""
    return by_row_pieces(matrix, lambda rows: (rows.contiguous() * vector).sum(dim=1))


def square_distances(gram: Tensor) -> Tensor:
    """Return ``|x_i - x_j|^2`` of all pairs of rows, >= 0: exactly 0 for identical rows.

    Args:
        gram: [n, n] float64.

    Returns:
        [n, n] float64.
    """
    return tensor_of(distances_of(gram.numpy()))


def distances_of(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return :func:`square_distances` as an array."""
    squares = products.diagonal()
    distances: NDArray[np.float64] = squares[:, None] + squares
    distances -= 2.0 * products
    np.maximum(distances, 0.0, out=distances)
    distances.reshape(-1)[:: len(distances) + 1] = 0.0
    return distances


class Around(Policy):
    """Base of the policies that average rows and apply another policy to the averages.

    Args:
        policy: applied to the Gram matrix of the averages.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.uses_previous = policy.uses_previous
        self.uses_norms = policy.uses_norms
        self.uses_round = policy.uses_round


def check_majority(num_rows: int, num_byzantine: int) -> None:
    """Raise ValueError if half of the rows or more may be Byzantine (faulty or malicious)."""
    if num_rows <= 2 * num_byzantine:
        raise ValueError(
            f"updates: expected more than {2 * num_byzantine} rows, twice num_byzantine, "
            f"got {num_rows}"
        )
