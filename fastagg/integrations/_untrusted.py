# SPDX-License-Identifier: Apache-2.0
"""Limits for what clients say: texts in logs and reports, and metrics.

A client chooses the names of arrays and metrics, values, and the reasons of its errors. None may
fill a server's logs, reports and checkpoints with them, or write a line of a log by itself.
"""

from __future__ import annotations

import math

import numpy as np

LONGEST = 200
"""Number of characters of a text from a client."""

MOST_METRICS = 1000
"""Number of metrics of one answer that are used."""

MOST_NUMBERS = 10_000
"""Number of numbers in a list that is a metric."""

_END = 50  # characters kept of the end of a longer text, which often says what was expected
_MOST_SHOWN = 10  # values of a list


def cut(text: str) -> str:
    """Return a text for a line of a log: at most ``LONGEST`` characters, all of them printable.

    Of a longer text the beginning and the end are kept. Other characters, such as ends of lines,
    are escaped.
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - _END - 5]} ... {text[-_END:]}"
    if text.isprintable():
        return text
    return cut("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def brief(value: object) -> str:
    """Return a value of a client as text for a message; of a large one no whole text is made."""
    if isinstance(value, str | bytes):
        return cut(repr(value if len(value) <= LONGEST else value[: LONGEST + 1]))
    if isinstance(value, list | tuple) and len(value) > _MOST_SHOWN:
        return f"a {type(value).__name__} of {len(value)} values"
    try:
        return cut(repr(value))
    except Exception:  # an int of thousands of digits has no text
        return f"a value of type {type(value).__name__}"


def small(value: object) -> object:
    """Return a value of a client, or :func:`brief` text in its place if it is large."""
    if value is None or isinstance(value, int | float | np.number):
        return value
    if isinstance(value, str | bytes) and len(value) <= LONGEST:
        return value
    if isinstance(value, list) and len(value) <= _MOST_SHOWN:
        return value if all(isinstance(item, int | float) for item in value) else brief(value)
    return brief(value)


def is_finite(value: object) -> bool:
    """Return whether a value of a client is a finite number, which a float can represent."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of a float
        return False
