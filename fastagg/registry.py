# SPDX-License-Identifier: Apache-2.0
"""Register rules by name, and find them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import NewType, TypeVar

from fastagg.aggregator import Aggregator
from fastagg.options import did_you_mean, option_defaults, option_names

RuleName = NewType("RuleName", str)
"""Mark a name that is known only at run time, for type checkers: ``make(RuleName(name), ...)``.

They refuse a plain ``str`` there, since a misspelt name in the code is a ``str``, too. At run time
``RuleName(name)`` is ``name``. Names from :func:`available` are marked.
"""

_RULES: dict[str, type[Aggregator]] = {}

Rule = TypeVar("Rule", bound=type[Aggregator])


def register(name: str) -> Callable[[Rule], Rule]:
    """Return a class decorator that registers a rule under ``name``, for :func:`fastagg.make`.

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


def available() -> list[RuleName]:
    """Return the names of all registered rules, sorted."""
    return [RuleName(name) for name in sorted(_RULES)]


def find(
    name: str, options: list[str], others: Collection[str] = (), *, argument: str = "name"
) -> type[Aggregator]:
    """Return the class of the rule ``name``, and check that it has these options.

    Args:
        name: the name of the rule.
        options: names of options.
        others: names of options that the caller of this takes itself, for hints.
        argument: what the caller calls ``name``, for messages.

    Raises:
        ValueError: there is no such rule.
        TypeError: the rule has no such option.
    """
    if not isinstance(name, str) or name not in _RULES:
        hint = did_you_mean(str(name), _RULES)
        raise ValueError(f"{argument}: expected one of {available()}, got {name!r}.{hint}")
    rule = _RULES[name]
    known = option_names(rule)
    unknown = sorted(set(options) - set(known))
    if unknown:
        hints = unknown_options(rule, unknown, [*known, *others])
        raise TypeError(f"rule {name!r} has no option(s) {unknown}; it has {known}.{hints}")
    return rule


def unknown_options(rule: type[Aggregator], unknown: list[str], known: list[str]) -> str:
    """Return sentences that say why a rule lacks options, or which of the ``known`` ones were
    probably meant; empty if neither is known."""
    return "".join(_reason(rule, option) or _hint(option, known) for option in unknown)


def check_required(rule: type[Aggregator], options: Collection[str]) -> None:
    """Raise TypeError unless all options of a rule are given that have no default."""
    missing = [
        option
        for option, default in option_defaults(rule).items()
        if default is inspect.Parameter.empty and option not in options
    ]
    if missing:
        raise TypeError(
            f"rule {rule.name!r}: expected the option(s) {missing}, which have no default, got "
            f"{sorted(options)}"
        )


_OTHER_NAMES = {
    **dict.fromkeys(["lr", "learning_rate", "eta", "server_learning_rate"], "server_lr"),
    **dict.fromkeys(["K", "n_clients", "clients"], "num_clients"),
    **dict.fromkeys(["d", "dim", "n_params", "params"], "num_params"),
    **dict.fromkeys(["f", "n_byzantine", "byzantine"], "num_byzantine"),
    **dict.fromkeys(["weights", "num_samples"], "client_weights"),
}
"""Names that papers and other libraries give to options."""


def _reason(rule: type[Aggregator], option: str) -> str:
    """Return why the rule cannot have an option of other rules; empty if that is not known."""
    return f" {option}: {rule.refused[option]}." if option in rule.refused else ""


def _hint(option: str, known: list[str]) -> str:
    """Return which of the known options was probably meant, as a sentence; empty if none was."""
    other = _OTHER_NAMES.get(option)
    close = [other] if other in known else difflib.get_close_matches(option, known, n=1)
    return f" Did you mean {close[0]}= for {option}=?" if close else ""
