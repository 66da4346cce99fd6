# SPDX-License-Identifier: Apache-2.0
"""Make an aggregator of a rule, by name.

Type checkers read ``making.pyi`` in place of this file. A build writes it (``write_stub.py``), with
the options and the class of each rule. Without it, ``make`` has the types that stand here.
"""

from __future__ import annotations

from typing import Any

from fastagg.aggregator import Aggregator
from fastagg.registry import check_required, find


def make(name: str, *positional: object, **options: Any) -> Aggregator:
    """Make an aggregator of the rule ``name``.

    Args:
        name: one of :func:`available`.
        **options: ``num_clients``, ``num_params``, the other options of every rule (see
            :class:`fastagg.Aggregator`), and those of the rule.

    Type checkers and editors know the options and the class of a rule whose name is written in the
    call. A name that is known only at run time is marked: ``make(RuleName(name), ...)``.

    Raises:
        ValueError: there is no such rule, or the value of an option is invalid.
        TypeError: the rule has no such option, or a required one is missing, or an option was
            given without its name.
    """
    if positional:
        given = dict(zip(("num_clients", "num_params"), positional, strict=False))
        shown = ", ".join(f"{option}={value!r}" for option, value in given.items())
        raise TypeError(
            f"make: expected options by name, got {len(positional)} without; write "
            f"fastagg.make({name!r}, {shown}, ...)"
        )
    rule = find(name, list(options))
    check_required(rule, options)
    return rule(**options)
