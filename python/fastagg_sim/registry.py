# SPDX-License-Identifier: Apache-2.0
"""Look up functions and classes by name, with error messages that list the known names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_type_hints

from fastagg.options import did_you_mean
from fastagg_sim.value_types import expected, fits

T = TypeVar("T")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`.

    Raises ValueError, naming the `kind` of name, all known names and similar ones, if `name` is
    unknown.
    """
    check_name(kind, name, table)
    return table[name]


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError, as `lookup` does, unless `name` is one of the `known` names."""
    if name not in known:
        names, hint = ", ".join(sorted(known)), did_you_mean(name, known)
        raise ValueError(f"unknown {kind} {name!r}; there are: {names}.{hint}")


def call(
    kind: str,
    name: str,
    make: Callable[..., T],
    *fixed: Any,
    of_the_run: Mapping[str, Any] | None = None,
    **options: Any,
) -> T:
    """Return `make(*fixed, **of_the_run, **options)`.

    of_the_run: arguments that are not listed as options.

    Raises TypeError, listing the known options, if `options` do not match the signature of `make`,
    and ValueError, naming the option, for a value of another type than its annotation.
    """
    signature = inspect.signature(make)
    given = of_the_run or {}
    try:
        signature.bind(*fixed, **given, **options)
    except TypeError as error:
        known = [key for key in [*signature.parameters][len(fixed) :] if key not in given]
        unknown = [key for key in options if key not in signature.parameters]
        hint = did_you_mean(unknown[0], known) if unknown else ""
        why = f"got an unexpected keyword argument {unknown[0]!r}" if unknown else error
        listed = ", ".join(known) or "none"
        raise TypeError(f"{kind} {name!r}: {why}; options: {listed}.{hint}") from None
    try:
        made = make(*fixed, **given, **options)
    except ValueError:  # it says more than the type
        raise
    except Exception:
        _check_types(make, {**given, **options})
        raise
    _check_types(make, {**given, **options})  # a bool is accepted where numbers are compared
    return made


def _check_types(make: Callable[..., object], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of another type than the annotation of `make` says."""
    hints = _hints(make)
    for option, value in options.items():
        # Tuples come from the code, not from a user, and may have a number for each client.
        if not isinstance(value, tuple) and not fits(value, hints[option]):
            raise ValueError(f"{option}: expected {expected(hints[option])}, got {value!r}")


def _hints(make: Callable[..., object]) -> dict[str, Any]:
    """Return the evaluated annotations of the arguments of `make`."""
    if dataclasses.is_dataclass(make):  # each field in the module of its own class
        return get_type_hints(make)
    parameters = inspect.signature(make, eval_str=True).parameters
    return {name: parameter.annotation for name, parameter in parameters.items()}
