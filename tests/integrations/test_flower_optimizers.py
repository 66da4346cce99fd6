# SPDX-License-Identifier: Apache-2.0
"""``server_optimizer`` beside Flower's FedAdam, FedYogi, FedAdagrad and FedAvgM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fastagg

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.common import (
    Code,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore"),  # of Flower: its legacy strategies are deprecated
]

K, D, ROUNDS = 5, 500, 25
# Flower's strategy, its arguments, and our optimizer and learning rate.
PAIRS: list[tuple[Any, dict[str, float], Any, float]] = [
    (FedAdam, {}, {"name": "adam", "tau": 1e-9, "bias_correction": "flower"}, 0.1),
    (FedAdam, {"eta": 0.01, "beta_1": 0.8, "beta_2": 0.95, "tau": 1e-3},
     {"name": "adam", "beta_1": 0.8, "beta_2": 0.95, "bias_correction": "flower"}, 0.01),
    (FedYogi, {}, "yogi", 0.01),
    (FedAdagrad, {}, {"name": "adagrad", "tau": 1e-9}, 0.1),
    (FedAvgM, {"server_momentum": 0.9, "server_learning_rate": 0.5}, "momentum", 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "arguments", "optimizer", "server_lr"), PAIRS)
def test_results_equal_those_of_flower(
    strategy: Any, arguments: dict[str, float], optimizer: Any, server_lr: float
) -> None:
    """The same models for both; updates are drawn as numbers that both represent without error."""
    rng = np.random.default_rng(0)
    first = rng.integers(-256, 256, D).astype(np.float32) / 128
    theirs = strategy(initial_parameters=ndarrays_to_parameters([first.copy()]), **arguments)
    agg = fastagg.make(
        "fedavg", num_clients=K, num_params=D, server_lr=server_lr, server_optimizer=optimizer
    )
    params, expected = torch.from_numpy(first.copy()), first
    for server_round in range(1, ROUNDS + 1):
        updates = rng.integers(-64, 64, (K, D)).astype(np.float32) / 128
        results: Any = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([expected + row]), 10, {}))
            for row in updates
        ]
        parameters, _ = theirs.aggregate_fit(server_round, results, [])
        assert parameters is not None
        # Ours gets the updates that Flower's average contains, from Flower's own parameters.
        models = np.stack([expected + row for row in updates])
        agg.step(params, torch.from_numpy(models - expected), range(K))
        (found,) = parameters_to_ndarrays(parameters)
        expected = found.astype(np.float32)  # those of FedAdam are float64
        error = np.abs(params.numpy() - expected).max() / np.abs(expected).max()
        assert error <= 1e-6, server_round
        params.copy_(torch.from_numpy(expected))  # errors of a round, and of the moments
