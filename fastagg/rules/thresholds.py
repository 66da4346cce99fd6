# SPDX-License-Identifier: Apache-2.0
"""Threshold sequences for FL-FDMS's candidate elimination: callables t -> Theta_t, t = 1, 2, ..."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Threshold = Callable[[int], float]


@dataclass(frozen=True)
class Theorem2Threshold:
    """Theta_t of FL-FDMS, Theorem 2 (eq. 58).

    ``factor * (sqrt((2 ln(2 K^2 T B_max) - 2 ln p) / (beta t)) + delta_f)``

    ``factor`` multiplies the whole threshold, as "0.5 Theta_t" (Case 2 of section 6.4) says.

    Args:
        num_clients: K.
        rounds: T, the planned number of rounds.
        beta: fraction of rounds in which any two clients are both active, in (0, 1].
        p: failure probability, in (0, 1).
        b_max: largest number of friends of any client.
        delta_f: largest score gap among friends, >= 0.
        factor: of the whole threshold, > 0.

    Raises:
        ValueError: an argument is out of its range.
    """

    num_clients: int
    rounds: int
    beta: float
    p: float
    b_max: int
    delta_f: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        ranges = {
            "num_clients": self.num_clients >= 1,
            "rounds": self.rounds >= 1,
            "beta": 0.0 < self.beta <= 1.0,
            "p": 0.0 < self.p < 1.0,
            "b_max": self.b_max >= 1,
            "delta_f": 0.0 <= self.delta_f < math.inf,
            "factor": 0.0 < self.factor < math.inf,
        }
        for name, valid in ranges.items():
            if not valid:
                raise ValueError(f"{name}: out of range, got {getattr(self, name)}")

    def __call__(self, t: int) -> float:
        logs = math.log(2 * self.num_clients**2 * self.rounds * self.b_max) - math.log(self.p)
        return self.factor * (math.sqrt(2 * logs / (self.beta * t)) + self.delta_f)


@dataclass(frozen=True)
class ReleasedThreshold:
    """Theta_t of the released FL-FDMS code.

    ``factor * sqrt(37.2 / (2 beta t)) + delta_f`` with beta = 0.5 and delta_f = 0.01.

    37.2 is 2 ln(2 K^2 T B_max) - 2 ln p for K = 20, T = 500, B_max = 3, p = 0.01. Against
    Theorem 2 there is another 2 under the root, and ``factor`` multiplies the root alone.

    Args:
        factor: 1 for case 1, 0.5 for case 2.
    """

    factor: float

    def __call__(self, t: int) -> float:
        return self.factor * math.sqrt(37.2 / (2 * 0.5 * t)) + 0.01


def named_threshold(name: str, num_clients: int) -> Threshold:
    """Return the threshold sequence of a name.

    "theorem2" is Theorem 2 with the constants of the released code (T = 500, beta = 0.5,
    p = 0.01, B_max = 3, delta_f = 0.01) and the given K.

    Raises:
        ValueError: there is no such name.
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
    """Return the threshold that ``Aggregator.options`` wrote as a mapping.

    Raises:
        ValueError: there is no such kind of threshold.
    """
    kind = option.get("kind")
    if kind not in _KINDS:
        raise ValueError(f"elimination: expected a kind of {sorted(_KINDS)}, got {kind!r}")
    return _KINDS[kind](**{k: v for k, v in option.items() if k != "kind"})


def read_threshold(
    elimination: str | Threshold | Mapping[str, Any] | None, num_clients: int
) -> tuple[str | Threshold | None, Threshold | None]:
    """Read an ``elimination`` option: return it, and its threshold sequence (None: no elimination).

    Raises:
        TypeError, ValueError: it is none of: None, a name, a callable, what ``options()`` wrote.
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
        TypeError, ValueError: the function returns no number.
    """
    value: object = threshold(t)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"elimination: expected a number for t = {t}, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"elimination: expected a number for t = {t}, got NaN")
    return float(value)
