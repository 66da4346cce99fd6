# SPDX-License-Identifier: Apache-2.0
"""Replay of the active clients from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, register
from fastagg_sim.files import write_atomically
from fastagg_sim.number_files import read_numbers


@register("trace")
@dataclass(frozen=True, kw_only=True)
class Trace(DropoutProcess):
    """The active clients of every round, from a CSV file with the columns `round` and `client`.

    A line states that a client is active in a round. Lines may be in any order, other columns are
    ignored, and in a round without a line no client is active. `write_trace` writes such a file.

    path: the file, absolute or relative to the working directory. It is read once.
    rounds: the length of the trace; by default it ends with the last round in the file.
    after: what to do after the end of the trace. "error": `active` raises IndexError. "repeat":
        start again from the beginning. "empty": no client is active.

    Raises ValueError for a file that cannot be read, a wrong header, a line without two whole
    numbers, a client that is not in [0, K), a duplicate line, or a round beyond `rounds`.
    """

    path: str | Path
    rounds: int | None = None
    after: str = "error"

    @classmethod
    def files(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return (str(options["path"]),) if "path" in options else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_of("after", ("error", "repeat", "empty"))
        if self.rounds is not None:
            self.whole_numbers("rounds", 1)
        _ = self._sets  # reads and checks the file

    @cached_property
    def _sets(self) -> dict[int, torch.Tensor]:
        """The active ids of the rounds in which there are some."""
        found: dict[int, set[int]] = {}
        for round, client in read_numbers("path", self.path, ("round", "client")):
            what = f"path: {self.path}: round {round}, client {client}"
            if client >= self.num_clients:
                raise ValueError(f"{what}: expected clients from 0 to {self.num_clients - 1}")
            if self.rounds is not None and round >= self.rounds:
                raise ValueError(f"{what}: the trace has rounds = {self.rounds}")
            clients = found.setdefault(round, set())
            if client in clients:
                raise ValueError(f"{what}: expected each line once, got it twice")
            clients.add(client)
        if self.rounds is None and not found:
            raise ValueError(
                f"path: {self.path} contains no round; set its length with the option rounds"
            )
        return {t: torch.tensor(sorted(clients)) for t, clients in found.items()}

    @cached_property
    def _length(self) -> int:
        return max(self._sets) + 1 if self.rounds is None else self.rounds

    @property
    def ends(self) -> int | None:
        return self._length if self.after == "error" else None

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        length = self._length
        if round >= length and self.after == "error":
            raise IndexError(
                f"round: {self.path} has rounds 0 to {length - 1}, got {round}; "
                "after=repeat or after=empty continues after the end of the trace"
            )
        if self.after == "repeat":
            round %= length
        return self._sets[round].clone() if round in self._sets else torch.arange(0)


def write_trace(path: str | Path, active: Iterable[Iterable[int] | torch.Tensor]) -> None:
    """Write the active clients of rounds 0, 1, ... to a file for the process `trace`.

    If the last rounds have no active client, also pass the number of rounds to `trace` as `rounds`:
    the file cannot represent them.
    """
    lines = ["round,client"]
    for round, clients in enumerate(active):
        lines += (f"{round},{int(client)}" for client in clients)
    write_atomically(Path(path), "\n".join(lines) + "\n")
