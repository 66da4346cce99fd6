# SPDX-License-Identifier: Apache-2.0
"""The options of all that has a name on the command line, for `fastagg-sim list`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import fastagg
from fastagg.aggregator import CommonOptions
from fastagg.options import option_defaults
from fastagg.registry import find
from fastagg_sim import dropout, latency, schedules
from fastagg_sim.dropout.base import PROCESSES, DropoutProcess
from fastagg_sim.latency.base import LATENCIES, LatencyProcess
from fastagg_sim.partition import PARTITIONS
from fastagg_sim.schedules.base import SCHEDULES

Options = dict[str, list[str]]
"""Texts KEY=DEFAULT, or KEY for an option without a default, by name of the rule or process."""


def of_rules() -> Options:
    """Return the options of each rule, without those that all rules have.

    "fedawe" is a name of the command line only: `fedavg` with other clients.
    """
    common = {"num_clients", "num_params", *CommonOptions.__annotations__}
    return {
        name: [
            _text(option, default)
            for option, default in option_defaults(find(name, [])).items()
            if option not in common
        ]
        for name in fastagg.available()
    } | {"fedawe": [_text("eta", 1.0)]}


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
