# SPDX-License-Identifier: Apache-2.0
"""Compare max pooling by slices with PyTorch's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fastagg_sim import pooling
from fastagg_sim.pooling import MaxPool2x2, max_pool_2x2

sizes = st.integers(2, 9)


@given(
    n=st.integers(1, 3),
    channels=st.integers(1, 3),
    height=sizes,
    width=sizes,
    coarse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_same_bits_forward_and_backward(
    n: int, channels: int, height: int, width: int, coarse: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, channels, height, width, generator=rng)
    if coarse:  # few values, so that maxima are often equal
        x = x.round()
    expected = functional.max_pool2d(x.requires_grad_(), 2)
    found = max_pool_2x2(x)
    assert torch.equal(found, expected)
    gradient = torch.randn(expected.shape, generator=rng)
    (right,) = torch.autograd.grad(expected, x, gradient)
    assert torch.equal(torch.autograd.grad(found, x, gradient)[0], right)
    with torch.inference_mode():
        assert torch.equal(max_pool_2x2(x), expected)


@pytest.mark.parametrize("large", [0, 10**9])
def test_both_implementations_of_the_layer_give_the_same_bits(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "_LARGE", large)
    x = torch.randn(2, 3, 5, 6).requires_grad_()
    layer = MaxPool2x2()
    assert torch.equal(layer(x), functional.max_pool2d(x, 2))
    assert torch.equal(
        torch.autograd.grad(layer(x).square().sum(), x)[0],
        torch.autograd.grad(functional.max_pool2d(x, 2).square().sum(), x)[0],
    )
    with torch.no_grad():
        assert torch.equal(layer(x), functional.max_pool2d(x, 2))


def test_nan_is_not_lost() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 1, 2] = float("nan")
    assert torch.equal(max_pool_2x2(x).isnan(), functional.max_pool2d(x, 2).isnan())


def test_a_whole_cohort_at_once() -> None:
    x = torch.randn(3, 2, 4, 6, 8)
    assert torch.equal(max_pool_2x2(x).flatten(0, 1), functional.max_pool2d(x.flatten(0, 1), 2))
