# SPDX-License-Identifier: Apache-2.0
"""Local training of one client, in place in its row of the update buffer.

During training the model's parameters are views of the row. After training the row is the local
model, and `row -= global` turns it into the client's update without copying or flattening.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastagg import FlatLayout
from fastagg_sim.config import LocalTraining

# Below this batch size PyTorch's own convolutions are faster than oneDNN's: by a fifth with batches
# of 5, a model of LeNet's size and one thread.
_ONEDNN_BATCH_SIZE = 8


@contextmanager
def fast_convolutions(batch_size: int) -> Iterator[None]:
    """Within this context, disable oneDNN if PyTorch's own convolutions are faster."""
    before = bool(torch.backends.mkldnn.enabled)
    _enable_onednn(before and batch_size >= _ONEDNN_BATCH_SIZE)
    try:
        yield
    finally:
        _enable_onednn(before)


def _enable_onednn(enabled: bool) -> None:
    # Not mkldnn.flags(), which also sets TF32 and warns about it.
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]


@dataclass(frozen=True)
class ClientData:
    """The samples of one client: `x` [n, ...] float32 and `y` [n] int64."""

    x: Tensor
    y: Tensor


def passes(
    num_samples: int, training: LocalTraining, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield a random order of the samples, int64 [n], for every pass over the data in a round.

    The permutations are drawn on the CPU, so they are the same for every device.
    """
    steps = -(-num_samples // training.batch_size)  # steps per pass
    left = training.steps(num_samples) if num_samples else 0
    while left > 0:
        yield torch.randperm(num_samples, generator=generator)
        left -= steps


def batches(
    data: ClientData, training: LocalTraining, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches (x, y) of one round.

    The last batch of each pass over the data may be smaller. With `local_steps` the last pass may
    be incomplete.
    """
    left = training.steps(data.y.numel())
    for order in passes(data.y.numel(), training, generator):
        there = order.to(data.x.device)
        xs = data.x[there].split(training.batch_size)
        ys = data.y[there].split(training.batch_size)
        yield from zip(xs[:left], ys[:left], strict=True)
        left -= len(xs)


class LocalTrainer:
    """Trains one client at a time; all clients share one model object."""

    def __init__(self, model: nn.Module, layout: FlatLayout, training: LocalTraining) -> None:
        self._model = model
        self._layout = layout
        self._training = training

    def train(
        self,
        row: Tensor,
        start: Tensor,
        data: ClientData,
        round_index: int,
        generator: torch.Generator,
        control: Tensor | None = None,
        velocity: Tensor | None = None,
    ) -> None:
        """Train one client and write `local model - start` into `row`.

        row: [d] float32, changed in place; its previous contents are ignored.
        start: [d] float32, the global model; not changed.
        data: the samples of the client.
        round_index: 0, 1, ...; determines the learning rate.
        generator: determines the order of the batches.
        control: [d] float32, added to every gradient (SCAFFOLD's c - c_i); None for none.
        velocity: [d] float32, the initial momentum, updated in place; None to start from zero.
        """
        with fast_convolutions(self._training.batch_size):
            self._train(row, start, data, round_index, generator, control, velocity)

    def _train(
        self,
        row: Tensor,
        start: Tensor,
        data: ClientData,
        round_index: int,
        generator: torch.Generator,
        control: Tensor | None,
        kept: Tensor | None,
    ) -> None:
        training = self._training
        lr = training.rate(round_index)
        row.copy_(start)
        self._layout.bind(self._model, row)
        self._model.train()
        parameters: list[Tensor] = [p for p in self._model.parameters() if p.requires_grad]
        velocity: list[Tensor] = []
        if training.momentum:
            if kept is None:
                velocity = [torch.zeros_like(p) for p in parameters]
            else:
                velocity = self._parts(kept)  # views, so that the caller's vector is updated
        shift = [] if control is None else self._parts(control)
        for x, y in batches(data, training, generator):
            loss = functional.cross_entropy(self._model(x), y)
            gradients = list(torch.autograd.grad(loss, parameters))
            with torch.no_grad():
                if shift:
                    torch._foreach_add_(gradients, shift)
                if training.prox:  # add the gradient of mu/2 |w - start|^2 at the current w
                    pull = self._proximal(parameters, start)
                    torch._foreach_add_(gradients, pull, alpha=training.prox)
                if velocity:
                    torch._foreach_mul_(velocity, training.momentum)
                    torch._foreach_add_(velocity, gradients)
                torch._foreach_add_(parameters, velocity or gradients, alpha=-lr)
        row.sub_(start)

    def _proximal(self, parameters: list[Tensor], start: Tensor) -> list[Tensor]:
        return list(torch._foreach_sub(parameters, self._parts(start)))

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector [d], one per trained parameter, in the model's order."""
        parts = self._layout.unflatten(vector)
        return [parts[name] for name, p in self._model.named_parameters() if p.requires_grad]


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int = 500,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> tuple[float, float]:
    """Return the accuracy in [0, 1] and the mean cross-entropy of `model` on x [n, ...], y [n].

    logits: called instead of `model`: a faster way to compute the same (`BatchedTrainer.logits`).
    """
    totals = torch.zeros(2, dtype=torch.float64, device=x.device)
    model.eval()
    with torch.inference_mode():
        for part, labels in zip(x.split(batch_size), y.split(batch_size), strict=True):
            found = model(part) if logits is None else logits(part)
            totals[0] += (found.argmax(dim=1) == labels).sum()
            totals[1] += functional.cross_entropy(found, labels, reduction="sum")
    correct, loss = totals.tolist()  # the only synchronisation with a GPU
    return correct / y.numel(), loss / y.numel()
