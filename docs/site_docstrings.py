# SPDX-License-Identifier: Apache-2.0
"""Our docstrings as the site's markdown: Sphinx roles, ``::``, tables, what a function returns."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`~?([\w.]+)`")
_RULER = r"^=+(?: +=+)+$"
_TABLE = re.compile(rf"{_RULER}\n(?:.*\n)+?{_RULER}\n(?:.*\n)+?{_RULER}", re.MULTILINE)
_RETURNS = re.compile(r"^(Returns:\n +)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Applied to every object as it is read; nothing is imported."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        docstring = obj.docstring
        if docstring is None:
            return
        text = _ROLE.sub(_reference, docstring.value)
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        text = re.sub(r"\((\*+)\)", _stars, text)  # footnote marks, before tables become code
        text = _TABLE.sub(lambda match: f"```text\n{match[0]}\n```".replace("\\*", "*"), text)
        if isinstance(obj, griffe.Function) and obj.returns is not None:
            # The parser takes what stands before the first colon for the type.
            text = _RETURNS.sub(lambda match: f"{match[1]}{obj.returns}: ", text)
        docstring.value = text


def _stars(match: re.Match[str]) -> str:
    return "(" + "\\*" * len(match[1]) + ")"


def _reference(match: re.Match[str]) -> str:
    """A link to what the reference has, code for what is private or relative to its class."""
    name = match[1]
    private = any(part.startswith("_") for part in name.split("."))
    if private or not name.startswith("fastagg."):
        return f"`{name}`"
    return f"[`{name}`][{name}]"
