# SPDX-License-Identifier: Apache-2.0
"""The options of all that has a name on the command line, for `fastagg-sim list`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Collection
from typing import Any

import fastagg
from fastagg.aggregator import CommonOptions
from fastagg.options import option_defaults
from fastagg.registry import find, unknown_options
from fastagg_sim import dropout, latency, schedules
from fastagg_sim.config import OF_THE_TASK, ConfigError
from fastagg_sim.dropout.base import PROCESSES, DropoutProcess
from fastagg_sim.latency.base import LATENCIES, LatencyProcess
from fastagg_sim.partition import PARTITIONS
from fastagg_sim.schedules.base import SCHEDULES
from fastagg_sim.simulation import SIMULATED

Options = dict[str, list[str]]
"""Texts KEY=DEFAULT, or KEY for an option without a default, by name of the rule or process."""


def of_rules() -> Options:
    """Return the options of each rule, without those that the run sets, or that all rules have
    unless the rule has another default of them.

    "fedawe" is a name of the command line only: `fedavg` with other clients.
    """
    others = {*OF_THE_TASK, *CommonOptions.__annotations__}
    found: Options = {}
    for name in fastagg.available():
        rule = find(name, [])
        found[name] = [
            "seed=(of the run)" if option == "seed" else _text(option, default)
            for option, default in option_defaults(rule).items()
            if option not in others and option not in rule.refused
        ]
        found[name] += [_text(option, value) for option, value in rule.own_defaults.items()]
    return found | {"fedawe": [_text("eta", 1.0), *found["fedavg"]]}


def of_every_rule() -> list[str]:
    """Return the options that all rules have, without those that the run sets."""
    defaults = {**option_defaults(fastagg.FedAvg), **SIMULATED}
    common = (option for option in CommonOptions.__annotations__ if option not in OF_THE_TASK)
    return [_text(option, defaults[option]) for option in common]


def check_rule_options(name: str, options: Collection[str]) -> None:
    """Raise ConfigError for an option of --rules that the rule does not have.

    Options that the run sets are not checked here.
    """
    rule = fastagg.FedAvg if name == "fedawe" else find(name, [])
    texts = of_rules()[name] + of_every_rule()
    own = list(dict.fromkeys(text.partition("=")[0] for text in texts))
    unknown = sorted(set(options) - {*own, *OF_THE_TASK})
    if unknown:
        raise ConfigError(
            f"--rules: {name} has no option {', '.join(unknown)}; it has {', '.join(own)}."
            + unknown_options(rule, unknown, own)
        )


def of_processes() -> Options:
    """Return the options of each dropout process."""
    common = {field.name for field in dataclasses.fields(DropoutProcess)}
    return {
        name: [
            _text(field.name, _default(field))
            for field in dataclasses.fields(PROCESSES[name])
            if field.init and field.name not in common
        ]
        for name in dropout.available()
    }


def of_latencies() -> Options:
    """Return the options of each latency process."""
    common = {field.name for field in dataclasses.fields(LatencyProcess)}
    return {
        name: [
            _text(field.name, _default(field))
            for field in dataclasses.fields(LATENCIES[name])
            if field.name not in common
        ]
        for name in latency.available()
    }


def of_schedules() -> Options:
    """Return the options of each schedule."""
    return {
        name: [
            _text(parameter.name, parameter.default)
            for parameter in inspect.signature(SCHEDULES[name]).parameters.values()
            if parameter.name != "latency"
        ]
        for name in schedules.available()
    }


def of_partitions() -> Options:
    """Return the options of each partition."""
    return {
        name: [
            _text(parameter.name, parameter.default)
            for parameter in inspect.signature(make).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        ]
        for name, make in PARTITIONS.items()
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty


def _text(name: str, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return name
    return f"{name}={default if isinstance(default, str) else json.dumps(default)}"
