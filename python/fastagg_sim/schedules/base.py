# SPDX-License-Identifier: Apache-2.0
"""The base class and the registry of schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastagg_sim.client_process import check_numbers
from fastagg_sim.latency import LatencyProcess
from fastagg_sim.registry import call, lookup

MOST = 1e300
"""A run does not last longer than this many simulated seconds."""


@dataclass(frozen=True, order=True)
class Work:
    """The local training of `client` from the model of round `round`."""

    client: int
    round: int


@dataclass(frozen=True)
class Plan:
    """A round in simulated time.

    starts: the clients that start from the model of this round and whose answers reach the server,
        in this round or later; ascending.
    answers: the work whose answers the server's step takes, ascending.
    late: the number of clients that are at work, or are stopped, when the round ends. Their work
        counts in a later round, or is lost.
    time: when the round ends, in simulated seconds since the start of the run.
    """

    starts: tuple[int, ...]
    answers: tuple[Work, ...]
    late: int
    time: float

    def ages(self, round: int) -> list[int]:
        """Return, for each answer to the step of `round`, the number of rounds since its model."""
        return [round - work.round for work in self.answers]


class ServerSchedule(ABC):
    """Decides, in simulated time, which answers the server's step of each round takes.

    Computation on the server takes no time. Clients that the dropout process makes absent are not
    waited for. Events at the same time are ordered by the id of the client, then by the round.

    Attributes:
        time: the end of the last round, in simulated seconds since the start of the run.
        repeats: whether a step may take several answers of a client, from different models.
    """

    late_answers = False
    """Whether answers from models of earlier rounds may take part in a step."""

    def __init__(self, latency: LatencyProcess) -> None:
        self.latency = latency
        self.repeats = True
        self.time = 0.0

    def next(self, round: int, active: Sequence[int]) -> Plan:
        """Return the plan of `round` and move `time` to its end. Call it for 0, 1, ... in order.

        active: the clients that can start from the model of this round, ascending.
        """
        plan = self._plan(round, active)
        self.time = plan.time
        return plan

    @abstractmethod
    def _plan(self, round: int, active: Sequence[int]) -> Plan:
        """Return the plan of `round`, which starts at `time`."""

    def waiting(self) -> list[Work]:
        """Return the work that has started and has not taken part in a step, ascending."""
        return []

    def state(self) -> dict[str, Any]:
        """Return all that later plans depend on, as JSON values."""
        return {"time": self.time}

    def load(self, state: Any, round: int) -> None:
        """Restore what `state` returned before `round`.

        Raises ValueError, naming the entry, for anything else; the schedule has then not changed.
        """
        check_entries(state, {"time"})
        self.time = read_seconds("time", state["time"])

    def _latencies(self, round: int, clients: Sequence[int]) -> list[tuple[float, int]]:
        """Return (seconds, client) of the clients that start in `round`, in the order in which
        they answer."""
        return sorted((self.latency.seconds(client, round), client) for client in clients)


def check_entries(state: Any, names: set[str]) -> None:
    """Raise ValueError unless `state` is a mapping with these names."""
    if not isinstance(state, dict) or set(state) != names:
        got = sorted(state) if isinstance(state, dict) else state
        raise ValueError(f"schedule: expected the entries {sorted(names)}, got {got!r}")


def read_seconds(name: str, value: Any, least: float = 0.0) -> float:
    """Return a number of a loaded state; ValueError unless it is finite and at least `least`."""
    check_numbers(f"schedule: {name}", (value,), least, MOST)
    return float(value)


SCHEDULES: dict[str, type[ServerSchedule]] = {}


def register(name: str) -> Callable[[type[ServerSchedule]], type[ServerSchedule]]:
    """Class decorator that registers a schedule for `make_schedule` under `name`."""

    def add(schedule: type[ServerSchedule]) -> type[ServerSchedule]:
        if name in SCHEDULES:
            raise ValueError(f"name: a schedule {name!r} already exists")
        SCHEDULES[name] = schedule
        return schedule

    return add


def make_schedule(name: str, latency: LatencyProcess, **options: Any) -> ServerSchedule:
    """Create the schedule `name` for clients with the latencies of `latency`.

    options: the options of the schedule, see docs/latency.md.

    Raises ValueError for an unknown name or an invalid setting, TypeError for an unknown option.
    """
    return call("schedule", name, lookup("schedule", name, SCHEDULES), latency, **options)


def read_count(name: str, value: Any, *, zero: bool = False) -> int:
    """Return the option `name`; raise ValueError unless it is a whole number >= 1, or >= 0."""
    least = 0 if zero else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected a whole number >= {least}, got {value!r}")
    return value


def of_round(clients: Sequence[int], round: int) -> tuple[Work, ...]:
    """Return the work of `clients` from the model of `round`, ascending."""
    return tuple(Work(client, round) for client in sorted(clients))
