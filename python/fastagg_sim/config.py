# SPDX-License-Identifier: Apache-2.0
"""What a run computes: typed, validated, and the same again after a trip through JSON.

A :class:`Config` is one *task* (data, model, local training, number of rounds) and three lists:
methods, dropout settings and seeds. Every combination of the three is one :class:`Job`, the unit
that is computed, checkpointed and stored. A method that always has every client active does not
depend on the dropout setting, so it gives one job per seed, shared by all dropout settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

NO_DROPOUT = "full"
DEVICES = ("cpu", "cuda")


class ConfigError(ValueError):
    """A setting is wrong; the message names it, what was expected and what came."""


def _require(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True)
class LocalTraining:
    """Stochastic gradient descent of one client in one round.

    Exactly one of `local_epochs` (passes over the client's data, a last smaller batch included) and
    `local_steps` (number of gradient steps) is given. The learning rate of round t = 0, 1, ... is
    `lr * lr_decay**t / (t + 1)**lr_power`. `prox` is the weight mu of FedProx's proximal term
    mu/2 |w - w_global|^2. Momentum starts from zero in every round or, with `keep_momentum`, from
    what the client's last active round left (zero for a client that was never active).
    `clients_at_once` is how many clients share a pass through the model (batched_clients.py); it
    changes results by rounding.
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
        _require(math.isfinite(self.prox) and self.prox >= 0, "prox", "a number >= 0", self.prox)
        power = self.lr_power
        _require(math.isfinite(power) and power >= 0, "lr_power", "a number >= 0", power)
        _require(
            self.momentum > 0 or not self.keep_momentum,
            "keep_momentum",
            "false without momentum",
            self.keep_momentum,
        )
        _require(self.clients_at_once >= 1, "clients_at_once", "at least 1", self.clients_at_once)

    def rate(self, round_index: int) -> float:
        """The learning rate of round 0, 1, ..."""
        return self.lr * self.lr_decay**round_index / (round_index + 1) ** self.lr_power

    def steps(self, num_samples: int) -> int:
        """How many gradient steps a client with so many samples takes in a round."""
        if self.local_epochs is None:
            assert self.local_steps is not None  # one of the two is given
            return self.local_steps
        return self.local_epochs * -(-num_samples // self.batch_size)

    def work(self, num_samples: int, round_index: int) -> float:
        """How far a constant gradient g moves the model in a round, as a multiple of -g: steps
        times learning rate, and more with momentum m, by which step j of K counts for
        1 + m + ... + m^(K - j) steps. ConfigError with `keep_momentum`: then it also depends on
        the rounds before."""
        _require(not self.keep_momentum, "keep_momentum", "false for this rule", True)
        steps, m = self.steps(num_samples), self.momentum
        counts = (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
        return self.rate(round_index) * counts


@dataclass(frozen=True)
class Method:
    """One line of a figure: an aggregation rule with its options, under a name of its own.

    `full_participation` ignores the dropout setting (the upper bound "Full");
    `full_first_round` has every client active in round 0, as the released FL-FDMS code does.
    `gradient_units` divides updates by the round's learning rate before the server gets them, and
    multiplies the server's rate by it. Rules without a memory do the same as before; those with one
    then remember gradients, which count at the current learning rate when they are used again (the
    MimiC paper), and not updates at the rate of their own round (its released code).
    `training` replaces the task's for this method (FedProx among others, say).
    `sample_weights` gives client k the weight n_k / N, its part of all training samples.
    """

    label: str
    rule: str
    options: dict[str, Any] = field(default_factory=dict)
    full_participation: bool = False
    full_first_round: bool = False
    gradient_units: bool = False
    training: LocalTraining | None = None
    sample_weights: bool = False


@dataclass(frozen=True)
class Dropout:
    """One dropout setting: the name of a process and its options, for example `alpha`.

    `seed_options` are further options that differ from seed to seed, by the seed as a string (the
    keys of JSON); they are no part of the label.
    """

    process: str = NO_DROPOUT
    options: dict[str, Any] = field(default_factory=dict)
    seed_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def only(self, seed: int) -> Dropout:
        """This setting without the options of other seeds."""
        mine = {key: value for key, value in self.seed_options.items() if key == str(seed)}
        return dataclasses.replace(self, seed_options=mine)

    def options_of(self, seed: int) -> dict[str, Any]:
        """All options of the process in a run with `seed`."""
        return {**self.options, **self.seed_options.get(str(seed), {})}

    @property
    def label(self) -> str:
        """The process and its options in the characters that labels may have: "exact-0.5",
        "markov-rate=0.3-memory=0.9". What is long is cut and told apart by a hash."""
        return "-".join([self.process, *(_label(*option) for option in self.options.items())])


def _label(key: str, value: Any) -> str:
    plain = plain_label(value if isinstance(value, str) else json.dumps(value))
    # The dropout ratio and the activity rate speak for themselves.
    return plain if key in ("alpha", "p") else f"{key.replace('_', '-')}={plain}"


def plain_label(text: str) -> str:
    """`text` in the characters that labels may have; what is long is cut and told apart by a
    hash."""
    plain = re.sub(r"[^A-Za-z0-9.+=-]+", "+", text).strip("+")
    if len(plain) > 24:
        plain = f"{plain[:16]}.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    return plain


@dataclass(frozen=True)
class Task:
    """What is learned and how: everything that the jobs of one run share.

    `train_fraction` keeps the first part of each client's index list (released FL-FDMS code: 0.8).
    `eval_every` evaluates the global model in every n-th round, and always in the last one.
    `max_uploads` ends a job after the round in which the clients have sent so many vectors (as
    `RoundRecord.uploads` counts them), and after `rounds` at the latest; None: only after `rounds`.
    `distances` records, round by round, how far the active clients' updates are apart
    (distances.csv).
    `train_loss` evaluates the loss, too, on so many training samples, drawn from all clients' once;
    0: not at all. `norm_rounds`: rounds in which the norm of every received update is noted
    (norms.csv).
    `device`: where models, data and the server are, "cpu" or "cuda"; results differ by rounding.
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
    device: str = "cpu"

    def __post_init__(self) -> None:
        _require(self.train_loss >= 0, "train_loss", "at least 0", self.train_loss)
        _require(self.device in DEVICES, "device", " or ".join(map(repr, DEVICES)), self.device)
        _require(self.rounds >= 1, "rounds", "at least 1", self.rounds)
        _require(self.num_clients >= 1, "num_clients", "at least 1", self.num_clients)
        _require(self.eval_every >= 1, "eval_every", "at least 1", self.eval_every)
        enough = self.max_uploads is None or self.max_uploads >= 1
        _require(enough, "max_uploads", "at least 1, or none", self.max_uploads)
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

    @property
    def training(self) -> LocalTraining:
        """The local training of the method."""
        return self.method.training or self.task.training

    @property
    def key(self) -> str:
        """Name of the job, fit for a folder and unique in its config."""
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
        for name, labels in (
            ("methods", [m.label for m in self.methods]),
            ("dropouts", [d.label for d in self.dropouts]),
            ("seeds", list(self.seeds)),
        ):
            _require(len(labels) > 0, name, "at least one", labels)
            _require(len(set(labels)) == len(labels), name, "no label twice", labels)
        for label in [m.label for m in self.methods] + [d.label for d in self.dropouts]:
            plain = all(c.isalnum() or c in "-.+= " for c in label) and label.strip()
            _require(bool(plain), "label", "letters, digits, '-', '.', '+', '=', spaces", label)

    def jobs(self) -> list[Job]:
        """Every job once, seed by seed, in the order of the methods and dropout settings."""
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
    """The Config written by :meth:`Config.to_json`. Unknown and missing keys raise ConfigError."""
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
    """The Job written by :func:`to_json`."""
    return _build(
        Job,
        data,
        "job",
        task=_task,
        method=_method,
        dropout=lambda v, at: _build(Dropout, v, at),
    )


def _task(value: Any, where: str) -> Task:
    return _build(Task, value, where, training=_training, norm_rounds=_rounds)


def _method(value: Any, where: str) -> Method:
    return _build(Method, value, where, training=lambda v, at: v and _training(v, at))


def _training(value: Any, where: str) -> LocalTraining:
    return _build(LocalTraining, value, where)


def _rounds(value: Any, where: str) -> tuple[int, ...]:
    return tuple(_items(value, where))


def _items(value: Any, where: str) -> list[Any]:
    _require(isinstance(value, list | tuple), where, "a list", value)
    return list(value)


def _build(kind: Any, data: Any, where: str, **nested: Any) -> Any:
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
    return kind(**values)
