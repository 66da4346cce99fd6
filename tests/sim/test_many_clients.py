# SPDX-License-Identifier: Apache-2.0
"""Runs with 10^5 clients: only what the active clients of a round need is made."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastagg_sim import data
from fastagg_sim.client_store import DealtSamples, GeneratedSamples
from fastagg_sim.config import ConfigError, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.data import GeneratedDataset
from fastagg_sim.partition import partition
from fastagg_sim.run_options import RunOptions
from fastagg_sim.simulation import Simulation, split_clients

K = 100_000
CPU = torch.device("cpu")


def job(rule: str = "fedavg", num_clients: int = K, sample: int = 20, **given: Any) -> Job:
    task = Task(
        dataset="synthetic",
        partition="natural",
        model="logistic",
        training=LocalTraining(batch_size=10, local_steps=2, lr=0.1, clients_at_once=16),
        rounds=3,
        num_clients=num_clients,
        data_options={"num_clients": num_clients, "groups": 50, "samples": 20, "test_clients": 50},
        **given,
    )
    return Job(task, Method("a", rule), Dropout("sampled", {"sample": sample}), 0)


@pytest.fixture
def generated_ids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients whose training samples were generated, in order."""
    seen: list[int] = []
    client = GeneratedDataset.client

    def noted(self: GeneratedDataset, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(k)
        return client(self, k)

    monkeypatch.setattr(GeneratedDataset, "client", noted)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fedavg", "fdms-means"])
def test_only_active_clients_are_generated(rule: str, generated_ids: list[int]) -> None:
    simulation = Simulation(job(rule))
    assert generated_ids == []
    for _ in range(3):
        simulation.run_round()
    active = torch.cat(simulation._history)
    assert len(active) == 60
    assert sorted(generated_ids) == torch.unique(active).tolist()
    assert simulation._buffer.allocated <= 20 + 16  # rows for S clients, allocated 16 at a time


def traced_peak(num_clients: int) -> int:
    """Return the most bytes of Python objects in a simulation of two rounds."""
    tracemalloc.start()
    try:
        simulation = Simulation(job(num_clients=num_clients))
        for _ in range(2):
            simulation.run_round()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_python_objects_do_not_grow_with_the_number_of_clients() -> None:
    """Lists of ids and groups take 8 bytes per client; one object per client would take 50."""
    traced_peak(100)  # fills the caches that any simulation fills
    few, many = 100, K // 4  # tracemalloc takes 100 µs for each
    # The least of two: a peak also counts what other threads of the process allocate meanwhile.
    most = min(traced_peak(many) for _ in range(2))
    assert most - traced_peak(few) < 40 * (many - few)


PEAKS = """
import torch
torch.set_num_threads(1)
from fastagg_sim.devices import peak_memory
from tests.sim.test_many_clients import job
from fastagg_sim.simulation import Simulation

peaks = []
for num_clients in (1000, 100_000):
    simulation = Simulation(job("{rule}", num_clients))
    for _ in range(3):
        simulation.run_round()
    peaks.append(peak_memory())
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "state"),
    [
        ("fedavg", 0),
        ("fdms-means", 256 + 8),  # the means of a client: docs/rules.md
    ],
)
def test_memory_beside_the_state_of_the_rule(rule: str, state: int) -> None:
    """Beside the state, at most 150 bytes per client: numbers [K] of 8 bytes (weights, groups,
    friends, what a round computes of them) and lists of them. A client's samples take 5 KB, a row
    2.4 KB."""
    root = Path(__file__).parents[2]
    run = [sys.executable, "-c", PEAKS.format(rule=rule)]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) < (state + 150) * K


def test_generated_and_dealt_samples_are_the_same() -> None:
    """The natural partition, generated client by client, is that of the whole data set."""
    dataset = data.load("synthetic", num_clients=7, seed=3)
    assert isinstance(dataset, GeneratedDataset)
    for fraction in (1.0, 0.7):
        task = Task(
            "synthetic",
            "natural",
            "logistic",
            LocalTraining(local_epochs=1),
            rounds=1,
            num_clients=7,
            train_fraction=fraction,
        )
        split = split_clients(task, dataset, 3)
        labels, clients = dataset.train_y, dataset.clients
        dealt = partition("natural", labels, 7, 3, clients=clients, train_fraction=fraction)
        assert split.sizes.tolist() == dealt.sizes.tolist()
        counts = [part.label_counts(labels, 10) for part in (split, dealt)]
        assert torch.equal(*counts)
        generated, kept = (
            GeneratedSamples(dataset, fraction, CPU),
            DealtSamples(dataset, dealt, CPU),
        )
        for client in range(7):
            assert torch.equal(split.clients[client], dealt.clients[client])
            assert torch.equal(generated[client].x, kept[client].x)
            assert torch.equal(generated[client].y, kept[client].y)
        ids = dealt.clients.joined()[::5]
        x, y = dataset.taken(ids)
        assert torch.equal(x, dataset.train_x[ids]) and torch.equal(y, dataset.train_y[ids])


def test_the_cache_is_bounded_and_keeps_the_clients_used_last(generated_ids: list[int]) -> None:
    dataset = data.load("synthetic", num_clients=50, samples=20)
    assert isinstance(dataset, GeneratedDataset)
    each = 20 * (60 * 4 + 8)  # bytes of a client
    store = GeneratedSamples(dataset, 1.0, CPU, capacity=3 * each)
    first = store[4]
    for client in (4, 5, 6, 4, 7):
        store[client]
    assert generated_ids == [4, 5, 6, 7]
    assert store.cached_bytes == 3 * each
    assert store[4] is first and store[6] is store[6]
    store[5]  # the oldest, which had to leave for 7
    assert generated_ids == [4, 5, 6, 7, 5]
    too_small = GeneratedSamples(dataset, 1.0, CPU, capacity=each - 1)
    assert torch.equal(too_small[4].x, first.x)
    assert too_small.cached_bytes == 0


@pytest.mark.parametrize("shared", [False, True])
def test_clients_that_share_samples_copy_them_when_they_train(shared: bool) -> None:
    dataset = data.load("digits")
    options = {"shared": True} if shared else {}
    split = partition("label-limited", dataset.train_y, 20, 0, shard_size=9, **options)
    store = DealtSamples(dataset, split, CPU)
    for client in (0, 7, 19):
        ids = split.clients[client]
        assert torch.equal(store[client].x, dataset.train_x[ids])
        assert torch.equal(store[client].y, dataset.train_y[ids])
    # What every client has in one copy, or the data set itself.
    held = 20 * 18 if not shared else len(dataset.train_y)
    assert len(store._x) == held
    assert (store._x.data_ptr() == dataset.train_x.data_ptr()) == shared


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_clients": 8}, "num_clients: expected 7, the number of clients of the data set"),
        ({"train_fraction": 0.01}, r"train_fraction: 0\.01 leaves client \d no sample"),
    ],
)
def test_natural_partitions_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    dataset = data.load("synthetic", num_clients=7, samples=20)
    training = LocalTraining(local_epochs=1)
    task = Task("synthetic", "natural", "logistic", training, 1, **{"num_clients": 7, **given})
    with pytest.raises(ValueError, match=message):
        split_clients(task, dataset, 0)


def test_the_command_generates_as_many_clients_as_it_simulates() -> None:
    def options(**given: Any) -> dict[str, Any]:
        return RunOptions(dataset="synthetic", **given).build().task.data_options

    assert options(num_clients=K) == {"num_clients": K}
    assert options(num_clients=100) == {}  # the default of the data set
    assert options(num_clients=30, data_options=("alpha=0.5",)) == {"num_clients": 30, "alpha": 0.5}
    assert options(num_clients=30, partition="dirichlet") == {}
    with pytest.raises(ConfigError, match="data-options"):
        options(data_options=("alpha",))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fedavg", "fdms-means", "mifa", "mimic"])
def test_a_resumed_run_with_many_clients_is_the_same(
    rule: str, tmp_path: Path, generated_ids: list[int]
) -> None:
    make: Callable[[], Simulation] = lambda: Simulation(job(rule, 2000, memory=True))  # noqa: E731
    whole, first, resumed = make(), make(), make()
    first.run_round()
    first.save(tmp_path)
    resumed.load(tmp_path)
    records = [whole.run_round() for _ in range(3)]
    for _ in range(2):
        again = resumed.run_round()
    assert torch.equal(whole.params, resumed.params)
    assert again.wrong_friend_rate == records[-1].wrong_friend_rate
    peaks = [record.peak_mb for record in records]
    assert None not in peaks and peaks == sorted(peaks)  # type: ignore[type-var]
