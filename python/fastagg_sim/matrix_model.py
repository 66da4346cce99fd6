# SPDX-License-Identifier: Apache-2.0
"""Gradients of small convolutional networks by batched matrix products, several models at once.

On a CPU, PyTorch's convolutions reach a small fraction of a core's arithmetic with kernels of 5x5,
a few channels and small batches: they reorder their arguments, pad the channels to the width of a
vector, and compute one model per call. Here the samples of a batch are the innermost dimension of
all activations, so that everything is a matrix product or an elementwise operation on long runs of
memory:

* Activations are [k, H, C, W n], for k models (clients) and n samples each.
* A convolution copies its input once per kernel column, to [k, H, kw C, W' n] for W' columns of
  output. From there, kh consecutive rows are a matrix [kh kw C, W' n]. One batched product of the
  weight with the matrices of all output rows is the convolution. The matrices overlap in memory; a
  complete unfolding would copy the input kh times more.
* The gradient with respect to the input is the same kind of product. The first and the last rows
  of the input meet fewer rows of the output; they have smaller products of their own if the batch
  is large, and zeros around the gradient of the output if it is small.
* The bias is added after pooling, where there are four times fewer values; the result is the same.
* The gradients are written by hand. All operations run in inference mode, which makes a call
  cheaper, and memory is used again in every step.

Large batches are computed piece by piece, so that the activations stay in the cache. Weights are
kept in the order that the products need from the start to the end of local training, not per step.

`python -m benchmarks simulation` compares the speed with that of a plain loop; docs/simulation.md
says where the time goes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fastagg_sim.pooling import MaxPool2x2

# Samples of all clients in one piece, from `python -m benchmarks simulation`. Results depend on it
# by rounding errors, if a batch is larger.
PIECE = 100

# From this length of an output row, in columns times samples, the first and last rows of an input
# gradient have smaller products of their own. For LeNet's second convolution these took 1.1 times
# as long as multiplying zeros with rows of 50 values, and 0.8 times with rows of 200 and more
# (Zen 1). Results depend on it only by the order in which the library adds.
_LONG_ROW = 100

_relu_gradient = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class Stack:
    """The layers of a supported model, in order."""

    convolutions: tuple[nn.Conv2d, ...]
    linears: tuple[nn.Linear, ...]


def find_stack(model: nn.Module) -> Stack | None:
    """Return the layers of `model` if `MatrixModel` can compute it, else None.

    Supported are `nn.Sequential` models, which may be nested, of one or more blocks of a
    convolution with bias (no stride, padding, dilation or groups), 2x2 max pooling and ReLU in
    either order; then Flatten; then linear layers with bias and a ReLU between each two of them.
    """
    layers = list(_flat(model))
    convolutions: list[nn.Conv2d] = []
    while layers and isinstance(convolution := layers[0], nn.Conv2d):
        others = layers[1:3]
        plain = (
            convolution.bias is not None
            and convolution.groups == 1
            and convolution.padding == (0, 0)
            and convolution.stride == convolution.dilation == (1, 1)
        )
        kinds = {type(layer) for layer in others}
        if not plain or kinds != {MaxPool2x2, nn.ReLU}:
            return None
        convolutions.append(convolution)
        del layers[:3]
    if not convolutions or not layers:
        return None
    flatten, *dense = layers
    if not isinstance(flatten, nn.Flatten) or (flatten.start_dim, flatten.end_dim) != (1, -1):
        return None
    linears = [layer for layer in dense[::2] if isinstance(layer, nn.Linear)]
    between = [layer for layer in dense[1::2] if type(layer) is nn.ReLU]
    if len(dense) % 2 == 0 or len(linears) + len(between) != len(dense):
        return None
    if any(layer.bias is None for layer in linears):
        return None
    return Stack(tuple(convolutions), tuple(linears))


def _flat(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.Sequential):
        return [module]
    return list(itertools.chain.from_iterable(_flat(child) for child in module))


class MatrixModel:
    """Computes the gradients of k models with the same layers but different parameters.

    Parameters are rows of a matrix [k, d] in the order that the products need: `arrange` and
    `restore` convert rows from and to the order of `FlatLayout`, and `parts` returns one view per
    parameter tensor.

    stack: the layers (`find_stack`).
    in_shape: shape (C, H, W) of a sample.

    Raises ValueError if samples of this shape do not fit the layers.
    """

    def __init__(self, stack: Stack, in_shape: Sequence[int]) -> None:
        shape = self._in_shape = tuple(in_shape)
        if len(shape) != 3:
            raise ValueError(f"in_shape: expected (channels, height, width), got {shape}")
        self._shapes: list[_ConvolutionShape | _LinearShape] = []
        for layer in stack.convolutions:
            found = _ConvolutionShape(layer, shape, first=not self._shapes)
            self._shapes.append(found)
            shape = found.out_shape
        features = math.prod(max(size, 0) for size in shape)
        if features == 0 or features != stack.linears[0].in_features:
            raise ValueError(
                f"in_shape: samples of shape {self._in_shape} give {features} features; the first "
                f"linear layer expects {stack.linears[0].in_features}"
            )
        self._shapes += [
            _LinearShape(linear, shape if i == 0 else None, last=linear is stack.linears[-1])
            for i, linear in enumerate(stack.linears)
        ]
        orders, start = [], 0
        self._arranged: list[tuple[int, ...]] = []
        for layer_shape in self._shapes:
            for given, dims, arranged in layer_shape.parameters:
                ids = torch.arange(start, start + math.prod(given)).view(given)
                orders.append(ids.permute(dims).flatten())
                self._arranged.append(arranged)
                start += ids.numel()
        self._order = torch.cat(orders)  # [d], the position in FlatLayout of every arranged column
        self._back = self._order.argsort()
        self._memory = _Memory()
        self._passes: dict[tuple[int, int, int], _Pass] = {}
        self._slices: dict[tuple[int, int], list[Tensor]] = {}
        self._sliced: Sequence[Tensor] = ()

    @torch.inference_mode()
    def take(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the samples `ids` [n] of x [N, C, H, W]: a tensor [n, C, H, W].

        The result is overwritten by the next call.
        """
        size = math.prod(self._in_shape)
        # Samples whose distance is a multiple of 1024 bytes are in the same few sets of the cache,
        # which would make it slow to transpose them.
        gap = _GAP if size % 256 == 0 else 0
        taken = self._memory("samples", ids.numel(), size + gap)[:, :size]
        torch.index_select(x.flatten(1), 0, ids, out=taken)
        return taken.unflatten(1, self._in_shape)

    def arrange(self, matrix: Tensor) -> Tensor:
        """Return a copy of rows [k, d] in the order that the products need."""
        return matrix.index_select(1, self._order)

    def restore(self, matrix: Tensor) -> Tensor:
        """Return a copy of arranged rows [k, d] in the order of `FlatLayout`."""
        return matrix.index_select(1, self._back)

    def parts(self, matrix: Tensor, k: int) -> list[Tensor]:
        """Return views [k, ...] of every parameter in the first k arranged rows of `matrix`."""
        views, start = [], 0
        for shape in self._arranged:
            size = math.prod(shape)
            views.append(matrix[:k, start : start + size].unflatten(1, shape))
            start += size
        return views

    @torch.inference_mode()
    def gradients(
        self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> list[Tensor]:
        """Return the gradients [k, ...] of each model's weighted sum of cross-entropies.

        The result is overwritten by the next call; the caller may change it, in inference mode.
        Calls with the same list `parameters` as the call before are faster.

        parameters: as from `parts`; not changed.
        x: [k, n, C, H, W], the samples; fastest as from `take`.
        y: [k n] int64, the labels.
        weight: [k n], the weights of the samples.
        """
        if parameters is not self._sliced:
            self._sliced, self._slices = parameters, {}
        k, n = x.shape[:2]
        y, weight = y.view(k, 1, n), weight.view(k, 1, n)
        models, samples = max(1, PIECE // n), -(-n // -(-n // PIECE))
        if models >= k and samples == n:
            return self._pass(0, k, n).run(parameters, x, y, weight)
        total = [self._memory(f"total {i}", *p.shape) for i, p in enumerate(parameters)]
        for i in range(0, k, models):
            end = min(i + models, k)
            key = i, end
            if key not in self._slices:
                self._slices[key] = [p[i:end] for p in parameters]
            sums = [t[i:end] for t in total]
            for j in range(0, n, samples):
                part = slice(i, end), slice(j, j + samples)
                there = x[part]
                found = self._pass(i, *there.shape[:2]).run(
                    self._slices[key], there, y[part[0], :, part[1]], weight[part[0], :, part[1]]
                )
                if j == 0:
                    torch._foreach_copy_(sums, found)
                else:
                    torch._foreach_add_(sums, found)
        return total

    @torch.inference_mode()
    def logits(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the logits [n, classes] of one model for samples x [n, C, H, W].

        parameters: as from `parts` of one row.
        """
        pieces = [
            self._pass(0, 1, len(part)).logits(parameters, part.unsqueeze(0))
            for part in x.split(PIECE)
        ]
        return torch.cat(pieces)

    def _pass(self, first: int, k: int, n: int) -> _Pass:
        """Return the pass for n samples of the k models from `first` on."""
        key = first, k, n
        if self._memory.grown or len(self._passes) >= _MOST_PASSES:
            self._passes, self._memory.grown = {}, False
        if key not in self._passes:
            self._passes[key] = _Pass(self._shapes, self._in_shape, k, n, self._memory)
        return self._passes[key]


# Values between samples.
_GAP = 16
# Passes that are kept; each is a few hundred views of the same memory.
_MOST_PASSES = 64


class _Memory:
    """Tensors by name, whose memory is used again. `grown` is set when views of it are outdated."""

    def __init__(self) -> None:
        self._storage: dict[str, Tensor] = {}
        self.grown = False

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialised tensor, which overlaps all others of the same name."""
        size = math.prod(shape)
        storage = self._storage.get(name)
        if storage is None or storage.numel() < size:
            self.grown = storage is not None
            storage = self._storage[name] = torch.empty(size)
        return storage[:size].view(shape)


class _Pass:
    """Forward and backward pass of k models for n samples each.

    All views of memory are made once: with small batches, making them takes as long as computing.
    """

    def __init__(
        self,
        shapes: Sequence[_ConvolutionShape | _LinearShape],
        in_shape: tuple[int, ...],
        k: int,
        n: int,
        memory: _Memory,
    ) -> None:
        channels, height, width = in_shape
        x = memory("input", k, height, channels, width * n)
        # The place of the samples, seen as [k, n, C, H, W]. To transpose them, numpy took half as
        # long as torch (Zen 3).
        samples = x.view(k, height, channels, width, n).permute(0, 4, 2, 1, 3)
        self._samples = samples.numpy()
        self._minus_one = torch.full((1, 1, 1), -1.0).expand(k, 1, n)
        self._layers: list[_Convolution | _Linear] = []
        gradient: Tensor | None = None
        for i, shape in enumerate(shapes):

            def named(name: str, *size: int, i: int = i) -> Tensor:
                return memory(f"layer {i} {name}", *size)

            layer: _Convolution | _Linear
            if isinstance(shape, _ConvolutionShape):
                layer = _Convolution(shape, k, n, x, gradient, named)
            else:
                layer = _Linear(shape, k, n, x, gradient, named)
            self._layers.append(layer)
            x, gradient = layer.out, layer.gradient
        self._logits, self._gradient = self._layers[-1].out, self._layers[-1].gradient
        self._parameters: Sequence[Tensor] = ()

    def run(
        self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> list[Tensor]:
        """Return the gradients; x [k, n, C, H, W], y and weight [k, 1, n]."""
        self._forward(parameters, x)
        gradient = self._gradient  # [k, classes, n]
        torch.softmax(self._logits, 1, out=gradient)
        gradient.scatter_add_(1, y, self._minus_one).mul_(weight)
        found: list[Tensor] = []
        for layer in reversed(self._layers):
            found[:0] = layer.backward()
        return found

    def logits(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the logits [n, classes] of one model; x [1, n, C, H, W]."""
        self._forward(parameters, x)
        return self._logits[0].mT.clone()

    def _forward(self, parameters: Sequence[Tensor], x: Tensor) -> None:
        if parameters is not self._parameters:
            for i, layer in enumerate(self._layers):
                layer.bind(parameters[2 * i], parameters[2 * i + 1])
            self._parameters = parameters
        np.copyto(self._samples, x.numpy())
        for layer in self._layers:
            layer.forward()


class _ConvolutionShape:
    """The sizes of a convolution with 2x2 max pooling and ReLU: [C, H, W] -> [C', H', W'].

    H' and W' are the sizes after pooling. Outputs of the convolution that pooling ignores are not
    computed.
    """

    def __init__(self, layer: nn.Conv2d, in_shape: tuple[int, ...], first: bool) -> None:
        c, h, w = self.in_shape = in_shape
        kh, kw = self.kernel = layer.kernel_size
        c_out = layer.out_channels
        self.out_shape = c_out, (h - kh + 1) // 2, (w - kw + 1) // 2
        self.first = first  # the gradient of the input is not needed
        # Products with few rows are slow. `side` 2: one product computes the four outputs of every
        # pooling window, 4 C' rows, from inputs of (kh + 1) x (kw + 1). For 5x5 it multiplies 44 %
        # more numbers, and still is a sixth faster for 10 channels and a fifth for 6.
        self.side = 2 if first and c_out < 16 else 1
        # Shape in the model, order of dimensions in the products, shape there. The rows of an
        # unfolded input are ordered by (row, column, channel) of the kernel.
        self.parameters = (
            ((c_out, c, kh, kw), (0, 2, 3, 1), (c_out, kh * kw * c)),
            ((c_out,), (0,), (c_out, 1)),
        )


class _Convolution:
    """A convolution, 2x2 max pooling and ReLU of k models with n samples each.

    x: [k, H, C, W n], the memory of the input.
    x_gradient: the same for its gradient; None if it is not needed.
    memory: returns memory by name and shape.

    `out` and `gradient` are [k, H', C', W' n].
    """

    def __init__(
        self,
        shape: _ConvolutionShape,
        k: int,
        n: int,
        x: Tensor,
        x_gradient: Tensor | None,
        memory: Callable[..., Tensor],
    ) -> None:
        (c, h, w), (kh, kw), side = shape.in_shape, shape.kernel, shape.side
        c_out, rows, columns = shape.out_shape
        self._side, self._kernel, self._channels = side, (kh, kw), c
        # Sizes of the products: `blocks` of them, of [side^2 C', taken_h taken_w C] with [.., run].
        taken_h, taken_w = kh + side - 1, kw + side - 1
        blocks = self._blocks = 2 * rows // side
        run, products = 2 * columns // side * n, side * side * c_out
        # The unfolded input, and the matrices of it that the products take.
        unfolded = memory("unfolded", k, h, taken_w * c, run)
        unfolded_shape = (k, h, taken_w, c, 2 * columns // side, n)
        self._unfolded = unfolded.view(unfolded_shape)
        strides = (h * c * w * n, c * w * n, n, w * n, side * n, 1)
        self._input_columns = x.as_strided(unfolded_shape, strides)
        self._windows = [_windows(u, blocks, taken_h, side) for u in unfolded]
        self._transposed = [window.mT for window in self._windows]
        # The result of the convolution before pooling, and later, in its place, the gradient.
        # Around it may be zeros, for the gradient with respect to the input.
        margin = 0 if shape.first or run >= _LONG_ROW else kh - 1
        padded = memory("full", k, blocks + 2 * margin, products, run)
        full = padded[:, margin : margin + blocks]
        self._margins = [padded[:, :margin], padded[:, margin + blocks :]] if margin else []
        self._full = list(full.unbind())
        self.out = memory("out", k, rows, c_out, columns * n)
        self.gradient = memory("gradient", k, rows, c_out, columns * n)
        # For pooling: the left and right columns of windows, then the upper and lower rows.
        half = memory("half", k, rows, 2, c_out, columns, n)
        if side == 1:
            self._left, self._right = full.view(k, rows, 2, c_out, columns, 2, n).unbind(5)
        else:
            self._left, self._right = full.view(k, rows, 2, 2, c_out, columns, n).unbind(3)
        self._half, (self._upper, self._lower) = half, half.unbind(2)
        self._pooled, self._pooled_gradient = (
            tensor.unflatten(3, (columns, n)) for tensor in (self.out, self.gradient)
        )
        self._sums = memory("sums", k, blocks, products, taken_h * taken_w * c)
        self._sum_of = list(self._sums.unbind())
        self._of_weight = memory("gradient of weight", k, c_out, kh * kw * c)
        self._of_bias = memory("gradient of bias", k, c_out, 1)
        if side > 1:
            wide = memory("wide", k, products, taken_h * taken_w * c).zero_()
            self._wide_parts = self._placed(wide)
            self._weights = [m.expand(blocks, -1, -1) for m in wide]
            self._of_wide = memory("gradient of wide", k, products, taken_h * taken_w * c)
            self._of_wide_parts = self._placed(self._of_wide)
        self._x_gradient = x_gradient
        if x_gradient is not None:
            used = blocks + kh - 1  # rows of the input that the convolution reads
            # The kernel turned upside down: row h of the input meets row i of the kernel in row
            # h - i of the output.
            self._turned = memory("turned", k, kh, c_out, kw * c)
            # Factors and result of every product; the result is in the unfolded input's place.
            self._to_input = [
                (t[kernel_rows].flatten(0, 1).mT.expand(end - h, -1, -1), windows, u[h:end])
                for p, t, u in zip(padded, self._turned, unfolded, strict=True)
                for h, end, kernel_rows, windows in _input_products(p, blocks, kh)
            ]
            by_column = unfolded.view(k, h, kw, c, run)
            # The columns of the input that meet each column of the kernel, and what their gradient
            # is the sum of. The first term is copied. So columns that do not meet the first column
            # of the kernel, and a last row that the convolution does not read, are set to zero.
            self._folds = [
                (x_gradient[:, :used, :, j * n : j * n + run], by_column[:, :used, j])
                for j in range(kw)
            ]
            rest = x_gradient[:, :used, :, run:], x_gradient[:, used:]
            self._unmet = [part for part in rest if part.numel()]

    def _placed(self, wide: Tensor) -> list[Tensor]:
        """Return the parts of wide [k, side^2 C', taken_h taken_w C] that hold the weight, one for
        each output of a pooling window: [k, C', kh, kw, C]."""
        side, (kh, kw) = self._side, self._kernel
        by_place = wide.unflatten(2, (kh + side - 1, kw + side - 1, self._channels))
        by_place = by_place.unflatten(1, (side, side, -1))
        return [
            by_place[:, i, j, :, i : i + kh, j : j + kw] for i in range(side) for j in range(side)
        ]

    def bind(self, weight: Tensor, bias: Tensor) -> None:
        """Use these parameters, [k, C', kh kw C] and [k, C', 1], from now on."""
        kh, kw = self._kernel
        self._weight = weight.unflatten(2, (kh, kw, self._channels))
        self._weight_by_row = weight.unflatten(2, (kh, kw * self._channels))
        self._bias = bias.unsqueeze(1)
        if self._side == 1:
            self._weights = [m.expand(self._blocks, -1, -1) for m in weight]

    def forward(self) -> None:
        """Compute `out` from the input."""
        self._unfolded.copy_(self._input_columns)
        for margin in self._margins:
            margin.zero_()
        if self._side > 1:
            for part in self._wide_parts:
                part.copy_(self._weight)
        for weight, windows, full in zip(self._weights, self._windows, self._full, strict=True):
            torch.bmm(weight, windows, out=full)
        # Pooling: the maximum of both columns, then of both rows. The place of the second value
        # of a pair receives 1 if it is the maximum, and 0 else.
        torch.maximum(self._left, self._right, out=self._half)
        self._right.gt_(self._left)
        torch.maximum(self._upper, self._lower, out=self._pooled)
        self._lower.gt_(self._upper)
        self.out.add_(self._bias).relu_()

    def backward(self) -> list[Tensor]:
        """Return the gradients of weight and bias from `gradient`, which is overwritten."""
        _relu_gradient(self.gradient, self.out, 0.0, grad_input=self.gradient)
        torch.sum(self.gradient, (1, 3), out=self._of_bias.squeeze(2))
        torch.mul(self._pooled_gradient, self._lower, out=self._lower)
        torch.sub(self._pooled_gradient, self._lower, out=self._upper)
        torch.mul(self._half, self._right, out=self._right)
        torch.sub(self._half, self._right, out=self._left)
        for full, windows, out in zip(self._full, self._transposed, self._sum_of, strict=True):
            torch.bmm(full, windows, out=out)
        if self._side > 1:
            torch.sum(self._sums, 1, out=self._of_wide)
            first, *others = self._of_wide_parts
            out = self._of_weight.view(first.shape)
            torch.add(first, others[0], out=out)
            for part in others[1:]:
                out.add_(part)
        else:
            torch.sum(self._sums, 1, out=self._of_weight)
        if self._x_gradient is not None:
            self._input_gradient()
        return [self._of_weight, self._of_bias]

    def _input_gradient(self) -> None:
        self._turned.copy_(self._weight_by_row.flip(2).transpose(1, 2))
        for weight, windows, unfolded in self._to_input:
            torch.bmm(weight, windows, out=unfolded)
        for part in self._unmet:
            part.zero_()
        (there, part), *others = self._folds
        there.copy_(part)
        for there, part in others:
            there.add_(part)


def _windows(x: Tensor, count: int, rows: int, step: int) -> Tensor:
    """Return `rows` consecutive rows of x [H, C, R], starting at rows 0, step, 2 step, ...

    The result is a view [count, rows C, R], whose matrices overlap.
    """
    channels, run = x.shape[1:]
    return x.as_strided((count, rows * channels, run), (step * channels * run, run, 1))


def _input_products(padded: Tensor, blocks: int, kh: int) -> list[tuple[int, int, slice, Tensor]]:
    """Return the products that give the gradient with respect to the input of a convolution.

    padded: [blocks, C', R], the gradient of the output, or [blocks + 2 (kh - 1), C', R] with zeros
        around it.

    Each product is (first row of the input, end, rows of the kernel turned upside down, the rows of
    `padded` that meet them as matrices [end - first, rows C', R]).
    """
    used = blocks + kh - 1
    if len(padded) > blocks:
        return [(0, used, slice(0, kh), _windows(padded, used, kh, 1))]

    def kernel_rows(h: int) -> tuple[int, int]:
        return max(0, kh - 1 - h), min(kh, used - h)

    products = []
    for (start, end), group in itertools.groupby(range(used), kernel_rows):
        rows = list(group)  # the inner rows of the input are one group
        gradients = padded[rows[0] + start - (kh - 1) :]
        windows = _windows(gradients, len(rows), end - start, 1)
        products.append((rows[0], rows[-1] + 1, slice(start, end), windows))
    return products


class _LinearShape:
    """The sizes of a linear layer, with ReLU unless it is the last one.

    in_shape: shape [C, H, W] of the input before Flatten; None for other layers.
    """

    def __init__(self, layer: nn.Linear, in_shape: tuple[int, ...] | None, last: bool) -> None:
        out, features = self.out_features, self.features = layer.out_features, layer.in_features
        self.relu = not last
        weight: tuple[tuple[int, ...], tuple[int, ...]] = ((out, features), (0, 1))
        if in_shape is not None:  # activations of a convolution are ordered by (H, C, W)
            weight = ((out, *in_shape), (0, 2, 1, 3))
        self.parameters = ((*weight, (out, features)), ((out,), (0,), (out, 1)))


class _Linear:
    """A linear layer, with or without ReLU, of k models with n samples each.

    x, x_gradient, memory: as for `_Convolution`. `out` and `gradient` are [k, features', n].
    """

    def __init__(
        self,
        shape: _LinearShape,
        k: int,
        n: int,
        x: Tensor,
        x_gradient: Tensor | None,
        memory: Callable[..., Tensor],
    ) -> None:
        assert x_gradient is not None  # a convolution comes first
        self._x, self._x_gradient = (t.view(k, shape.features, n) for t in (x, x_gradient))
        self._x_transposed = self._x.mT
        self._relu = shape.relu
        self.out = memory("out", k, shape.out_features, n)
        self.gradient = memory("gradient", k, shape.out_features, n)
        self._of_weight = memory("gradient of weight", k, shape.out_features, shape.features)
        self._of_bias = memory("gradient of bias", k, shape.out_features, 1)

    def bind(self, weight: Tensor, bias: Tensor) -> None:
        """Use these parameters, [k, features', features] and [k, features', 1], from now on."""
        self._weight, self._bias, self._weight_transposed = weight, bias, weight.mT

    def forward(self) -> None:
        """Compute `out` from the input."""
        self.out.copy_(self._bias)  # baddbmm copies a vector more slowly
        torch.baddbmm(self.out, self._weight, self._x, out=self.out)
        if self._relu:
            self.out.relu_()

    def backward(self) -> list[Tensor]:
        """Return the gradients of weight and bias from `gradient`, which is overwritten."""
        if self._relu:
            _relu_gradient(self.gradient, self.out, 0.0, grad_input=self.gradient)
        torch.bmm(self.gradient, self._x_transposed, out=self._of_weight)
        torch.sum(self.gradient, 2, keepdim=True, out=self._of_bias)
        torch.bmm(self._weight_transposed, self.gradient, out=self._x_gradient)
        return [self._of_weight, self._of_bias]
