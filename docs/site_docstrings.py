# SPDX-License-Identifier: Apache-2.0
"""Convert docstrings to the site's markdown: Sphinx roles, ``::``, tables, return types.

An attribute that the docstring of its class describes gets no second entry.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# Public names of modules that are defined elsewhere; the reference has them under the second name.
_HOMES = {
    "fastagg.streaming": "fastagg.updates.streams",
    "fastagg.client_files": "fastagg.updates.files",
    "fastagg.bits": "fastagg.ops.bits",
    "fastagg.reference": "fastagg.ops.reference",
}
_ROLE = re.compile(r":[a-z]+:`~?([\w.]+)`")
_RULER = r"^=+(?: +=+)+$"
_TABLE = re.compile(rf"{_RULER}\n(?:.*\n)+?{_RULER}\n(?:.*\n)+?{_RULER}", re.MULTILINE)
# One or more names that a section of a class describes: "Args:", "Attributes:".
_NAMES = re.compile(r"^ {4}([a-z_][\w, ]*):", re.MULTILINE)
_RETURNS = re.compile(r"^(Returns:\n +)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Convert the docstring of every object when it is read; nothing is imported."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        docstring = obj.docstring
        if docstring is None:
            return
        text = _ROLE.sub(_reference, docstring.value)
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        text = re.sub(r"\((\*+)\)", _stars, text)  # footnote marks, before tables become code
        text = _TABLE.sub(lambda match: f"```text\n{match[0]}\n```".replace("\\*", "*"), text)
        if isinstance(obj, griffe.Function) and obj.returns is not None:
            # The parser takes the text before the first colon as the type.
            text = _RETURNS.sub(lambda match: f"{match[1]}{obj.returns}: ", text)
        docstring.value = text

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Leave out attributes and properties that the docstring of the class describes."""
        if cls.docstring is None:
            return
        sections = re.split(r"^(?:Args|Attributes):\n", cls.docstring.value, flags=re.MULTILINE)[1:]
        described = {
            name
            for section in sections
            for names in _NAMES.findall(re.split(r"^\S", section, flags=re.MULTILINE)[0])
            for name in names.split(", ")
        }
        for name, member in cls.members.items():
            if name in described and isinstance(member, griffe.Attribute):
                member.docstring = None  # without one it is not shown


def _stars(match: re.Match[str]) -> str:
    return "(" + "\\*" * len(match[1]) + ")"


def _reference(match: re.Match[str]) -> str:
    """Return a link to an object of the reference, or code for a private or relative name."""
    name = match[1]
    private = any(part.startswith("_") for part in name.split("."))
    if private or not name.startswith("fastagg."):
        return f"`{name}`"
    for public, home in _HOMES.items():
        if name == public or name.startswith(f"{public}."):
            return f"[`{name}`][{home}{name[len(public) :]}]"
    return f"[`{name}`][{name}]"
