# SPDX-License-Identifier: Apache-2.0
"""2x2 max pooling, with the bits of PyTorch's and on a CPU in less time.

PyTorch's kernel for the CPU compares number by number and branches on the outcome, which no
processor can predict. Two maxima of strided slices need no branch: five times faster and more in
the forward pass. The backward pass costs more than PyTorch's, so that both together pay for large
inputs only (`python -m benchmarks simulation --only pooling`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# From here on the slices are faster forward and backward together; results do not depend on it.
_LARGE = 1 << 16


class MaxPool2x2(nn.MaxPool2d):
    """`nn.MaxPool2d(2)`: windows of 2x2 with stride 2; an odd last row or column is left out."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, C, H, W] -> [n, C, H // 2, W // 2]."""
        recorded = x.requires_grad and torch.is_grad_enabled()
        if x.device.type != "cpu" or (recorded and x.numel() < _LARGE):
            return functional.max_pool2d(x, 2)
        return max_pool_2x2(x)


def max_pool_2x2(x: Tensor) -> Tensor:
    """The maxima of 2x2 windows by slices: [..., H, W] -> [..., H // 2, W // 2].

    Equal maxima: the gradient goes to the first in row-major order, as PyTorch's does.
    """
    height, width = x.shape[-2:]
    x = x[..., : height - height % 2, : width - width % 2]
    if x.requires_grad and torch.is_grad_enabled():
        return _MaxPool2x2.apply(x)
    return _halve_rows(_halve_columns(x))


def _columns(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2, :], x[..., 1::2, :]


def _halve_columns(x: Tensor) -> Tensor:
    return torch.maximum(*_columns(x))


def _halve_rows(x: Tensor) -> Tensor:
    return torch.maximum(*_rows(x))


class _MaxPool2x2(torch.autograd.Function):
    """Remembers which column and which row won; the winner gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = _columns(x)
        columns = torch.maximum(left, right)
        upper, lower = _rows(columns)
        ctx.save_for_backward(right > left, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        right_won, lower_won = ctx.saved_tensors
        columns = gradient.new_empty(right_won.shape)
        upper, lower = _rows(columns)
        torch.mul(gradient, lower_won, out=lower)
        torch.sub(gradient, lower, out=upper)
        whole = gradient.new_empty(*right_won.shape[:-1], 2 * right_won.shape[-1])
        left, right = _columns(whole)
        torch.mul(columns, right_won, out=right)
        torch.sub(columns, right, out=left)
        return whole
