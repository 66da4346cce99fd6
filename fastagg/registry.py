# SPDX-License-Identifier: Apache-2.0
"""Rules by name: registering, making, loading and planning them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from fastagg import checkpoint
from fastagg.aggregator import Aggregator
from fastagg.options import option_names

_RULES: dict[str, type[Aggregator]] = {}

Rule = TypeVar("Rule", bound=type[Aggregator])


def register(name: str) -> Callable[[Rule], Rule]:
    """Class decorator: make a rule known to :func:`make` under ``name``."""

    def add(rule: Rule) -> Rule:
        if name in _RULES:
            raise ValueError(f"name: a rule {name!r} is registered already, {_RULES[name]!r}")
        rule.name = name
        _RULES[name] = rule
        return rule

    return add


def available() -> list[str]:
    """The names of all registered rules, sorted."""
    return sorted(_RULES)


def find(name: str, options: list[str]) -> type[Aggregator]:
    """The rule ``name``, which must have these options.

    Raises:
        ValueError: there is no such rule.
        TypeError: the rule has no such option.
    """
    if name not in _RULES:
        close = difflib.get_close_matches(str(name), _RULES, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"name: expected one of {available()}, got {name!r}.{hint}")
    rule = _RULES[name]
    known = option_names(rule)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"rule {name!r} has no option(s) {unknown}; it has {known}")
    return rule


def make(name: str, **options: Any) -> Aggregator:
    """Make an aggregator by the name of its rule.

    Args:
        name: one of :func:`available`.
        **options: ``num_clients``, ``num_params``, ``server_lr``, ``device``, ``nonfinite``,
            ``max_norm``, and those of the rule.

    Raises:
        ValueError: there is no such rule, or an option has a bad value.
        TypeError: the rule has no such option, or a required one is missing.
    """
    return find(name, list(options))(**options)


def load(path: str | os.PathLike[str], **options: Any) -> Aggregator:
    """Recreate the aggregator that ``save`` wrote; it goes on bit-identically.

    Args:
        path: the file.
        **options: to be other than they were, such as ``memory_folder``, ``nonfinite`` or
            ``device`` (on another one it goes on from the same state, with other last bits).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, foreign, or written by another version of the format.
    """
    with checkpoint.opened(path) as saved:
        aggregator = make(saved.rule, **(saved.options | options))
        aggregator.load_state_dict({name: saved.get(name) for name in saved.names})
    return aggregator
