# SPDX-License-Identifier: Apache-2.0
"""A model of one's own with batch normalisation in the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fastagg
from fastagg.updates.statistics import mean_
from fastagg_sim import models
from fastagg_sim.config import ConfigError, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.simulation import Simulation

K = 6


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    def normalised(in_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4, momentum=0.4), nn.Linear(4, 10)
        )

    monkeypatch.setitem(models.MODELS, "normalised", normalised)


def simulate(rule: str, **training: Any) -> Simulation:
    task = Task(
        dataset="digits",
        partition="clustered",
        model="normalised",
        training=LocalTraining(batch_size=10, local_epochs=1, lr=0.1, **training),
        rounds=8,
        num_clients=K,
        partition_options={"num_groups": 2, "samples_per_client": 20},
    )
    return Simulation(Job(task, Method(rule, rule), Dropout("bernoulli", {"p": 0.4}), 3))


def mean(simulation: Simulation) -> Tensor:
    return simulation._statistics.values


def test_statistics_are_not_parameters() -> None:
    simulation = simulate("fedavg")
    assert simulation.params.numel() == 64 * 4 + 4 + 8 + 4 * 10 + 10
    assert mean(simulation).tolist() == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize("rule", ["mifa", "stale", "scaffold"])
def test_statistics_stay_valid_and_a_resumed_run_has_the_same(rule: str, tmp_path: Path) -> None:
    whole = simulate(rule)
    for number in range(8):
        whole.run_round()
        assert bool(torch.isfinite(mean(whole)).all())
        assert bool((mean(whole)[4:] >= 0.0).all())
        if number == 2:
            whole.save(tmp_path)
    assert whole.done
    assert mean(whole).ne(mean(simulate(rule))).all()
    resumed = simulate(rule)
    resumed.load(tmp_path)
    while not resumed.done:
        resumed.run_round()
    assert torch.equal(resumed.params, whole.params)
    assert torch.equal(mean(resumed), mean(whole))


def test_every_client_starts_with_the_statistics_of_the_server() -> None:
    simulation = simulate("fedavg")
    layer = simulation._model[2]  # type: ignore[index]
    started = []

    def note(module: nn.Module, inputs: Any) -> None:
        if module.training and int(layer.num_batches_tracked) == 0:
            started.append(layer.running_var.tolist())

    layer.register_forward_pre_hook(note)
    for _ in range(3):
        expected = mean(simulation)[4:].tolist()
        active = simulation.run_round().active
        assert started == [expected] * active
        assert layer.num_batches_tracked == 0  # evaluation has those of the server
        assert layer.running_var.tolist() == mean(simulation)[4:].tolist()
        started.clear()


@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 3.0]])
def test_the_mean_of_statistics(weights: list[float] | None) -> None:
    rows = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0])]
    out = torch.full((2,), 9.0)
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    assert mean_(out, rows, [0, 2], given)
    assert out.tolist() == ([2.0, 0.0] if weights is None else [2.5, 0.0])


def test_without_weight_there_is_no_mean() -> None:
    out = torch.full((2,), 9.0)
    assert not mean_(out, [torch.ones(2)], [1], torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert not mean_(out, [], [], None)
    assert out.tolist() == [9.0, 9.0]


def test_a_client_with_nan_is_named() -> None:
    simulation = simulate("fedavg")
    statistics = simulation._statistics
    layer = simulation._model[2]  # type: ignore[index]
    for client, value in [(0, 2.0), (4, torch.nan)]:
        layer.running_mean.fill_(value)
        statistics.take(client)
    before = mean(simulation).clone()
    aggregator = fastagg.FedAvg(num_clients=K, num_params=simulation.params.numel())
    with pytest.raises(ValueError, match="client 4 has NaN"):
        statistics.average(aggregator, [0, 4])
    assert torch.equal(mean(simulation), before)


def test_several_clients_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"without buffers .* use clients_at_once=1"):
        simulate("fedavg", clients_at_once=2)


@pytest.mark.parametrize("name", ["statistics", "other"])
def test_a_damaged_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    simulation = simulate("fedavg")
    simulation.save(tmp_path)
    path = tmp_path / "statistics.safetensors"
    save_file({name: torch.zeros(7 if name == "statistics" else 8)}, path)
    simulation.run_round()
    before = mean(simulation).clone()
    with pytest.raises(ConfigError, match=r"statistics\.safetensors"):
        simulation.load(tmp_path)
    assert torch.equal(mean(simulation), before)
    assert simulation.next_round == 1
