# SPDX-License-Identifier: Apache-2.0
"""The base class and the registry of dropout processes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastagg_sim.client_process import ClientProcess
from fastagg_sim.registry import call, lookup
from fastagg_sim.seeds import generator


@dataclass(frozen=True, kw_only=True)
class DropoutProcess(ClientProcess, ABC):
    """Decides which clients are active in a round.

    A process is a pure function of (seed, round, history). State that it stores only saves time, so
    rounds can be requested in any order, repeatedly, or after a restart.

    seed: the seed of the run. Draws for round t use the stream ("dropout", t); draws that are made
        once per run use the stream ("dropout", name of the process).
    label_counts: how many samples of each label every client has, K rows of C numbers, if the
        process needs them.

    For num_clients and groups see `ClientProcess`.
    """

    label_counts: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_counts is not None and (
            len(self.label_counts) != self.num_clients
            or len({len(row) for row in self.label_counts}) != 1
        ):
            raise ValueError(
                f"label_counts: expected {self.num_clients} rows of equal length, one per client, "
                f"got {len(self.label_counts)} of length {sorted(set(map(len, self.label_counts)))}"
            )

    @classmethod
    def at_ratio(cls, alpha: float) -> dict[str, Any]:
        """Return the options for which a fraction `alpha` of the clients is absent on average.

        The fraction is exact up to rounding to whole clients. The result is empty if the process
        has no such option. Used by the command line.
        """
        return {}

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """Return which of "groups" and "label_counts" the process uses with these options.

        Unknown options have no effect here; the constructor refuses them.
        """
        return frozenset()

    @classmethod
    def changes_clients(cls, options: Mapping[str, Any]) -> bool:
        """Return whether clients join or leave during a run with these options.

        Unknown options have no effect here; the constructor refuses them.
        """
        return False

    def active(self, round: int, history: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return the ids of the active clients in `round` (0, 1, ...).

        history: the active ids of all earlier rounds, oldest first, for processes that react to
            them.

        Returns int64 [S], ascending; S may be 0. Raises ValueError for a negative round.
        """
        if round < 0:
            raise ValueError(f"round: expected 0 or more, got {round}")
        return self.draw(round, generator(self.seed, "dropout", round), history)

    def joined(self, round: int) -> int:
        """Return the number of clients that have joined by `round`; those with the lowest ids."""
        return self.num_clients

    @property
    def leaves(self) -> torch.Tensor | None:
        """The first round in which each client is gone for good, int64 [K]; None: nobody leaves."""
        return None

    @property
    def ends(self) -> int | None:
        """The first round that `active` refuses, as a trace may; None: it refuses none."""
        return None

    def left(self, round: int) -> list[int]:
        """Return the clients that are gone for good from `round` on, but not before, ascending.

        A client that is gone before it joins is in the list of the round in which it joins.
        """
        if self.leaves is None:
            return []
        before = self.joined(round - 1) if round > 0 else 0
        leaves = self.leaves[: self.joined(round)]
        gone = leaves == round
        gone[before:] = leaves[before:] <= round
        found: list[int] = gone.nonzero().flatten().tolist()
        return found

    @abstractmethod
    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Draw the result of `active` from `rng`, the random stream of this round."""


PROCESSES: dict[str, type[DropoutProcess]] = {}


def register(name: str) -> Callable[[type[DropoutProcess]], type[DropoutProcess]]:
    """Class decorator that registers a process for `make_dropout` under `name`."""

    def add(process: type[DropoutProcess]) -> type[DropoutProcess]:
        if name in PROCESSES:
            raise ValueError(f"name: a dropout process {name!r} already exists")
        PROCESSES[name] = process
        return process

    return add


def needs(name: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Return which of the arguments "groups" and "label_counts" `make_dropout` needs.

    They take time and memory for each of K clients.

    Raises ValueError for an unknown name.
    """
    return lookup("dropout process", name, PROCESSES).needs(options)


def changes_clients(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether clients join or leave during a run with the process `name`.

    Raises ValueError for an unknown name.
    """
    return lookup("dropout process", name, PROCESSES).changes_clients(options)


def make_dropout(
    name: str,
    *,
    num_clients: int,
    seed: int,
    groups: Sequence[int] | None = None,
    label_counts: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> DropoutProcess:
    """Create the process `name` for `num_clients` clients of a run with `seed`.

    groups: the group of every client (`Partition.groups`); required by cluster-floor.
    label_counts: K rows of C numbers (`Partition.label_counts`); required by label-correlated, and
        by adversarial unless sizes="equal".
    options: the options of the process, see docs/dropout.md.

    Raises ValueError for an unknown name or an invalid setting, TypeError for an unknown option.
    """
    return call(
        "dropout process",
        name,
        lookup("dropout process", name, PROCESSES),
        of_the_run={
            "num_clients": num_clients,
            "seed": seed,
            "groups": None if groups is None else tuple(int(group) for group in groups),
            "label_counts": (
                None
                if label_counts is None
                else tuple(tuple(int(count) for count in row) for row in label_counts)
            ),
        },
        **options,
    )


def probabilities(name: str, value: float | Sequence[float], num_clients: int) -> torch.Tensor:
    """Return one probability per client, float64 [K].

    value: one number for all clients, or a list of K numbers.

    Raises ValueError, naming the option `name`, if `value` is neither or is outside [0, 1].
    """
    many = isinstance(value, Sequence) and not isinstance(value, str)
    listed = list(value) if many else [value] * num_clients  # type: ignore[arg-type]
    for p in listed:
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
            raise ValueError(f"{name}: expected a probability in [0, 1], got {p!r}")
    if len(listed) != num_clients:
        raise ValueError(
            f"{name}: expected one number or one per client, {num_clients}, got {len(listed)}"
        )
    return torch.tensor(listed, dtype=torch.float64)


def active_count(num_clients: int, alpha: float) -> int:
    """Return S = floor((1 - alpha) K), the number of active clients at dropout ratio `alpha`.

    A product less than 1e-9 below a whole number counts as that number, so that rounding errors
    such as (1 - 0.9) * 10 = 1 - 2e-16 do not change the result.

    Raises ValueError if alpha is not in [0, 1].
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha: expected a dropout ratio in [0, 1], got {alpha}")
    return math.floor((1.0 - alpha) * num_clients + 1e-9)
