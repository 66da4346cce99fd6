# SPDX-License-Identifier: Apache-2.0
"""Run a job of fastagg's simulation in Flower's simulation engine.

    python -m benchmarks.flower_run JOB.json ACTIVE WORKERS

The model, data, batches, number of active clients and test set are the same. Clients train with a
plain PyTorch loop, as is usual with Flower; there is one Ray actor per worker. Prints the seconds
of every round except the first, in which the actors start and load the data.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fastagg_sim import data
from fastagg_sim.client import ClientData, batches, evaluate
from fastagg_sim.config import Job, job_from_dict
from fastagg_sim.models import make_model
from fastagg_sim.seeds import generator
from fastagg_sim.simulation import split_clients


@functools.cache
def _parts(path: str) -> tuple[Job, nn.Module, list[ClientData], tuple[torch.Tensor, torch.Tensor]]:
    """Load the job, its model, the clients' samples and the test set, once per process."""
    torch.set_num_threads(1)
    job = job_from_dict(json.loads(Path(path).read_text()))
    task = job.task
    dataset = data.load(task.dataset, seed=job.seed, **task.data_options)
    model = make_model(
        task.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=job.seed
    )
    clients = [
        ClientData(dataset.train_x[ids], dataset.train_y[ids])
        for ids in split_clients(task, dataset, job.seed).clients
    ]
    return job, model, clients, (dataset.test_x, dataset.test_y)


def train(path: str, client: int, round_index: int) -> int:
    """Train the model of this process in place on the data of a client.

    Returns the number of samples.
    """
    job, model, clients, _ = _parts(path)
    training = job.task.training
    optimizer = torch.optim.SGD(model.parameters(), lr=training.rate(round_index))
    order = generator(job.seed, "batches", round_index, client)
    model.train()
    for x, y in batches(clients[client], training, order):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return clients[client].y.numel()


def client_app(path: str) -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        _, model, _, _ = _parts(path)
        given: Any = message.content  # its records are not typed
        model.load_state_dict(given["arrays"].to_torch_state_dict())
        index = int(given["config"]["server-round"]) - 1
        count = train(path, int(context.node_config["partition-id"]), index)
        content: dict[str, Any] = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": count}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server_app(path: str, active: int, ends: list[float]) -> Any:
    """Create the server. It appends the time to `ends` after every evaluation: of the initial model
    and of every round."""
    from flwr.app import ArrayRecord, Context, MetricRecord
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg

    job, model, _, test = _parts(path)
    app = ServerApp()

    def judge(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy, loss = evaluate(model, *test)
        ends.append(time.perf_counter())
        return MetricRecord({"accuracy": accuracy, "loss": loss})

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=active / job.task.num_clients,
            fraction_evaluate=0.0,
            min_available_nodes=job.task.num_clients,
        )
        arrays = ArrayRecord(model.state_dict())
        rounds = job.task.rounds
        result = strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=judge)
        if len(result.train_metrics_clientapp) < rounds:  # Flower continues when clients fail
            raise RuntimeError(
                f"clients failed: expected metrics of {rounds} rounds, "
                f"got {result.train_metrics_clientapp}"
            )

    return app


def main(path: str, active: int, workers: int) -> None:
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.WARNING)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # for Ray's workers
    job, *_ = _parts(path)
    ends: list[float] = []
    run_simulation(
        server_app(path, active, ends),
        client_app(path),
        num_supernodes=job.task.num_clients,
        backend_config={
            "init_args": {"num_cpus": workers, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    print(json.dumps(seconds))


if __name__ == "__main__":
    # Import this module by its name, so that Ray's workers can find its functions.
    from benchmarks import flower_run

    flower_run.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
