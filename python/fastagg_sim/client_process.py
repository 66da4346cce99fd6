# SPDX-License-Identifier: Apache-2.0
"""What processes over K clients share: their sizes, and checks of their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ClientProcess:
    """A random process over clients, a function of the seed of a run.

    num_clients: K, at least 1.
    seed: the seed of the run.
    groups: the group of every client, if the process needs them.
    """

    num_clients: int
    seed: int
    groups: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise ValueError(f"num_clients: expected a positive number, got {self.num_clients}")
        if self.groups is not None and len(self.groups) != self.num_clients:
            raise ValueError(
                f"groups: expected one group per client, {self.num_clients}, got {len(self.groups)}"
            )

    @classmethod
    def files(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the paths of the files that the process reads with these options.

        Unknown options have no effect here; the constructor refuses them.
        """
        return ()

    def whole_numbers(self, name: str, minimum: int) -> None:
        """Raise ValueError unless the option `name` is a whole number >= `minimum`."""
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name}: expected a whole number >= {minimum}, got {value!r}")

    def one_of(self, name: str, choices: Sequence[str]) -> None:
        """Raise ValueError unless the option `name` is one of `choices`."""
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")

    def numbers(self, name: str, low: float, high: float) -> tuple[float, ...]:
        """Return the option `name`, one number for all clients or a list of K, as K numbers.

        Raises ValueError if it is neither, or unless all are between `low` and `high`.
        """
        value = getattr(self, name)
        many = isinstance(value, Sequence) and not isinstance(value, str)
        listed = tuple(value) if many else (value,) * self.num_clients
        check_numbers(name, listed, low, high)
        if len(listed) != self.num_clients:
            raise ValueError(
                f"{name}: expected one number or one per client, {self.num_clients}, "
                f"got {len(listed)}"
            )
        return listed


def check_numbers(name: str, values: Sequence[object], low: float, high: float) -> None:
    """Raise ValueError, naming the option `name`, unless all `values` are numbers between `low`
    and `high`."""
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and low <= value <= high):  # type: ignore[operator]
            raise ValueError(
                f"{name}: expected a number between {low:g} and {high:g}, got {value!r}"
            )
