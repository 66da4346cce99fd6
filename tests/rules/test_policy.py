# SPDX-License-Identifier: Apache-2.0
"""Compare the building blocks of the robust policies with plain definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastagg import ops
from fastagg.rules.gram_policy import times
from fastagg.rules.krum import krum_scores


def gram_of(n: int, copies: bool = False) -> Tensor:
    rows = torch.randn(n, 60)
    if copies:
        rows[n // 2 :] = rows[: n - n // 2].clone()
    return ops.gram(rows, dtype=torch.float64)


@pytest.mark.parametrize("n", [3, 8, 101])
def test_krum_scores_of_copies_are_equal_to_the_bit(n: int) -> None:
    """Ties go to the lowest id, so copies must have one score, in any order of arrival."""
    gram = gram_of(n)
    order = torch.randperm(n)
    assert torch.equal(krum_scores(gram[order][:, order], 1), krum_scores(gram, 1)[order])
    scores = krum_scores(gram_of(2 * n, copies=True), 1)
    assert torch.equal(scores[:n], scores[n:])


def test_products_against_matrix_products() -> None:
    matrix, vector = torch.rand(5, 12, dtype=torch.float64), torch.rand(12, dtype=torch.float64)
    assert torch.allclose(times(matrix, vector), matrix @ vector, rtol=0, atol=1e-14)
