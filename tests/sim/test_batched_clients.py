# SPDX-License-Identifier: Apache-2.0
"""Compare clients trained at once with the same clients trained one by one."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fastagg import FlatLayout
from fastagg_sim.batched_clients import (
    BatchedTrainer,
    ClientWork,
    clients_at_once,
    grouped,
)
from fastagg_sim.batched_clients import (
    one_by_one as convolve_one_by_one,
)
from fastagg_sim.client import ClientData, LocalTrainer
from fastagg_sim.config import LocalTraining
from fastagg_sim.models import MODELS, make_model

SIZES = (23, 8, 5, 17, 10)  # different numbers of steps, and a last batch of 1, 2, 3 and 5 samples


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))


def work(
    in_shape: tuple[int, ...], num_params: int, sizes: tuple[int, ...] = SIZES, shift: float = 0.0
) -> list[ClientWork]:
    clients = []
    for k, n in enumerate(sizes):
        rng = generator(100 + k)
        data = ClientData(
            torch.randn(n, *in_shape, generator=rng), torch.randint(0, 3, (n,), generator=rng)
        )
        control = shift * torch.randn(num_params, generator=rng) if shift else None
        row = torch.full((num_params,), float("nan"))  # the old content must not matter
        clients.append(ClientWork(row, data, generator(k), control))
    return clients


def one_by_one(
    model: nn.Module, training: LocalTraining, clients: list[ClientWork], t: int
) -> list[torch.Tensor]:
    layout = FlatLayout.from_module(model)
    trainer = LocalTrainer(copy.deepcopy(model), layout, training)
    start, rows = layout.flatten(model), []
    for k, client in enumerate(clients):
        row = torch.empty_like(start)
        trainer.train(row, start, client.data, t, generator(k), client.control)
        rows.append(row)
    return rows


@pytest.mark.parametrize("shift", [0.0, 0.1])
@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(batch_size=5, local_epochs=2, lr=0.3),
        LocalTraining(batch_size=5, local_steps=3, lr=0.3, lr_decay=0.5),
        LocalTraining(batch_size=40, local_epochs=3, lr=0.2, momentum=0.9),
        LocalTraining(batch_size=4, local_epochs=2, lr=0.2, prox=0.7),
        LocalTraining(batch_size=4, local_steps=9, lr=0.2, prox=0.7, momentum=0.5),
    ],
)
def test_same_updates_as_one_by_one(training: LocalTraining, shift: float) -> None:
    model = mlp()
    layout = FlatLayout.from_module(model)
    start = layout.flatten(model)
    before = start.clone()
    clients = work((3, 4), layout.num_params, shift=shift)
    expected = one_by_one(model, training, clients, t=2)
    BatchedTrainer(model, layout, training).train(clients, start, 2)
    for client, right in zip(clients, expected, strict=True):
        # a dozen float32 steps whose sums are taken in another order
        torch.testing.assert_close(client.row, right, rtol=1e-4, atol=1e-6)
    assert torch.equal(start, before)


IN_SHAPES = {
    "mnist-cnn": [(1, 28, 28)],
    "lenet": [(3, 32, 32), (1, 19, 22)],
    "niid-cnn": [(1, 28, 28)],
    "vgg11": [(3, 32, 32)],
    "digits-mlp": [(1, 8, 8)],
    "logistic": [(60,)],
}


def without_masks(model: nn.Module) -> nn.Module:
    """Turn dropout layers off: their masks differ between clients at once and one by one."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("convolutions", [None, "separate", "grouped"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "vgg11" else ()) for n in MODELS],
)
def test_every_model(
    name: str, convolutions: Literal["products", "separate", "grouped"] | None
) -> None:
    for in_shape in IN_SHAPES[name]:
        model = without_masks(make_model(name, num_classes=3, in_shape=in_shape, seed=0))
        layout = FlatLayout.from_module(model)
        training = LocalTraining(batch_size=4, local_epochs=1, lr=0.05)
        clients = work(in_shape, layout.num_params, sizes=(9, 4, 6))
        expected = one_by_one(model, training, clients, t=0)
        trainer = BatchedTrainer(model, layout, training, convolutions=convolutions)
        trainer.train(clients, layout.flatten(model), 0)
        for client, right in zip(clients, expected, strict=True):
            # Rounding over up to three steps; a ReLU or maximum that flips would give 1e-2.
            error = (client.row - right).norm() / right.norm()
            assert error < 1e-5


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    batch_size=st.integers(1, 9),
    epochs=st.integers(1, 2),
)
def test_clients_do_not_touch_each_other(sizes: list[int], batch_size: int, epochs: int) -> None:
    """An update depends on its client's data alone, for any sizes."""
    model = mlp()
    layout = FlatLayout.from_module(model)
    training = LocalTraining(batch_size=batch_size, local_epochs=epochs, lr=0.1)
    trainer = BatchedTrainer(model, layout, training)
    start = layout.flatten(model)
    clients = work((12,), layout.num_params, tuple(sizes))
    trainer.train(clients, start, 0)
    alone = work((12,), layout.num_params, tuple(sizes))
    for client, one in zip(clients, alone, strict=True):
        trainer.train([one], start, 0)
        # another number of clients takes another path through the matrix product: rounding
        torch.testing.assert_close(client.row, one.row, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("planned", [1, 70])
def test_how_many_steps_are_planned_ahead_does_not_matter(
    planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    layout = FlatLayout.from_module(model)
    training = LocalTraining(batch_size=4, local_epochs=2, lr=0.1)
    rows = []
    for _ in range(2):
        clients = work((12,), layout.num_params)
        BatchedTrainer(model, layout, training).train(clients, layout.flatten(model), 0)
        rows.append(torch.stack([client.row for client in clients]))
        monkeypatch.setattr("fastagg_sim.batched_clients._PLANNED", planned)
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("length", [{"local_epochs": 2}, {"local_steps": 7}])
def test_clients_without_data_send_zeros(length: dict[str, int]) -> None:
    model = mlp()
    layout = FlatLayout.from_module(model)
    start = layout.flatten(model)
    training = LocalTraining(batch_size=4, lr=0.1, **length)
    clients = work((12,), layout.num_params, sizes=(5, 0, 9))
    BatchedTrainer(model, layout, training).train(clients, start, 0)
    alone = one_by_one(model, training, work((12,), layout.num_params, sizes=(5, 0, 9)), t=0)
    for client, right in zip(clients, alone, strict=True):
        torch.testing.assert_close(client.row, right, rtol=1e-4, atol=1e-6)  # as above
    assert not clients[1].row.any() and clients[0].row.any()


@pytest.mark.parametrize(
    "settings", [{}, {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}]
)
def test_one_grouped_convolution_is_one_for_each_client(settings: dict[str, object]) -> None:
    x, weight, bias = torch.randn(3, 4, 2, 9, 10), torch.randn(3, 5, 2, 3, 3), torch.randn(3, 5)
    # sums of 18 products in another order
    torch.testing.assert_close(
        grouped(x, weight, bias, settings), convolve_one_by_one(x, weight, bias, settings)
    )


def test_dropout_layers_draw_for_every_client() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    layout = FlatLayout.from_module(model)
    training = LocalTraining(batch_size=3, local_steps=1)
    data = ClientData(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))
    clients = [ClientWork(torch.empty(layout.num_params), data, generator(0)) for _ in range(2)]
    BatchedTrainer(model, layout, training).train(clients, layout.flatten(model), 0)
    assert not torch.equal(clients[0].row, clients[1].row)


def test_velocity_is_kept_from_round_to_round() -> None:
    """Two rounds of one step with kept velocity and model equal one round of two steps."""
    model = mlp()
    layout = FlatLayout.from_module(model)
    start = layout.flatten(model)
    data = work((12,), layout.num_params, sizes=(4, 4))[0].data  # full batches: no order

    def trained(steps: int, begin: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
        training = LocalTraining(batch_size=4, local_steps=steps, lr=0.2, momentum=0.8)
        client = ClientWork(torch.empty_like(begin), data, generator(0), velocity=velocity)
        BatchedTrainer(model, layout, training).train([client], begin, 0)
        return begin + client.row

    velocity = torch.zeros_like(start)
    middle = trained(1, start, velocity)
    assert velocity.any()
    # the batches hold the same four samples in another order: rounding
    torch.testing.assert_close(
        trained(1, middle, velocity), trained(2, start, torch.zeros_like(start))
    )


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (nn.Sequential(nn.Linear(4, 3, bias=False)), "layer Linear"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), "layer Conv2d"),
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), "layer Softmax"),
        (nn.Sequential(nn.MaxPool2d(3)), "layer MaxPool2d"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)), "without buffers"),
    ],
)
def test_other_models_are_refused(model: nn.Module, complaint: str) -> None:
    layout = FlatLayout.from_module(mlp())
    with pytest.raises(ValueError, match=complaint):
        BatchedTrainer(model, layout, LocalTraining(local_epochs=1))


def test_frozen_parameters_and_some_controls_are_refused() -> None:
    model = mlp()
    layout = FlatLayout.from_module(model)
    training = LocalTraining(local_epochs=1)
    trainer = BatchedTrainer(model, layout, training)
    clients = [*work((12,), layout.num_params, (3,)), *work((12,), layout.num_params, (3,), 1.0)]
    with pytest.raises(ValueError, match="clients: 1 of 2 have a control"):
        trainer.train(clients, layout.flatten(model), 0)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        BatchedTrainer(model, layout, training)


@pytest.mark.parametrize(
    ("model", "in_shape", "batch_size", "expected"),
    [
        ("mnist-cnn", (1, 28, 28), 5, 40),
        ("lenet", (3, 32, 32), 20, 8),
        ("lenet", (3, 32, 32), 50, 1),
        ("lenet", (3, 32, 32), 500, 1),
        ("digits-mlp", (1, 8, 8), 10, 128),
        ("logistic", (60,), 1, 128),
        ("logistic", (1, 28, 28), 50, 1),  # 3 would fit into the cache: no gain
        ("vgg11", (3, 32, 32), 32, 1),
    ],
)
def test_how_many_clients_at_once(
    model: str, in_shape: tuple[int, ...], batch_size: int, expected: int
) -> None:
    assert clients_at_once(model, in_shape, batch_size) == expected
