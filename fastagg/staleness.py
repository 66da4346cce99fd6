# SPDX-License-Identifier: Apache-2.0
"""How much late rows count: rows that were computed from an older model (``staleness``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from fastagg.options import (
    MOST,
    from_saved,
    read_choice,
    read_count,
    read_factor,
    replace_fields,
)
from fastagg.updates.cohort import Cohort

_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"constant": {}, "polynomial": {"a": 0.5}, "hinge": {"a": 10.0, "b": 4}}
)
"""The arguments of each function, and their defaults."""
_LEAST = 1e-100
"""Least factor: a weight of 0 would mean that a row is left out, which ``max_staleness`` says."""


@dataclass(frozen=True)
class Staleness:
    """The option ``staleness``: the factor s of a row, a function of its age.

    The age of a row is the number of rounds since the model that it started from. A row of the
    present round has age 0 and s = 1. ::

        "constant"     s = 1
        "polynomial"   s = (1 + age)^-a
        "hinge"        s = 1                          # if age <= b
                           1 / (a (age - b) + 1)      # otherwise

    The functions and their arguments are those of Xie et al. 2019, "Asynchronous Federated
    Optimization" (FedAsync), section 5.2, and the defaults those of its experiments. "polynomial"
    with a = 0.5 is the 1 / sqrt(1 + age) of Nguyen et al. 2022 (FedBuff).

    Args:
        name: one of the names above.
        a: >= 0, finite; not "constant". Default: 0.5, or 10 for "hinge".
        b: number of rounds, >= 0; "hinge" only. Default: 4.

    Raises:
        TypeError, ValueError: an argument is not as described, or the function does not have it.
    """

    name: str = "constant"
    a: float | None = None
    b: int | None = None

    def __post_init__(self) -> None:
        read_choice("staleness", self.name, list(_DEFAULTS))
        defaults = _DEFAULTS[self.name]
        for argument in ("a", "b"):
            value = getattr(self, argument)
            if argument not in defaults:
                if value is not None:
                    raise ValueError(
                        f"staleness: {argument}: expected None with {self.name!r}, which has no "
                        f"such argument, got {value!r}"
                    )
            elif value is None:
                replace_fields(self, **{argument: defaults[argument]})
        if self.a is not None:
            replace_fields(self, a=read_factor("staleness: a", self.a))
        if self.b is not None:
            replace_fields(self, b=read_count("staleness: b", self.b, least=0, most=MOST))

    def factors(self, ages: Tensor) -> Tensor:
        """Return s of each age: [S] int64, >= 0 -> [S] float64, in [1e-100, 1]."""
        late = ages.to(torch.float64)
        if self.name == "constant":
            return torch.ones_like(late)
        if self.name == "polynomial":
            return ((1.0 + late) ** -cast(float, self.a)).clamp_(min=_LEAST)
        beyond = (late - cast(int, self.b)).clamp_(min=0.0)
        return (1.0 / (cast(float, self.a) * beyond + 1.0)).clamp_(min=_LEAST)


def none_but_constant(reason: str) -> Mapping[str, str]:
    """Return why a rule takes no function but "constant", for ``Aggregator.refused_staleness``."""
    return {name: reason for name in _DEFAULTS if name != "constant"}


def no_late_rows(reason: str) -> Mapping[str, str]:
    """Return why a rule takes no late rows, for ``Aggregator.refused_staleness``."""
    return dict.fromkeys(_DEFAULTS, reason)


def read_staleness(value: object, refused: Mapping[str, str] | None = None) -> Staleness | None:
    """Return the option ``staleness``: None, or a function of ages.

    Args:
        value: None, a name, a :class:`Staleness`, or a mapping of its arguments, as
            :func:`fastagg.options.to_saved` makes it.
        refused: names of functions that the rule cannot have, with the reasons.

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    read = _read(value)
    if read is not None and refused and read.name in refused:
        taken = [repr(name) for name in _DEFAULTS if name not in refused]
        expected = " or ".join(["None", *taken])
        raise ValueError(f"staleness: expected {expected}, got {read.name!r}: {refused[read.name]}")
    return read


def _read(value: object) -> Staleness | None:
    if value is None or isinstance(value, Staleness):
        return value
    if isinstance(value, str):
        return Staleness(read_choice("staleness", value, list(_DEFAULTS)))
    if not isinstance(value, Mapping):
        raise TypeError(
            f"staleness: expected None, one of {list(_DEFAULTS)}, a Staleness or a mapping of its "
            f"arguments, got {value!r} ({type(value).__name__})"
        )
    return from_saved("staleness", value, Staleness)


def read_max_staleness(value: object, staleness: Staleness | None) -> int | None:
    """Return the option ``max_staleness``: None, or the largest age of a row, at least 0."""
    if value is None:
        return None
    most = read_count("max_staleness", value, least=0, most=MOST)
    if staleness is None:
        raise ValueError(
            "max_staleness: expected None without staleness, because all late rows are refused "
            f"then, got {most}"
        )
    return most


def late_positions(
    cohort: Cohort, staleness: Staleness | None, most: int | None, rule: str
) -> dict[int, str]:
    """Return, by position, why rows are too old; ``cohort`` has late rows.

    Args:
        cohort: the active clients.
        staleness: the option of the rule.
        most: its option ``max_staleness``.
        rule: its name.

    Raises:
        ValueError: the rule was not told what to do with late rows.
    """
    ages = cast(Tensor, cohort.ages).tolist()
    if staleness is None:
        client = next(k for k, age in zip(cohort.ids, ages, strict=True) if age)
        raise ValueError(
            f"ages: expected zeros, got {max(ages)} as the largest age, and client {client} is "
            f"late; rule {rule!r} has staleness=None, which takes no late rows: make it with "
            'staleness="constant" to count them in full, or with another staleness'
        )
    if most is None:
        return {}
    return {
        position: f"age {age}, but at most max_staleness = {most} is accepted"
        for position, age in enumerate(ages)
        if age > most
    }


def discounted(weights: Tensor, cohort: Cohort, staleness: Staleness | None) -> Tensor:
    """Return ``weights`` [S] float64, times the factors of late rows; unchanged if there are none.

    Args:
        weights: of the rows of ``cohort``.
        cohort: the active clients.
        staleness: the option of the rule; not None if there are late rows.
    """
    if cohort.ages is None:
        return weights
    assert staleness is not None
    return weights * staleness.factors(cohort.ages)
