# SPDX-License-Identifier: Apache-2.0
"""The roles of a model's arrays: what the server does with each of them.

=========  =============================================================================
role       what happens to the array
=========  =============================================================================
"rule"     the rule aggregates it, as a part of the vector [d]
"mean"     its value becomes the plain mean of the values of this round's active clients
"server"   the server's value stays, and is sent; what clients answer is ignored
"local"    every client keeps its own; the server neither sends nor needs it
=========  =============================================================================

A rule with a memory adds and subtracts updates of different rounds. Running statistics, such as a
variance, do not survive this: the result may be negative. A mean of values stays within them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

ROLES = ("rule", "mean", "server", "local")
OF_FLOATS = ("rule", "mean")
"""Roles that integers and bools cannot have."""

Roles = Literal["auto"] | Mapping[str, str]
"""Names or patterns of names -> roles, in order; or "auto", which is the same as no pattern."""

_STATISTICS = ("running_mean", "running_var")


def read_roles(value: object) -> dict[str, str]:
    """Return the option ``roles`` as a dict from patterns to roles.

    Args:
        value: "auto", or an ordered mapping from names, or patterns as of :mod:`fnmatch`, to roles.

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    if isinstance(value, str) and value == "auto":
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f'roles: expected "auto" or a mapping of patterns to roles, got {value!r}')
    for pattern, role in value.items():
        if not isinstance(pattern, str):
            raise TypeError(f"roles: expected names or patterns as keys, got {pattern!r}")
        if role not in ROLES:
            raise ValueError(f"roles: {pattern!r}: expected one of {[*ROLES]}, got {role!r}")
    return dict(value)


def assign_roles(
    is_float: Mapping[str, bool], patterns: Mapping[str, str], statistics: Collection[str] = ()
) -> dict[str, str]:
    """Return the role of every array of a model.

    The first pattern that matches a name decides. Patterns with the roles "rule" and "mean" concern
    arrays of floats only. For other names: integers and bools are "server"; names that end in
    running_mean or running_var, and those in ``statistics``, are "mean"; the rest is "rule".

    Args:
        is_float: dict from the names of the arrays to whether they hold floats.
        patterns: from :func:`read_roles`.
        statistics: names that are known to be running statistics.

    Raises:
        ValueError: a pattern matches no array.
    """
    for pattern, role in patterns.items():
        if not any(_matches(pattern, role, *array) for array in is_float.items()):
            kind = "array of floats" if role in OF_FLOATS else "array"
            raise ValueError(
                f"roles: the pattern {pattern!r} matches no {kind} of the model; its arrays are "
                f"{[*is_float][:10]}{' ...' if len(is_float) > 10 else ''}"
            )
    return {
        name: next(
            (role for pattern, role in patterns.items() if _matches(pattern, role, name, floats)),
            _default(name, floats, statistics),
        )
        for name, floats in is_float.items()
    }


def norm_statistics(module: nn.Module) -> set[str]:
    """Return the names of all running statistics of a module's normalisation layers."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _NormBase)
        for name, buffer in layer.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


def is_variance(name: str) -> bool:
    """Return whether the values of an array with the role "mean" must not be negative."""
    return name.endswith("running_var")


def _matches(pattern: str, role: str, name: str, is_float: bool) -> bool:
    # A whole name is no pattern, also if it has a bracket or an asterisk.
    fits = name == pattern or fnmatchcase(name, pattern)
    return fits and (is_float or role not in OF_FLOATS)


def _default(name: str, is_float: bool, statistics: Collection[str]) -> str:
    if not is_float:
        return "server"
    return "mean" if name in statistics or name.endswith(_STATISTICS) else "rule"
