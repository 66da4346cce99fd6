# SPDX-License-Identifier: Apache-2.0
"""The federated training loop: broadcast, local training, dropout, aggregation, evaluation.

Every random draw is a function of (seed, stream, round, client). A round therefore needs no
generator state from earlier rounds, and a run resumed from a checkpoint computes the same numbers
as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import fastagg
from fastagg import FlatLayout, ops, tensor_file
from fastagg.updates.row_pool import RowPool
from fastagg_sim import data
from fastagg_sim.batched_clients import BatchedTrainer, ClientWork, uses_products
from fastagg_sim.client import LocalTrainer, evaluate
from fastagg_sim.client_parts import client_parts
from fastagg_sim.client_store import ClientStore, DealtSamples, GeneratedSamples
from fastagg_sim.config import ConfigError, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.devices import find_device, now, peak_memory, repeatable, seed_layers
from fastagg_sim.dropout import DropoutProcess, make_dropout, needs
from fastagg_sim.echoes import Echoes
from fastagg_sim.models import make_model
from fastagg_sim.partition import Partition, generated, partition
from fastagg_sim.rule_seeds import with_seeds
from fastagg_sim.schedules import Plan
from fastagg_sim.schedules.base import of_round
from fastagg_sim.seeds import derive, generator, numpy_generator
from fastagg_sim.simulated_time import ROWS, simulated_time
from fastagg_sim.statistics import RunningStatistics

_HEADER_LIMIT = 1 << 24  # bytes of the header of a file of a checkpoint
SIMULATED: Mapping[str, Any] = {"max_norm": None}  # simulated clients do not lie
"""Defaults of rules in a simulation, where they are not those of `fastagg.make`."""


@dataclass(frozen=True)
class RoundRecord:
    """The measurements of one round: one row of metrics.csv, timings.csv, distances.csv and
    memory.csv.

    uploads: number of vectors of the model's size that clients have sent so far. With SCAFFOLD a
        client sends two per round, as counted in its paper; with all other rules one.
    active: number of active clients.
    accuracy, loss: on the test set; None if the model was not evaluated in this round.
    substitutions: number of absent clients that were substituted by a friend.
    wrong_friend_rate: fraction of the substitutions in which the friend belongs to another group;
        None if the groups are not known or there was no substitution.
    pairs: `StepReport.pairs`.
    distance2_friends: largest squared distance between the updates of two active clients of the
        same group; None if there is no such pair, or unless `Task.distances`.
    distance2_all: the same over all pairs of active clients.
    train_loss: on the sample that `Task.train_loss` asks for, else None.
    peak_mb: largest resident memory of the process so far, in 10^6 bytes; None unless
        `Task.memory`.
    time: simulated seconds since the start of the run, at the end of the round; None without
        `Task.latency`, as `late` and `age`.
    late: number of clients that are at work, or are stopped, when the round ends.
    age: mean number of rounds between an answer's model and the step that takes it; None without
        answers.
    seconds_*: wall-clock times.
    """

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
    peak_mb: float | None = None
    time: float | None = None
    late: int | None = None
    age: float | None = None


class Simulation:
    """One job, computed round by round.

    Attributes:
        device: where models, data and updates are stored.
        params: [d] float32, the global model.
        aggregator: the server's rule.
        groups: the group of each client, int64 [K], or None if the groups are not known.
        next_round: the index of the round that `run_round` will compute.

    Raises ConfigError if the device of the job is not available.
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
        self._split = split
        self.groups = None if split.groups is None else torch.tensor(split.groups)
        self._clients = client_store(task, dataset, split, device)
        self._test = (dataset.test_x.to(device), dataset.test_y.to(device))
        self._train_sample = train_sample(task, dataset, split, job.seed, device)
        model = make_model(
            task.model,
            num_classes=dataset.num_classes,
            in_shape=dataset.in_shape,
            seed=job.seed,
        ).to(device)
        layout = FlatLayout.from_module(model, roles="auto")
        self._model = model
        self._statistics = RunningStatistics(model, layout)
        self._layout = layout
        self.params = layout.flatten(model)  # [d]
        # Rows for the active clients only.
        self._buffer = RowPool(task.num_clients, layout.num_params, device)
        self._trainer = LocalTrainer(model, layout, job.training)
        self._batched: BatchedTrainer | None = None
        if job.training.clients_at_once > 1 or uses_products(model):
            self._batched = BatchedTrainer(model, layout, job.training)
        self._momentum: dict[int, Tensor] = {}  # client -> [d]; empty unless keep_momentum
        self._norms: dict[int, list[float]] = {}  # round -> [K]
        self._dropout = dropout_process(job.dropout, split, dataset, job.seed)
        self.aggregator = make_aggregator(
            task,
            job.method,
            layout.num_params,
            split,
            device,
            seed=job.seed,
            num_clients=self._dropout.joined(0),
        )
        self._parts = client_parts(self.aggregator)
        self._echoes = None if job.method.echo is None else Echoes(job.method.echo, self.params)
        self._time = simulated_time(job, split.groups, self.aggregator)
        if self._statistics and self._takes_late_answers:
            raise ConfigError(
                "model: expected one without running statistics, which are the mean of the "
                "clients of one round, for a schedule with late answers"
            )

    @property
    def done(self) -> bool:
        task = self.job.task
        enough = task.max_uploads is not None and self._uploads >= task.max_uploads
        if self._time is not None and task.max_seconds is not None:
            enough = enough or self._time.time >= task.max_seconds
        return enough or self.next_round >= task.rounds

    @property
    def rounds_done(self) -> int:
        """Number of rounds done, for the progress display.

        If the task ends after a number of uploads (`max_uploads`) or of simulated seconds
        (`max_seconds`), this is the same fraction of `rounds` as the uploads or seconds so far are
        of that number, if that is larger.
        """
        task = self.job.task
        done = self.next_round
        if task.max_uploads is not None:
            done = max(done, task.rounds * self._uploads // task.max_uploads)
        if self._time is not None and task.max_seconds is not None:
            done = max(done, int(task.rounds * min(1.0, self._time.time / task.max_seconds)))
        return min(done, task.rounds)

    def _active(self, round_index: int) -> Tensor:
        """Return the active clients, int64 [S], and append them to the history.

        Dropout processes may depend on the history.
        """
        if round_index == 0 and self.job.method.full_first_round:
            active = torch.arange(self._dropout.joined(0))
        else:
            active = self._dropout.active(round_index, self._history)
        self._history.append(active)
        return active

    @property
    def _takes_late_answers(self) -> bool:
        return self._time is not None and self._time.schedule.late_answers

    def _plan(self, round_index: int) -> Plan:
        """Return who starts and who answers in a round."""
        active = self._active(round_index).tolist()
        if self._time is None:
            return Plan(tuple(active), of_round(active, round_index), 0, 0.0)
        return self._time.schedule.next(round_index, active)

    def _change_clients(self, index: int) -> None:
        """Let the rule grow by the clients that join, and forget those that leave for good."""
        joined, left = self._dropout.joined(index), self._dropout.left(index)
        if joined > self.aggregator.num_clients:
            job = self.job
            self.aggregator.grow(
                joined, **client_options(job.task, job.method, self._split, joined)
            )
        if not left:
            return
        if self._parts is not None:
            self._parts.leave(left)
        else:
            self.aggregator.forget(left)
        if self._echoes is not None:
            self._echoes.leave(left)
        for client in left:
            self._momentum.pop(client, None)

    def run_round(self) -> RoundRecord:
        """Compute the next round. Changes `params` and the state of the aggregator in place."""
        index = self.next_round
        started = now(self.device)
        self._buffer.release()
        self._change_clients(index)
        plan = self._plan(index)
        clients = list(plan.starts)
        task = self.job.task
        # Updates are sent in units of `unit`: the server gets row / unit and its learning rate is
        # multiplied by `unit`.
        unit = self.job.training.rate(index) if self.job.method.gradient_units else 1.0
        self.aggregator.server_lr = task.server_lr * unit
        scaffold = self.aggregator if isinstance(self.aggregator, fastagg.Scaffold) else None
        if scaffold is not None:
            sizes = self._split.sizes[: scaffold.num_clients]
            scaffold.local_work = local_work(self.job.training, sizes, index) / unit
        with repeatable(self.device):
            at_once = self.job.training.clients_at_once if self._echoes is None else 1
            for together in groups_of(clients, at_once):
                self._train(together, index, scaffold)
        if unit != 1.0:
            for row in self._buffer.rows(clients):
                row.div_(unit)
        trained = now(self.device)
        distances = self._distances(clients) if task.distances else (None, None)
        if index in task.norm_rounds:
            self._norms[index] = self._row_norms(clients)
        started_step = now(self.device)
        active = torch.tensor([work.client for work in plan.answers], dtype=torch.int64)
        if self.aggregator.noise_multiplier > 0.0:  # repeatable: there is nothing to protect
            stream = numpy_generator(self.job.seed, "noise", index)
            self.aggregator.random_bytes = stream.bytes
        report = self._step_late(plan, index) if self._takes_late_answers else self._step(active)
        self._statistics.average(self.aggregator, report.active.tolist())
        if self._echoes is not None:
            self._echoes.receive(report.active.tolist(), self.params, index)
        aggregated = now(self.device)
        self.next_round += 1
        answers = len(plan.answers)
        self._uploads += answers * (1 if scaffold is None else scaffold.uploads_per_client)
        with repeatable(self.device):
            accuracy, loss, train_loss = self._evaluate()
        evaluated = now(self.device)
        substitutions, wrong_rate = self._count_substitutions(report.friends, active)
        ages = plan.ages(index)
        return RoundRecord(
            round=index,
            uploads=self._uploads,
            active=answers,
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
            peak_mb=peak_memory() / 1e6 if task.memory else None,
            time=None if self._time is None else plan.time,
            late=None if self._time is None else plan.late,
            age=sum(ages) / len(ages) if ages and self._time is not None else None,
        )

    def _train(self, clients: Sequence[int], index: int, scaffold: fastagg.Scaffold | None) -> None:
        """Train `clients` in round `index` and write their updates into their rows.

        Clients that echo are trained one at a time, because each starts from its own model.
        """
        seed = self.job.seed
        # Layers that draw random numbers (nn.Dropout) use a global generator.
        seed_layers(self.device, derive(seed, "layers", index, clients[0]))
        velocities = {client: self._load_momentum(client) for client in clients}
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
        start = self.params if self._echoes is None else self._echoes.start(clients[0])
        if self._batched is not None:
            self._batched.train(work, start, index)
        else:
            for client, one in zip(clients, work, strict=True):
                self._statistics.put()
                self._trainer.train(
                    one.row, start, one.data, index, one.generator, one.control, one.velocity
                )
                self._statistics.take(client)
        for client, velocity in velocities.items():
            self._store_momentum(client, velocity)
        if self._echoes is not None:
            self._echoes.echo_(clients[0], work[0].row, self.params, index)

    def _load_momentum(self, client: int) -> Tensor | None:
        """Return a copy [d] of the momentum that `client` stored in its last active round.

        Zeros for a client that was never active; None unless `keep_momentum`.
        """
        if not self.job.training.keep_momentum:
            return None
        kept = self._momentum.get(client)
        return torch.zeros_like(self.params) if kept is None else kept.clone()

    def _store_momentum(self, client: int, velocity: Tensor | None) -> None:
        """Store the momentum of `client` after its training.

        If it is not finite, the client keeps its previous momentum: a NaN would never disappear
        from it again. The check runs on the device, without waiting for the result.
        """
        if velocity is None:
            return
        before = self._momentum.get(client, torch.zeros_like(velocity))
        finite = torch.isfinite(velocity).all()
        self._momentum[client] = torch.where(finite, velocity, before)

    def _step_late(self, plan: Plan, index: int) -> fastagg.StepReport:
        """Run one step of the server on answers from models of this and earlier rounds."""
        assert self._time is not None
        rows = self._time.collect(plan, index, self._buffer)
        clients = [work.client for work in plan.answers]
        return self.aggregator.step(self.params, rows, clients, ages=plan.ages(index))

    def _step(self, active: Tensor) -> fastagg.StepReport:
        """Run one step of the server and, for rules that have one, the clients' part of it."""
        if self._parts is not None:
            return self._parts.step(self.params, self._buffer, active)
        return self.aggregator.step(self.params, self._buffer, active)

    def _distances(self, clients: Sequence[int]) -> tuple[float | None, float | None]:
        """Return `RoundRecord.distance2_friends` and `distance2_all` of the active `clients`."""
        gram = ops.gram(self._buffer.rows(clients), dtype=torch.float64)
        distance2 = ops.distance_scores(gram).square().cpu()  # [S, S]
        groups = torch.arange(len(clients)) if self.groups is None else self.groups[clients]
        pairs = ~torch.eye(len(clients), dtype=torch.bool)
        friends = pairs & (groups[:, None] == groups[None, :])
        found = (distance2[chosen] for chosen in (friends, pairs))
        first, second = (float(values.max()) if values.numel() else None for values in found)
        return first, second

    def _row_norms(self, clients: Sequence[int]) -> list[float]:
        """Return the norm of every client's row, [K]; NaN for clients that are not active."""
        norms = [math.nan] * self.job.task.num_clients
        for client in clients:
            norms[client] = float(self._buffer.row(client).norm(dtype=torch.float64))
        return norms

    @property
    def norms(self) -> dict[int, list[float]]:
        """The norms of the updates, [K], by round, for the `norm_rounds` of the task so far."""
        return dict(self._norms)

    def _evaluate(self) -> tuple[float | None, float | None, float | None]:
        """Return the accuracy and loss on the test set, and the training loss.

        All are None if the model is not to be evaluated after this round (`Task.eval_every`); the
        training loss is also None if the task does not ask for it.
        """
        if self.next_round % self.job.task.eval_every and not self.done:
            return None, None, None
        self._layout.bind(self._model, self.params)
        self._statistics.put()
        logits = None
        if self._batched is not None:
            logits = self._batched.logits(self.params, self._test[0].shape[1:])
        train_loss = None
        if self._train_sample is not None:
            _, train_loss = evaluate(self._model, *self._train_sample, logits=logits)
        return *evaluate(self._model, *self._test, logits=logits), train_loss

    def _count_substitutions(
        self, friends: Tensor | None, active: Tensor
    ) -> tuple[int, float | None]:
        """Return the number of substitutions in this round, and `RoundRecord.wrong_friend_rate`.

        friends: `StepReport.friends`, [K] or None.
        active: ids of the active clients.
        """
        if friends is None:
            return 0, None
        friends = friends.cpu()
        replaced = (friends >= 0).index_fill_(0, active, False).nonzero().flatten()
        if not len(replaced) or self.groups is None:
            return len(replaced), None
        wrong = int((self.groups[replaced] != self.groups[friends[replaced]]).sum())
        return len(replaced), wrong / len(replaced)

    def save(self, folder: Path) -> None:
        """Write the complete state that later rounds depend on to `folder`, an empty folder."""
        save_file({"params": self.params}, folder / "params.safetensors")
        self.aggregator.save(folder / "aggregator.safetensors")
        if self._statistics:
            values = {"statistics": self._statistics.values}
            save_file(values, folder / "statistics.safetensors")
        if self._parts is not None:
            save_file(self._parts.state(), folder / self._parts.file)
        if self._momentum:
            kept = {str(client): momentum for client, momentum in self._momentum.items()}
            save_file(kept, folder / "momentum.safetensors")
        state = {"next_round": self.next_round, "uploads": self._uploads, "norms": self._norms}
        if self._time is not None:
            state["schedule"] = self._time.save(folder)
        if self._echoes is not None:
            save_file(self._echoes.models(), folder / "models.safetensors")
            state["echoes"] = self._echoes.rounds()
        (folder / "state.json").write_text(json.dumps(state) + "\n")

    def load(self, folder: Path) -> None:
        """Restore the state that :meth:`save` wrote for the same job.

        Raises ConfigError if the checkpoint has another number of parameters or is damaged. The
        simulation has then not changed.
        """
        try:
            state = json.loads((folder / "state.json").read_text())
            uploads, next_round = int(state["uploads"]), int(state["next_round"])
            norms = {int(t): norms for t, norms in state.get("norms", {}).items()}
            last = {str(k): int(t) for k, t in state.get("echoes", {}).items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{folder / 'state.json'}: damaged: {error!r}") from error
        time = self._time
        if time is not None:
            time = time.restored(state.get("schedule"), next_round, folder / "state.json")
            if self._takes_late_answers:
                time.put(self._read(folder / ROWS, time.names()))
        options: dict[str, Any] = {"device": str(self.device)}
        if "memory_folder" in self.job.method.options:  # which is never in a file
            options["memory_folder"] = self.job.method.options["memory_folder"]
        aggregator = fastagg.load(folder / "aggregator.safetensors", **options)
        params = self._read(folder / "params.safetensors", ["params"])["params"]
        statistics = self._statistics.values
        if self._statistics:
            path = folder / "statistics.safetensors"
            statistics = self._read(path, ["statistics"], statistics)["statistics"]
        parts, kept = client_parts(aggregator), dict[str, Tensor]()
        if parts is not None:
            kept = self._read(folder / parts.file, None, dtype=parts.dtype)
        models: dict[str, Tensor] = {}
        if self._echoes is not None:
            models = self._read(folder / "models.safetensors", ["first", *last])
        momentum: dict[str, Tensor] = {}
        if (folder / "momentum.safetensors").exists():
            momentum = self._read(folder / "momentum.safetensors", None)
        self.params = params
        self._statistics.values = statistics
        self.aggregator = aggregator
        self._time = time
        self._parts = parts
        if parts is not None:
            parts.load(kept)
        if self._echoes is not None:
            self._echoes.load(models, last)
        self._uploads = uploads
        self._norms = norms
        self._momentum = {int(client): vector for client, vector in momentum.items()}
        self._history = []
        self.next_round = next_round
        for index in range(self.next_round):
            self._active(index)

    def _read(
        self,
        path: Path,
        names: list[str] | None,
        like: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Read vectors of a model. Files are not mapped: others may change them.

        names: of the vectors; None: any client ids.
        like: a vector of their size; None: the parameters.
        dtype: their dtype.
        """
        shape = (self.params if like is None else like).shape
        try:
            found = tensor_file.load(path, limit=_HEADER_LIMIT)
        except ValueError as error:
            raise ConfigError(f"{path}: damaged: {error}") from error
        wrong = set(names) != set(found) if names is not None else not all(map(_is_id, found))
        if wrong:
            expected = "client ids" if names is None else names[:10]
            raise ConfigError(f"{path}: expected {expected}, got {sorted(found)[:10]}")
        for name, vector in found.items():
            if vector.shape != shape or vector.dtype != dtype:
                raise ConfigError(
                    f"{path}: expected {name} of shape {tuple(shape)} {dtype} for this "
                    f"job, got {tuple(vector.shape)} {vector.dtype}"
                )
        return {name: vector.to(self.device) for name, vector in found.items()}


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdigit()


def groups_of(clients: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Split `clients` into consecutive groups of `size`; the last one may be smaller."""
    for start in range(0, len(clients), size):
        yield clients[start : start + size]


def make_aggregator(
    task: Task,
    method: Method,
    num_params: int,
    split: Partition,
    device: str | torch.device = "cpu",
    *,
    seed: int,
    num_clients: int | None = None,
) -> fastagg.Aggregator:
    """Create the aggregation rule of `method`.

    num_params: the number of parameters d of the model.
    split: the partition, for rules that need the number of training samples of each client.
    seed: the seed of the run, from which a method that is `seeded` derives those of its rules.
    num_clients: how many clients take part at first; by default all of the task.

    Raises ConfigError if the method has gradient units and its rule remembers models. For other
    errors see `fastagg.make`.
    """
    number = task.num_clients if num_clients is None else num_clients
    needed = {**SIMULATED, **client_options(task, method, split, number)}
    options = method.options
    if method.seeded:
        options = with_seeds(method.rule, options, seed)
    aggregator = fastagg.make(
        fastagg.RuleName(method.rule),
        num_clients=number,
        num_params=num_params,
        server_lr=task.server_lr,
        device=device,
        **{**needed, **options},
    )
    if method.gradient_units and getattr(aggregator, "remembers_models", False):
        raise ConfigError(
            f"gradient_units: expected false for {method.rule}, which remembers models, got true: "
            "the model plus an update that is divided by the learning rate is no client's model"
        )
    return aggregator


def client_options(
    task: Task, method: Method, split: Partition, num_clients: int
) -> dict[str, Any]:
    """Return the options of the rule of `method` with a value for each of the first clients."""
    options: dict[str, Any] = {}
    sizes = split.sizes[:num_clients]
    if method.rule == "scaffold":
        options["local_work"] = local_work(method.training or task.training, sizes, 0)
    if method.sample_weights:
        total = int(split.sizes.sum())
        options["client_weights"] = [size / total for size in sizes.tolist()]
    return options


def local_work(training: LocalTraining, sizes: Tensor, round_index: int) -> Tensor:
    """Return `LocalTraining.work` of every client in a round, float64 [K].

    sizes: the number of training samples of each client, int64 [K].

    This is the option `local_work` of SCAFFOLD.
    """
    distinct, which = torch.unique(sizes, return_inverse=True)
    work = [training.work(size, round_index) for size in distinct.tolist()]
    return torch.tensor(work, dtype=torch.float64)[which]


def train_sample(
    task: Task, dataset: data.Dataset, split: Partition, seed: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return the samples (x, y) on which the training loss of `task` is measured, on `device`.

    None if the task does not measure the training loss.
    """
    if not task.train_loss:
        return None
    every = split.clients.joined()
    order = torch.randperm(len(every), generator=generator(seed, "train-loss"))
    x, y = dataset.taken(every[order[: task.train_loss]])
    return x.to(device), y.to(device)


def client_store(
    task: Task, dataset: data.Dataset, split: Partition, device: torch.device
) -> ClientStore:
    """Return the samples of the clients of `split`, which `split_clients` has returned."""
    if task.partition == "natural" and isinstance(dataset, data.GeneratedDataset):
        return GeneratedSamples(dataset, task.train_fraction, device)
    return DealtSamples(dataset, split, device)


def split_clients(task: Task, dataset: data.Dataset, seed: int) -> Partition:
    """Partition the training samples of `dataset` among the clients of `task`.

    The natural partition of a data set that is generated client by client generates nothing.
    """
    options = dict(task.partition_options)
    if task.partition == "natural":
        if isinstance(dataset, data.GeneratedDataset) and not options:
            if dataset.num_clients != task.num_clients:
                raise ValueError(
                    f"num_clients: expected {dataset.num_clients}, the number of clients of the "
                    f"data set, got {task.num_clients}"
                )
            return generated(
                dataset.num_clients, lambda: dataset.sizes, dataset.groups, task.train_fraction
            )
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
    """Create the dropout process of a setting for the clients of `split`, which partitions
    `dataset`."""
    options = dropout.options_of(seed)
    needed = needs(dropout.process, options)
    label_counts = None
    if "label_counts" in needed:
        label_counts = split.label_counts(dataset.train_y, dataset.num_classes).tolist()
    return make_dropout(
        dropout.process,
        num_clients=split.num_clients,
        seed=seed,
        groups=split.groups if "groups" in needed else None,
        label_counts=label_counts,
        **options,
    )
