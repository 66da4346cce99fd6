# SPDX-License-Identifier: Apache-2.0
"""Look up functions and classes by name, with error messages that list the known names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fastagg.options import did_you_mean

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


def call(kind: str, name: str, make: Callable[..., T], *fixed: Any, **options: Any) -> T:
    """Return `make(*fixed, **options)`.

    Raises TypeError, listing the known options, if `options` do not match the signature of `make`.
    """
    signature = inspect.signature(make)
    try:
        signature.bind(*fixed, **options)
    except TypeError as error:
        known = ", ".join(list(signature.parameters)[len(fixed) :]) or "none"
        raise TypeError(f"{kind} {name!r}: {error}; options: {known}") from None
    return make(*fixed, **options)
