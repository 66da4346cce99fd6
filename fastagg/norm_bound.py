# SPDX-License-Identifier: Apache-2.0
"""A bound of the norms of rows that follows the norms which clients send (``max_norm``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.options import from_saved, read_count, read_positive, replace_fields, shown

ADAPTIVE = "adaptive"
_FEWEST = 3
"""Norms from which a median is taken: of fewer, one may be that of the only other client."""
_MOST = 1 << 20  # entries of a window


@dataclass(frozen=True)
class AdaptiveNorm:
    """The option ``max_norm``: a multiple of the running median of the norms of rows.

    The bound of a round is ``multiple`` times the median of the last ``window`` norms. While fewer
    than ``warmup`` norms are known, those of the present round count as well, and with fewer than
    3 in all there is no bound. For an even count, the median is the lower one of the two middle
    values. After the round, its norms are added in the order of client ids. A norm above the bound
    is recorded as the bound, so that the bound can grow with the norms.
    Zero rows have no effect. So fewer than half of the rows cannot move the bound beyond
    ``multiple`` times a norm of the others, whatever they are.

    Args:
        multiple: > 1.
        window: number of norms that are kept, >= 3.
        warmup: in [0, window].
    """

    multiple: float = 10.0
    window: int = 256
    warmup: int = 32

    def __post_init__(self) -> None:
        multiple = read_positive("max_norm: multiple", self.multiple)
        if multiple <= 1.0:
            raise ValueError(f"max_norm: multiple: expected a number > 1, got {multiple}")
        window = read_count("max_norm: window", self.window, least=_FEWEST, most=_MOST)
        warmup = read_count("max_norm: warmup", self.warmup, least=0, most=window)
        replace_fields(self, multiple=multiple, window=window, warmup=warmup)


MaxNorm = float | AdaptiveNorm | None


def read_max_norm(value: object) -> MaxNorm:
    """Return the option ``max_norm``: None, a number > 0, or an :class:`AdaptiveNorm`.

    Args:
        value: None, a number, "adaptive", an :class:`AdaptiveNorm`, or a mapping of its arguments,
            as :func:`fastagg.options.to_saved` makes it.

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    if value is None or isinstance(value, AdaptiveNorm):
        return value
    if isinstance(value, str) and value == ADAPTIVE:
        return AdaptiveNorm()
    if isinstance(value, Mapping):
        return from_saved("max_norm", value, AdaptiveNorm)
    if isinstance(value, str):
        raise TypeError(
            f'max_norm: expected None, "auto", "adaptive" or a number > 0, got {shown(value)}'
        )
    return read_positive("max_norm", value)


def resolve_max_norm(value: object, nonfinite: object, noise_multiplier: object = 0.0) -> object:
    """Return an option ``max_norm`` with "auto" replaced by what it means with these options."""
    if isinstance(value, str) and value == "auto":
        return ADAPTIVE if nonfinite == "drop" and noise_multiplier == 0.0 else None
    return value


def norm_bytes(value: object) -> int:
    """Return the bytes of state of an option ``max_norm``.

    Raises:
        TypeError, ValueError: the option is not valid.
    """
    read = read_max_norm(value)
    return 8 * read.window + 8 if isinstance(read, AdaptiveNorm) else 0


class RecentNorms:
    """The last norms of an :class:`AdaptiveNorm`, and what the present round adds to them.

    Attributes:
        norms: [window] float64, the last norms; norm n is at n modulo window. Zeros at first.
        count: [] int64, the number of norms so far.
    """

    def __init__(self, options: AdaptiveNorm) -> None:
        self.options = options
        self.norms = torch.zeros(options.window, dtype=torch.float64, device="cpu")
        self.count = torch.zeros((), dtype=torch.int64, device="cpu")
        self._bound: float | None = None  # of the present round
        self._added: dict[int, float] = {}  # norms of the present round, by client

    def begin(self) -> None:
        """Begin a round."""
        self._bound, self._added = None, {}

    def bound(self, norms: Mapping[int, float]) -> float:
        """Return the bound of the present round, infinite if there is none.

        Args:
            norms: finite norms of all rows of the round, by client, in the first call of a round.
                Further calls return the same bound.
        """
        if self._bound is None:
            positive = {client: norm for client, norm in norms.items() if norm > 0.0}
            known: list[float] = self.norms[: min(int(self.count), len(self.norms))].tolist()
            if len(known) < self.options.warmup:
                known += positive.values()
            self._bound = self._of(known) if len(known) >= _FEWEST else math.inf
            self._added = {client: min(norm, self._bound) for client, norm in positive.items()}
        return self._bound

    @property
    def settled(self) -> float:
        """The bound of the next round if it does not depend on its norms; else infinite."""
        known: list[float] = self.norms[: min(int(self.count), len(self.norms))].tolist()
        if len(known) < max(self.options.warmup, _FEWEST):
            return math.inf
        return self._of(known)

    def _of(self, known: list[float]) -> float:
        return self.options.multiple * sorted(known)[(len(known) - 1) // 2]

    def add(self, without: Collection[int] = ()) -> None:
        """Add the norms of the present round, except those of some clients. Cannot fail."""
        window, count = len(self.norms), int(self.count)
        for client in sorted(self._added.keys() - without):
            self.norms[count % window] = self._added[client]
            count += 1
        self.count.fill_(count)
        self.begin()

    def state(self) -> dict[str, Tensor]:
        return {"norms": self.norms, "norm_count": self.count}


def check_norms(state: invariants.State) -> None:
    """Check the norms and their number in a state.

    Raises:
        ValueError: no steps lead to this state.
    """
    norms, count = cast(Tensor, state["norms"]), cast(Tensor, state["norm_count"])
    invariants.check_rounds("norm_count", count)
    invariants.check_range("norms", norms, 0.0, math.nextafter(math.inf, 0.0))
    known = torch.arange(len(norms), device="cpu") < int(count)
    invariants.require(
        torch.equal(norms > 0.0, known), "norms", f"{int(known.sum())} norms > 0, then zeros"
    )
