# SPDX-License-Identifier: Apache-2.0
"""The task: digits, with two labels per group of clients, and plain PyTorch training.

The data, the model, the partition and the batches come from fastagg's simulation, so that the same
run can be repeated there and compared bit for bit. Local training does not use the simulation.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fastagg_sim import data
from fastagg_sim.client import ClientData, batches, evaluate
from fastagg_sim.config import Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.models import make_model
from fastagg_sim.seeds import generator
from fastagg_sim.simulation import split_clients

SEED = 0

# Small models train fastest on one thread, and matrix products on two threads have other bits.
torch.set_num_threads(1)


def job(
    rule: str,
    clients: int,
    rounds: int,
    dropout: Dropout | None = None,
    *,
    groups: int | None = None,
) -> Job:
    """Return the run as a job of fastagg's simulation; by default with two clients per group."""
    task = Task(
        dataset="digits",
        partition="clustered",
        model="digits-mlp",
        training=LocalTraining(batch_size=10, local_epochs=1, lr=0.1),
        rounds=rounds,
        num_clients=clients,
        partition_options={"num_groups": groups or clients // 2, "samples_per_client": 60},
    )
    return Job(task, Method(rule, rule), dropout or Dropout(), SEED)


@cache
def dataset() -> data.Dataset:
    return data.load("digits", seed=SEED)


def model() -> nn.Module:
    digits = dataset()
    shape = tuple(digits.train_x.shape[1:])
    return make_model("digits-mlp", num_classes=digits.num_classes, in_shape=shape, seed=SEED)


@cache
def client_data(partition: int, clients: int, groups: int | None) -> ClientData:
    digits = dataset()
    task = job("fedavg", clients, 1, groups=groups).task
    ids = split_clients(task, digits, SEED).clients[partition]
    return ClientData(digits.train_x[ids], digits.train_y[ids])


def train(
    net: nn.Module, partition: int, clients: int, server_round: int, *, groups: int | None = None
) -> int:
    """Train `net` in place for one round; return the number of samples."""
    training = job("fedavg", clients, 1).task.training
    samples = client_data(partition, clients, groups)
    parameters = list(net.parameters())
    rng = generator(SEED, "batches", server_round - 1, partition)
    net.train()
    for x, y in batches(samples, training, rng):
        gradients = torch.autograd.grad(cross_entropy(net(x), y), parameters)
        # SGD by hand: torch.optim imports PyTorch's compiler, 2 seconds in each client's process.
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=training.lr)
    return len(samples.y)


def accuracy(net: nn.Module) -> float:
    """Return the accuracy on the test set."""
    digits = dataset()
    return evaluate(net, digits.test_x, digits.test_y)[0]


def weights(net: nn.Module) -> list[np.ndarray]:
    return [value.detach().cpu().numpy() for value in net.state_dict().values()]


def set_weights(net: nn.Module, arrays: list[np.ndarray]) -> None:
    names = net.state_dict().keys()
    net.load_state_dict({n: torch.tensor(a) for n, a in zip(names, arrays, strict=True)})
