# SPDX-License-Identifier: Apache-2.0
"""FedAWE: Algorithm 1 of its paper in float64, against ``fedavg`` with clients that echo."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import FedAWEClient

K, D, STEPS, LOCAL, ETA = 5, 7, 3, 0.05, 0.8


class Problem:
    """Quadratic objectives with exact gradients: f_i(x) = |A_i (x - b_i)|^2 / 2."""

    def __init__(self) -> None:
        g = np.random.default_rng(0)
        self.a = g.standard_normal((K, D, D)) / 2
        self.b = g.standard_normal((K, D))

    def train(self, client: int, x: np.ndarray) -> np.ndarray:
        for _ in range(STEPS):
            x = x - LOCAL * self.a[client].T @ (self.a[client] @ (x - self.b[client]))
        return x

    def train_tensor(self, client: int, x: Tensor) -> Tensor:
        return torch.from_numpy(self.train(client, x.double().numpy())).float()


def algorithm_1(problem: Problem, rounds: list[list[int]], first: np.ndarray) -> list[np.ndarray]:
    """Lines 2 to 23 of Algorithm 1, as printed, in float64; an empty round changes nothing."""
    x = [first.copy() for _ in range(K)]
    tau = [-1] * K
    model, models = first, []
    for t, active in enumerate(rounds):
        dagger = {}
        for i in active:
            innovation = x[i] - problem.train(i, x[i])  # G_i
            dagger[i] = x[i] - ETA * (t - tau[i]) * innovation
        if active:
            model = sum(dagger.values()) / len(active)
        for i in active:
            x[i], tau[i] = model, t
        models.append(model)
    return models


def availability(count: int, seed: int) -> list[list[int]]:
    """Heterogeneous and changing: client i is active with a probability that oscillates."""
    g = np.random.default_rng(seed)
    phases = np.arange(K)
    return [
        [i for i in range(K) if g.random() < 0.15 * (i + 1) * (1 + 0.3 * np.sin(t + phases[i]))]
        for t in range(count)
    ]


def test_fedavg_with_these_clients_is_the_algorithm_of_the_paper() -> None:
    problem, rounds = Problem(), availability(40, 3)
    assert [] in rounds and any(len(active) > 2 for active in rounds)
    params = torch.randn(D, generator=torch.Generator().manual_seed(1))
    expected = algorithm_1(problem, rounds, params.double().numpy())
    clients = [FedAWEClient(params, eta=ETA) for _ in range(K)]
    agg = fastagg.make("fedavg", num_clients=K, num_params=D)
    for t, active in enumerate(rounds):
        answers = [clients[i].answer_(problem.train_tensor(i, clients[i].model), t) for i in active]
        report = agg.step(params, [answer - params for answer in answers], active)
        for i in report.active.tolist():
            clients[i].receive(params, t)
        # Each round rounds a few float32 numbers, up to eta (t - tau) = 10 times larger than the
        # model (below 4); the training contracts what earlier rounds added.
        assert np.abs(params.double().numpy() - expected[t]).max() <= 16 * 10 * 4 * 2.0**-24
    assert np.abs(expected[-1] - expected[0]).max() > 0.1


def test_the_echoes_of_a_client_add_up_to_the_rounds() -> None:
    """Proposition 1: if client i is active in round R - 1, its factors add up to R."""
    client, total = FedAWEClient(torch.zeros(1)), 0.0
    for number in (0, 3, 4, 9):
        total += client.answer_(torch.ones(1), number).item()  # x_i = 0, so u = 1
        client.receive(torch.zeros(1), number)
        assert total == number + 1


def test_hand_worked() -> None:
    client = FedAWEClient(torch.tensor([2.0]), eta=0.5, first_round=1)
    assert client.answer_(torch.tensor([5.0]), 3).tolist() == [6.5]  # 2 + 0.5 * 3 * 3
    assert client.model.tolist() == [2.0]  # until the answer has counted
    client.receive(torch.tensor([4.0]), 3)
    assert client.answer_(torch.tensor([3.0]), 4).tolist() == [3.5]  # 4 - 0.5 * 1
    assert client.answer_(torch.tensor([3.0]), 5).tolist() == [3.0]  # that of round 4 was lost


def test_bad_rounds(same_bits: Callable[..., None]) -> None:
    client = FedAWEClient(torch.zeros(2))
    client.receive(torch.ones(2), 4)
    for call in (client.answer_, client.receive):
        with pytest.raises(ValueError, match="number: expected at least 5, got 4"):
            call(torch.zeros(2), 4)
        with pytest.raises(TypeError, match="number"):
            call(torch.zeros(2), 4.5)  # type: ignore[arg-type]
    same_bits(client.model, torch.ones(2))
    with pytest.raises(ValueError, match="eta"):
        FedAWEClient(torch.zeros(2), eta=-1.0)


def test_a_model_of_another_form_is_refused() -> None:
    client = FedAWEClient(torch.zeros(3))
    for size in (1, 4):  # one number would be taken for all parameters
        with pytest.raises(ValueError, match=rf"^model: expected shape \[3\], got \[{size}\]"):
            client.receive(torch.ones(size), 0)
    with pytest.raises(ValueError, match=r"^trained: expected shape"):
        client.answer_(torch.ones(4), 0)
    with pytest.raises(TypeError, match=r"^trained: expected dtype"):
        client.answer_(torch.ones(3, dtype=torch.float64), 0)
    assert client.model.tolist() == [0.0] * 3 and client.last == -1
    for first in ([0.0], torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        with pytest.raises((TypeError, ValueError), match=r"^first_model: expected "):
            FedAWEClient(first)  # type: ignore[arg-type]


def test_a_model_that_is_none_changes_nothing() -> None:
    client = FedAWEClient(torch.zeros(2))
    for model, error in (
        ([1.0, 2.0], TypeError),
        (torch.zeros(2, dtype=torch.float64), TypeError),
        (torch.zeros(3), ValueError),
        (torch.tensor([1.0, float("nan")]), ValueError),
    ):
        with pytest.raises(error, match=r"^model: expected"):
            client.receive(model, 1)  # type: ignore[arg-type]
    assert client.model.tolist() == [0.0, 0.0] and client.last == -1
