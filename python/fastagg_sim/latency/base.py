# SPDX-License-Identifier: Apache-2.0
"""The base class and the registry of latency processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

from fastagg_sim.client_process import ClientProcess
from fastagg_sim.registry import call, lookup
from fastagg_sim.seeds import uniform

SHORTEST, LONGEST = 1e-9, 1e9
"""The range of options in seconds."""
WIDEST = 10.0
"""The largest standard deviation of a logarithm. With these limits all latencies are finite."""

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class LatencyProcess(ClientProcess, ABC):
    """Decides how many simulated seconds a client takes to answer.

    The seconds include all that lies between the server's message with a model and its receipt of
    the client's answer: downloading, training, waiting, uploading.

    A process is a pure function of (seed, client, round): clients and rounds can be requested in
    any order and on any machine. The draw of a client in a round uses the stream ("latency", round,
    client) of `fastagg_sim.seeds.uniform`; draws that are made once per run use the stream
    ("latency", name of the process).
    """

    incomplete: ClassVar[bool] = False
    """Whether `seconds` may refuse some clients and rounds, as a trace does."""

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """Return {"groups"} if the process uses the groups with these options, else nothing.

        Unknown options have no effect here; the constructor refuses them.
        """
        return frozenset()

    def seconds(self, client: int, round: int) -> float:
        """Return the seconds that `client` takes to answer when it starts from the model of
        `round` (0, 1, ...): a finite number >= 0.

        Raises IndexError for a client that is not in [0, K), ValueError for a negative round.
        """
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client: expected an id in [0, {self.num_clients}), got {client}")
        if round < 0:
            raise ValueError(f"round: expected 0 or more, got {round}")
        return self.draw(client, round, uniform(self.seed, "latency", round, client))

    @abstractmethod
    def draw(self, client: int, round: int, u: float) -> float:
        """Return the result of `seconds` for u, which is uniform in (0, 1)."""


LATENCIES: dict[str, type[LatencyProcess]] = {}


def register(name: str) -> Callable[[type[LatencyProcess]], type[LatencyProcess]]:
    """Class decorator that registers a process for `make_latency` under `name`."""

    def add(process: type[LatencyProcess]) -> type[LatencyProcess]:
        if name in LATENCIES:
            raise ValueError(f"name: a latency process {name!r} already exists")
        LATENCIES[name] = process
        return process

    return add


def needs(name: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Return {"groups"} if `make_latency` needs the groups for this process, else nothing.

    Raises ValueError for an unknown name.
    """
    return lookup("latency process", name, LATENCIES).needs(options)


def make_latency(
    name: str,
    *,
    num_clients: int,
    seed: int,
    groups: Sequence[int] | None = None,
    **options: Any,
) -> LatencyProcess:
    """Create the process `name` for `num_clients` clients of a run with `seed`.

    groups: the group of every client (`Partition.groups`); required by classes with by="group".
    options: the options of the process, see docs/latency.md.

    Raises ValueError for an unknown name or an invalid setting, TypeError for an unknown option.
    """
    return call(
        "latency process",
        name,
        lookup("latency process", name, LATENCIES),
        of_the_run={
            "num_clients": num_clients,
            "seed": seed,
            "groups": None if groups is None else tuple(int(group) for group in groups),
        },
        **options,
    )


def normal(u: float) -> float:
    """Return the quantile of the standard normal distribution at u, which lies in (0, 1)."""
    return _NORMAL.inv_cdf(u)
