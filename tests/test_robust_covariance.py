# SPDX-License-Identifier: Apache-2.0
"""SMEA and CAF: hand-worked cases, outliers, ties, and invariances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fastagg import robust
from fastagg.robust import covariance


def test_smea_looks_at_variance_and_mda_at_the_farthest_pair() -> None:
    x = np.array([[-2.0, 0.0], [-2.0, 0.0], [2.0, 0.0], [2.1, 0.0], [0.0, 3.7]])
    # The last is the farthest, 4.2 from two others, and MDA leaves it out. But those that stay then
    # have a variance of 4 along one axis; without the fourth, the covariance is
    # [[2.75, 0.4625], [0.4625, 2.567]], whose eigenvalues are 3.13 and 2.19.
    np.testing.assert_allclose(robust.MDA(1)(x), [0.025, 0.0], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(robust.SMEA(1)(x), [-0.5, 0.925], rtol=1e-12)


def test_caf_by_hand() -> None:
    # On a line: 0, 1, 2, 3, 14 have the mean 4 and deviations -4, -3, -2, -1, 10. One step leaves
    # weights 1 - (16, 9, 4, 1, 100) / 100; their sum, 3.70, is more than n - 2f = 3, and their
    # variance is smaller. The next step takes away the 0, and what is left is below 3.
    x = np.array([[0.0], [1.0], [2.0], [3.0], [14.0]])
    weights = np.array([0.84, 0.91, 0.96, 0.99, 0.0])
    expected = (weights @ x) / weights.sum()
    np.testing.assert_allclose(robust.CAF(1)(x), expected, rtol=1e-12)


@pytest.mark.parametrize("far", [1e2, 1e6, 1e10, 1e15])
@pytest.mark.parametrize("rule", [robust.SMEA, robust.CAF])
def test_far_vectors_do_not_move_the_result(rule: Any, far: float) -> None:
    x = np.random.default_rng(0).standard_normal((11, 40))
    center = x[2:].mean(0)
    x[:2] = far * x[:2] / np.linalg.norm(x[:2], axis=1)[:, None]
    # The mean of all would be off by far / 11 and more; sqrt(40) is the length of a good vector.
    assert np.linalg.norm(rule(2)(x) - center) < 0.5 * math.sqrt(40)


def test_caf_ends_while_vectors_without_weight_are_far_away() -> None:
    steps = []
    real = torch.linalg.eigh
    x = np.random.default_rng(1).standard_normal((9, 50))
    x[8] *= 1e10  # removed by the first step, but still the farthest along any direction
    x[7] *= 5.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", lambda m: (steps.append(1), real(m))[1])
        robust.CAF(2)(x)
    assert len(steps) <= 2 * 2


@pytest.mark.parametrize("rule", [robust.SMEA, robust.CAF])
def test_order_shift_and_scale(rule: Any) -> None:
    x = np.random.default_rng(2).standard_normal((9, 30))
    expected = rule(3)(x)
    order = np.random.default_rng(3).permutation(9)
    # The same up to rounding: sums follow the order of the vectors.
    np.testing.assert_allclose(rule(3)(x[order]), expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(rule(3)(x + 5.0) - 5.0, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(rule(3)(-7.0 * x) / -7.0, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", [robust.SMEA, robust.CAF])
def test_the_mean_for_f_zero_or_equal_vectors(rule: Any) -> None:
    x = np.random.default_rng(4).standard_normal((6, 7))
    np.testing.assert_allclose(rule(0)(x), x.mean(0), rtol=1e-12, atol=1e-15)
    copies = np.tile(x[:1], (5, 1))
    np.testing.assert_allclose(rule(2)(copies), x[0], rtol=1e-12)
    np.testing.assert_array_equal(rule(0)(x[:1]), x[0])


def test_ties_go_to_the_first_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # Corners of a simplex: every set of n - f has the same distances.
    for batch in (1, 3, 1 << 11):  # also across batches
        monkeypatch.setattr(covariance, "_BATCH", batch)
        factors = robust.SMEA(2)(np.eye(6))
        np.testing.assert_array_equal(factors, [0.25] * 4 + [0.0] * 2)


@pytest.mark.parametrize("rule", [robust.SMEA, robust.CAF])
def test_only_distances_are_read(rule: Any) -> None:
    """Eigenvalues are computed on n x n matrices, for any d."""
    x = np.random.default_rng(5).standard_normal((7, 1000)).astype(np.float32)
    x[3] += 100.0
    sizes: list[int] = []
    real = torch.linalg.eigvalsh if rule is robust.SMEA else torch.linalg.eigh
    name = real.__name__.removeprefix("linalg_")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, name, lambda m: (sizes.append(max(m.shape[-2:])), real(m))[1])
        result = rule(1)(x)
    assert sizes and max(sizes) <= 7
    assert np.abs(result).max() < 5.0
