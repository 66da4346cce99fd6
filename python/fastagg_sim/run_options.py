# SPDX-License-Identifier: Apache-2.0
"""The options of `fastagg-sim run` and the configuration they stand for."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastagg_sim.config import (
    Config,
    ConfigError,
    Dropout,
    LocalTraining,
    Method,
    Task,
    plain_label,
)

# Model, partition and options of the partition, where the command line does not say.
DEFAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "digits": ("digits-mlp", "clustered", {"samples_per_client": 60}),
    "synthetic": ("logistic", "natural", {}),
    "mnist": ("mnist-cnn", "clustered", {"samples_per_client": 200}),
    "fmnist": ("niid-cnn", "clustered", {"samples_per_client": 200}),
    "cifar10": ("lenet", "clustered", {"samples_per_client": 1000}),
}

# Options that say where and how to compute, not what.
_RUNTIME = ("config", "out", "workers", "checkpoint_seconds")


@dataclass(frozen=True)
class RunOptions:
    """Compare rules on one data set under one or more dropout settings.

    Options written KEY=VALUE take JSON values or plain words. Names: `fastagg-sim list`.
    """

    config: Path | None = None
    """Repeat the run of this config.json; only --out, --workers and --checkpoint-seconds may be
    given with it."""
    out: Path | None = None
    """Folder of the results; results/NAME by default."""
    workers: int | None = None
    """Number of worker processes; by default one per core, on GPUs one per GPU."""
    checkpoint_seconds: float = 20.0
    """Save every job's state that often; at most this much work is lost when it is killed."""
    name: str = "run"
    """Name of the run."""
    rules: tuple[str, ...] = ("fedavg", "fdms")
    """Rules to compare, each RULE or RULE:KEY=VALUE,KEY=VALUE (for instance
    fdms:similarity=distance)."""
    with_full: bool = False
    """Add "Full": fedavg with every client active in every round."""
    full_first_round: bool = False
    """Every client is active in round 0, whatever the dropout process says."""
    gradient_units: bool = False
    """Servers get updates divided by the round's learning rate, so that what mimic, mifa and others
    remember counts at the current rate when it is used again."""
    dropout: tuple[str, ...] = ("exact",)
    """Dropout processes, each PROCESS or PROCESS:KEY=VALUE,KEY=VALUE (for instance
    round-robin:tau_max=50)."""
    alphas: tuple[float, ...] = (0.5,)
    """Dropout ratios, each combined with every process that can be set to a ratio, unless its
    options say otherwise (docs/dropout.md)."""
    seeds: tuple[int, ...] = (0,)
    """One repetition per seed."""
    rounds: int = 50
    """Number of communication rounds."""
    num_clients: int = 20
    """Number of clients K."""
    server_lr: float = 1.0
    """Server learning rate."""
    dataset: str = "digits"
    """Data set."""
    data_options: tuple[str, ...] = ()
    """Options of the data set, KEY=VALUE."""
    partition: str | None = None
    """Partition; by default one that suits the data set."""
    partition_options: tuple[str, ...] = ()
    """Options of the partition, KEY=VALUE."""
    train_fraction: float = 1.0
    """Part of each client's samples that is used, from the start of its list."""
    model: str | None = None
    """Model; by default one that suits the data set."""
    batch_size: int = 10
    """Batch size of local training."""
    local_epochs: int | None = None
    """Passes over the client's data per round; 1 unless --local-steps is given."""
    local_steps: int | None = None
    """Gradient steps per round, instead of --local-epochs."""
    lr: float = 0.1
    """Learning rate of local training."""
    lr_decay: float = 1.0
    """Factor on the learning rate from round to round."""
    momentum: float = 0.0
    """Momentum of local training."""
    prox: float = 0.0
    """Weight mu of FedProx's proximal term."""
    clients_at_once: int | None = None
    """How many clients share a pass through the model; by default what was measured to be fastest
    on a CPU for this model and batch size, and up to 128 on a GPU. 1: one after the other. Results
    differ by rounding."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where models, data and the server are. cuda: on a GPU. Results differ by rounding."""
    eval_every: int = 1
    """Evaluate the global model in every n-th round."""

    def check_alone(self) -> None:
        """ConfigError if --config is mixed with options that it fixes."""
        if self.config is None:
            return
        given = [
            "--" + f.name.replace("_", "-")
            for f in dataclasses.fields(self)
            if f.name not in _RUNTIME and getattr(self, f.name) != f.default
        ]
        if given:
            raise ConfigError(f"--config: cannot be combined with {', '.join(given)}")

    def build(self) -> Config:
        """The configuration, with every default written out."""
        model, partition, partition_options = DEFAULTS.get(self.dataset, (None, None, {}))
        if self.partition is not None and self.partition != partition:
            partition_options = {}
        epochs = self.local_epochs
        if epochs is None and self.local_steps is None:
            epochs = 1
        every = [_dropout(text, alpha) for text in self.dropout for alpha in self.alphas]
        settings = {dropout.label: dropout for dropout in every}  # not every process has a ratio
        return Config(
            name=self.name,
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
                data_options=_options("data-options", self.data_options),
                partition_options={
                    **partition_options,
                    **_options("partition-options", self.partition_options),
                },
                train_fraction=self.train_fraction,
                server_lr=self.server_lr,
                eval_every=self.eval_every,
                device=self.device,
            ),
            methods=self._methods(),
            dropouts=tuple(settings.values()),
            seeds=self.seeds,
        )

    def _clients_at_once(self, default_model: str | None) -> int:
        if self.clients_at_once is not None:
            return self.clients_at_once
        from fastagg_sim.batched_clients import clients_at_once
        from fastagg_sim.data import DATASETS

        info = DATASETS.get(self.dataset)
        model = self.model or default_model
        if info is None or model is None:
            return 1  # there is no such combination; whoever loads the data says so
        return clients_at_once(model, info.in_shape, self.batch_size, self.device)

    def _methods(self) -> tuple[Method, ...]:
        full = (Method("Full", "fedavg", full_participation=True),) if self.with_full else ()
        return (*full, *(self._method(text) for text in self.rules))

    def _method(self, text: str) -> Method:
        rule, options = _named("rules", text)
        settings = (f"{key.replace('_', '-')}={_value(v)}" for key, v in options.items())
        return Method(
            "-".join([rule, *settings]),
            rule,
            options,
            full_first_round=self.full_first_round,
            gradient_units=self.gradient_units,
        )


def _value(value: Any) -> str:
    """An option's value in a label."""
    return plain_label(json.dumps(value)) if isinstance(value, list | dict) else str(value)


def _given(name: str, value: str | None) -> str:
    if value is None:
        raise ConfigError(f"{name}: expected a name (this data set has no default), got none")
    return value


def _dropout(text: str, alpha: float) -> Dropout:
    from fastagg_sim.dropout.base import PROCESSES
    from fastagg_sim.registry import lookup

    process, options = _named("dropout", text)
    try:
        ratio = lookup("dropout process", process, PROCESSES).at_ratio(alpha)
    except ValueError as error:
        raise ConfigError(f"dropout: {error}") from error
    return Dropout(process, {**ratio, **options})


def _named(name: str, text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of "NAME:KEY=VALUE,KEY=VALUE"; values may hold commas."""
    named, _, rest = text.partition(":")
    return named, _options(name, tuple(re.split(r",(?=\w+=)", rest)) if rest else ())


def _options(name: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """{"key": value} of "key=value" texts; values are JSON where they parse as such."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"{name}: expected KEY=VALUE, got {pair!r}")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found
