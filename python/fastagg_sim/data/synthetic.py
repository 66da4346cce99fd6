# SPDX-License-Identifier: Apache-2.0
"""Synthetic(alpha, beta): generated clients that differ in their linear models and their inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fastagg_sim.data.base import GeneratedDataset, Samples
from fastagg_sim.seeds import numpy_generator

FEATURES = 60
CLASSES = 10
TRAIN_FRACTION = 0.9
NUM_CLIENTS = 100


def load_synthetic(
    root: Path | None,
    seed: int,
    *,
    num_clients: int = NUM_CLIENTS,
    alpha: float = 1.0,
    beta: float = 1.0,
    redraw: int = 0,
    groups: int | None = None,
    samples: int | None = None,
    test_clients: int = 1000,
) -> GeneratedDataset:
    """Generate Synthetic(alpha, beta) of FedProx (Li et al. 2020).

    Su et al., appendix E.2, use (1, 1). Client k has n_k = 50 + floor(lognormal(4, 2)) samples, a
    heavy-tailed distribution with a mean of about 450:

        u_k ~ N(0, alpha^2)    W_k ~ N(u_k, 1) [10, 60]    b_k ~ N(u_k, 1) [10]
        B_k ~ N(0, beta^2)     v_k ~ N(B_k, 1) [60]
        x ~ N(v_k, diag(j^-1.2, j = 1 ... 60))             y = argmax(W_k x + b_k)

    The first 90 % of each client's samples are training data; the other samples of the first
    `test_clients` clients together are the test data. `Dataset.clients` contains the training
    indices of each client (partition "natural").

    root: unused, since the data are generated.
    seed: the seed of the run. The samples of client k are drawn from the stream
        ("data", "synthetic", k), so they do not depend on `num_clients`.
    num_clients: M = 100 in Su et al., 30 in FedProx.
    redraw: another number draws other x from the same n_k, W_k, b_k and v_k. The shadow runs of Su
        et al. need this.
    groups: number of hidden groups. Client k is in group g = k mod `groups`, and W, b and v are
        those of the group, from the stream ("data", "synthetic", "group", g); n_k and x are the
        client's. None: every client has W, b and v of its own.
    samples: n_k of every client, at least 10; None: as above.
    test_clients: number of clients whose test data are used; all if there are fewer.

    Raises ValueError for num_clients < 1, a negative alpha, beta or redraw, or another option out
    of its range.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients: expected a positive number, got {num_clients}")
    if alpha < 0 or beta < 0:
        raise ValueError(
            f"alpha, beta: expected standard deviations of 0 or more, got {alpha} and {beta}"
        )
    if redraw < 0:
        raise ValueError(f"redraw: expected 0 or more, got {redraw}")
    if groups is not None and not 1 <= groups <= num_clients:
        raise ValueError(f"groups: expected 1 to num_clients = {num_clients}, got {groups}")
    if samples is not None and samples < 10:
        raise ValueError(f"samples: expected at least 10, got {samples}")
    if test_clients < 1:
        raise ValueError(f"test_clients: expected a positive number, got {test_clients}")
    source = _Source(seed, alpha, beta, redraw, groups, samples)
    return GeneratedDataset(
        "synthetic",
        (FEATURES,),
        CLASSES,
        num_clients,
        source.make,
        source.sizes,
        min(num_clients, test_clients),
        None if groups is None else [client % groups for client in range(num_clients)],
    )


_Model = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The mean v [60] of x, W [10, 60] and b [10]."""


@dataclass(frozen=True)
class _Source:
    """Generates the samples of any client. The fields are the arguments of `load_synthetic`."""

    seed: int
    alpha: float
    beta: float
    redraw: int
    groups: int | None
    samples: int | None

    def make(self, client: int) -> tuple[Samples, Samples]:
        rng = self._generator(client)
        size = self._size(rng)
        if self.groups is None:
            mean, weight, bias = self._model(rng)
        else:
            mean, weight, bias = _group_model(self, client % self.groups)
        spread = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations: variance j^-1.2
        fresh = self._generator(client, self.redraw) if self.redraw else rng
        x = mean + spread * fresh.normal(size=(size, FEATURES))
        y = torch.from_numpy(np.argmax(x @ weight.T + bias, axis=1).astype(np.int64))
        xs = torch.from_numpy(x.astype(np.float32))
        train, _ = _split(size)
        return (xs[:train], y[:train]), (xs[train:], y[train:])

    def _model(self, rng: np.random.RandomState) -> _Model:
        u = rng.normal(0.0, self.alpha)
        center = rng.normal(0.0, self.beta)
        mean = rng.normal(center, 1.0, FEATURES)
        return mean, rng.normal(u, 1.0, (CLASSES, FEATURES)), rng.normal(u, 1.0, CLASSES)

    def sizes(self, client: int) -> tuple[int, int]:
        return _split(self._size(self._generator(client)))

    def _size(self, rng: np.random.RandomState) -> int:
        drawn = int(rng.lognormal(4.0, 2.0)) + 50  # drawn anyway, so that the rest is the same
        return drawn if self.samples is None else self.samples

    def _generator(self, *names: str | int) -> np.random.RandomState:
        return numpy_generator(self.seed, "data", "synthetic", *names)


@functools.lru_cache(maxsize=128)  # 5 KB each
def _group_model(source: _Source, group: int) -> _Model:
    return source._model(source._generator("group", group))


def _split(size: int) -> tuple[int, int]:
    """Return how many of a client's samples are for training, and how many for the test."""
    train = int(TRAIN_FRACTION * size)
    return train, size - train
