# SPDX-License-Identifier: Apache-2.0
"""Local training of several clients at once: step s of all clients is one pass through the layers.

The local models are the rows of a matrix [k, d], and a linear layer becomes one batched matrix
product. The overhead of calling PyTorch is thus paid once for k clients. Every client sees the same
batches as if it were trained alone; the results differ from those of `LocalTrainer` by rounding
errors.

Gradients are computed in one of two ways. On a CPU, the networks that `MatrixModel` supports are
computed by it, which is also the fastest way to train a single client. Other models, and all models
on a GPU, are computed by PyTorch's autograd with activations [k, batch, ...].

The rows of an update buffer are separate tensors, so that a rule can take ownership of one of them.
The matrix is therefore separate memory, and the pass that subtracts the global model writes the
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastagg import FlatLayout
from fastagg_sim.client import ClientData, fast_convolutions, passes
from fastagg_sim.config import ConfigError, LocalTraining
from fastagg_sim.matrix_model import MatrixModel, Stack, find_stack
from fastagg_sim.pooling import MaxPool2x2, max_pool_2x2

Layer = Callable[[Tensor, Sequence[Tensor]], Tensor]  # ([k, batch, ...], parameters [k, ...])
# x [k, batch, C, H, W], weight, bias, settings of conv2d
Convolve = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Dropout)


@dataclass(frozen=True)
class ClientWork:
    """The inputs and the output of one client's local training in a round.

    row: [d] float32, receives the update; its previous contents are ignored.
    data: the samples of the client.
    generator: determines the order of the batches.
    control: [d] float32, added to every gradient (SCAFFOLD's c - c_i); None for none.
    velocity: [d] float32, the initial momentum, updated in place; None to start from zero.
    """

    row: Tensor
    data: ClientData
    generator: torch.Generator
    control: Tensor | None = None
    velocity: Tensor | None = None


# The sizes at which training clients at once is fastest on a CPU, from benchmarks/results/
# simulation.md. For models with convolutions: samples of all clients in one pass. For others:
# input values of all clients in one pass; more do not fit into the cache.
_SAMPLES = {"mnist-cnn": 200, "lenet": 160, "niid-cnn": 200}
_INPUTS = {"logistic": 1 << 17, "digits-mlp": 1 << 17}
# With fewer clients than this, training one after the other is as fast (with convolutions, without
# convolutions).
_LEAST_CLIENTS = 4, 16
_MOST_CLIENTS = 128
# For all models: more clients use a GPU better, and its memory holds this many models. Chosen, not
# measured.
GPU_CLIENTS_AT_ONCE = 128
# Number of sample indices that are sent to the device at a time.
_PLANNED = 1 << 21


def clients_at_once(
    model: str, in_shape: Sequence[int], batch_size: int, device: str = "cpu"
) -> int:
    """Return how many clients to train at once.

    model: name of the model.
    in_shape: shape of one sample.
    batch_size: batch size of local training.
    device: "cpu" or "cuda". On a CPU the result is 1 for models without measurements.

    Raises ConfigError if the batch size is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size: expected at least 1, got {batch_size}")
    if device != "cpu":
        return GPU_CLIENTS_AT_ONCE
    if model in _SAMPLES:
        fitting, least = _SAMPLES[model] // batch_size, _LEAST_CLIENTS[0]
    else:
        inputs = batch_size * math.prod(in_shape)
        fitting, least = _INPUTS.get(model, 0) // inputs, _LEAST_CLIENTS[1]
    return min(fitting, _MOST_CLIENTS) if fitting >= least else 1


class _Models(Protocol):
    """Computes the gradients of k models. See `MatrixModel`, whose methods these are."""

    def take(self, x: Tensor, ids: Tensor) -> Tensor: ...
    def arrange(self, matrix: Tensor) -> Tensor: ...
    def restore(self, matrix: Tensor) -> Tensor: ...
    def parts(self, matrix: Tensor, k: int) -> list[Tensor]: ...
    def gradients(
        self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> list[Tensor]: ...


class _RecordedModel:
    """Computes the gradients of k models with PyTorch's autograd. The order of rows is that of the
    model."""

    def __init__(self, layers: Sequence[tuple[Layer, int]], layout: FlatLayout) -> None:
        self._layers = layers
        self._layout = layout

    def take(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.index_select(0, ids)

    def arrange(self, matrix: Tensor) -> Tensor:
        return matrix

    def restore(self, matrix: Tensor) -> Tensor:
        return matrix

    def parts(self, matrix: Tensor, k: int) -> list[Tensor]:
        """Return views [k, *shape] of every parameter in the first k rows of a matrix [n, d]."""
        return [
            matrix[:k, slot.start : slot.stop].unflatten(1, slot.shape)
            for slot in self._layout.slots
        ]

    def gradients(
        self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> list[Tensor]:
        leaves = [p.detach().requires_grad_() for p in parameters]
        logits = self._logits(x, leaves).flatten(0, 1)
        losses = functional.cross_entropy(logits, y, reduction="none")
        return list(torch.autograd.grad((losses * weight).sum(), leaves))

    def _logits(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Apply the models of k clients: x [k, batch, ...] -> logits [k, batch, classes]."""
        taken = 0
        for layer, count in self._layers:
            x = layer(x, parameters[taken : taken + count])
            taken += count
        return x


def uses_products(model: nn.Module) -> bool:
    """Return whether `BatchedTrainer` computes `model` by matrix products.

    This is then the fastest way also for one client at a time.
    """
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    return on_cpu and find_stack(model) is not None


class BatchedTrainer:
    """Trains several clients at once.

    The model must be an `nn.Sequential`, which may be nested, of the supported layers: Conv2d and
    Linear with bias, MaxPool2x2, Flatten, and elementwise layers (ReLU, Tanh, Sigmoid, Dropout).

    convolutions: how convolutions are computed. The results differ by rounding errors.
        "products": the whole model by batched matrix products (`MatrixModel`). The default on a
            CPU, for the models that `find_stack` supports.
        "separate": one call of PyTorch's convolution per client, and pooling by slices. The default
            on a CPU for other models: the overhead of a call is small compared to a convolution.
        "grouped": one call for all clients, with one group of channels per client, and PyTorch's
            pooling. The default on other devices.

    Raises ValueError if the model is not supported, naming the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: FlatLayout,
        training: LocalTraining,
        *,
        convolutions: Literal["products", "separate", "grouped"] | None = None,
    ) -> None:
        if next(model.buffers(), None) is not None or layout.tied:
            raise ValueError(
                "model: training clients at once needs a model without buffers and without shared "
                "parameters; use clients_at_once=1"
            )
        if not all(p.requires_grad for p in model.parameters()):
            raise ValueError(
                "model: training clients at once needs a model without frozen parameters; "
                "use clients_at_once=1"
            )
        if convolutions is None:
            on_cpu = all(p.device.type == "cpu" for p in model.parameters())
            convolutions = "separate" if on_cpu else "grouped"
            if uses_products(model):
                convolutions = "products"
        self._training = training
        self._stack = find_stack(model) if convolutions == "products" else None
        if convolutions == "products" and self._stack is None:
            raise ValueError(
                f'convolutions: "products" does not support the layers of this model: {model}; '
                'use "separate"'
            )
        # Models by the shape of a sample.
        self._matrix_models: dict[tuple[int, ...], MatrixModel] = {}
        self._recorded = _RecordedModel(list(_layers(model, convolutions == "grouped")), layout)

    def train(self, clients: Sequence[ClientWork], start: Tensor, round_index: int) -> None:
        """Train `clients` and write `local model - start` into the row of each.

        clients: either all or none of them have a control, and the same for velocities.
        start: [d] float32, the global model; not changed.
        round_index: 0, 1, ...; determines the learning rate.
        """
        order = sorted(clients, key=lambda c: _steps(c, self._training), reverse=True)
        models = self._models_for(order[0].data.x.shape[1:])
        anchor = models.arrange(start.unsqueeze(0))  # [1, d]
        rows = anchor.repeat(len(order), 1)  # [k, d]
        with fast_convolutions(self._training.batch_size):
            self._descend(models, rows, order, anchor, self._training.rate(round_index))
        for row, client in zip(models.restore(rows), order, strict=True):
            torch.sub(row, start, out=client.row)

    def logits(self, params: Tensor, in_shape: Sequence[int]) -> Callable[[Tensor], Tensor] | None:
        """Return a function from samples [n, *in_shape] to logits [n, classes] of the model
        `params` [d], by matrix products.

        None if the model is not computed by matrix products: call the model itself.
        """
        if self._stack is None:
            return None
        model = self._matrix_model(self._stack, in_shape)
        parts = model.parts(model.arrange(params.unsqueeze(0)), 1)
        return lambda x: model.logits(parts, x)

    def _models_for(self, in_shape: Sequence[int]) -> _Models:
        """Return what computes the gradients for samples of shape `in_shape`."""
        return self._recorded if self._stack is None else self._matrix_model(self._stack, in_shape)

    def _matrix_model(self, stack: Stack, in_shape: Sequence[int]) -> MatrixModel:
        key = tuple(in_shape)
        if key not in self._matrix_models:
            self._matrix_models[key] = MatrixModel(stack, key)
        return self._matrix_models[key]

    def _descend(
        self,
        models: _Models,
        rows: Tensor,
        clients: Sequence[ClientWork],
        anchor: Tensor,
        lr: float,
    ) -> None:
        """Run the gradient steps of `clients` on arranged `rows` [k, d], in place.

        `clients` are sorted by decreasing number of steps, so that those with steps left are always
        the first ones. `anchor`: [1, d], the global model, arranged. Updates the clients'
        velocities in place.
        """
        training = self._training
        shift, momentum = (
            None if matrix is None else models.arrange(matrix)
            for matrix in (
                _matrix([c.control for c in clients]),
                _matrix([c.velocity for c in clients]),
            )
        )
        if momentum is None and training.momentum:
            momentum = torch.zeros_like(rows)
        anchor = anchor.expand_as(rows)
        k, parameters = 0, list[Tensor]()
        for x, y, weight in joint_batches(clients, training, models.take):
            if len(x) != k:
                k, parameters = len(x), models.parts(rows, len(x))
            gradients = models.gradients(parameters, x, y, weight)
            with torch.inference_mode():
                if shift is not None:
                    torch._foreach_add_(gradients, models.parts(shift, k))
                if training.prox:
                    pull = torch._foreach_sub(parameters, models.parts(anchor, k))
                    torch._foreach_add_(gradients, pull, alpha=training.prox)
                if momentum is not None:
                    velocity = models.parts(momentum, k)
                    torch._foreach_mul_(velocity, training.momentum)
                    torch._foreach_add_(velocity, gradients)
                    gradients = velocity
                torch._foreach_add_(parameters, gradients, alpha=-lr)
        if momentum is not None:
            for client, velocity in zip(clients, models.restore(momentum), strict=True):
                if client.velocity is not None:
                    client.velocity.copy_(velocity)


def _matrix(vectors: Sequence[Tensor | None]) -> Tensor | None:
    """Stack k vectors [d] to a matrix [k, d]; None if all are None."""
    given = [vector for vector in vectors if vector is not None]
    if given and len(given) < len(vectors):
        raise ValueError(
            f"clients: {len(given)} of {len(vectors)} have a control (or a velocity); "
            "expected all or none"
        )
    return torch.stack(given) if given else None


def joint_batches(
    clients: Sequence[ClientWork],
    training: LocalTraining,
    take: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, step by step, the batches of the first k clients: those that have steps left.

    clients: sorted by decreasing number of steps.
    take: returns the samples x[ids] for x [N, ...] and ids [n].

    Yields x [k, b, ...], y [k b], and the weight [k b] of each sample in the mean over its client's
    batch. Batches smaller than b are padded with samples of weight 0.

    A step gathers its samples from one concatenated copy of all clients' data. The sample indices
    are sent to the device for many steps at a time.
    """
    xs, ys = [c.data.x for c in clients], [c.data.y for c in clients]
    filler = sum(y.numel() for y in ys)
    if len(clients) > 1:
        x = torch.cat([*xs, xs[0].new_zeros(1, *xs[0].shape[1:])])
        y = torch.cat([*ys, ys[0].new_zeros(1)])
    else:
        x, y = xs[0], ys[0]  # batches of one client are never padded
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
                take(x, chosen).unflatten(0, (k_now, b_now)),
                y.index_select(0, chosen),
                weight[:k_now, :b_now].flatten(),
            )


def _steps(client: ClientWork, training: LocalTraining) -> int:
    """Return the number of gradient steps of a client in a round; 0 if it has no data."""
    n = client.data.y.numel()
    return training.steps(n) if n else 0


def _order(client: ClientWork, training: LocalTraining, start: int, filler: int) -> Tensor:
    """Return the sample indices of every batch of a client, int64 [steps, b].

    start: index of the client's first sample in the concatenated data.
    filler: index that pads batches smaller than b.
    """
    n = client.data.y.numel()
    width = min(n, training.batch_size)
    each = -(-n // training.batch_size)  # steps per pass over the data
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
    """Yield every layer of a model in order, and the number of parameter tensors it takes."""
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
            f"model: clients cannot be trained at once with the layer {module}; supported are "
            f"Sequential, Linear and Conv2d with bias, MaxPool2x2, Flatten, "
            f"{', '.join(kind.__name__ for kind in _ELEMENTWISE)}; use clients_at_once=1"
        )


def _linear(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    weight, bias = parameters
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _pool_by_slices(x: Tensor, _: Sequence[Tensor]) -> Tensor:
    return max_pool_2x2(x)


def _pool(x: Tensor, _: Sequence[Tensor]) -> Tensor:
    x = x.transpose(0, 1)  # the memory layout that `grouped` returns, so that nothing is copied
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
    """Convolve with one call per client: x [k, b, C, H, W] -> [k, b, C', H', W']."""
    each = zip(x.unbind(), weight.unbind(), bias.unbind(), strict=True)
    return torch.stack([functional.conv2d(xk, wk, bk, **settings) for xk, wk, bk in each])


def grouped(x: Tensor, weight: Tensor, bias: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The same in one call of a grouped convolution, with one group of channels per client."""
    k = len(x)
    channels = x.transpose(0, 1).flatten(1, 2)  # [b, k C, H, W]
    out = functional.conv2d(channels, weight.flatten(0, 1), bias.flatten(), groups=k, **settings)
    return out.unflatten(1, (k, -1)).transpose(0, 1)
