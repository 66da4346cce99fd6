# SPDX-License-Identifier: Apache-2.0
"""Register rules by name; find, make and load them."""

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
    """Return a class decorator that registers a rule under ``name``, for :func:`make`.

    Raises:
        ValueError: another rule has this name (raised when the decorator is applied).
    """

    def add(rule: Rule) -> Rule:
        if name in _RULES:
            raise ValueError(f"name: {name!r} is already the name of {_RULES[name].__name__}")
        rule.name = name
        _RULES[name] = rule
        return rule

    return add


def available() -> list[str]:
    """Return the names of all registered rules, sorted."""
    return sorted(_RULES)


def find(name: str, options: list[str]) -> type[Aggregator]:
    """Return the class of the rule ``name``, and check that it has these options.

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
    """Make an aggregator of the rule ``name``.

    Args:
        name: one of :func:`available`.
        **options: ``num_clients``, ``num_params``, ``server_lr``, ``device``, ``nonfinite``,
            ``max_norm`` (see :class:`fastagg.Aggregator`), and the options of the rule.

    Raises:
        ValueError: there is no such rule, or the value of an option is invalid.
        TypeError: the rule has no such option, or a required one is missing.
    """
    return find(name, list(options))(**options)


def load(path: str | os.PathLike[str], **options: Any) -> Aggregator:
    """Recreate an aggregator from a file that ``Aggregator.save`` wrote.

    Its further steps give the same bits as those of the saved aggregator.

    Args:
        path: the file.
        **options: options to change, for example ``memory_folder``, ``nonfinite`` or ``device``.
            On another device the state is the same, but further steps may differ in the last bits.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, is not a checkpoint of this library, or has another
            format version; or the value of an option is invalid.
        TypeError: the rule has no such option.
    """
    with checkpoint.opened(path) as saved:
        aggregator = make(saved.rule, **(saved.options | options))
        aggregator.load_state_dict({name: saved.get(name) for name in saved.names})
    return aggregator
