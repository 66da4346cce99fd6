# SPDX-License-Identifier: Apache-2.0
"""Base of the dropout processes that are combined with another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastagg_sim.dropout.base import PROCESSES, DropoutProcess, make_dropout, needs


@dataclass(frozen=True, kw_only=True)
class Combined(DropoutProcess):
    """A process in which another one decides which clients are available.

    process, options: the name and the options of the other process. It uses all K clients and the
        same seed and history.
    """

    process: str = "full"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        name, inner = options.get("process", cls.process), options.get("options", {})
        if name not in PROCESSES or not isinstance(inner, Mapping):
            return frozenset()  # the constructor refuses it
        return needs(name, inner)

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
