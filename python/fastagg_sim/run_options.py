# SPDX-License-Identifier: Apache-2.0
"""The options of `fastagg-sim run`, and how a configuration is built from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastagg_sim.config import (
    Config,
    ConfigError,
    Dropout,
    Latency,
    LocalTraining,
    Method,
    Schedule,
    Task,
    plain_label,
)

# For each data set: default model, default partition, default options of that partition.
DEFAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "digits": ("digits-mlp", "clustered", {"samples_per_client": 60}),
    "synthetic": ("logistic", "natural", {}),
    "mnist": ("mnist-cnn", "clustered", {"samples_per_client": 200}),
    "fmnist": ("niid-cnn", "clustered", {"samples_per_client": 200}),
    "cifar10": ("lenet", "clustered", {"samples_per_client": 1000}),
}

# Options that do not change what is computed; they can be combined with --config.
_RUNTIME = ("config", "out", "workers", "checkpoint_seconds", "reuse")
_FEDAWE = "fedawe"  # among the rules on the command line: a rule with other clients


@dataclass(frozen=True)
class RunOptions:
    """Compare rules on one data set under one or more dropout settings.

    `fastagg-sim list` shows all names. In KEY=VALUE options, VALUE is JSON or a plain word.
    """

    config: Path | None = None
    """Repeat the run of this config.json. Can only be combined with --out, --workers,
    --checkpoint-seconds and --reuse."""
    out: Path | None = None
    """Results folder; results/NAME by default. If it has an interrupted run of the same options,
    that run is resumed."""
    workers: int | None = None
    """Number of worker processes, at least 1; by default one per core, or one per GPU with --device
    cuda."""
    checkpoint_seconds: float = 20.0
    """Seconds between two checkpoints of a job; a job that is killed loses at most the work since
    its last checkpoint."""
    reuse: tuple[Path, ...] = ()
    """Results folders, or folders that contain some: jobs that they have with the same settings are
    copied from there and not computed again."""
    name: str | None = None
    """Name of the run. By default it consists of the data set and a hash of all options, so that
    runs with different options have different results folders. To add rules, dropout settings or
    seeds to a run later, give it a name: jobs that are finished are then not repeated."""
    rules: tuple[str, ...] = ("fedavg", "fdms")
    """Rules to compare, each RULE or RULE:KEY=VALUE,KEY=VALUE (for instance
    fdms:similarity=distance). Also fedawe, or fedawe:eta=RATE: fedavg with the clients of FedAWE,
    which keep their models while they are absent."""
    with_full: bool = False
    """Also run "Full": fedavg with every client active in every round. It has the options of the
    server and --gradient-units. It waits for all clients, whatever --schedule says."""
    full_first_round: bool = False
    """Make every client active in round 0, regardless of the dropout process."""
    gradient_units: bool = False
    """Divide updates by the round's learning rate before the server gets them, and multiply the
    server's by it. Rules with a memory (mimic, mifa, ...) then apply remembered updates at the
    current learning rate. Server optimizers with a state, and --clip-norm, are then in units of
    gradients, too. Not for rules that remember models (stale-models)."""
    dropout: tuple[str, ...] = ("exact",)
    """Dropout processes, each PROCESS or PROCESS:KEY=VALUE,KEY=VALUE (for instance
    round-robin:tau_max=50)."""
    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratios. Every process that has a dropout ratio runs once per ratio, unless its
    KEY=VALUE options already set it (docs/dropout.md)."""
    latency: str | None = None
    """How long clients take to answer: PROCESS or PROCESS:KEY=VALUE,KEY=VALUE (for instance
    lognormal:median=20,sigma=0.5). Rounds then take simulated time (docs/latency.md)."""
    schedule: tuple[str, ...] = ()
    """For which answers the server waits, each SCHEDULE or SCHEDULE:KEY=VALUE,KEY=VALUE (for
    instance deadline:seconds=30); with --latency. Every rule runs with each of them. By default the
    server waits for all."""
    max_seconds: float | None = None
    """Simulated seconds after which a run ends, if it has not reached --rounds; with --latency."""
    max_uploads: int | None = None
    """Updates that the server receives, after which a run ends if it has not reached --rounds."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; the run is repeated once per seed."""
    rounds: int = 50
    """Number of communication rounds."""
    num_clients: int = 20
    """Number of clients K."""
    server_lr: float = 1.0
    """Server learning rate."""
    server_optimizer: str = "sgd"
    """Server optimizer of all rules, NAME or NAME:KEY=VALUE,KEY=VALUE (for instance
    adam:tau=1e-9); the names are those of fastagg.ServerOptimizer."""
    min_active: int = 1
    """Minimum number of active clients; a round with fewer is skipped, under every rule."""
    clip_norm: float | None = None
    """Norm to which longer updates are scaled down, under every rule."""
    noise_multiplier: float = 0.0
    """Standard deviation of the noise on the aggregate, in units of the sensitivity; needs
    --clip-norm and rules that take it (docs/privacy.md)."""
    dataset: str = "digits"
    """Data set."""
    data_options: tuple[str, ...] = ()
    """Options of the data set, KEY=VALUE."""
    partition: str | None = None
    """Partition of the training data; by default one that suits the data set."""
    partition_options: tuple[str, ...] = ()
    """Options of the partition, KEY=VALUE."""
    train_fraction: float = 1.0
    """Fraction of each client's samples that is used, taken from the start of its list."""
    model: str | None = None
    """Model; by default one that suits the data set."""
    batch_size: int = 10
    """Batch size of local training."""
    local_epochs: int | None = None
    """Passes over the client's data per round; 1 unless --local-steps is given."""
    local_steps: int | None = None
    """Gradient steps per client and round, instead of --local-epochs."""
    lr: float = 0.1
    """Learning rate of local training."""
    lr_decay: float = 1.0
    """The learning rate is multiplied by this factor after every round."""
    momentum: float = 0.0
    """Momentum of local training."""
    prox: float = 0.0
    """Weight mu of FedProx's proximal term."""
    clients_at_once: int | None = None
    """Number of clients that are trained together, in one pass through the model. By default the
    fastest number measured on a CPU for this model and batch size, and up to 128 on a GPU; 1 trains
    one client after the other. The results of different numbers differ by rounding errors. It has
    no effect on fedawe, whose clients start from different models and train one after the other."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the models, the data and the server. The results of cpu and cuda differ by rounding
    errors."""
    eval_every: int = 1
    """Evaluate the global model every this many rounds."""

    def check_alone(self, arguments: Sequence[str]) -> None:
        """Raise ConfigError if --config is combined with options that the file determines.

        arguments: the words of the command line, which say which options were given, also those
            with the value of their default.
        """
        if self.config is None:
            return
        words = {word.partition("=")[0].replace("_", "-") for word in arguments}
        options = [
            "--" + f.name.replace("_", "-")
            for f in dataclasses.fields(self)
            if f.name not in _RUNTIME
        ]
        given = [option for option in options if option in words]
        if given:
            raise ConfigError(
                f"--config: cannot be combined with {', '.join(given)}; "
                "the configuration file determines these settings"
            )

    def build(self) -> Config:
        """Return the configuration, with all defaults filled in.

        Raises ConfigError for an unknown name or a wrong option; the message names the option.
        """
        self._check_lists()
        self._check_names()
        model, partition, partition_options = DEFAULTS.get(self.dataset, (None, None, {}))
        if self.partition is not None and self.partition != partition:
            partition_options = {}
        epochs = self.local_epochs
        if epochs is None and self.local_steps is None:
            epochs = 1
        config = Config(
            name=self.name or "",
            task=Task(
                dataset=self.dataset,
                partition=_given("partition", self.partition or partition),
                model=_given("model", self.model or model),
                training=LocalTraining(
                    batch_size=self.batch_size,
                    local_epochs=epochs,
                    local_steps=self.local_steps,
                    lr=self.lr,
                    lr_decay=self.lr_decay,
                    momentum=self.momentum,
                    prox=self.prox,
                    clients_at_once=self._clients_at_once(model),
                ),
                rounds=self.rounds,
                num_clients=self.num_clients,
                data_options=self._data_options(),
                partition_options={
                    **partition_options,
                    **_options("partition-options", self.partition_options),
                },
                train_fraction=self.train_fraction,
                server_lr=self.server_lr,
                eval_every=self.eval_every,
                device=self.device,
                latency=self._latency(),
                max_seconds=self.max_seconds,
                max_uploads=self.max_uploads,
            ),
            methods=self._methods(),
            dropouts=self._dropouts(),
            seeds=self.seeds,
        )
        if self.name is not None:
            return config
        digest = hashlib.blake2b(config.to_json().encode(), digest_size=4).hexdigest()
        return dataclasses.replace(config, name=f"{self.dataset}-{digest}")

    def _check_lists(self) -> None:
        """Raise ConfigError for an empty list, or a value that is in one of them twice.

        `_dropouts` finds settings that are there twice in different words.
        """
        for name in ("rules", "dropout", "alphas", "schedule", "seeds"):
            values = getattr(self, name)
            if not values and name != "schedule" and not (name == "rules" and self.with_full):
                raise ConfigError(f"--{name}: expected at least one value, got none")
            again = [value for i, value in enumerate(values) if value in values[:i]]
            if again and name != "dropout":
                raise ConfigError(f"--{name}: expected each value once, got {again[0]} again")

    def _check_names(self) -> None:
        import fastagg
        from fastagg_sim import schedules
        from fastagg_sim.data import DATASETS
        from fastagg_sim.models import MODELS
        from fastagg_sim.named_options import check_rule_options
        from fastagg_sim.partition import PARTITIONS

        _check_name("dataset", "data set", self.dataset, DATASETS)
        for option, name, known in (
            ("partition", self.partition, PARTITIONS),
            ("model", self.model, MODELS),
        ):
            if name is not None:
                _check_name(option, option, name, known)
        for text in self.rules:
            rules = [*fastagg.available(), _FEDAWE]
            name, options = _named("rules", text)
            _check_name("rules", "rule", name, rules)
            check_rule_options(name, options)
        for text in self.schedule:
            name, _ = _named("schedule", text)
            _check_name("schedule", "schedule", name, schedules.available())

    def _dropouts(self) -> tuple[Dropout, ...]:
        """Return the dropout settings. Raises ConfigError if one is given twice."""
        found: list[Dropout] = []
        for text in self.dropout:
            every = [_dropout(text, alpha) for alpha in self.alphas]
            # A process without a dropout ratio gives the same setting for every alpha; keep one.
            distinct = [d for i, d in enumerate(every) if d not in every[:i]]
            again = [d.label for d in distinct if d in found]
            if again:
                raise ConfigError(
                    f"--dropout: expected each setting once, got {again[0]} again from {text!r}"
                )
            found += distinct
        return tuple(found)

    def _latency(self) -> Latency | None:
        if self.latency is None:
            for name in ("schedule", "max_seconds"):
                if getattr(self, name):
                    option = "--" + name.replace("_", "-")
                    raise ConfigError(f"{option}: needs --latency, which gives rounds a length")
            return None
        from fastagg_sim import latency

        process, options = _named("latency", self.latency)
        _check_name("latency", "latency process", process, latency.available())
        return Latency(process, options)

    def _data_options(self) -> dict[str, Any]:
        """Return the options of the data set.

        Synthetic data are generated for `num_clients` clients, unless another partition than their
        own divides them.
        """
        given = _options("data-options", self.data_options)
        if self.dataset != "synthetic" or self.partition not in (None, "natural"):
            return given
        from fastagg_sim.data.synthetic import NUM_CLIENTS

        if self.num_clients == NUM_CLIENTS:
            return given
        return {"num_clients": self.num_clients, **given}

    def _clients_at_once(self, default_model: str | None) -> int:
        if self.clients_at_once is not None:
            return self.clients_at_once
        from fastagg_sim.batched_clients import clients_at_once
        from fastagg_sim.data import DATASETS

        model = _given("model", self.model or default_model)
        in_shape = DATASETS[self.dataset].in_shape
        return clients_at_once(model, in_shape, self.batch_size, self.device)

    def _methods(self) -> tuple[Method, ...]:
        full: tuple[Method, ...] = ()
        if self.with_full:
            full = (
                Method(
                    "Full",
                    "fedavg",
                    self._server_options(),
                    full_participation=True,
                    gradient_units=self.gradient_units,
                ),
            )
        settings: list[Schedule | None] = [
            Schedule(*_named("schedule", text)) for text in self.schedule
        ]
        return (
            *full,
            *(self._method(text, setting) for text in self.rules for setting in settings or [None]),
        )

    def _server_options(self) -> dict[str, Any]:
        """Return the options that all rules share, where they are not the defaults."""
        options: dict[str, Any] = {}
        if self.server_optimizer != "sgd":
            from fastagg.server_optimizer import read_server_optimizer

            name, arguments = _named("server-optimizer", self.server_optimizer)
            options["server_optimizer"] = {"name": name, **arguments} if arguments else name
            try:
                read_server_optimizer(options["server_optimizer"])
            except (TypeError, ValueError) as error:
                raise ConfigError(f"--server-optimizer: {error}") from error
        if self.min_active != 1:
            options["min_active"] = self.min_active
        if self.clip_norm is not None:
            options["clip_norm"] = self.clip_norm
        if self.noise_multiplier:
            options["noise_multiplier"] = self.noise_multiplier
        return options

    def _method(self, text: str, schedule: Schedule | None) -> Method:
        from fastagg_sim.rule_seeds import draws

        rule, options = _named("rules", text)
        settings = (f"{key.replace('_', '-')}={_value(v)}" for key, v in options.items())
        label = "-".join([rule, *settings, *([] if schedule is None else [schedule.label])])
        echo = None
        if rule == _FEDAWE:
            echo, rule = options.pop("eta", 1.0), "fedavg"
            if isinstance(echo, bool) or not isinstance(echo, int | float):
                raise ConfigError(f"--rules: fedawe: expected a number as eta, got {echo!r}")
        return Method(
            label,
            rule,
            {**self._server_options(), **options},
            full_first_round=self.full_first_round,
            gradient_units=self.gradient_units,
            schedule=schedule,
            echo=echo,
            seeded=draws(rule, options),
        )


def _value(value: Any) -> str:
    """Return the text of an option's value in a method's label."""
    if isinstance(value, str):
        return plain_label(value)
    return plain_label(json.dumps(value)) if isinstance(value, list | dict) else str(value)


def _given(name: str, value: str | None) -> str:
    if value is None:
        raise ConfigError(f"--{name}: expected a name (there is no default for this data set)")
    return value


def _check_name(option: str, kind: str, name: str, known: Collection[str]) -> None:
    from fastagg_sim.registry import check_name

    try:
        check_name(kind, name, known)
    except ValueError as error:
        raise ConfigError(f"--{option}: {error}") from error


def _dropout(text: str, alpha: float) -> Dropout:
    from fastagg_sim.dropout.base import PROCESSES
    from fastagg_sim.registry import lookup

    process, options = _named("dropout", text)
    try:
        ratio = lookup("dropout process", process, PROCESSES).at_ratio(alpha)
    except ValueError as error:
        raise ConfigError(f"--dropout: {error}") from error
    return Dropout(process, {**ratio, **options})


def _named(name: str, text: str) -> tuple[str, dict[str, Any]]:
    """Split "NAME:KEY=VALUE,KEY=VALUE" into the name and the options; values may contain commas."""
    named, _, rest = text.partition(":")
    return named, _options(name, tuple(re.split(r",(?=\w+=)", rest)) if rest else ())


def _options(name: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse "key=value" texts into {"key": value}; a value that is not valid JSON is a string."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--{name}: expected KEY=VALUE, got {pair!r}")
        if key in found:
            raise ConfigError(f"--{name}: expected each key once, got {key!r} again: {pair!r}")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found
