# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: typed, validated, and stored as JSON without loss.

A :class:`Config` consists of one *task* (data, model, local training, number of rounds) and three
lists: methods, dropout settings and seeds. Every combination of the three is one :class:`Job`, the
unit that is computed, checkpointed and stored. A method with full participation does not depend on
the dropout setting, so it has one job per seed, shared by all dropout settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from fastagg_sim.value_types import expected, fits

NO_DROPOUT = "full"
DEVICES = ("cpu", "cuda")
# Options of rules that follow from the task, and what sets them.
OF_THE_TASK = {
    "server_lr": "--server-lr (server_lr of the task)",
    "num_clients": "--num-clients (num_clients of the task)",
    "device": "--device (device of the task)",
    "num_params": "the model",
    "local_work": "local training (the learning rate and the steps of each client)",
}
# Arguments of processes, partitions and data sets that the run passes: they are no options.
_OF_PROCESSES = ("name", "num_clients", "seed", "groups", "label_counts")
_OF_PARTITIONS = ("name", "num_clients", "seed", "labels", "clients", "train_fraction")
_OF_DATA = ("name", "seed", "root")


def _refuse_options_of_the_run(
    what: str, options: Mapping[str, Any], names: tuple[str, ...]
) -> None:
    """Raise ConfigError if one of `options` is among the `names` that the run passes itself."""
    for name in names:
        if name in options:
            raise ConfigError(f"{what}: expected no option {name}, which the run sets itself")


class ConfigError(ValueError):
    """A setting is invalid; the message states its name, what was expected, and what was given."""


def _require(condition: bool, name: str, expected: str, value: object) -> None:
    """Raise ConfigError unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True)
class LocalTraining:
    """Stochastic gradient descent of one client in one round.

    Exactly one of `local_epochs` and `local_steps` must be given.

    batch_size: samples per gradient step; the last batch of a pass over the data may be smaller.
    local_epochs: number of passes over the client's data.
    local_steps: number of gradient steps.
    lr, lr_decay, lr_power: the learning rate of round t = 0, 1, ... is
        `lr * lr_decay**t / (t + 1)**lr_power`.
    momentum: momentum of SGD. It starts from zero in every round, unless `keep_momentum`.
    prox: the weight mu of FedProx's proximal term mu/2 |w - w_global|^2.
    keep_momentum: start from the momentum at the end of the client's last active round (zero for a
        client that was never active).
    clients_at_once: number of clients that are trained together, in one pass through the model
        (batched_clients.py). It changes results by rounding errors.
    """

    batch_size: int = 32
    local_epochs: int | None = None
    local_steps: int | None = None
    lr: float = 0.1
    lr_decay: float = 1.0
    momentum: float = 0.0
    prox: float = 0.0
    lr_power: float = 0.0
    keep_momentum: bool = False
    clients_at_once: int = 1

    def __post_init__(self) -> None:
        _require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        _require(self.batch_size < 1 << 63, "batch_size", "at most 2^63 - 1", self.batch_size)
        if (self.local_epochs is None) == (self.local_steps is None):
            raise ConfigError(
                "local_epochs, local_steps: expected exactly one of the two, got "
                f"local_epochs={self.local_epochs}, local_steps={self.local_steps}"
            )
        length = self.local_steps if self.local_epochs is None else self.local_epochs
        _require(length is not None and length >= 1, "local_epochs/local_steps", ">= 1", length)
        _require(math.isfinite(self.lr) and self.lr > 0, "lr", "a finite number > 0", self.lr)
        _require(0 < self.lr_decay <= 1, "lr_decay", "0 < lr_decay <= 1", self.lr_decay)
        _require(0 <= self.momentum < 1, "momentum", "0 <= momentum < 1", self.momentum)
        for name in ("prox", "lr_power"):
            number = getattr(self, name)
            _require(math.isfinite(number) and number >= 0, name, "a finite number >= 0", number)
        _require(
            self.momentum > 0 or not self.keep_momentum,
            "keep_momentum",
            "false without momentum",
            self.keep_momentum,
        )
        _require(self.clients_at_once >= 1, "clients_at_once", "at least 1", self.clients_at_once)

    def rate(self, round_index: int) -> float:
        """Return the learning rate of round `round_index` = 0, 1, ..."""
        return self.lr * self.lr_decay**round_index / (round_index + 1) ** self.lr_power

    def steps(self, num_samples: int) -> int:
        """Return the number of gradient steps that a client with `num_samples` takes in a round."""
        if self.local_epochs is None:
            assert self.local_steps is not None  # exactly one of the two is given
            return self.local_steps
        return self.local_epochs * -(-num_samples // self.batch_size)

    def work(self, num_samples: int, round_index: int) -> float:
        """Return the local work of a client in a round: the sum of its effective step sizes.

        A constant gradient g would move the model by -work * g. Without momentum this is the number
        of steps times the learning rate. With momentum m, step j of K counts as
        1 + m + ... + m^(K - j) steps.

        Raises ConfigError with `keep_momentum`, since the result would depend on earlier rounds.
        """
        _require(not self.keep_momentum, "keep_momentum", "false for this rule", True)
        steps, m = self.steps(num_samples), self.momentum
        counts = (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
        return self.rate(round_index) * counts


@dataclass(frozen=True)
class Method:
    """One line of a figure: an aggregation rule with its options, under a unique name.

    label: the name of the line.
    rule: the name of the rule, see `fastagg.available()`.
    options: the options of the rule.
    full_participation: ignore the dropout setting; every client is always active. This is the upper
        bound "Full" of FL-FDMS.
    full_first_round: every client is active in round 0, as in the released FL-FDMS code.
    gradient_units: divide updates by the round's learning rate before the server gets them, and
        multiply the server's learning rate by it. Rules with a memory then remember gradients and
        apply them at the current learning rate (as in the MimiC paper), and not updates at the
        learning rate of the round in which they were received (as in its released code). So do
        server optimizers with a state, and late answers. Norms (`clip_norm`, the radius of
        centered-clip) are then those of gradients. Without any of these, results only differ by
        rounding errors. Rules that remember models (stale-models) cannot have it.
    training: local training for this method, instead of that of the task (for instance FedProx).
    sample_weights: give client k the weight n_k / N, its fraction of all training samples.
    schedule: for which answers the server waits; needs `Task.latency`. None: for all.
    echo: the clients are those of FedAWE with this global rate: they keep their models while they
        are absent, and echo their updates (:class:`fastagg.FedAWEClient`). FedAWE itself is the
        rule "fedavg" with a server_lr of 1. None: clients train from the global model.
    seeded: the random numbers of the rule itself (buckets, sketches), and of a rule inside it,
        follow the seed of the run, as all other streams do, except where a rule has the option
        `seed`. False: they are those of the option `seed` of the rule, in every run.
    """

    label: str
    rule: str
    options: dict[str, Any] = field(default_factory=dict)
    full_participation: bool = False
    full_first_round: bool = False
    gradient_units: bool = False
    training: LocalTraining | None = None
    sample_weights: bool = False
    schedule: Schedule | None = None
    echo: float | None = None
    seeded: bool = False

    def __post_init__(self) -> None:
        for name, option in OF_THE_TASK.items():
            if name in self.options:
                raise ConfigError(
                    f"options: expected no {name} for the rule {self.rule!r}; {option} sets it "
                    "for all rules"
                )
        _require(
            not (self.seeded and "seed" in self.options and "rule" not in self.options),
            "seeded",
            "false with the option seed of the rule",
            self.seeded,
        )
        _require(
            self.echo is None or (math.isfinite(self.echo) and self.echo >= 0),
            "echo",
            "a finite number >= 0, or none",
            self.echo,
        )
        keeping = self.rule in ("scaffold", "mifa-client") or self.options.get("mode") == "client"
        _require(
            self.echo is None or not keeping,
            "echo",
            f"none for {self.rule}, whose clients keep something else",
            self.echo,
        )


@dataclass(frozen=True)
class Dropout:
    """One dropout setting.

    process: the name of a dropout process.
    options: its options, for example `alpha`.
    seed_options: further options for individual seeds. The keys are the seeds as strings, because
        JSON only has string keys. They are not part of the label.
    """

    process: str = NO_DROPOUT
    options: dict[str, Any] = field(default_factory=dict)
    seed_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for options in (self.options, *self.seed_options.values()):
            _refuse_options_of_the_run(f"dropout {self.process!r}", options, _OF_PROCESSES)

    def only(self, seed: int) -> Dropout:
        """Return this setting without the options of other seeds."""
        mine = {key: value for key, value in self.seed_options.items() if key == str(seed)}
        return dataclasses.replace(self, seed_options=mine)

    def options_of(self, seed: int) -> dict[str, Any]:
        """Return all options of the process in a run with `seed`."""
        return {**self.options, **self.seed_options.get(str(seed), {})}

    @property
    def label(self) -> str:
        """The process and its options as text, such as "exact-0.5" or "markov-rate=0.3-memory=0.9".

        Only contains characters that are allowed in labels. Long values are truncated and made
        unique by a hash.
        """
        return "-".join([self.process, *(_label(*option) for option in self.options.items())])


@dataclass(frozen=True)
class Latency:
    """How long clients take to answer, in simulated seconds.

    process: the name of a latency process (`fastagg_sim.latency`).
    options: its options, for example `median`.
    """

    process: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_options_of_the_run(f"latency {self.process!r}", self.options, _OF_PROCESSES)


@dataclass(frozen=True)
class Schedule:
    """For which answers the server waits, in simulated time.

    name: the name of a schedule (`fastagg_sim.schedules`).
    options: its options, for example `seconds`.
    """

    name: str = "synchronous"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name and the options as text, such as "deadline-seconds=5"; as `Dropout.label`."""
        return "-".join([self.name, *(_label(*option) for option in self.options.items())])


def _label(key: str, value: Any) -> str:
    plain = plain_label(value if isinstance(value, str) else json.dumps(value))
    # The dropout ratio and the active probability are understood without their names.
    return plain if key in ("alpha", "p") else f"{key.replace('_', '-')}={plain}"


def plain_label(text: str) -> str:
    """Convert `text` to characters that are allowed in labels.

    Long texts are truncated and made unique by a hash.
    """
    plain = re.sub(r"[^A-Za-z0-9.+=-]+", "+", text).strip("+")
    if len(plain) > 24:
        plain = f"{plain[:16]}.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    return plain


@dataclass(frozen=True)
class Task:
    """What is learned and how: everything that the jobs of one run share.

    dataset, data_options: the data set and its options (`fastagg_sim.data`).
    partition, partition_options: how its training samples are divided among the clients
        (`fastagg_sim.partition`).
    model: the name of the model (`fastagg_sim.models`).
    training: local training, for methods that have no `training` of their own.
    rounds: number of rounds.
    num_clients: number of clients K.
    train_fraction: only use this fraction of each client's samples, from the start of its index
        list. The released FL-FDMS code uses 0.8.
    server_lr: the server's learning rate.
    eval_every: evaluate the global model every this many rounds, and after the last round.
    max_uploads: end a job after the round in which `RoundRecord.uploads` reaches this number, and
        after `rounds` at the latest. None: end after `rounds`.
    distances: record the largest distances between the active clients' updates in every round
        (distances.csv).
    train_loss: also evaluate the loss on this many training samples, which are drawn once from
        those of all clients. 0: do not evaluate it.
    norm_rounds: record the norm of every received update in these rounds (norms.csv).
    memory: record the largest resident memory of the process so far in every round (memory.csv).
    device: the device of models, data and the server, "cpu" or "cuda". Results differ by rounding
        errors.
    latency: how long clients take to answer. None: there is no simulated time.
    max_seconds: end a job after the round in which the simulated time reaches this number of
        seconds, and after `rounds` at the latest; needs `latency`. None: end after `rounds`.
    """

    dataset: str
    partition: str
    model: str
    training: LocalTraining
    rounds: int
    num_clients: int = 20
    data_options: dict[str, Any] = field(default_factory=dict)
    partition_options: dict[str, Any] = field(default_factory=dict)
    train_fraction: float = 1.0
    server_lr: float = 1.0
    eval_every: int = 1
    max_uploads: int | None = None
    distances: bool = False
    train_loss: int = 0
    norm_rounds: tuple[int, ...] = ()
    memory: bool = False
    device: str = "cpu"
    latency: Latency | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        _refuse_options_of_the_run("data_options", self.data_options, _OF_DATA)
        _refuse_options_of_the_run("partition_options", self.partition_options, _OF_PARTITIONS)
        _require(self.train_loss >= 0, "train_loss", "at least 0", self.train_loss)
        _require(self.device in DEVICES, "device", " or ".join(map(repr, DEVICES)), self.device)
        _require(self.rounds >= 1, "rounds", "at least 1", self.rounds)
        _require(self.num_clients >= 1, "num_clients", "at least 1", self.num_clients)
        _require(self.eval_every >= 1, "eval_every", "at least 1", self.eval_every)
        enough = self.max_uploads is None or self.max_uploads >= 1
        _require(enough, "max_uploads", "at least 1, or none", self.max_uploads)
        limit = self.max_seconds
        if limit is not None:
            _require(
                math.isfinite(limit) and limit > 0, "max_seconds", "a finite number > 0", limit
            )
            _require(self.latency is not None, "max_seconds", "none without latency", limit)
        _require(
            0 < self.train_fraction <= 1,
            "train_fraction",
            "0 < train_fraction <= 1",
            self.train_fraction,
        )
        _require(
            math.isfinite(self.server_lr) and self.server_lr >= 0,
            "server_lr",
            "a finite number >= 0",
            self.server_lr,
        )


@dataclass(frozen=True)
class Job:
    """One method under one dropout setting with one seed: the unit of work and of storage."""

    task: Task
    method: Method
    dropout: Dropout
    seed: int

    def __post_init__(self) -> None:
        # A method that repeats the task's training is the same job as one that leaves it out.
        if self.method.training == self.task.training:
            object.__setattr__(self, "method", dataclasses.replace(self.method, training=None))

    @property
    def training(self) -> LocalTraining:
        """The local training of the method, by default that of the task."""
        return self.method.training or self.task.training

    @property
    def key(self) -> str:
        """Name of the job; valid as a folder name and unique within its configuration."""
        return job_key(self.method.label, self.dropout.label, self.seed)


def job_key(method: str, dropout: str, seed: int) -> str:
    return f"{method}_{dropout}_seed{seed}"


@dataclass(frozen=True)
class Config:
    """A task and the methods, dropout settings and seeds to compare on it."""

    name: str
    task: Task
    methods: tuple[Method, ...]
    dropouts: tuple[Dropout, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        for one, other in itertools.combinations(self.dropouts, 2):
            if one.label == other.label:
                raise ConfigError(
                    f"dropouts: expected distinct labels, got {one.label!r} for {one} and {other}; "
                    "give an option another value, or leave one of them out"
                )
        for name, labels in (
            ("methods", [m.label for m in self.methods]),
            ("dropouts", [d.label for d in self.dropouts]),
            ("seeds", list(self.seeds)),
        ):
            _require(len(labels) > 0, name, "at least one", labels)
            _require(len(set(labels)) == len(labels), name, "distinct labels", labels)
        for label in [m.label for m in self.methods] + [d.label for d in self.dropouts]:
            plain = all(c.isalnum() or c in "-.+= " for c in label) and label.strip()
            _require(bool(plain), "label", "letters, digits, '-', '.', '+', '=', spaces", label)
        for method in self.methods if self.task.latency is None else ():
            _require(method.schedule is None, "schedule", "none without latency", method.schedule)

    def jobs(self) -> list[Job]:
        """Return all jobs: for each seed, every method with every dropout setting, in order."""
        found = []
        for seed in self.seeds:
            for method in self.methods:
                dropouts = (Dropout(),) if method.full_participation else self.dropouts
                found += [Job(self.task, method, d.only(seed), seed) for d in dropouts]
        return found

    def to_json(self) -> str:
        return to_json(self)


def to_json(value: Config | Job) -> str:
    return json.dumps(dataclasses.asdict(value), indent=2) + "\n"


def config_from_dict(data: dict[str, Any]) -> Config:
    """Build the Config that :meth:`Config.to_json` wrote.

    Raises ConfigError for unknown or missing keys and for invalid values.
    """
    return _build(
        Config,
        data,
        "config",
        task=_task,
        methods=lambda v, at: tuple(_method(m, at) for m in _items(v, at)),
        dropouts=lambda v, at: tuple(_build(Dropout, d, at) for d in _items(v, at)),
        seeds=lambda v, at: tuple(_items(v, at)),
    )


def job_from_dict(data: dict[str, Any]) -> Job:
    """Build the Job that :func:`to_json` wrote; raises ConfigError as `config_from_dict` does."""
    return _build(
        Job,
        data,
        "job",
        task=_task,
        method=_method,
        dropout=lambda v, at: _build(Dropout, v, at),
    )


def _task(value: Any, where: str) -> Task:
    return _build(
        Task,
        value,
        where,
        training=_training,
        norm_rounds=_rounds,
        latency=lambda v, at: v and _build(Latency, v, at),
    )


def _method(value: Any, where: str) -> Method:
    return _build(
        Method,
        value,
        where,
        training=lambda v, at: v and _training(v, at),
        schedule=lambda v, at: v and _build(Schedule, v, at),
    )


def _training(value: Any, where: str) -> LocalTraining:
    return _build(LocalTraining, value, where)


def _rounds(value: Any, where: str) -> tuple[int, ...]:
    return tuple(_items(value, where))


def _items(value: Any, where: str) -> list[Any]:
    _require(isinstance(value, list | tuple), where, "a list", value)
    return list(value)


def _build(kind: Any, data: Any, where: str, **nested: Any) -> Any:
    """Build the dataclass `kind` from the JSON object `data`.

    where: the path of `data` in the file, for messages.
    nested: for fields that are not plain JSON values, the function (value, path) that builds them.

    Raises ConfigError, naming the setting, for an unknown or missing key and for a value of another
    type than the field's.
    """
    _require(isinstance(data, dict), where, "an object", data)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    _require(not unknown, where, f"only the keys {sorted(fields)}", unknown)
    missing = sorted(
        name
        for name, f in fields.items()
        if name not in data
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    )
    if missing:
        raise ConfigError(f"{where}: the keys {missing} are missing")
    values = {
        name: nested[name](value, f"{where}.{name}") if name in nested else value
        for name, value in data.items()
    }
    hints = get_type_hints(kind)
    for name, value in values.items():
        _require(fits(value, hints[name]), f"{where}.{name}", expected(hints[name]), value)
    return kind(**values)
