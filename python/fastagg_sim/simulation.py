# SPDX-License-Identifier: Apache-2.0
"""The federated loop: broadcast, local training, dropout, aggregation, evaluation.

Every random draw is a function of (seed, stream, round, client), so a round needs no generator
state from the rounds before it: a run resumed from a checkpoint repeats the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastagg
from fastagg import ops
from fastagg.updates.buffer import UpdateBuffer
from fastagg.updates.layout import FlatLayout
from fastagg_sim import data
from fastagg_sim.batched_clients import BatchedTrainer, ClientWork
from fastagg_sim.client import ClientData, LocalTrainer, evaluate
from fastagg_sim.config import ConfigError, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.devices import find_device, now, repeatable, seed_layers
from fastagg_sim.dropout import DropoutProcess, make_dropout
from fastagg_sim.models import make_model
from fastagg_sim.partition import Partition, partition
from fastagg_sim.seeds import derive, generator


@dataclass(frozen=True)
class RoundRecord:
    """What one round did. `uploads` counts the vectors of the model's size that clients have sent
    so far: two for a client and round of SCAFFOLD, as in its paper, else one. `accuracy` and `loss`
    (test set) are None if it was not evaluated; `wrong_friend_rate` is the fraction of
    substitutions whose friend is of another group, None without known groups or without a
    substitution. `distance2_friends` and `distance2_all` are the largest squared distances between
    the updates of two active clients of one group, and of any two, or None if there is no such
    pair. They and `train_loss` are None, too, where the task does not ask for them. Times are in
    seconds."""

    round: int
    uploads: int
    active: int
    accuracy: float | None
    loss: float | None
    wrong_friend_rate: float | None
    substitutions: int
    pairs: int
    seconds_training: float
    seconds_aggregation: float
    seconds_evaluation: float
    distance2_friends: float | None = None
    distance2_all: float | None = None
    train_loss: float | None = None


class Simulation:
    """One job, advanced round by round.

    Attributes: `device`, where models, data and updates are; `params` [d] float32, the global
    model; `aggregator`; `groups`, the group of each client or None; `next_round`, the index of the
    round that `run_round` will compute.

    Raises ConfigError if there is no such device.
    """

    def __init__(self, job: Job) -> None:
        task = job.task
        self.job = job
        self.device = device = find_device(task.device)
        self.next_round = 0
        self._uploads = 0
        self._history: list[Tensor] = []
        dataset = data.load(task.dataset, seed=job.seed, **task.data_options)
        split = split_clients(task, dataset, job.seed)
        self.groups = split.groups
        # Gathered once, so that the full training set can be freed.
        self._clients = [
            ClientData(dataset.train_x[ids].to(device), dataset.train_y[ids].to(device))
            for ids in split.clients
        ]
        self._test = (dataset.test_x.to(device), dataset.test_y.to(device))
        self._train_sample = train_sample(task, dataset, split, job.seed, device)
        model = make_model(
            task.model,
            num_classes=dataset.num_classes,
            in_shape=tuple(dataset.train_x.shape[1:]),
            seed=job.seed,
        ).to(device)
        layout = FlatLayout.from_module(model)
        self._model = model
        self._layout = layout
        self.params = layout.flatten(model)  # [d]
        self._buffer = UpdateBuffer(task.num_clients, layout.num_params, device)
        self._trainer = LocalTrainer(model, layout, job.training)
        self._batched: BatchedTrainer | None = None
        if job.training.clients_at_once > 1:
            self._batched = BatchedTrainer(model, layout, job.training)
        self._momentum: dict[int, Tensor] = {}  # client -> [d], where clients keep it
        self._norms: dict[int, list[float]] = {}  # round -> [K]
        self._sizes = [client.y.numel() for client in self._clients]
        self.aggregator = make_aggregator(task, job.method, layout.num_params, self._sizes, device)
        self._dropout = dropout_process(job.dropout, split, dataset, job.seed)
        self._mimic: list[fastagg.MimiCClient] = []  # of every client, where it keeps a correction
        if isinstance(self.aggregator, fastagg.MimiC) and self.aggregator.mode == "client":
            d = layout.num_params
            self._mimic = [fastagg.MimiCClient(d, device) for _ in range(task.num_clients)]

    @property
    def done(self) -> bool:
        task = self.job.task
        enough = task.max_uploads is not None and self._uploads >= task.max_uploads
        return enough or self.next_round >= task.rounds

    @property
    def rounds_done(self) -> int:
        """How much of the job is done, for a display: rounds, or as many as the uploads stand for
        where the task ends after a number of them."""
        task = self.job.task
        if task.max_uploads is None:
            return self.next_round
        uploads = min(task.rounds, task.rounds * self._uploads // task.max_uploads)
        return max(self.next_round, uploads)

    def _active(self, round_index: int) -> Tensor:
        """The active clients, [S] int64, and remembers them: the process may depend on the past."""
        if round_index == 0 and self.job.method.full_first_round:
            active = torch.arange(self.job.task.num_clients)
        else:
            active = self._dropout.active(round_index, self._history)
        self._history.append(active)
        return active

    def run_round(self) -> RoundRecord:
        """Compute the next round. Changes `params` and the aggregator's state."""
        index = self.next_round
        started = now(self.device)
        active = self._active(index)
        clients: list[int] = active.tolist()
        task = self.job.task
        # What an update of 1 is in the model.
        unit = self.job.training.rate(index) if self.job.method.gradient_units else 1.0
        self.aggregator.server_lr = task.server_lr * unit
        scaffold = self.aggregator if isinstance(self.aggregator, fastagg.Scaffold) else None
        if scaffold is not None:
            scaffold.local_work = local_work(self.job.training, self._sizes, index) / unit
        with repeatable(self.device):
            for together in groups_of(clients, self.job.training.clients_at_once):
                self._train(together, index, scaffold)
        if unit != 1.0:
            for row in self._buffer.rows(clients):
                row.div_(unit)
        trained = now(self.device)
        distances = self._distances(clients) if task.distances else (None, None)
        if index in task.norm_rounds:
            self._norms[index] = self._row_norms(clients)
        started_step = now(self.device)
        report = self._step(active)
        aggregated = now(self.device)
        self.next_round += 1
        self._uploads += len(clients) * (1 if scaffold is None else scaffold.uploads_per_client)
        with repeatable(self.device):
            accuracy, loss, train_loss = self._evaluate()
        evaluated = now(self.device)
        substitutions, wrong_rate = self._judge(report.friends, set(clients))
        return RoundRecord(
            round=index,
            uploads=self._uploads,
            active=len(clients),
            accuracy=accuracy,
            loss=loss,
            wrong_friend_rate=wrong_rate,
            substitutions=substitutions,
            pairs=int(report.pairs),
            seconds_training=trained - started,
            seconds_aggregation=aggregated - started_step,
            seconds_evaluation=evaluated - aggregated,
            distance2_friends=distances[0],
            distance2_all=distances[1],
            train_loss=train_loss,
        )

    def _train(self, clients: Sequence[int], index: int, scaffold: fastagg.Scaffold | None) -> None:
        """Put the updates of some clients into their rows."""
        seed = self.job.seed
        # Layers that draw random numbers (nn.Dropout) use a global generator.
        seed_layers(self.device, derive(seed, "layers", index, clients[0]))
        velocities = {client: self._kept_momentum(client) for client in clients}
        work = [
            ClientWork(
                self._buffer.row(client),
                self._clients[client],
                generator(seed, "batches", index, client),
                None if scaffold is None else scaffold.control(client),
                velocities[client],
            )
            for client in clients
        ]
        if self._batched is not None:
            self._batched.train(work, self.params, index)
        else:
            for one in work:
                self._trainer.train(
                    one.row, self.params, one.data, index, one.generator, one.control, one.velocity
                )
        for client, velocity in velocities.items():
            self._keep_momentum(client, velocity)

    def _kept_momentum(self, client: int) -> Tensor | None:
        """A copy [d] of the momentum that `client` goes on from, zeros at first; None: no client
        keeps it."""
        if not self.job.training.keep_momentum:
            return None
        kept = self._momentum.get(client)
        return torch.zeros_like(self.params) if kept is None else kept.clone()

    def _keep_momentum(self, client: int, velocity: Tensor | None) -> None:
        """What `client` has after its training; a client whose training went wrong keeps what it
        had, since momentum with a NaN would have one for ever. Decided on the device: nobody waits
        for it."""
        if velocity is None:
            return
        before = self._momentum.get(client, torch.zeros_like(velocity))
        sound = torch.isfinite(velocity).all()
        self._momentum[client] = torch.where(sound, velocity, before)

    def _step(self, active: Tensor) -> fastagg.StepReport:
        """One step of the server, and in MimiC's client mode what its clients do around it."""
        aggregator = self.aggregator
        if not (self._mimic and isinstance(aggregator, fastagg.MimiC)):
            return aggregator.step(self.params, self._buffer, active)
        clients = active.tolist()
        sent = [self._mimic[k].correct_(self._buffer.row(k)) for k in clients]
        report = aggregator.step(self.params, sent, active)
        dropped = set(report.rejected.tolist())  # what they sent is no part of v, and not finite
        for client, row in zip(clients, sent, strict=True):
            if client not in dropped:
                self._mimic[client].learn(row, aggregator.aggregate)
        return report

    def _distances(self, clients: Sequence[int]) -> tuple[float | None, float | None]:
        """The largest squared distance between two updates of one group, and of any two."""
        gram = ops.gram(self._buffer.rows(clients), dtype=torch.float64)
        distance2 = ops.distance_scores(gram).square().cpu()  # [S, S]
        groups = torch.tensor([-1 - k if self.groups is None else self.groups[k] for k in clients])
        pairs = ~torch.eye(len(clients), dtype=torch.bool)
        friends = pairs & (groups[:, None] == groups[None, :])
        found = (distance2[chosen] for chosen in (friends, pairs))
        first, second = (float(values.max()) if values.numel() else None for values in found)
        return first, second

    def _row_norms(self, clients: Sequence[int]) -> list[float]:
        """The norm of every client's row, [K]; NaN for those without one in this round."""
        norms = [math.nan] * self.job.task.num_clients
        for client in clients:
            norms[client] = float(self._buffer.row(client).norm(dtype=torch.float64))
        return norms

    @property
    def norms(self) -> dict[int, list[float]]:
        """For every round of the task's `norm_rounds` so far, the norms of the updates [K]."""
        return dict(self._norms)

    def _evaluate(self) -> tuple[float | None, float | None, float | None]:
        """Accuracy and loss on the test set, and the training loss, after `next_round` rounds,
        where they are due."""
        if self.next_round % self.job.task.eval_every and not self.done:
            return None, None, None
        self._layout.bind(self._model, self.params)
        train_loss = None
        if self._train_sample is not None:
            _, train_loss = evaluate(self._model, *self._train_sample)
        return *evaluate(self._model, *self._test), train_loss

    def _judge(self, friends: Tensor | None, active: set[int]) -> tuple[int, float | None]:
        """Number of substitutions of this round and the fraction across groups."""
        if friends is None:
            return 0, None
        pairs = [(k, i) for k, i in enumerate(friends.tolist()) if i >= 0 and k not in active]
        if not pairs or self.groups is None:
            return len(pairs), None
        wrong = sum(self.groups[k] != self.groups[i] for k, i in pairs)
        return len(pairs), wrong / len(pairs)

    def save(self, folder: Path) -> None:
        """Write all that the next rounds depend on into the existing, empty `folder`."""
        save_file({"params": self.params}, folder / "params.safetensors")
        self.aggregator.save(folder / "aggregator.safetensors")
        if self._mimic:
            corrections = {str(k): client.correction for k, client in enumerate(self._mimic)}
            save_file(corrections, folder / "corrections.safetensors")
        if self._momentum:
            kept = {str(client): momentum for client, momentum in self._momentum.items()}
            save_file(kept, folder / "momentum.safetensors")
        state = {"next_round": self.next_round, "uploads": self._uploads, "norms": self._norms}
        (folder / "state.json").write_text(json.dumps(state) + "\n")

    def load(self, folder: Path) -> None:
        """Go on from what :meth:`save` wrote for the same job."""
        state = json.loads((folder / "state.json").read_text())
        device = str(self.device)
        aggregator = fastagg.load(folder / "aggregator.safetensors", device=device)
        params = load_file(folder / "params.safetensors", device)["params"]
        if params.shape != self.params.shape:
            raise ConfigError(
                f"{folder}: params has shape {tuple(params.shape)}, "
                f"this job needs {tuple(self.params.shape)}"
            )
        self.params = params
        self.aggregator = aggregator
        if self._mimic:
            corrections = load_file(folder / "corrections.safetensors", device)
            for k, client in enumerate(self._mimic):
                client.correction = corrections[str(k)]
        self._uploads = int(state["uploads"])
        self._norms = {int(t): norms for t, norms in state.get("norms", {}).items()}
        self._momentum = {}
        if (folder / "momentum.safetensors").exists():
            kept = load_file(folder / "momentum.safetensors", device)
            self._momentum = {int(client): momentum for client, momentum in kept.items()}
        self._history = []
        self.next_round = int(state["next_round"])
        for index in range(self.next_round):
            self._active(index)


def groups_of(clients: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """`clients` in their order, `size` at a time; the last may be fewer."""
    for start in range(0, len(clients), size):
        yield clients[start : start + size]


def make_aggregator(
    task: Task,
    method: Method,
    num_params: int,
    sizes: Sequence[int],
    device: str | torch.device = "cpu",
) -> fastagg.Aggregator:
    """The server of a method, for models of `num_params` and clients with so many samples each."""
    needed: dict[str, Any] = {}
    if method.rule == "scaffold":
        needed["local_work"] = local_work(method.training or task.training, sizes, 0)
    if method.sample_weights:
        needed["client_weights"] = [size / sum(sizes) for size in sizes]
    return fastagg.make(
        method.rule,
        num_clients=task.num_clients,
        num_params=num_params,
        server_lr=task.server_lr,
        device=device,
        **{**needed, **method.options},
    )


def local_work(training: LocalTraining, sizes: Sequence[int], round_index: int) -> Tensor:
    """[K] float64: what SCAFFOLD's server must know of the clients' training in a round."""
    work = [training.work(size, round_index) for size in sizes]
    return torch.tensor(work, dtype=torch.float64)


def train_sample(
    task: Task, dataset: data.Dataset, split: Partition, seed: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """The x and y on which the training loss of `task` is measured, on `device`; None if it is
    not."""
    if not task.train_loss:
        return None
    every = torch.cat(split.clients)
    order = torch.randperm(len(every), generator=generator(seed, "train-loss"))
    ids = every[order[: task.train_loss]]
    return dataset.train_x[ids].to(device), dataset.train_y[ids].to(device)


def split_clients(task: Task, dataset: data.Dataset, seed: int) -> Partition:
    """The samples of each client of `task`."""
    options = dict(task.partition_options)
    if task.partition == "natural":
        options["clients"] = dataset.clients
    return partition(
        task.partition,
        dataset.train_y,
        task.num_clients,
        seed,
        train_fraction=task.train_fraction,
        **options,
    )


def dropout_process(
    dropout: Dropout, split: Partition, dataset: data.Dataset, seed: int
) -> DropoutProcess:
    """The process of `dropout` for the clients of `split`, a partition of `dataset`."""
    return make_dropout(
        dropout.process,
        num_clients=split.num_clients,
        seed=seed,
        groups=split.groups,
        label_counts=split.label_counts(dataset.train_y, dataset.num_classes).tolist(),
        **dropout.options_of(seed),
    )
