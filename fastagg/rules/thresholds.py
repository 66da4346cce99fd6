# SPDX-License-Identifier: Apache-2.0
"""Threshold sequences for FL-FDMS's candidate elimination: callables t -> Theta_t, t = 1, 2, ..."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastagg.options import read_factor, read_size, replace_fields

Threshold = Callable[[int], float]


@dataclass(frozen=True)
class Theorem2Threshold:
    """Compute Theta_t of FL-FDMS, Theorem 2 (eq. 58).

    ``factor * (sqrt((2 ln(2 K^2 T B_max) - 2 ln p) / (beta t)) + delta_f)``

    ``factor`` multiplies the whole threshold, as in "0.5 Theta_t" (Case 2 of section 6.4).

    Args:
        num_clients: K.
        rounds: T, the planned number of rounds.
        beta: fraction of rounds in which any two clients are both active, in (0, 1].
        p: failure probability, in (0, 1).
        b_max: largest number of friends of any client.
        delta_f: largest score gap among friends, >= 0.
        factor: multiplies the whole threshold, > 0.

    Raises:
        ValueError: an argument is out of range.
    """

    num_clients: int
    rounds: int
    beta: float
    p: float
    b_max: int
    delta_f: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_clients", "rounds", "b_max"):
            replace_fields(self, **{name: read_size(name, getattr(self, name))})
        for name in ("beta", "p", "delta_f", "factor"):
            replace_fields(self, **{name: read_factor(name, getattr(self, name))})
        ranges = {
            "num_clients": (self.num_clients >= 1, "at least 1"),
            "rounds": (self.rounds >= 1, "at least 1"),
            "beta": (0.0 < self.beta <= 1.0, "a number in (0, 1]"),
            "p": (0.0 < self.p < 1.0, "a number in (0, 1)"),
            "b_max": (self.b_max >= 1, "at least 1"),
            "delta_f": (0.0 <= self.delta_f < math.inf, "a finite number >= 0"),
            "factor": (0.0 < self.factor < math.inf, "a finite number > 0"),
        }
        for name, (valid, expected) in ranges.items():
            if not valid:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")
        if not math.isfinite(self(1)):
            raise ValueError(f"beta: expected a finite threshold, got an infinite one for {self}")

    def __call__(self, t: int) -> float:
        logs = math.log(2 * self.num_clients**2 * self.rounds * self.b_max) - math.log(self.p)
        return self.factor * (math.sqrt(2 * logs / (self.beta * t)) + self.delta_f)


@dataclass(frozen=True)
class ReleasedThreshold:
    """Compute Theta_t as the released FL-FDMS code does.

    ``factor * sqrt(37.2 / (2 beta t)) + delta_f`` with beta = 0.5 and delta_f = 0.01.

    37.2 is 2 ln(2 K^2 T B_max) - 2 ln p for K = 20, T = 500, B_max = 3, p = 0.01. This differs from
    Theorem 2 in two points: there is a factor 2 in the denominator under the root, and ``factor``
    multiplies the root only.

    Args:
        factor: 1 for case 1, 0.5 for case 2.
    """

    factor: float

    def __post_init__(self) -> None:
        replace_fields(self, factor=read_factor("factor", self.factor))

    def __call__(self, t: int) -> float:
        return self.factor * math.sqrt(37.2 / (2 * 0.5 * t)) + 0.01


def named_threshold(name: str, num_clients: int) -> Threshold:
    """Return the threshold sequence ``name``, for K = ``num_clients``.

    "theorem2" is Theorem 2 with K and the constants of the released code (T = 500, beta = 0.5,
    p = 0.01, B_max = 3, delta_f = 0.01). "released_case1" and "released_case2" are
    :class:`ReleasedThreshold` with factor 1 and 0.5; they do not depend on K.

    Raises:
        ValueError: ``name`` is none of these.
    """
    if name == "theorem2":
        return Theorem2Threshold(num_clients, rounds=500, beta=0.5, p=0.01, b_max=3, delta_f=0.01)
    if name == "released_case1":
        return ReleasedThreshold(factor=1.0)
    if name == "released_case2":
        return ReleasedThreshold(factor=0.5)
    raise ValueError(
        'elimination: expected None, "theorem2", "released_case1", "released_case2" or a '
        f"callable t -> threshold, got {name!r}"
    )


_KINDS: dict[str, type[Theorem2Threshold] | type[ReleasedThreshold]] = {
    "Theorem2Threshold": Theorem2Threshold,
    "ReleasedThreshold": ReleasedThreshold,
}


def from_option(option: Mapping[str, Any]) -> Threshold:
    """Return the threshold that ``Aggregator.options`` represents as a mapping.

    Raises:
        ValueError: ``option["kind"]`` is not the name of a threshold class.
    """
    kind = option.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"elimination: expected kind to be one of {sorted(_KINDS)}, got {kind!r}")
    return _KINDS[kind](**{k: v for k, v in option.items() if k != "kind"})


def read_threshold(
    elimination: str | Threshold | Mapping[str, Any] | None, num_clients: int
) -> tuple[str | Threshold | None, Threshold | None]:
    """Read the option ``elimination`` of FDMS.

    Args:
        elimination: None, a name of :func:`named_threshold`, a callable t -> Theta_t, or a mapping
            from ``Aggregator.options``.
        num_clients: K.

    Returns:
        The option, with a mapping replaced by its threshold; and the threshold sequence, or None
        without elimination.

    Raises:
        TypeError, ValueError: ``elimination`` is not as described.
    """
    if elimination is None:
        return None, None
    if isinstance(elimination, str):
        return elimination, named_threshold(elimination, num_clients)
    if isinstance(elimination, Mapping):
        elimination = from_option(elimination)
    if not callable(elimination):
        raise TypeError(
            "elimination: expected None, a name or a callable t -> threshold, "
            f"got {type(elimination).__name__}"
        )
    return elimination, elimination


def value_at(threshold: Threshold, t: int) -> float:
    """Return Theta_t of a threshold sequence, for t = 1, 2, ...

    Raises:
        TypeError, ValueError: the callable returned NaN or something that is not a number.
    """
    value: object = threshold(t)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"elimination: expected a number for t = {t}, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"elimination: expected a number for t = {t}, got NaN")
    return float(value)
