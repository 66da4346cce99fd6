# SPDX-License-Identifier: Apache-2.0
"""Synthetic(alpha, beta): generated clients that differ in their linear models and their inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fastagg_sim.data.base import Dataset
from fastagg_sim.seeds import numpy_generator

FEATURES = 60
CLASSES = 10
TRAIN_FRACTION = 0.9


def load_synthetic(
    root: Path | None,
    seed: int,
    *,
    num_clients: int = 100,
    alpha: float = 1.0,
    beta: float = 1.0,
    redraw: int = 0,
) -> Dataset:
    """Generate Synthetic(alpha, beta) of FedProx (Li et al. 2020).

    Su et al., appendix E.2, use (1, 1). Client k has n_k = 50 + floor(lognormal(4, 2)) samples, a
    heavy-tailed distribution with a mean of about 450:

        u_k ~ N(0, alpha^2)    W_k ~ N(u_k, 1) [10, 60]    b_k ~ N(u_k, 1) [10]
        B_k ~ N(0, beta^2)     v_k ~ N(B_k, 1) [60]
        x ~ N(v_k, diag(j^-1.2, j = 1 ... 60))             y = argmax(W_k x + b_k)

    The first 90 % of each client's samples are training data; the other samples of all clients
    together are the test data. `Dataset.clients` contains the training indices of each client
    (partition "natural").

    root: unused, since the data are generated.
    seed: the seed of the run. The samples of client k are drawn from the stream
        ("data", "synthetic", k), so they do not depend on `num_clients`.
    num_clients: M = 100 in Su et al., 30 in FedProx.
    redraw: another number draws other x from the same n_k, W_k, b_k and v_k. The shadow runs of Su
        et al. need this.

    Raises ValueError for num_clients < 1 or a negative alpha, beta or redraw.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients: expected a positive number, got {num_clients}")
    if alpha < 0 or beta < 0:
        raise ValueError(
            f"alpha, beta: expected standard deviations of 0 or more, got {alpha} and {beta}"
        )
    if redraw < 0:
        raise ValueError(f"redraw: expected 0 or more, got {redraw}")
    train_x, train_y, test_x, test_y = [], [], [], []
    for client in range(num_clients):
        rng = numpy_generator(seed, "data", "synthetic", client)
        fresh = numpy_generator(seed, "data", "synthetic", client, redraw) if redraw else rng
        x, y = _samples(rng, fresh, alpha, beta)
        split = int(TRAIN_FRACTION * len(y))
        train_x.append(x[:split])
        train_y.append(y[:split])
        test_x.append(x[split:])
        test_y.append(y[split:])
    clients = torch.split(torch.arange(sum(map(len, train_y))), [len(y) for y in train_y])
    return Dataset(
        "synthetic",
        torch.from_numpy(np.concatenate(train_x)),
        torch.from_numpy(np.concatenate(train_y)),
        torch.from_numpy(np.concatenate(test_x)),
        torch.from_numpy(np.concatenate(test_y)),
        CLASSES,
        list(clients),
    )


def _samples(
    rng: np.random.RandomState, fresh: np.random.RandomState, alpha: float, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one client's x float32 [n, 60] and y int64 [n].

    The size, the model and the mean of x are drawn from `rng`, x itself from `fresh`.
    """
    size = int(rng.lognormal(4.0, 2.0)) + 50
    u = rng.normal(0.0, alpha)
    center = rng.normal(0.0, beta)
    mean = rng.normal(center, 1.0, FEATURES)
    weight = rng.normal(u, 1.0, (CLASSES, FEATURES))
    bias = rng.normal(u, 1.0, CLASSES)
    spread = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations: variance j^-1.2
    x = mean + spread * fresh.normal(size=(size, FEATURES))
    y = np.argmax(x @ weight.T + bias, axis=1)
    return x.astype(np.float32), y.astype(np.int64)
