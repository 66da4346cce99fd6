# SPDX-License-Identifier: Apache-2.0
"""Arithmetic with NumPy in place of torch: the same bits, without PyTorch's threads or warnings."""

from __future__ import annotations

import math

import pytest
import torch

from fastagg.rules.gram_policy import times
from fastagg.updates import small

CPU = torch.device("cpu")
SPECIAL = [0.0, -0.0, 1.0, -1e300, 1e-320, math.inf, -math.inf, math.nan]


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


@pytest.fixture(name="matrix")
def _matrix() -> torch.Tensor:
    torch.manual_seed(0)
    matrix = torch.randn(180, 200, dtype=torch.float64) * 1e3
    matrix[0, : len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)
    return matrix


def test_quotients_are_those_of_torch(matrix: torch.Tensor) -> None:
    divisors = torch.rand(180, 1, dtype=torch.float64)
    divisors[:4, 0] = torch.tensor([0.0, math.inf, math.nan, 1e-310], dtype=torch.float64)
    divisors[4:, 0] += 1e-3
    for divisor in (divisors, torch.tensor(3.0, dtype=torch.float64)):
        found = small.quotients(matrix, divisor)
        assert same(found, (matrix / divisor).float())
        assert found.isfinite().sum() > 170 * 200


def test_pairs_are_scaled_in_place(matrix: torch.Tensor) -> None:
    square, factors = matrix[:, :180].contiguous(), torch.rand(180, dtype=torch.float64)
    factors[3], factors[5] = math.inf, 0.0
    expected = square * (factors[:, None] * factors)
    small.scale_pairs_(square, factors)
    assert same(square, expected) and square.isfinite().sum() > 170 * 170


def test_numbers_are_limited_and_the_least_is_found(matrix: torch.Tensor) -> None:
    expected = matrix.clamp(-1.0, 1.0)
    assert math.isnan(small.lowest(matrix))
    assert small.lowest(matrix[1:]) == matrix[1:].min().item() < -1e3
    assert small.clamped_(matrix, -1.0, 1.0) is matrix and same(matrix, expected)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 0), (7, 3), (5, 10_000), (2, 40_000)])
def test_pieces_of_rows_are_all_rows_in_order(rows: int, columns: int) -> None:
    matrix = torch.randn(rows, columns)
    pieces = small.row_pieces(matrix)
    assert torch.equal(torch.cat([matrix[some] for some in pieces]), matrix)
    if columns < 1 << 15:
        assert all(matrix[some].numel() < 1 << 15 for some in pieces)
    else:
        assert len(pieces) == 1


def test_products_by_pieces_are_those_of_the_whole(matrix: torch.Tensor) -> None:
    vector = torch.randn(180, dtype=torch.float64)
    rows = matrix[1:].T  # not contiguous
    expected = (rows.contiguous() * vector[1:]).sum(dim=1)
    assert torch.equal(times(rows, vector[1:]), expected)
    assert len(small.row_pieces(rows)) > 1 and expected.abs().max() > 1.0


def test_zeros_begin_at_a_cache_line() -> None:
    found = [small.zeros(count, CPU) for count in (0, 1, 1000, 100_000)]
    assert all(zeros.data_ptr() % 64 == 0 and not zeros.any() for zeros in found)
    assert [len(zeros) for zeros in found] == [0, 1, 1000, 100_000]
