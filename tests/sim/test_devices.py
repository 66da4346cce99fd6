# SPDX-License-Identifier: Apache-2.0
"""The device of a run: how it is chosen and recorded, and that all tensors are on it.

What needs a GPU is in test_on_cuda.py. Here tensors on the "meta" device, which have no values,
replace tensors on a GPU. An operation that mixes them with CPU tensors raises an error. Reading a
value, which would make a program wait for a GPU, raises an error too.
"""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import fastagg
from fastagg import ops
from fastagg_sim import cli, devices, experiments, runner
from fastagg_sim.batched_clients import GPU_CLIENTS_AT_ONCE
from fastagg_sim.config import Config, ConfigError, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.experiments._adversarial import AdversarialOptions, _shadow, cifar_local
from fastagg_sim.job_folder import JobFolder
from fastagg_sim.progress import Progress
from fastagg_sim.results import ResultsFolder
from fastagg_sim.run_options import RunOptions
from fastagg_sim.simulation import Simulation

no_gpu = pytest.mark.skipif("cuda" in ops.devices(), reason="there is a GPU here")


def task(**settings: Any) -> Task:
    given: dict[str, Any] = {
        "dataset": "digits",
        "partition": "clustered",
        "model": "digits-mlp",
        "training": LocalTraining(batch_size=10, local_epochs=1, lr=0.1),
        "rounds": 3,
        "num_clients": 10,
        "partition_options": {"num_groups": 5, "samples_per_client": 20},
    }
    return Task(**{**given, **settings})


def config(**settings: Any) -> Config:
    methods = (Method("fedavg", "fedavg"), Method("mifa", "mifa"))
    return Config("tiny", task(**settings), methods, (Dropout("exact", {"alpha": 0.5}),), (0, 1))


# --- choosing a GPU --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "visible", "kernels", "reason"),
    [
        (None, False, (), "is built without CUDA$"),
        ("13.0", False, (), "PyTorch sees no GPU"),
        ("13.0", True, ("cpu",), "built without CUDA kernels"),
        ("13.0", True, ("cpu", "cuda"), None),
    ],
)
def test_the_error_names_what_is_missing(
    cuda: str | None,
    visible: bool,
    kernels: tuple[str, ...],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
    monkeypatch.setattr(ops, "devices", lambda: kernels)
    devices.require_device("cpu")
    if reason is None:
        devices.require_device("cuda")
        return
    with pytest.raises(ConfigError, match="device: expected 'cpu' on this machine.*" + reason):
        devices.require_device("cuda")


@no_gpu
@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["experiment", "fdms-fig1-mnist"],
        ["experiment", "adversarial-fig11", "--candidates", "shadow"],
    ],
)
def test_without_a_gpu_no_run_is_started(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FASTAGG_DATA", str(tmp_path / "data"))
    assert cli.main([*arguments, "--device", "cuda", "--out", str(tmp_path / "out")]) == 2
    assert "error: device: expected 'cpu' on this machine, got 'cuda'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@no_gpu
def test_simulation_and_runner_refuse_a_missing_gpu(tmp_path: Path) -> None:
    job = Job(task(device="cuda"), Method("fedavg", "fedavg"), Dropout(), 0)
    with pytest.raises(ConfigError, match="device"):
        Simulation(job)
    with pytest.raises(ConfigError, match="device"):
        runner.run_jobs([JobFolder(tmp_path, job)])


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="device: expected 'cpu' or 'cuda', got 'cuda:1'"):
        task(device="cuda:1")


@pytest.mark.parametrize("name", ["theorem4", "adversarial-fig8"])
def test_experiments_without_training_refuse_the_device_option(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["experiment", name, "--device", "cuda", "--out", str(tmp_path)]
    assert cli.main(arguments) == 2
    assert f"--device: {name} does not use this option" in capsys.readouterr().err


# --- configuration of a run on a GPU -----------------------------------------------------------


def trainings(of: Config) -> list[LocalTraining]:
    return [of.task.training, *(m.training for m in of.methods if m.training is not None)]


@pytest.mark.usefixtures("no_shadow_runs")
@pytest.mark.parametrize("name", sorted(experiments.available()))
def test_every_experiment_trains_clients_at_once_on_a_gpu(name: str) -> None:
    experiment = experiments.available()[name]
    here = experiment.runs(experiment.options())
    there = experiment.runs(experiment.options(device="cuda"))
    assert here == dict(experiment.configs(experiment.options()))
    assert list(here) == list(there)
    for part, of in there.items():
        assert of.task.device == "cuda"
        assert {t.clients_at_once for t in trainings(of)} == {GPU_CLIENTS_AT_ONCE}
        assert [j.key for j in of.jobs()] == [j.key for j in here[part].jobs()]
        assert here[part].task.device == "cpu"


def test_shadow_runs_use_the_device_of_the_run(tmp_path: Path) -> None:
    folders = set()
    for device in ("cpu", "cuda"):
        options = AdversarialOptions(device=device)  # type: ignore[arg-type]
        shadow = _shadow(task(), cifar_local(options), options)
        of = shadow.config([0])
        assert of.task.device == device
        at_once = GPU_CLIENTS_AT_ONCE if device == "cuda" else 1
        assert {t.clients_at_once for t in trainings(of)} == {at_once}
        folders.add(shadow.folder(tmp_path))
    assert len(folders) == 2


def test_options_of_run() -> None:
    plain = RunOptions(device="cuda").build()
    assert plain.task.device == "cuda"
    assert plain.task.training.clients_at_once == GPU_CLIENTS_AT_ONCE
    assert RunOptions(device="cuda", clients_at_once=3).build().task.training.clients_at_once == 3
    assert RunOptions(device="cuda", model="vgg11", dataset="cifar10").build().task.training == (
        dataclasses.replace(plain.task.training)
    )


def test_the_device_is_recorded_and_must_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    on_gpu = devices.on_device(config(), "cuda")
    folder = ResultsFolder(tmp_path, on_gpu)
    folder.prepare()
    assert json.loads((tmp_path / "config.json").read_text())["task"]["device"] == "cuda"
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert (versions["gpu"], versions["cuda"]) == ("a GPU", "13.0")
    assert ResultsFolder.read(tmp_path).config == on_gpu
    for job in folder.job_folders():
        assert json.loads((job.path / "job.json").read_text())["task"]["device"] == "cuda"
    with pytest.raises(ConfigError, match="device was 'cuda', now 'cpu'"):
        ResultsFolder(tmp_path, config()).prepare()


def test_folders_without_a_device_count_as_cpu(tmp_path: Path) -> None:
    ResultsFolder(tmp_path, config()).prepare()
    for path in tmp_path.rglob("*.json"):
        content = json.loads(path.read_text())
        if "task" in content:
            del content["task"]["device"]
            path.write_text(json.dumps(content))
    ResultsFolder(tmp_path, config()).prepare()
    assert "gpu" not in json.loads((tmp_path / "versions.json").read_text())


# --- all tensors are on the device -------------------------------------------------------------

RULES: dict[str, Method] = {
    "fdms": Method("fdms", "fdms"),
    "stale-models": Method("stale-models", "stale-models"),
    "mimic": Method("mimic", "mimic", gradient_units=True),
    "mimic client": Method("mimic client", "mimic", {"mode": "client"}),
    "scaffold": Method("scaffold", "scaffold"),
    "bucketing": Method("bucketing", "bucketing", {"reuse": True}, sample_weights=True),
}


def tensors(value: object) -> list[Tensor]:
    """Return all tensors that an object holds, directly or in nested objects."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, list | tuple):
        return [t for part in value for t in tensors(part)]
    return []


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Make simulations use the meta device."""
    meta = torch.device("meta")
    monkeypatch.setattr("fastagg_sim.simulation.find_device", lambda device: meta)
    monkeypatch.setattr("fastagg.aggregator.read_device", torch.device)
    return meta


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, GPU_CLIENTS_AT_ONCE])
@pytest.mark.parametrize("rule", RULES)
def test_a_round_of_training_stays_on_the_device(
    rule: str, at_once: int, on_meta: torch.device
) -> None:
    training = LocalTraining(
        batch_size=7,
        local_steps=2,
        momentum=0.5,
        keep_momentum=rule != "scaffold",
        prox=0.1,
        clients_at_once=at_once,
    )
    job = Job(task(training=training, train_loss=50), RULES[rule], Dropout(), 0)
    simulation = Simulation(job)
    layout, buffer = simulation._layout, simulation._buffer
    model = simulation._model.state_dict()
    for client in range(10):
        scaffold = simulation.aggregator
        simulation._train([client], 0, scaffold if isinstance(scaffold, fastagg.Scaffold) else None)
    simulation._train(range(10), 1, scaffold if isinstance(scaffold, fastagg.Scaffold) else None)
    data = [[client.x, client.y] for client in map(simulation._clients.__getitem__, range(10))]
    held = [
        *(buffer.rows(range(10)), data, model, simulation.params, simulation._momentum),
        *(simulation._test, simulation._train_sample),
        [] if simulation._parts is None else [*simulation._parts.state().values()],
    ]
    found = tensors(held)
    d = layout.num_params
    found += [t for t in tensors(simulation.aggregator.__dict__) if t.shape[-1:] == (d,)]
    assert len(found) >= 10 + 20 + len(model) + 5
    assert {t.device for t in found} == {on_meta}
    # Reading a value, which would wait for a GPU, raises an error.
    with pytest.raises(RuntimeError, match="meta"):
        simulation.params.sum().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_shape"),
    [("mnist-cnn", (1, 28, 28)), ("lenet", (3, 32, 32)), ("vgg11", (3, 32, 32))],
)
@pytest.mark.parametrize("at_once", [1, GPU_CLIENTS_AT_ONCE])
def test_models_with_convolutions_stay_on_the_device(
    name: str,
    in_shape: tuple[int, ...],
    at_once: int,
    on_meta: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fastagg_sim.data import Dataset

    rng = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 10
    noise = Dataset(
        "noise", torch.randn(40, *in_shape, generator=rng), y, torch.zeros(2, *in_shape), y[:2], 10
    )
    monkeypatch.setattr("fastagg_sim.data.load", lambda *_, **__: noise)
    training = LocalTraining(batch_size=3, local_epochs=1, clients_at_once=at_once)
    given = {"model": name, "training": training, "num_clients": 5}
    options = {"num_groups": 5, "samples_per_client": 8}
    job = Job(task(**given, partition_options=options), Method("a", "fedavg"), Dropout(), 0)
    simulation = Simulation(job)
    simulation._train(range(5), 0, None)
    assert {row.device for row in simulation._buffer.rows(range(5))} == {on_meta}


# --- one process per GPU -----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_processes_are_spread_over_the_gpus(workers: int, tmp_path: Path) -> None:
    """Run eight jobs on two GPUs; a process that ends frees a place on its GPU."""
    started: list[int] = []

    class Process:
        def __init__(self, target: object, args: tuple[Any, ...], daemon: bool) -> None:
            started.append(args[-1])

        def start(self) -> None: ...

        def join(self) -> None: ...

    jobs = devices.on_device(dataclasses.replace(config(), seeds=tuple(range(4))), "cuda").jobs()
    folders = [JobFolder(tmp_path / job.key, job) for job in jobs]
    pool = runner._Pool(folders, workers, 2, 20.0, Progress(jobs, Console(file=io.StringIO())))
    pool._context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Process)  # type: ignore[assignment]
    pool.start_waiting_jobs()
    assert started == [0, 1, 0, 1, 0][:workers]
    for slot in {0, workers - 1}:
        pipe, running = next((p, r) for p, r in pool._running.items() if r.slot == slot)
        running.ended = True
        pool._close(pipe)
        pool.start_waiting_jobs()
        assert (len(pool._running), started[-1]) == (workers, slot % 2)


@pytest.mark.parametrize(
    ("device", "workers", "expected"),
    [
        ("cpu", None, (runner.default_workers(), 0)),
        ("cpu", 7, (7, 0)),
        ("cuda", None, (3, 3)),
        ("cuda", 7, (7, 3)),
    ],
)
def test_one_process_per_core_or_gpu_unless_asked_for_more(
    device: str,
    workers: int | None,
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Pool(runner._Pool):
        def __init__(self, queue: Any, workers: int, gpus: int, *others: Any) -> None:
            asked.append((workers, gpus))
            super().__init__([], workers, gpus, *others)

    monkeypatch.setattr(runner, "_Pool", Pool)
    monkeypatch.setattr(runner, "require_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    jobs = devices.on_device(config(), device).jobs()
    runner.run_jobs([JobFolder(tmp_path / job.key, job) for job in jobs], workers=workers)
    assert asked == [expected]
