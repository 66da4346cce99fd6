# SPDX-License-Identifier: Apache-2.0
"""Base of the dropout processes that are combined with another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fastagg_sim.dropout.base import (
    PROCESSES,
    DropoutProcess,
    changes_clients,
    make_dropout,
    needs,
)
from fastagg_sim.seeds import generator


@dataclass(frozen=True, kw_only=True)
class Combined(DropoutProcess):
    """A process in which another one decides which clients are available, join and leave.

    process, options: the name and the options of the other process. It uses all K clients and the
        same seed and history, and draws what it draws alone.

    A process with other processes of its own kind inside adds their number to the names of its
    random streams (`stream`): all of them have the same seed.
    """

    process: str = "full"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def _other(cls, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
        """Return the name and the options of the other process; None if the constructor refuses
        them."""
        name, inner = options.get("process", cls.process), options.get("options", {})
        return (name, inner) if name in PROCESSES and isinstance(inner, Mapping) else None

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        other = cls._other(options)
        return frozenset() if other is None else needs(*other)

    @classmethod
    def files(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        other = cls._other(options)
        return () if other is None else PROCESSES[other[0]].files(other[1])

    @classmethod
    def changes_clients(cls, options: Mapping[str, Any]) -> bool:
        other = cls._other(options)
        return other is not None and changes_clients(*other)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.options, Mapping):
            raise ValueError(
                f"options: expected the options of {self.process} as a mapping, "
                f"got {self.options!r}"
            )
        _ = self.inner  # checks process and options

    @cached_property
    def inner(self) -> DropoutProcess:
        """The other process."""
        return make_dropout(
            self.process,
            num_clients=self.num_clients,
            seed=self.seed,
            groups=self.groups,
            label_counts=self.label_counts,
            **self.options,
        )

    def stream(self, *names: str | int) -> torch.Generator:
        """Return the generator of the stream ("dropout", names) of this process.

        With n > 0 processes of its own kind inside, the stream is ("dropout", names, n).
        """
        inside, other = 0, self.inner
        while isinstance(other, Combined):
            inside += type(other) is type(self)
            other = other.inner
        return generator(self.seed, "dropout", *names, *([inside] if inside else []))

    def joined(self, round: int) -> int:
        return self.inner.joined(round)

    @property
    def leaves(self) -> torch.Tensor | None:
        return self.inner.leaves

    @property
    def ends(self) -> int | None:
        return self.inner.ends
