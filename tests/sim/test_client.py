# SPDX-License-Identifier: Apache-2.0
"""Compare local training in a buffer row with a plain loop using torch's optimiser."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fastagg import FlatLayout, UpdateBuffer
from fastagg_sim.client import ClientData, LocalTrainer, batches, evaluate
from fastagg_sim.config import LocalTraining


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _data(n: int = 23) -> ClientData:
    rng = _generator()
    return ClientData(torch.randn(n, 5, generator=rng), torch.randint(0, 3, (n,), generator=rng))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def _expected(model: nn.Module, data: ClientData, training: LocalTraining, t: int) -> torch.Tensor:
    """Return local minus global model, flat, from torch.optim.SGD on the FedProx objective."""
    local = copy.deepcopy(model)
    anchor = [p.detach().clone() for p in model.parameters()]
    lr = training.lr * training.lr_decay**t
    optimizer = torch.optim.SGD(local.parameters(), lr=lr, momentum=training.momentum)
    for x, y in batches(data, training, _generator()):
        optimizer.zero_grad()
        loss = functional.cross_entropy(local(x), y)
        for p, a in zip(local.parameters(), anchor, strict=True):
            loss = loss + training.prox / 2 * (p - a).square().sum()
        loss.backward()
        optimizer.step()
    moved = [p.detach() - a for p, a in zip(local.parameters(), anchor, strict=True)]
    return torch.cat([m.flatten() for m in moved])


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(batch_size=5, local_epochs=2, lr=0.3),
        LocalTraining(batch_size=5, local_steps=3, lr=0.3, lr_decay=0.5),
        LocalTraining(batch_size=4, local_epochs=2, lr=0.2, momentum=0.9),
        LocalTraining(batch_size=4, local_epochs=3, lr=0.2, prox=0.7),
        LocalTraining(batch_size=4, local_epochs=1, lr=0.2, prox=0.7, momentum=0.5),
    ],
)
def test_update_is_what_sgd_gives(training: LocalTraining) -> None:
    model = _model()
    layout = FlatLayout.from_module(model)
    start = layout.flatten(model).clone()
    expected = _expected(model, _data(), training, t=2)
    buffer = UpdateBuffer(3, layout.num_params)
    for row in buffer.rows(range(3)):
        row.fill_(float("nan"))  # the old content of the row must not matter
    before = start.clone()
    LocalTrainer(model, layout, training).train(buffer.row(1), start, _data(), 2, _generator())
    # The same operations in a different order (fused prox and momentum): a few units of rounding.
    torch.testing.assert_close(buffer.row(1), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(start, before)
    assert buffer.row(0).isnan().all() and buffer.row(2).isnan().all()


@given(
    n=st.integers(1, 30),
    batch_size=st.integers(1, 40),
    epochs=st.integers(1, 3),
)
def test_epochs_are_permutations(n: int, batch_size: int, epochs: int) -> None:
    data = ClientData(torch.arange(n, dtype=torch.float32), torch.arange(n))
    training = LocalTraining(batch_size=batch_size, local_epochs=epochs)
    seen = list(batches(data, training, _generator()))
    assert all(torch.equal(x.long(), y) for x, y in seen)
    labels = torch.cat([y for _, y in seen]).reshape(epochs, n)
    assert torch.equal(labels.sort(dim=1).values, torch.arange(n).expand(epochs, n))
    assert len(seen) == epochs * -(-n // batch_size)


@given(n=st.integers(1, 10), batch_size=st.integers(1, 12), steps=st.integers(1, 20))
def test_steps_are_counted(n: int, batch_size: int, steps: int) -> None:
    data = ClientData(torch.zeros(n), torch.arange(n))
    training = LocalTraining(batch_size=batch_size, local_steps=steps)
    assert len(list(batches(data, training, _generator()))) == steps


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_control_is_added_to_every_gradient_in_proportion_to_work(momentum: float) -> None:
    """A model that does not depend on its parameters moves by -work * control exactly."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :3] + 0.0 * self.weight[:3]

    training = LocalTraining(batch_size=5, local_epochs=2, lr=0.3, lr_decay=0.5, momentum=momentum)
    model = Constant()
    layout = FlatLayout.from_module(model)
    row, control = torch.empty(4), torch.tensor([1.0, -2.0, 0.0, 4.0])
    data = _data(23)
    LocalTrainer(model, layout, training).train(row, torch.zeros(4), data, 1, _generator(), control)
    assert training.steps(23) == len(list(batches(data, training, _generator()))) == 10
    # ten steps in float32
    torch.testing.assert_close(row, -training.work(23, 1) * control, rtol=1e-5, atol=0)


def test_evaluate_does_not_depend_on_the_batch_size() -> None:
    model, data = _model(), _data(50)
    accuracy, loss = evaluate(model, data.x, data.y)
    logits = model(data.x)
    assert accuracy == (logits.argmax(1) == data.y).float().mean().item() or accuracy == (
        pytest.approx((logits.argmax(1) == data.y).double().mean().item())
    )
    assert loss == pytest.approx(functional.cross_entropy(logits, data.y).item(), rel=1e-5)
    assert evaluate(model, data.x, data.y, batch_size=7)[0] == accuracy
