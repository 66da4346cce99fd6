# SPDX-License-Identifier: Apache-2.0
"""The colour, line style and marker of every rule and method, and the form of titles.

All pictures take them from here, so that a rule looks the same in all of them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLORS = {
    "black": "#000000",
    "blue": "#0072B2",
    "green": "#009E73",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "orange": "#E69F00",
    "grey": "#999999",
}
# Lines can be told apart without colours by these, and points by the markers of the same number.
STYLES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (1.5, 0.9)),
    (0, (9, 2)),
    (0, (4, 1.2, 1, 1.2, 1, 1.2)),
    (0, (1, 2.2)),
    (0, (3, 3)),
)
MARKERS = ("P", "*", "v", "o", "D", "s", "^", "p")


@dataclass(frozen=True)
class Look:
    """How a method is drawn: the name of its colour, and the number of its style."""

    name: str
    number: int

    @property
    def color(self) -> str:
        return COLORS[self.name]

    @property
    def style(self) -> Any:
        return STYLES[self.number]

    @property
    def marker(self) -> str:
        return MARKERS[self.number]


# No two of them are equal. Methods of one experiment differ in colour and in style.
RULES: Mapping[str, Look] = {
    "amplified": Look("black", 6),
    "bucketing": Look("vermillion", 4),
    "bulyan": Look("vermillion", 7),
    "centered-clip": Look("sky", 1),
    "fdms": Look("vermillion", 3),
    "fdms-means": Look("sky", 2),
    "fdms-soft": Look("vermillion", 0),
    "fedau": Look("sky", 5),
    "fedavg": Look("blue", 1),
    "fedbuff": Look("green", 0),
    "fedvarp": Look("orange", 0),
    "geometric-median": Look("blue", 0),
    "krum": Look("green", 5),
    "meamed": Look("sky", 4),
    "median": Look("orange", 2),
    "mifa": Look("orange", 5),
    "mimic": Look("purple", 4),
    "mimic-aged": Look("purple", 0),
    "multi-krum": Look("green", 6),
    "nnm": Look("grey", 3),
    "scaffold": Look("grey", 7),
    "stale": Look("green", 7),
    "stale-models": Look("green", 2),
    "trimmed-mean": Look("purple", 2),
}
REFERENCE = Look("black", 0)  # plain averaging without dropout
# Methods that are not a rule with its own options: rules in other training, or with other settings.
METHODS: Mapping[str, Look] = {
    "FedProx": Look("vermillion", 2),
    "FedProx variant": Look("green", 3),
    "bucketing cclip": Look("purple", 7),
    "cclip 1": Look("blue", 5),
    "bucketing cclip 1": Look("vermillion", 6),
    "FDMS first": Look("orange", 7),
    "FedAvg late": Look("sky", 7),
    "FedAvg waits": Look("black", 2),
    "FDMS k=1024": Look("green", 1),
    "Means first": Look("purple", 5),
    "MIFA bfloat16": Look("vermillion", 1),
    "MIFA int8": Look("black", 3),
    "Stale bfloat16": Look("blue", 4),
    "Stale int8": Look("sky", 6),
    "With CR case 1": Look("blue", 6),
    "With CR case 2": Look("orange", 4),
    r"$\sigma_F^2$": Look("black", 1),  # distances between updates, and not methods
    r"$\sigma_P^2$": Look("grey", 0),
}
# The papers' names, and those of the experiments.
LOOKS: Mapping[str, Look] = {
    **RULES,
    **METHODS,
    "Full": REFERENCE,
    "no dropout": REFERENCE,
    "full": REFERENCE,
    "FedAvg without dropout": REFERENCE,
    "Dropout": RULES["fedavg"],
    "FedAvg": RULES["fedavg"],
    "FedBuff": RULES["fedbuff"],
    "Stale": RULES["stale-models"],
    "FDMS": RULES["fdms"],
    "Means": RULES["fdms-means"],
    "Without CR": RULES["fdms"],
    "MIFA": RULES["mifa"],
    "MimiC": RULES["mimic"],
    "SCAFFOLD": RULES["scaffold"],
    "FedAvg variant": RULES["amplified"],
    "GM": RULES["geometric-median"],
    "cclip": RULES["centered-clip"],
    "cclip 100": RULES["centered-clip"],
    "bucketing GM": RULES["bucketing"],
    "bucketing cclip 100": METHODS["bucketing cclip"],
}


def look(method: str, rule: str = "") -> Look:
    """Return the look of a method; it depends on nothing but the names.

    A method with options, such as "mimic-mode=client" or "cclip 10", has the colour of the method
    without them. Any other name has the colour of its `rule`. The name of a user's own rule has a
    colour that follows from the name.
    """
    if method in LOOKS:
        return LOOKS[method]
    number = crc32(method.encode())
    parents = [n for n in LOOKS if re.match(rf"{re.escape(n)}(-[\w-]+=| \S)", method)]
    for parent in (max(parents, key=len, default=""), rule):
        if parent in LOOKS:
            return replace(LOOKS[parent], number=number % len(STYLES))
    colors = [name for name in COLORS if name != REFERENCE.name]
    return Look(colors[number // len(STYLES) % len(colors)], number % len(STYLES))


def looks(methods: Mapping[str, str] | Iterable[str]) -> dict[str, Look]:
    """Return the looks of the methods of one picture, by name; no two are equal.

    If two would be equal, the later one that is not in the table gets the next free line style of
    its colour, and another colour when all styles are taken.

    methods: names, or the rule of each method by its name.
    """
    rules = methods if isinstance(methods, Mapping) else dict.fromkeys(methods, "")
    found = {method: LOOKS[method] for method in rules if method in LOOKS}
    for method, rule in rules.items():
        if method in found:
            continue
        wanted = look(method, rule)
        names, numbers = list(COLORS), range(len(STYLES))
        first = names.index(wanted.name)
        choices = (
            Look(name, (wanted.number + step) % len(STYLES))
            for name in names[first:] + names[:first]
            for step in numbers
        )
        taken = set(found.values())
        found[method] = next((choice for choice in choices if choice not in taken), wanted)
    return {method: found[method] for method in rules}


# --- titles -----------------------------------------------------------------------------------

_SYMBOLS = {"alpha": r"$\alpha$", "epsilon": r"$\epsilon$", "tau_max": r"$\tau_\mathrm{max}$"}


def form(text: str) -> str:
    """Return `text` in the form of all titles: a capital, parts after commas, "name = value".

    "MNIST (K=40)" -> "MNIST, K = 40"; "P:500, low" -> "P = 500, low"; "training loss" -> "Training
    loss". Greek letters replace their names. Names stay as they are: "p = 0.1", "fdms, round 3".
    """
    text = re.sub(r" \(([^()]*)\)", r", \1", text)
    text = re.sub(r"(?<=\w)(?: ?= ?|:(?=\d))", " = ", text)
    for name, symbol in _SYMBOLS.items():
        text = re.sub(rf"(?<!\\)\b{name}\b", symbol.replace("\\", r"\\"), text)
    begins_with_name = re.match(r"\S+ = ", text) or text.partition(",")[0] in RULES
    return text if begins_with_name else text[:1].upper() + text[1:]


def wrapped(text: str, width: int) -> str:
    """Return `text` in lines of at most `width` characters, with "name = value" in one line."""
    if len(text) <= width:
        return text
    whole = text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
    return textwrap.fill(whole, width).replace("\N{NO-BREAK SPACE}", " ")


def set_title(panel: Axes, text: str, *, size: float = 11, width: int | None = None) -> None:
    """Give a panel its title, in the `form` of all titles.

    width: the longest line; by default the title is one line.
    """
    title = form(text)
    panel.set_title(title if width is None else wrapped(title, width), fontsize=size)
