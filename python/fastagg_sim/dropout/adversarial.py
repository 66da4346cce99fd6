# SPDX-License-Identifier: Apache-2.0
"""An adversary that silences selected clients within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fastagg_sim.dropout.base import DropoutProcess, register
from fastagg_sim.number_files import read_numbers
from fastagg_sim.seeds import generator

ALL = "all"
# Relative tolerance of the budget, for rounding errors such as 0.7 * 10 = 7 + 9e-16.
SLACK = 1e-9


@register("adversarial")
@dataclass(frozen=True, kw_only=True)
class Adversarial(DropoutProcess):
    """The scheme of Su et al., section 6.1: the adversary silences some of the sampled clients.

    In every round the server takes a uniform sample of `sample` clients in random order. The
    adversary visits them in that order and silences every candidate that fits into the budget

        sum of n_i over the silenced clients <= epsilon * sample / K * sum of n_i over all clients,

    but it always leaves at least one client active.

    candidates: the clients that the adversary may silence: a list of ids, the path of a CSV file
        with a column `client` (as `fastagg_sim.dropout.shadow` writes), or "all". In the paper they
        are the 35 of 100 clients whose updates change most in two shadow runs. The paper's figures
        show 8 of 10 clients silenced in every round. With 35 candidates this is impossible, since
        on average 3.5 of 10 sampled clients are candidates. With "all" it happens, but silencing
        the first eight of a random order is a uniform choice and no longer adversarial.
    sample: number of clients that the server samples per round; 10 in the paper.
    epsilon: the budget, in [0, 1]; with 0 no client is silenced.
    strict: require < instead of <= in the budget, as in the released code, where epsilon = 0.9
        corresponds to 0.8 in the paper.
    sizes: the meaning of n_i. "samples": number of samples of client i (needs label_counts, which
        the simulation provides). "equal": n_i = 1 for every client.
    """

    candidates: str | Path | Sequence[int]
    sample: int = 10
    epsilon: float = 0.8
    strict: bool = False
    sizes: str = "samples"

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> frozenset[str]:
        samples = options.get("sizes", "samples") == "samples"
        return frozenset({"label_counts"}) if samples else frozenset()

    @classmethod
    def files(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        candidates = options.get("candidates", ALL)
        named = isinstance(candidates, str | Path) and candidates != ALL
        return (str(candidates),) if named else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole_numbers("sample", 1)
        if self.sample > self.num_clients:
            raise ValueError(
                f"sample: expected at most num_clients = {self.num_clients}, got {self.sample}"
            )
        if not 0.0 <= self.epsilon <= 1.0:
            raise ValueError(f"epsilon: expected a number in [0, 1], got {self.epsilon}")
        if not isinstance(self.strict, bool):
            raise ValueError(f"strict: expected true or false, got {self.strict!r}")
        self.one_of("sizes", ("samples", "equal"))
        if self.sizes == "samples" and self.label_counts is None:
            raise ValueError(
                "label_counts: adversarial needs the samples of every client; "
                "pass label_counts, or use sizes=equal"
            )
        _ = self._candidates  # reads and checks them

    @cached_property
    def _candidates(self) -> frozenset[int]:
        if self.candidates == ALL:
            return frozenset(range(self.num_clients))
        if isinstance(self.candidates, str | Path):
            ids = [row[0] for row in read_numbers("candidates", self.candidates, ("client",))]
        else:
            ids = list(self.candidates)
        for client in ids:
            if isinstance(client, bool) or not isinstance(client, int):
                raise ValueError(f"candidates: expected client ids, got {client!r}")
            if not 0 <= client < self.num_clients:
                raise ValueError(
                    f"candidates: expected ids from 0 to {self.num_clients - 1}, got {client}"
                )
        if len(set(ids)) < len(ids):
            raise ValueError(f"candidates: expected no id twice, got {sorted(ids)}")
        return frozenset(ids)

    @cached_property
    def _sizes(self) -> list[int]:
        """n_i of every client."""
        if self.sizes == "equal" or self.label_counts is None:
            return [1] * self.num_clients
        return [sum(row) for row in self.label_counts]

    @property
    def _sampled_mass(self) -> float:
        """The expected sum of n_i over a sample; the budget is epsilon times this number."""
        return sum(self._sizes) * self.sample / self.num_clients

    def sampled(self, round: int) -> list[int]:
        """Return the clients that the server samples in `round`, in the order in which the
        adversary visits them."""
        return self._sampled(generator(self.seed, "dropout", round))

    def _sampled(self, rng: torch.Generator) -> list[int]:
        return torch.randperm(self.num_clients, generator=rng)[: self.sample].tolist()

    def silenced_fraction(self, round: int) -> float:
        """Return epsilon_t, the used part of the budget in `round`; at most epsilon.

        It is the sum of n_i over the silenced clients, divided by its expectation over a sample of
        clients.
        """
        silenced = set(self.sampled(round)) - set(self.active(round).tolist())
        return sum(self._sizes[client] for client in silenced) / self._sampled_mass

    def draw(
        self, round: int, rng: torch.Generator, history: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        sampled = self._sampled(rng)
        budget = self.epsilon * self._sampled_mass
        limit = budget * (1.0 - SLACK) if self.strict else budget * (1.0 + SLACK)
        silenced: set[int] = set()
        mass = 0
        for client in sampled:
            if len(silenced) == len(sampled) - 1:
                break
            more = mass + self._sizes[client]
            fits = more < limit if self.strict else more <= limit
            if client in self._candidates and fits:
                silenced.add(client)
                mass = more
        return torch.tensor(sorted(set(sampled) - silenced), dtype=torch.int64)
