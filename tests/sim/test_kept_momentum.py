# SPDX-License-Identifier: Apache-2.0
"""Clients that keep their momentum across rounds, and robust rules over all last momenta."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fastagg import StepReport
from fastagg_sim.client import ClientData, batches
from fastagg_sim.config import ConfigError, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.seeds import generator
from fastagg_sim.simulation import Simulation

MOMENTUM = 0.9
TRAINING = LocalTraining(
    batch_size=8, local_steps=1, lr=0.2, momentum=MOMENTUM, keep_momentum=True, lr_power=0.5
)
CLIPPING = {"tau": 0.8, "iterations": 2}
MEDIAN = {"nu": 0.1, "iterations": 8, "start": "zero"}


def make_job(rule: str, options: dict[str, Any], rounds: int = 6, *, reuse: bool = True) -> Job:
    task = Task(
        dataset="digits",
        partition="dirichlet",
        model="logistic",
        training=LocalTraining(batch_size=8, local_steps=3),  # replaced by the method's
        rounds=rounds,
        num_clients=7,
        partition_options={"alpha": 0.5, "balanced": False},
    )
    method = Method(
        rule,
        rule,
        {**options, "reuse": True} if reuse else options,
        gradient_units=True,
        training=TRAINING,
        sample_weights=True,
    )
    return Job(task, method, Dropout("exact", {"alpha": 0.6}), seed=3)  # two of seven active


def clipped(v: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Compute eq. 43 of Su et al."""
    for _ in range(CLIPPING["iterations"]):
        norms = np.maximum(np.linalg.norm(x - v, axis=1), 1e-30)
        v = v + (w * np.minimum(1.0, CLIPPING["tau"] / norms)) @ (x - v)
    return v


def median(v: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Run smoothed Weiszfeld from zero."""
    z = np.zeros_like(v)
    for _ in range(MEDIAN["iterations"]):
        beta = w / np.maximum(MEDIAN["nu"], np.linalg.norm(x - z, axis=1))
        z = beta @ x / beta.sum()
    return z


@pytest.mark.parametrize(
    ("rule", "options", "aggregate"),
    [("centered-clip", CLIPPING, clipped), ("geometric-median", MEDIAN, median)],
)
def test_rounds_are_those_of_the_paper(rule: str, options: dict[str, Any], aggregate: Any) -> None:
    """m_i <- .9 m_i + g_i for the active, 0 for those never active; the rule over all M clients;
    model <- model - lr_t v. Written out with torch's SGD gradients and numpy."""
    simulation = Simulation(make_job(rule, options))
    model, layout = copy.deepcopy(simulation._model), simulation._layout
    params = simulation.params.clone()
    sizes = simulation._split.sizes.numpy()
    weights = sizes / sizes.sum()
    momentum = np.zeros((7, layout.num_params))
    v = np.zeros(layout.num_params)
    seen: set[int] = set()
    unseen = 0  # rounds in which some client had never been active
    for t in range(6):
        active = simulation._dropout.active(t).tolist()
        seen |= set(active)
        for client in active:
            model.load_state_dict(layout.state_dict(params))
            model.zero_grad()
            data = simulation._clients[client]
            ((x, y),) = batches(data, TRAINING, generator(3, "batches", t, client))
            functional.cross_entropy(model(x), y).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            momentum[client] = MOMENTUM * momentum[client] + gradient.double().numpy()
        unseen += len(seen) < 7
        v = aggregate(v, -momentum, weights)
        params = params + 0.2 / (t + 1) ** 0.5 * torch.from_numpy(v).float()
        simulation.run_round()
        # float32 momenta and models, and distances from a Gram matrix
        torch.testing.assert_close(simulation.params, params, rtol=1e-4, atol=2e-6)
    assert simulation._momentum.keys() == seen
    assert unseen >= 2


def test_resuming_keeps_the_momentum(tmp_path: Path) -> None:
    job = make_job("centered-clip", CLIPPING)
    whole, first, resumed = (Simulation(job) for _ in range(3))
    for _ in range(3):
        first.run_round()
    first.save(tmp_path)
    resumed.load(tmp_path)
    while not whole.done:
        whole.run_round()
    while not resumed.done:
        resumed.run_round()
    assert torch.equal(whole.params, resumed.params)
    assert whole._momentum.keys() == resumed._momentum.keys()
    for client, momentum in whole._momentum.items():
        assert torch.equal(resumed._momentum[client], momentum)


def test_clients_at_once_keep_the_same_momentum() -> None:
    ends = []
    for together in (1, 4):
        training = dataclasses.replace(TRAINING, local_steps=3, clients_at_once=together)
        job = make_job("fedavg", {}, reuse=False)
        job = dataclasses.replace(job, method=dataclasses.replace(job.method, training=training))
        job = dataclasses.replace(job, dropout=Dropout("exact", {"alpha": 0.2}))  # five of seven
        simulation = Simulation(job)
        while not simulation.done:
            simulation.run_round()
        ends.append(simulation)
    alone, batched = ends
    assert batched._batched is not None and alone._batched is None
    assert batched._momentum.keys() == alone._momentum.keys()
    # 18 float32 steps whose sums are taken in another order
    for client, momentum in alone._momentum.items():
        torch.testing.assert_close(batched._momentum[client], momentum, rtol=1e-3, atol=1e-5)
        assert momentum.abs().max() > 1e-2
    torch.testing.assert_close(batched.params, alone.params, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("together", [1, 4])
def test_failed_training_leaves_no_nan_in_the_momentum(together: int) -> None:
    job = make_job("geometric-median", {**MEDIAN, "nonfinite": "drop"})
    training = dataclasses.replace(TRAINING, clients_at_once=together)
    method = dataclasses.replace(job.method, training=training)
    simulation = Simulation(dataclasses.replace(job, method=method, dropout=Dropout("full")))
    rejected: list[list[int]] = []
    step = simulation._step

    def watched(active: torch.Tensor) -> StepReport:
        report = step(active)
        rejected.append(report.rejected.tolist())
        return report

    simulation._step = watched  # type: ignore[method-assign]
    simulation.run_round()
    before = {client: kept.clone() for client, kept in simulation._momentum.items()}
    store = simulation._clients
    bad = ClientData(torch.full_like(store[2].x, torch.nan), store[2].y)
    simulation._clients = {k: store[k] for k in range(7)} | {2: bad}  # type: ignore[assignment]
    simulation.run_round()
    simulation._clients = store
    assert torch.equal(simulation._momentum[2], before[2])
    assert not torch.equal(simulation._momentum[3], before[3])
    simulation.run_round()
    assert rejected == [[], [2], []]  # it takes part again
    assert not torch.equal(simulation._momentum[2], before[2])
    assert all(bool(kept.isfinite().all()) for kept in simulation._momentum.values())


def test_kept_momentum_needs_momentum_and_no_scaffold() -> None:
    with pytest.raises(ConfigError, match="keep_momentum"):
        LocalTraining(local_steps=1, keep_momentum=True)
    with pytest.raises(ConfigError, match="keep_momentum"):
        TRAINING.work(20, 0)


def test_the_learning_rate_decays_with_a_power_of_the_round() -> None:
    training = LocalTraining(local_steps=1, lr=0.6, lr_power=0.5)
    assert [training.rate(t) for t in (0, 3, 8)] == pytest.approx([0.6, 0.3, 0.2])
    with pytest.raises(ConfigError, match="lr_power"):
        LocalTraining(local_steps=1, lr_power=-0.5)
