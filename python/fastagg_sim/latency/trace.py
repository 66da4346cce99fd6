# SPDX-License-Identifier: Apache-2.0
"""Replay of latencies from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fastagg_sim.client_process import check_numbers
from fastagg_sim.files import write_atomically
from fastagg_sim.latency.base import LONGEST, SHORTEST, LatencyProcess, register
from fastagg_sim.number_files import POSITIVE, WHOLE, read_table


@register("trace")
@dataclass(frozen=True, kw_only=True)
class Trace(LatencyProcess):
    """The latencies in a CSV file with the columns `round`, `client` and `seconds`.

    A line states how long a client takes to answer if it starts from the model of a round. Lines
    may be in any order, and other columns are ignored. `write_trace` writes such a file.

    path: the file, absolute or relative to the working directory. It is read once.
    after: what follows the last round in the file. "error": `seconds` raises IndexError. "repeat":
        start again from round 0.

    Raises ValueError for a file that cannot be read or is larger than 256 MiB, a wrong header, a
    line of another form, a client that is not in [0, K), seconds that are not between 1e-9 and 1e9,
    a duplicate line, or a file without lines. `seconds` raises ValueError for a client and round
    without a line: a trace of latencies does not say who is absent, a dropout process does.
    """

    incomplete: ClassVar[bool] = True

    path: str | Path
    after: str = "error"

    @classmethod
    def files(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return (str(options["path"]),) if "path" in options else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("after", ("error", "repeat"))
        _ = self._found  # reads and checks the file

    @cached_property
    def _found(self) -> dict[tuple[int, int], float]:
        """The seconds by (round, client)."""
        found: dict[tuple[int, int], float] = {}
        columns = {"round": WHOLE, "client": WHOLE, "seconds": POSITIVE}
        for round, client, seconds in read_table("path", self.path, columns):
            what = f"path: {self.path}: round {round}, client {client}"
            if client >= self.num_clients:
                raise ValueError(f"{what}: expected clients from 0 to {self.num_clients - 1}")
            if (round, client) in found:
                raise ValueError(f"{what}: expected each line once, got it twice")
            check_numbers(f"{what}: seconds", (seconds,), SHORTEST, LONGEST)
            found[round, client] = seconds
        if not found:
            raise ValueError(f"path: {self.path}: expected at least one latency, got none")
        return found

    @cached_property
    def _length(self) -> int:
        return max(round for round, _ in self._found) + 1

    def draw(self, client: int, round: int, u: float) -> float:
        if round >= self._length and self.after == "error":
            raise IndexError(
                f"round: {self.path} has rounds 0 to {self._length - 1}, got {round}; "
                "after=repeat starts again after the end of the trace"
            )
        round %= self._length
        if (round, client) not in self._found:
            raise ValueError(
                f"path: {self.path}: expected a latency of client {client} in round {round}, "
                "found none; add its line, or a dropout process in which the client is absent then"
            )
        return self._found[round, client]


def write_trace(path: str | Path, latencies: Iterable[tuple[int, int, float]]) -> None:
    """Write (round, client, seconds), in the given order, to a file for the process `trace`."""
    lines = ["round,client,seconds"]
    lines += (f"{round},{client},{float(seconds)!r}" for round, client, seconds in latencies)
    write_atomically(Path(path), "\n".join(lines) + "\n")
