# SPDX-License-Identifier: Apache-2.0
"""Compare gradients by batched matrix products with PyTorch's autograd, in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fastagg import FlatLayout
from fastagg_sim import matrix_model
from fastagg_sim.batched_clients import BatchedTrainer, ClientWork, uses_products
from fastagg_sim.client import ClientData, evaluate
from fastagg_sim.config import LocalTraining
from fastagg_sim.matrix_model import MatrixModel, find_stack
from fastagg_sim.models import MODELS, make_model
from fastagg_sim.pooling import MaxPool2x2


def network(kernel: tuple[int, int] = (2, 3), hidden: int = 4) -> nn.Sequential:
    """A small network for samples of shape (2, 9, 8), with an odd number of rows before pooling."""
    height, width = (9 - kernel[0] + 1) // 2, (8 - kernel[1] + 1) // 2
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, kernel), MaxPool2x2(), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(3 * height * width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 3),
    )


def build(model: nn.Module, in_shape: tuple[int, ...]) -> MatrixModel:
    stack = find_stack(model)
    assert stack is not None
    return MatrixModel(stack, in_shape)


def rows_of(model: nn.Module, k: int) -> Tensor:
    """Return k different rows [k, d] near the parameters of `model`."""
    start = FlatLayout.from_module(model).flatten(model)
    rng = torch.Generator().manual_seed(3)
    return start + 0.02 * torch.randn(k, start.numel(), generator=rng)


def found(model: nn.Module, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the gradients [k, d] of models `rows` for x [k, n, ...], y and weight [k, n]."""
    k = len(rows)
    products = build(model, tuple(x.shape[2:]))
    arranged = products.arrange(rows)
    taken = products.take(x.flatten(0, 1), torch.arange(y.numel())).unflatten(0, x.shape[:2])
    assert torch.equal(taken, x)
    parameters = products.parts(arranged, k)
    gradients = products.gradients(parameters, taken, y.flatten(), weight.flatten())
    assert torch.equal(products.restore(arranged), rows)
    return products.restore(torch.cat([g.flatten(1) for g in gradients], dim=1))


def expected(model: nn.Module, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same from autograd in float64."""
    model = copy.deepcopy(model).double()
    gradients = []
    for row, xs, ys, ws in zip(rows, x, y, weight, strict=True):
        nn.utils.vector_to_parameters(row.double(), model.parameters())
        losses = functional.cross_entropy(model(xs.double()), ys, reduction="none")
        parts = torch.autograd.grad((losses * ws).sum(), list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(gradients)


def samples(k: int, n: int, in_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(k + 100 * n)
    x = torch.randn(k, n, *in_shape, generator=rng)
    y = torch.randint(0, 3, (k, n), generator=rng)
    weight = torch.rand(k, n, generator=rng)
    weight[0, 0] = 0.0  # padding
    return x, y, weight


@pytest.mark.parametrize("piece", [1, 4, 50])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 9), (3, 2), (5, 3)])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (5, 4)])
def test_gradients(
    kernel: tuple[int, int], k: int, n: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_model, "PIECE", piece)
    torch.manual_seed(0)
    model = network(kernel)
    rows, batch = rows_of(model, k), samples(k, n, (2, 9, 8))
    right = expected(model, rows, *batch)
    # float32 sums of up to 300 products against float64
    torch.testing.assert_close(
        found(model, rows, *batch).double(), right, rtol=1e-5, atol=1e-6 * float(right.abs().max())
    )


@pytest.mark.parametrize(
    ("name", "in_shape"),
    [
        ("mnist-cnn", (1, 28, 28)),
        ("lenet", (3, 32, 32)),
        ("niid-cnn", (1, 28, 28)),
        ("lenet", (1, 19, 22)),  # the second output has fewer rows than the kernel
    ],
)
@pytest.mark.parametrize("long_row", [1, 10**9])  # with smaller products at the edge, with zeros
def test_gradients_of_the_models(
    name: str, in_shape: tuple[int, ...], long_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_model, "_LONG_ROW", long_row)
    model = make_model(name, num_classes=3, in_shape=in_shape, seed=0)
    assert uses_products(model)
    rows, batch = rows_of(model, 2), samples(2, 4, in_shape)
    right = expected(model, rows, *batch)
    error = (found(model, rows, *batch) - right).norm() / right.norm()
    assert error < 2e-6  # float32 rounding; PyTorch's own convolutions have an error of 3e-7


def test_evaluation_before_and_after_training() -> None:
    """Accuracy and loss are those of the model, and training afterwards gives the same bits."""
    model = make_model("lenet", num_classes=3, in_shape=(1, 18, 20), seed=0)
    layout = FlatLayout.from_module(model)
    params = layout.flatten(model)
    rng = torch.Generator().manual_seed(5)
    x, y = torch.randn(230, 1, 18, 20, generator=rng), torch.randint(0, 3, (230,), generator=rng)
    trainer = BatchedTrainer(model, layout, LocalTraining(batch_size=30, local_epochs=1, lr=0.1))
    rows = []
    for _ in range(2):
        logits = trainer.logits(params, (1, 18, 20))
        assert logits is not None
        torch.testing.assert_close(logits(x), model(x), rtol=1e-4, atol=1e-6)  # float32 rounding
        accuracy, loss = evaluate(model, x, y, logits=logits)
        right = evaluate(model, x, y)
        assert accuracy == right[0] and loss == pytest.approx(right[1], rel=1e-6)
        row = torch.empty_like(params)
        work = ClientWork(row, ClientData(x, y), torch.Generator().manual_seed(1))
        trainer.train([work], params, 0)
        rows.append(row)
    assert torch.equal(*rows) and rows[0].any()


def test_a_case_by_hand() -> None:
    """2 x - 1 of [[1, 2], [3, 5]] has the maximum 9; the logits are (ln 3, 0), the label is 0."""
    model = nn.Sequential(
        nn.Conv2d(1, 1, 1), MaxPool2x2(), nn.ReLU(), nn.Flatten(), nn.Linear(1, 2)
    )
    row = torch.tensor([[2.0, -1.0, math.log(3) / 9, 0.0, 0.0, 0.0]])
    x = torch.tensor([[[[[1.0, 2.0], [3.0, 5.0]]]]])
    gradient = found(model, row, x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    # softmax (3/4, 1/4): the gradient of the logits is (-1/4, 1/4)
    pulled = -0.25 * math.log(3) / 9
    right = torch.tensor([[5 * pulled, pulled, -0.25 * 9, 0.25 * 9, -0.25, 0.25]])
    torch.testing.assert_close(gradient, right)


def test_equal_maxima_send_the_gradient_to_the_first_as_in_pytorch() -> None:
    """With small integers convolutions are exact, and values of a window are often equal."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, 2), MaxPool2x2(), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.ReLU(), MaxPool2x2()),
        *(nn.Flatten(), nn.Linear(3 * 2 * 2, 3)),
    )
    rows = rows_of(model, 2)
    convolutions = sum(p.numel() for p in model.parameters()) - 39
    rows[:, :convolutions] = torch.randint(-1, 3, (2, convolutions)).float()
    x = torch.randint(0, 2, (2, 6, 1, 11, 11)).float()
    batch = x, torch.randint(0, 3, (2, 6)), torch.ones(2, 6)
    right = expected(model, rows, *batch)
    error = (found(model, rows, *batch) - right).norm() / right.norm()
    assert error < 1e-6  # rounding of the linear layer


def test_memory_of_earlier_steps_does_not_matter() -> None:
    """A trainer that has seen other groups and batches gives the bits of a new one."""
    model = make_model("lenet", num_classes=3, in_shape=(1, 18, 20), seed=0)
    layout = FlatLayout.from_module(model)
    start = layout.flatten(model)
    training = LocalTraining(batch_size=5, local_epochs=2, lr=0.1, momentum=0.5)

    def work(sizes: tuple[int, ...]) -> list[ClientWork]:
        clients = []
        for k, n in enumerate(sizes):
            rng = torch.Generator().manual_seed(k)
            x = torch.randn(n, 1, 18, 20, generator=rng)
            data = ClientData(x, torch.randint(0, 3, (n,), generator=rng))
            clients.append(ClientWork(torch.empty_like(start), data, rng))
        return clients

    used, new = (BatchedTrainer(model, layout, training) for _ in range(2))
    used.train([*work((40, 3, 17)), *work((30, 30))], start, 0)
    again, once = work((7, 12)), work((7, 12))
    used.train(again, start, 1)
    new.train(once, start, 1)
    for one, other in zip(again, once, strict=True):
        assert torch.equal(one.row, other.row)


@pytest.mark.parametrize(
    "block",
    [
        [nn.Conv2d(2, 3, 3, padding=1), MaxPool2x2(), nn.ReLU()],
        [nn.Conv2d(2, 3, 3, stride=2), MaxPool2x2(), nn.ReLU()],
        [nn.Conv2d(2, 3, 3, dilation=2), MaxPool2x2(), nn.ReLU()],
        [nn.Conv2d(2, 4, 3, groups=2), MaxPool2x2(), nn.ReLU()],
        [nn.Conv2d(2, 3, 3, bias=False), MaxPool2x2(), nn.ReLU()],
        [nn.Conv2d(2, 3, 3), nn.ReLU()],
        [nn.Conv2d(2, 3, 3), MaxPool2x2()],
        [nn.Conv2d(2, 3, 3), MaxPool2x2(), nn.Tanh()],
        [nn.Conv2d(2, 3, 3), nn.MaxPool2d(3), nn.ReLU()],
        [nn.Conv2d(2, 3, 3), MaxPool2x2(), nn.ReLU(), nn.Dropout(0.5)],
        [],
    ],
)
def test_other_blocks_are_not_supported(block: list[nn.Module]) -> None:
    model = nn.Sequential(*block, nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 2, 12, 12))
    assert find_stack(model) is None and not uses_products(model)
    with pytest.raises(ValueError, match='convolutions: "products" does not support'):
        training = LocalTraining(local_epochs=1)
        BatchedTrainer(model, FlatLayout.from_module(model), training, convolutions="products")


@pytest.mark.parametrize(
    "end",
    [
        [nn.Flatten(2), nn.Linear(75, 3)],
        [nn.Linear(75, 3)],
        [nn.Flatten()],
        [],
        [nn.Flatten(), nn.Linear(75, 3, bias=False)],
        [nn.Flatten(), nn.Linear(75, 3), nn.ReLU()],
        [nn.Flatten(), nn.Linear(75, 3), nn.Linear(3, 3)],
        [nn.Flatten(), nn.Linear(75, 3), nn.Tanh(), nn.Linear(3, 3)],
    ],
)
def test_other_ends_are_not_supported(end: list[nn.Module]) -> None:
    assert find_stack(nn.Sequential(nn.Conv2d(2, 3, 3), MaxPool2x2(), nn.ReLU(), *end)) is None


def test_models_that_use_products() -> None:
    shapes = {"vgg11": (3, 32, 32), "digits-mlp": (1, 8, 8), "logistic": (60,)}
    supported = {
        name
        for name in MODELS
        if uses_products(
            make_model(name, num_classes=3, in_shape=shapes.get(name, (1, 28, 28)), seed=0)
        )
    }
    assert supported == {"mnist-cnn", "lenet", "niid-cnn"}
    assert not uses_products(network().double())


@pytest.mark.parametrize("in_shape", [(2, 9), (2, 1, 8), (2, 9, 12)])
def test_samples_that_do_not_fit_are_refused(in_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="in_shape"):
        build(network(), in_shape)
