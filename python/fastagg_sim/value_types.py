# SPDX-License-Identifier: Apache-2.0
"""Compare values from JSON files and from the command line with type annotations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

_WORDS: dict[Any, str] = {
    **{bool: "true or false", int: "a whole number", float: "a number", str: "text"},
    **{Path: "a path", NoneType: "null"},
    **{dict: "an object", Mapping: "an object", tuple: "a list", Sequence: "a list"},
}


def fits(value: Any, hint: Any) -> bool:
    """Return whether `value` has the type of an annotation.

    hint: the annotation, evaluated. For dict[str, T] and tuple[T, ...] the elements must fit, too;
        for Sequence and Mapping they are not compared.

    A bool is no number. A whole number fits float, if a float can hold it.
    """
    kind = get_origin(hint) or hint
    if kind is Any:
        return True
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if kind is float or kind is int:
        if isinstance(value, bool) or not isinstance(value, Real if kind is float else Integral):
            return False
        too_large = isinstance(value, Integral) and abs(int(value)) > sys.float_info.max
        return kind is int or not too_large
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        return False
    if kind is dict and get_args(hint):
        return all(fits(element, get_args(hint)[1]) for element in value.values())
    if kind is tuple and get_args(hint):
        return all(fits(element, get_args(hint)[0]) for element in value)
    return True


def expected(hint: Any) -> str:
    """Return the type of an annotation in words, for messages."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(expected, get_args(hint))))
    words = _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    elements = get_args(hint)
    if kind is tuple and elements[0] in (int, float):
        words += " of numbers" if elements[0] is float else " of whole numbers"
    if kind is dict and get_origin(elements[-1]) is dict:
        words += " of objects"
    return words
