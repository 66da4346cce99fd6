# SPDX-License-Identifier: Apache-2.0
"""Configurations: validation, jobs, JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastagg_sim.config import (
    Config,
    ConfigError,
    Dropout,
    Job,
    LocalTraining,
    Method,
    Task,
    config_from_dict,
    job_from_dict,
    to_json,
)

VALUES = st.one_of(st.booleans(), st.integers(), st.floats(0, 1), st.text(max_size=5))
OPTIONS = st.dictionaries(st.sampled_from(["alpha", "beta", "size"]), VALUES, max_size=2)


def _task(**changes: Any) -> Task:
    training = LocalTraining(local_epochs=1)
    settings = {"dataset": "digits", "partition": "clustered", "model": "m", "rounds": 3}
    return Task(**{**settings, "training": training, **changes})


def _config(**changes: Any) -> Config:
    parts: dict[str, Any] = {
        "name": "x",
        "task": _task(),
        "methods": (Method("Full", "fedavg", full_participation=True), Method("FDMS", "fdms")),
        "dropouts": (Dropout("exact", {"alpha": 0.5}), Dropout("exact", {"alpha": 0.7})),
        "seeds": (0, 1),
    }
    return Config(**{**parts, **changes})


def test_jobs_share_full_participation_between_dropout_settings() -> None:
    keys = [job.key for job in _config().jobs()]
    assert keys == [
        "Full_full_seed0",
        "FDMS_exact-0.5_seed0",
        "FDMS_exact-0.7_seed0",
        "Full_full_seed1",
        "FDMS_exact-0.5_seed1",
        "FDMS_exact-0.7_seed1",
    ]


@pytest.mark.parametrize(
    ("dropout", "label"),
    [
        (Dropout(), "full"),
        (Dropout("exact", {"alpha": 0.5}), "exact-0.5"),
        (Dropout("bernoulli", {"p": [0.1, 1]}), "bernoulli-0.1+1"),
        (Dropout("markov", {"rate": 0.3, "memory": 0.9}), "markov-rate=0.3-memory=0.9"),
        (Dropout("round-robin", {"tau_max": 20}), "round-robin-tau-max=20"),
        (Dropout("sampled", {"options": {"p": 0.5}}), "sampled-options=p+0.5"),
    ],
)
def test_labels_of_dropout_settings(dropout: Dropout, label: str) -> None:
    assert dropout.label == label
    assert _config(dropouts=(dropout,)).jobs()[-1].key == f"FDMS_{label}_seed1"


def test_labels_of_long_options_are_cut_and_stay_distinct() -> None:
    one, two = (Dropout("trace", {"path": f"/traces of a week/phones/day {n}.csv"}) for n in (1, 2))
    assert one.label.startswith("trace-path=traces+of+a+week.")
    assert len(one.label) < 50 and one.label != two.label
    _config(dropouts=(one, two))


def test_dropout_settings_with_one_label_are_named() -> None:
    one, two = (Dropout("trace", {"path": path}) for path in ("a/b.csv", "a_b.csv"))
    with pytest.raises(ConfigError, match=r"dropouts: .*'trace-path=a[+]b.csv'.*a/b.csv.*a_b.csv"):
        _config(dropouts=(one, Dropout(), two))


def test_a_method_that_repeats_the_training_of_the_task_is_the_same_job() -> None:
    task = _task()
    with_it, without, other = (
        Job(task, Method("a", "fdms", training=training), Dropout(), 0)
        for training in (task.training, None, LocalTraining(local_epochs=2))
    )
    assert to_json(with_it) == to_json(without) != to_json(other)
    assert with_it.training == without.training == task.training


@given(options=OPTIONS, data_options=OPTIONS, steps=st.integers(1, 9), lr=st.floats(1e-9, 1e3))
def test_json_round_trip(
    options: dict[str, Any], data_options: dict[str, Any], steps: int, lr: float
) -> None:
    training = LocalTraining(local_steps=steps, lr=lr, prox=0.5)
    own = LocalTraining(local_steps=steps, lr=lr, prox=0.25)
    config = _config(
        task=_task(training=training, data_options=data_options),
        methods=(Method("a", "fdms", options, full_first_round=True, training=own),),
    )
    assert config_from_dict(json.loads(config.to_json())) == config
    job = config.jobs()[0]
    assert job_from_dict(json.loads(to_json(job))) == job


def test_json_with_unknown_or_missing_keys_is_refused() -> None:
    content = json.loads(_config().to_json())
    content["task"]["training"]["learning_rate"] = 1
    with pytest.raises(ConfigError, match=r"config\.task\.training.*learning_rate"):
        config_from_dict(content)
    content = json.loads(_config().to_json())
    del content["task"]["rounds"]
    with pytest.raises(ConfigError, match=r"config\.task: the keys \['rounds'\] are missing"):
        config_from_dict(content)
    with pytest.raises(ConfigError, match="an object"):
        config_from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("name", 3, "config.name: expected text"),
        ("seeds", ["0"], "config.seeds: expected a list of whole numbers"),
        ("seeds", [True], "config.seeds: expected a list of whole numbers"),
        ("seeds", 0, "config.seeds: expected a list"),
        ("task", None, "config.task: expected an object"),
        ("task.rounds", "3", "config.task.rounds: expected a whole number"),
        ("task.rounds", 3.0, "config.task.rounds: expected a whole number"),
        ("task.eval_every", None, "config.task.eval_every: expected a whole number"),
        ("task.num_clients", True, "config.task.num_clients: expected a whole number"),
        ("task.distances", 1, "config.task.distances: expected true or false"),
        ("task.norm_rounds", ["1"], "config.task.norm_rounds: expected a list of whole numbers"),
        ("task.max_uploads", "9", "config.task.max_uploads: expected a whole number or null"),
        ("task.latency", 3, "config.task.latency: expected an object"),
        ("task.latency", 0, "config.task.latency: expected"),
        ("task.training.lr", "0.1", "config.task.training.lr: expected a number"),
        pytest.param(
            *("task.training.lr", 10**400, "config.task.training.lr: expected a number"),
            id="larger than any float",
        ),
        ("methods.0.label", 3, "config.methods.label: expected text"),
        ("methods.0.options", [1], "config.methods.options: expected an object"),
        ("methods.0.echo", "1", "config.methods.echo: expected a number or null"),
        ("dropouts.0.process", None, "config.dropouts.process: expected text"),
        ("dropouts.0.seed_options", {"0": 1}, "config.dropouts.seed_options: expected an object"),
    ],
)
def test_json_with_a_value_of_another_type_is_refused(path: str, value: Any, message: str) -> None:
    content = json.loads(_config().to_json())
    *parents, last = path.split(".")
    place = content
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    with pytest.raises(ConfigError, match=message):
        config_from_dict(content)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "local_epochs, local_steps"),
        ({"local_epochs": 1, "local_steps": 1}, "local_epochs, local_steps"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"local_steps": -1}, "local_steps"),
        ({"local_epochs": 1, "batch_size": 0}, "batch_size"),
        ({"local_epochs": 1, "lr": 0.0}, "lr"),
        ({"local_epochs": 1, "lr": float("nan")}, "lr"),
        ({"local_epochs": 1, "lr_decay": 0.0}, "lr_decay"),
        ({"local_epochs": 1, "momentum": 1.0}, "momentum"),
        ({"local_epochs": 1, "prox": -1.0}, "prox"),
    ],
)
def test_bad_training_is_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LocalTraining(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 0),
        ("num_clients", 0),
        ("eval_every", 0),
        ("train_fraction", 0.0),
        ("train_fraction", 1.1),
        ("server_lr", -1.0),
        ("server_lr", float("inf")),
    ],
)
def test_bad_task_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        _task(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"methods": (Method("a", "fdms"), Method("a", "mifa"))}, "methods"),
        ({"methods": (Method("../a", "fdms"),)}, "label"),
        ({"methods": (Method("a,b", "fdms"),)}, "label"),
        ({"methods": (Method("", "fdms"),)}, "label"),
    ],
)
def test_bad_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(**changes)
