# SPDX-License-Identifier: Apache-2.0
"""Compare the simulation on a GPU with the one on a CPU, and with a repetition.

Needs only PyTorch, numpy and safetensors, as `make gpu-check` finds them; data are generated.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastagg import FlatLayout, ops
from fastagg_sim.batched_clients import GPU_CLIENTS_AT_ONCE, BatchedTrainer, ClientWork
from fastagg_sim.client import ClientData, LocalTrainer, evaluate
from fastagg_sim.config import Config, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.data import Dataset
from fastagg_sim.devices import find_device, repeatable
from fastagg_sim.models import MODELS, make_model
from fastagg_sim.simulation import Simulation

if "cuda" not in ops.devices():
    pytest.skip("no CUDA kernels in this build, or no GPU", allow_module_level=True)

IN_SHAPES = {"vgg11": (3, 32, 32), "lenet": (3, 32, 32), "logistic": (60,)}
SIZES = (9, 4, 6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(name: str, device: torch.device, at_once: bool) -> list[Tensor]:
    """Return the updates of three clients with the model `name`, trained on `device`."""
    model = model_without_masks(name)
    layout = FlatLayout.from_module(model)
    start = layout.flatten(model).to(device)
    before, moved = start.clone(), model.to(device)
    training = LocalTraining(batch_size=4, local_epochs=1, lr=0.05, momentum=0.5, prox=0.1)
    in_shape = IN_SHAPES.get(name, (1, 28, 28))
    clients = []
    for k, n in enumerate(SIZES):
        x = torch.randn(n, *in_shape, generator=generator(100 + k))
        y = torch.randint(0, 3, (n,), generator=generator(200 + k))
        data = ClientData(x.to(device), y.to(device))
        control = 0.01 * torch.randn(layout.num_params, generator=generator(300 + k))
        row = torch.full_like(start, float("nan"))
        clients.append(ClientWork(row, data, generator(k), control.to(device)))
    with repeatable(device):
        if at_once:
            BatchedTrainer(moved, layout, training).train(clients, start, 1)
        else:
            trainer = LocalTrainer(moved, layout, training)
            for c in clients:
                trainer.train(c.row, start, c.data, 1, c.generator, c.control)
    assert torch.equal(start, before)
    return [client.row.cpu() for client in clients]


def model_without_masks(name: str) -> nn.Module:
    in_shape = IN_SHAPES.get(name, (1, 28, 28))
    model = make_model(name, num_classes=3, in_shape=in_shape, seed=0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_on_cuda_follows_the_cpu(name: str, at_once: bool) -> None:
    here = train(name, torch.device("cpu"), at_once)
    there = train(name, find_device("cuda"), at_once)
    again = train(name, find_device("cuda"), at_once)
    for one, other, repeated in zip(here, there, again, strict=True):
        # float32 sums in another order, by other algorithms, through up to three steps
        assert (one - other).norm() < 1e-3 * one.norm()
        assert torch.equal(other, repeated)


def test_evaluation_on_cuda() -> None:
    model, x = model_without_masks("mnist-cnn"), torch.randn(1234, 1, 28, 28)
    y = torch.randint(0, 3, (1234,))
    accuracy, loss = evaluate(model, x, y)
    with repeatable(find_device("cuda")):
        there = evaluate(model.cuda(), x.cuda(), y.cuda())
    assert abs(there[0] - accuracy) <= 2 / 1234  # two logits that are equal but for rounding
    assert there[1] == pytest.approx(loss, rel=1e-4)  # float32


# --- whole rounds ------------------------------------------------------------------------------

METHODS = {
    "fedavg": Method("fedavg", "fedavg"),
    "fdms": Method("fdms", "fdms"),
    "mifa": Method("mifa", "mifa", gradient_units=True),
    "mimic": Method("mimic", "mimic"),
    "mimic client": Method("mimic client", "mimic", {"mode": "client"}),
    "scaffold": Method("scaffold", "scaffold"),
    "geometric-median": Method("geometric-median", "geometric-median", {"reuse": True}),
}


def make_job(method: Method, device: str, **task: Any) -> Job:
    at_once = GPU_CLIENTS_AT_ONCE if device == "cuda" else 1
    given: dict[str, Any] = {
        "dataset": "noise",
        "partition": "clustered",
        "model": "lenet",
        "training": LocalTraining(batch_size=5, local_epochs=1, lr=0.05, clients_at_once=at_once),
        "rounds": 4,
        "num_clients": 10,
        "partition_options": {"num_groups": 5, "samples_per_client": 12},
        "train_loss": 40,
        "distances": True,
        "device": device,
    }
    return Job(Task(**{**given, **task}), method, Dropout("cluster-floor", {"alpha": 0.4}), 0)


@pytest.fixture(autouse=True)
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a data set of coloured noise in ten classes."""
    y = torch.arange(300) % 10
    x = torch.randn(300, 3, 32, 32, generator=generator(0)) + y[:, None, None, None] / 5
    made = Dataset("noise", x[:200], y[:200], x[200:], y[200:], 10)
    monkeypatch.setattr(
        "fastagg_sim.data.load", lambda name, **_: made if name == "noise" else pytest.fail(name)
    )


def run(simulation: Simulation, rounds: int | None = None) -> list[dict[str, Any]]:
    records = []
    while not simulation.done and len(records) != rounds:
        record = dataclasses.asdict(simulation.run_round())
        records.append({k: v for k, v in record.items() if not k.startswith("seconds")})
    return records


@pytest.mark.parametrize("name", list(METHODS))
def test_rounds_on_cuda_follow_the_cpu_repeat_and_resume(name: str, tmp_path: Path) -> None:
    job = make_job(METHODS[name], "cuda")
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = Simulation(job)
    records = run(first, 2)
    first.save(tmp_path)
    records += run(first)
    assert first.params.is_cuda and first.aggregator.device.type == "cuda"
    again = Simulation(job)
    assert run(again) == records
    assert torch.equal(again.params, first.params)
    resumed = Simulation(job)
    resumed.load(tmp_path)
    assert run(resumed) == records[2:]
    assert torch.equal(resumed.params, first.params)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    here = Simulation(make_job(METHODS[name], "cpu"))
    expected = run(here)
    assert [r["active"] for r in records] == [r["active"] for r in expected]
    begin = make_model("lenet", num_classes=10, in_shape=(3, 32, 32), seed=0)
    moved = here.params - here._layout.flatten(begin)
    # Rounding over four rounds of up to three steps; no two clients tie.
    assert (first.params.cpu() - here.params).norm() < 1e-2 * moved.norm()


def test_masks_of_dropout_layers_on_cuda_repeat() -> None:
    training = LocalTraining(
        batch_size=4, local_epochs=1, lr=1e-3, clients_at_once=GPU_CLIENTS_AT_ONCE
    )
    job = make_job(METHODS["fedavg"], "cuda", model="vgg11", training=training, rounds=2)
    first, second = Simulation(job), Simulation(job)
    run(first)
    torch.cuda.manual_seed(5)  # the global generator must not matter
    run(second)
    assert torch.equal(first.params, second.params)


def test_worker_processes_on_cuda_write_the_same_bytes_again(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    from fastagg_sim.results import ResultsFolder
    from fastagg_sim.runner import run_jobs

    task = Task(
        dataset="synthetic",
        partition="natural",
        model="logistic",
        training=LocalTraining(batch_size=10, local_steps=5, clients_at_once=GPU_CLIENTS_AT_ONCE),
        rounds=3,
        num_clients=100,
        device="cuda",
    )
    half = Dropout("exact", {"alpha": 0.5})
    config = Config("tiny", task, (METHODS["fdms"], METHODS["mifa"]), (half,), (0,))
    written = []
    for name, workers in (("a", None), ("b", 2)):
        folder = ResultsFolder(tmp_path / name, config)
        folder.prepare()
        outcome = run_jobs(folder.job_folders(), workers=workers)
        assert not outcome.failures, outcome.failures
        folder.merge()
        written.append((folder.path / "metrics.csv").read_bytes())
    assert written[0] == written[1]
    assert written[0].count(b"\n") == 1 + 2 * 3
