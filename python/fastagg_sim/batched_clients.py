# SPDX-License-Identifier: Apache-2.0
"""Local training of several clients at once: step s of all of them is one pass through the layers.

Their models are a matrix [k, d], activations are [k, batch, ...], and linear layers become one
batched product, so that the cost of calling PyTorch is paid once for k clients. Clients see the
batches that they would see alone; the results differ from those of `LocalTrainer` by rounding.

The rows of an update buffer are apart from each other, so that a rule can keep one of them. So the
matrix is one of its own, and the pass that subtracts the global model writes the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastagg.updates.layout import FlatLayout
from fastagg_sim.client import ClientData, fast_convolutions, passes
from fastagg_sim.config import LocalTraining
from fastagg_sim.pooling import MaxPool2x2, max_pool_2x2

Layer = Callable[[Tensor, Sequence[Tensor]], Tensor]  # ([k, batch, ...], parameters [k, ...])
# x [k, batch, C, H, W], weight, bias, settings of conv2d
Convolve = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Dropout)


@dataclass(frozen=True)
class ClientWork:
    """What one client does in a round.

    row: [d] float32, gets the update; its old content is ignored. generator: the order of the
    batches. control: [d] float32, added to every gradient (SCAFFOLD's c - c_i). velocity: [d]
    float32, the momentum to go on from, changed in place; None: from zero.
    """

    row: Tensor
    data: ClientData
    generator: torch.Generator
    control: Tensor | None = None
    velocity: Tensor | None = None


# Measured (benchmarks/results/simulation.md). Samples of all clients together in one pass, for
# models with convolutions; numbers in their inputs, for others: more leave the cache. With fewer
# clients than the least number, one by one is as fast.
_SAMPLES = {"mnist-cnn": 200, "lenet": 160, "niid-cnn": 200}
_INPUTS = {"logistic": 1 << 17, "digits-mlp": 1 << 17}
_LEAST_CLIENTS = 4, 16  # with and without convolutions
_MOST_CLIENTS = 128
# Of any model: a GPU is the fuller the more clients there are, and has room for their models. A
# choice, not a measurement.
GPU_CLIENTS_AT_ONCE = 128
# Numbers of samples that are sent to the device at a time.
_PLANNED = 1 << 21


def clients_at_once(
    model: str, in_shape: Sequence[int], batch_size: int, device: str = "cpu"
) -> int:
    """How many clients with that model, input and batch size to train at once. On a CPU 1 for
    models of which nothing was measured."""
    if device != "cpu":
        return GPU_CLIENTS_AT_ONCE
    if model in _SAMPLES:
        fitting, least = _SAMPLES[model] // batch_size, _LEAST_CLIENTS[0]
    else:
        inputs = batch_size * math.prod(in_shape)
        fitting, least = _INPUTS.get(model, 0) // inputs, _LEAST_CLIENTS[1]
    return min(fitting, _MOST_CLIENTS) if fitting >= least else 1


class BatchedTrainer:
    """Trains clients together whose model is an `nn.Sequential` (also of such) of the layers that
    this module knows: Conv2d, Linear, MaxPool2x2, Flatten, and elementwise ones.

    grouped_convolutions: whether a convolution of all clients is one call with a group of channels
        for each, and pooling PyTorch's own; by default on any device but a CPU, where a
        convolution is work enough to be called for itself.

    Raises ValueError for any other model, naming what does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: FlatLayout,
        training: LocalTraining,
        *,
        grouped_convolutions: bool | None = None,
    ) -> None:
        if next(model.buffers(), None) is not None or layout.tied:
            raise ValueError(
                "model: clients trained at once expect one without buffers and shared parameters"
            )
        if not all(p.requires_grad for p in model.parameters()):
            raise ValueError("model: clients trained at once expect one without frozen parameters")
        if grouped_convolutions is None:
            grouped_convolutions = any(p.device.type != "cpu" for p in model.parameters())
        self._layers = list(_layers(model, grouped_convolutions))
        self._layout = layout
        self._training = training

    def train(self, clients: Sequence[ClientWork], start: Tensor, round_index: int) -> None:
        """Put `local model - start` into the row of every client.

        start: [d] float32, the global model; not changed. Controls and velocities are given to
        all clients or to none.
        """
        order = sorted(clients, key=lambda c: _steps(c, self._training), reverse=True)
        models = start.repeat(len(order), 1)  # [k, d]
        with fast_convolutions(self._training.batch_size):
            self._descend(models, order, start, self._training.rate(round_index))
        for model, client in zip(models, order, strict=True):
            torch.sub(model, start, out=client.row)

    def _descend(
        self, models: Tensor, clients: Sequence[ClientWork], start: Tensor, lr: float
    ) -> None:
        """`clients` by falling number of steps: those still at work are always the first ones."""
        training = self._training
        shift = _matrix([c.control for c in clients])
        momentum = _matrix([c.velocity for c in clients])
        if momentum is None and training.momentum:
            momentum = torch.zeros_like(models)
        anchor = start.expand_as(models)
        for x, y, weight in together(clients, training):
            k = len(x)
            parameters = [p.detach().requires_grad_() for p in self._parts(models, k)]
            losses = functional.cross_entropy(
                self._logits(x, parameters).flatten(0, 1), y, reduction="none"
            )
            gradients = list(torch.autograd.grad((losses * weight).sum(), parameters))
            with torch.no_grad():
                if shift is not None:
                    torch._foreach_add_(gradients, self._parts(shift, k))
                if training.prox:
                    pull = torch._foreach_sub(parameters, self._parts(anchor, k))
                    torch._foreach_add_(gradients, pull, alpha=training.prox)
                if momentum is not None:
                    velocity = self._parts(momentum, k)
                    torch._foreach_mul_(velocity, training.momentum)
                    torch._foreach_add_(velocity, gradients)
                    gradients = velocity
                torch._foreach_add_(parameters, gradients, alpha=-lr)
        for i, client in enumerate(clients):
            if client.velocity is not None and momentum is not None:
                client.velocity.copy_(momentum[i])

    def _parts(self, matrix: Tensor, k: int) -> list[Tensor]:
        """The first k rows of a matrix [n, d], as views [k, *shape] of every parameter."""
        return [
            matrix[:k, slot.start : slot.stop].unflatten(1, slot.shape)
            for slot in self._layout.slots
        ]

    def _logits(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[k, batch, ...] -> [k, batch, classes]"""
        taken = 0
        for layer, count in self._layers:
            x = layer(x, parameters[taken : taken + count])
            taken += count
        return x


def _matrix(vectors: Sequence[Tensor | None]) -> Tensor | None:
    """[k, d], or None if there are none."""
    given = [vector for vector in vectors if vector is not None]
    if given and len(given) < len(vectors):
        raise ValueError(f"clients: {len(given)} of {len(vectors)} have a control or a velocity")
    return torch.stack(given) if given else None


def together(
    clients: Sequence[ClientWork], training: LocalTraining
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Step by step, the batches of the k clients that are still at work.

    clients: by falling number of steps, so that these are the first ones.

    Yields x [k, b, ...], y [k b], and [k b] the weight of each sample in the mean of its own batch;
    smaller batches are filled up with zeros of weight zero. A step is a gather from one copy of all
    clients' data; which samples it takes is sent to the device many steps at a time.
    """
    xs, ys = [c.data.x for c in clients], [c.data.y for c in clients]
    x = torch.cat([*xs, xs[0].new_zeros(1, *xs[0].shape[1:])])
    y = torch.cat([*ys, ys[0].new_zeros(1)])
    filler = y.numel() - 1
    orders, start = [], 0
    for client in clients:
        orders.append(_order(client, training, start, filler))
        start += client.data.y.numel()
    k, b = len(orders), max(order.shape[1] for order in orders)
    steps = len(orders[0])
    chunk = max(1, _PLANNED // (k * max(b, 1)))
    for first in range(0, steps, chunk):
        plan = torch.full((min(chunk, steps - first), k, b), filler)
        for i, order in enumerate(orders):
            part = order[first : first + chunk]
            plan[: len(part), i, : order.shape[1]] = part
        real = plan != filler
        sizes = real.sum(dim=2)  # [steps, k]
        weights = (real / sizes.clamp(min=1)[:, :, None]).to(x.device)
        plan = plan.to(x.device)
        counts, widths = (sizes > 0).sum(dim=1).tolist(), sizes.amax(dim=1).tolist()
        for ids, weight, k_now, b_now in zip(plan, weights, counts, widths, strict=True):
            chosen = ids[:k_now, :b_now].flatten()
            yield (
                x.index_select(0, chosen).unflatten(0, (k_now, b_now)),
                y.index_select(0, chosen),
                weight[:k_now, :b_now].flatten(),
            )


def _steps(client: ClientWork, training: LocalTraining) -> int:
    """Of a round; none without data."""
    n = client.data.y.numel()
    return training.steps(n) if n else 0


def _order(client: ClientWork, training: LocalTraining, start: int, filler: int) -> Tensor:
    """[steps, b] int64: the samples of every batch of a client, counted from `start`; `filler`
    where a batch is smaller."""
    n = client.data.y.numel()
    width = min(n, training.batch_size)
    each = -(-n // training.batch_size)  # steps of a pass
    rows = [
        functional.pad(order + start, (0, each * width - n), value=filler).view(each, width)
        for order in passes(n, training, client.generator)
    ]
    return (
        torch.cat(rows)[: _steps(client, training)]
        if rows
        else torch.empty(0, 0, dtype=torch.int64)
    )


def _layers(module: nn.Module, grouped_convolutions: bool) -> Iterator[tuple[Layer, int]]:
    """Every layer of a model in order, and how many parameters it takes."""
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _layers(child, grouped_convolutions)
        return
    count = len(list(module.parameters()))
    if isinstance(module, nn.Linear) and module.bias is not None:
        yield _linear, count
    elif isinstance(module, nn.Conv2d) and module.bias is not None and module.groups == 1:
        yield _convolution(module, grouped if grouped_convolutions else one_by_one), count
    elif isinstance(module, MaxPool2x2):
        yield _pool if grouped_convolutions else _pool_by_slices, count
    elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        yield lambda x, _: x.flatten(2), count
    elif isinstance(module, _ELEMENTWISE):
        yield lambda x, _: module(x), count
    else:
        raise ValueError(
            f"model: clients cannot be trained at once with the layer {module}; known are "
            f"Sequential, Linear and Conv2d with bias, MaxPool2x2, Flatten, "
            f"{', '.join(kind.__name__ for kind in _ELEMENTWISE)}"
        )


def _linear(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    weight, bias = parameters
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _pool_by_slices(x: Tensor, _: Sequence[Tensor]) -> Tensor:
    return max_pool_2x2(x)


def _pool(x: Tensor, _: Sequence[Tensor]) -> Tensor:
    x = x.transpose(0, 1)  # as `grouped` leaves it in memory, so that nothing is copied
    return functional.max_pool2d(x.flatten(0, 1), 2).unflatten(0, x.shape[:2]).transpose(0, 1)


def _convolution(module: nn.Conv2d, convolve: Convolve) -> Layer:
    settings: dict[str, Any] = {
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
    }

    def layer(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        weight, bias = parameters
        return convolve(x, weight, bias, settings)

    return layer


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """A convolution for each client: [k, b, C, H, W] -> [k, b, C', H', W']."""
    each = zip(x.unbind(), weight.unbind(), bias.unbind(), strict=True)
    return torch.stack([functional.conv2d(xk, wk, bk, **settings) for xk, wk, bk in each])


def grouped(x: Tensor, weight: Tensor, bias: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The same as one convolution with a group of channels for each client."""
    k = len(x)
    channels = x.transpose(0, 1).flatten(1, 2)  # [b, k C, H, W]
    out = functional.conv2d(channels, weight.flatten(0, 1), bias.flatten(), groups=k, **settings)
    return out.unflatten(1, (k, -1)).transpose(0, 1)
