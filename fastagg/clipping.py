# SPDX-License-Identifier: Apache-2.0
"""The options ``clip_norm``, to which longer rows are scaled down, and ``noise_multiplier``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.noise import Noise, RandomBytes, standard_normal
from fastagg.norm_bound import MaxNorm
from fastagg.options import from_saved, read_factor, read_part, read_positive, replace_fields

_LEAST, _MOST = 1e-30, 1e30  # of an adaptive bound
LEAST_FACTOR = 2.0**-126
"""The least normal number of float32. Factors below it have fewer digits."""
_LARGEST_EXPONENT = 200.0  # exp(200) takes any bound beyond _MOST, and exp(710) would overflow


@dataclass(frozen=True)
class AdaptiveClip:
    """The option ``clip_norm``: a bound that follows a quantile of the norms of rows.

    After a round with S rows, of which a part b is not longer than the bound C, the next bound is
    ``C * exp(-rate * (b - quantile))``: Andrew, Thakkar, McMahan and Ramaswamy 2021,
    "Differentially Private Learning with Adaptive Clipping", Algorithm 1. A skipped round does not
    change it. The bound stays within 1e-30 and 1e30.

    Args:
        initial: the first bound, > 0, in units of the updates.
        quantile: the part of rows that shall not be longer, in [0, 1].
        rate: finite, >= 0; the step of the logarithm of the bound.
        count_noise: standard deviation, in rows, of Gaussian noise that is added to the number of
            rows which are not longer. With ``noise_multiplier`` it must be larger than that; the
            paper uses a twentieth of the number of active clients.
    """

    initial: float = 0.1
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 0.0

    def __post_init__(self) -> None:
        initial = read_positive("clip_norm: initial", self.initial)
        if not _LEAST <= initial <= _MOST:
            raise ValueError(f"clip_norm: initial: expected {_LEAST} to {_MOST}, got {initial}")
        replace_fields(
            self,
            initial=initial,
            quantile=read_part("clip_norm: quantile", self.quantile),
            rate=read_factor("clip_norm: rate", self.rate),
            count_noise=read_factor("clip_norm: count_noise", self.count_noise),
        )


ClipNorm = float | AdaptiveClip | None


def read_clip_norm(value: object) -> ClipNorm:
    """Return the option ``clip_norm``: None, a number > 0, or an :class:`AdaptiveClip`.

    Args:
        value: None, a number, "adaptive", an :class:`AdaptiveClip`, or a mapping of its arguments,
            as :func:`fastagg.options.to_saved` makes it.

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    if value is None or isinstance(value, AdaptiveClip):
        return value
    if isinstance(value, str) and value == "adaptive":
        return AdaptiveClip()
    if isinstance(value, Mapping):
        return from_saved("clip_norm", value, AdaptiveClip)
    return read_positive("clip_norm", value)


def clip_bytes(value: object) -> int:
    """Return the bytes of state of an option ``clip_norm``.

    Raises:
        TypeError, ValueError: the option is not valid.
    """
    return 8 if isinstance(read_clip_norm(value), AdaptiveClip) else 0


class Clipping:
    """The bound of a ``clip_norm``, and what the present round makes of it.

    Args:
        options: a number or an :class:`AdaptiveClip`.

    Attributes:
        bound: [] float64, the bound C of the next round.
    """

    def __init__(self, options: float | AdaptiveClip) -> None:
        self.options = options
        first = options.initial if isinstance(options, AdaptiveClip) else options
        self.bound = torch.tensor(first, dtype=torch.float64, device="cpu")
        self._next: float | None = None

    def begin(self) -> None:
        """Begin a round, or begin it again with fewer rows; without rows, the bound stays."""
        self._next = None

    def factors(self, squares: Sequence[float], random_bytes: RandomBytes) -> list[float]:
        """Return min(1, C / norm) of each row.

        Args:
            squares: squared norms of all rows that are left in the round, finite; S >= 1 numbers.
            random_bytes: the source of the noise of the count.
        """
        bound = float(self.bound)
        norms = [math.sqrt(square) for square in squares]
        if isinstance(self.options, AdaptiveClip):
            count = sum(norm <= bound for norm in norms) + self._count_noise(random_bytes)
            exponent = -self.options.rate * (count / len(norms) - self.options.quantile)
            grown = math.exp(min(exponent, _LARGEST_EXPONENT))
            self._next = min(max(bound * grown, _LEAST), _MOST)
        return [1.0 if norm <= bound else bound / norm for norm in norms]

    def _count_noise(self, random_bytes: RandomBytes) -> float:
        assert isinstance(self.options, AdaptiveClip)
        if self.options.count_noise == 0.0:
            return 0.0
        return self.options.count_noise * standard_normal(1, random_bytes).item()

    def commit(self) -> None:
        """Take the bound for the next round. Cannot fail."""
        if self._next is not None:
            self.bound.fill_(self._next)
        self.begin()

    def state(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint holds, not copied."""
        return {"clip_bound": self.bound} if isinstance(self.options, AdaptiveClip) else {}


def check_clipping(state: invariants.State) -> None:
    """Check the bound in a state.

    Raises:
        ValueError: no steps lead to this state.
    """
    if "clip_bound" in state:
        invariants.check_range("clip_bound", cast(Tensor, state["clip_bound"]), _LEAST, _MOST)


_ROUNDING = 1.0 + 2.0**-16
"""Margin of the sensitivity for roundings in a client's own row: of its norm, whose squares are
added up in float32 within blocks of 768 columns, of factors, and of the scaled row."""
FLOAT32_SUM = 2.0**-19
"""How far roundings can move two sums over rows apart, in units of the sum of |factor| * |row|.
The quotients of factors, the sums of eight rows each (eight operations) and the result are float32,
so an error has at most 10 roundings of 2^-24, and two errors are below 2^-19."""
FLOAT64_SUM = 2.0**-23
"""The same if only the result is float32: two roundings of 2^-24."""


class Noisy(Protocol):
    """What :func:`check_noise` asks of an aggregator."""

    no_noise: str

    @property
    def name(self) -> str: ...
    @property
    def clip_norm(self) -> ClipNorm: ...
    @property
    def max_norm(self) -> MaxNorm: ...


def check_noise(rule: Noisy, multiplier: float, **changed: ClipNorm | MaxNorm) -> None:
    """Check that a rule can have noise with its options.

    Args:
        rule: the rule.
        multiplier: ``noise_multiplier``; 0: there is nothing to check.
        **changed: new values of ``clip_norm`` or ``max_norm``.

    Raises:
        ValueError: the sensitivity of the rule is not known, or not limited by these options.
    """
    if multiplier == 0.0:
        return
    if rule.no_noise:
        raise ValueError(
            f"noise_multiplier: expected 0 for {rule.name}, got {multiplier:g}: {rule.no_noise}"
        )
    clip_norm = changed.get("clip_norm", rule.clip_norm)
    max_norm = changed.get("max_norm", rule.max_norm)
    if clip_norm is None:
        raise ValueError(
            "clip_norm: expected a bound with noise_multiplier, because without one a client can "
            "change the aggregate without limit, got None"
        )
    if max_norm is not None:
        raise ValueError(
            "max_norm: expected None with noise_multiplier, because a rejection shows something of "
            f"an update that the noise does not cover; clip_norm limits norms, got {max_norm!r}"
        )
    if isinstance(clip_norm, AdaptiveClip) and clip_norm.count_noise <= multiplier:
        raise ValueError(
            f"clip_norm: count_noise: expected more than noise_multiplier = {multiplier:g}, "
            f"because the count is a part of what the noise protects, got {clip_norm.count_noise:g}"
        )


def check_remembered(
    name: str, before: tuple[ClipNorm, float] | None, clip_norm: ClipNorm, multiplier: float
) -> None:
    """Check that the noise of a rule covers the rows that it remembers, and will release again.

    The noise of a round follows from the bound of that round. So no row that is remembered may be
    longer than this bound.

    Args:
        name: that of the rule.
        before: ``clip_norm`` and ``noise_multiplier`` of the rounds in which it received the rows;
            None: it has no rows.
        clip_norm, multiplier: those of the next round.

    Raises:
        ValueError: a row may be longer than ``clip_norm``.
    """
    if multiplier == 0.0:
        return
    if isinstance(clip_norm, AdaptiveClip):
        raise ValueError(
            f"clip_norm: expected a number with noise_multiplier for {name}, because rows that it "
            "remembers may be longer than an adaptive bound that has become smaller since, got "
            "AdaptiveClip"
        )
    if before is None:
        return
    bound, noise = before
    if noise == 0.0:
        raise ValueError(
            f"noise_multiplier: expected 0, got {multiplier:g}, because {name} remembers rows of "
            "rounds without noise, which may be longer than clip_norm; forget the clients, or "
            "begin with a new aggregator"
        )
    if isinstance(bound, float) and clip_norm is not None and clip_norm < bound:
        raise ValueError(
            f"clip_norm: expected at least {bound:g} with noise_multiplier, because {name} "
            f"remembers rows that may be so long, got {clip_norm:g}"
        )


def noise_of(clipping: Clipping, multiplier: float, largest: float, rounding: float) -> Noise:
    """Return the noise of a round.

    A count with noise of the standard deviation s is a Gaussian release, too: one client changes it
    by at most 1. With noise of z' = (z^-2 - s^-2)^(-1/2) times the sensitivity in the aggregate,
    both together are as one release with the multiplier z (Andrew et al. 2021, theorem 1, where a
    client changes the count by 1/2).

    Args:
        clipping: the bound.
        multiplier: z > 0.
        largest: the largest change of the aggregate by one client, in units of the bound.
        rounding: how much more it can change because sums are rounded, in the same units.
    """
    own = multiplier
    if isinstance(clipping.options, AdaptiveClip):
        count_noise = clipping.options.count_noise
        ratio = multiplier / count_noise  # < 1
        own = multiplier / math.sqrt(1.0 - ratio**2)  # z**-2 could overflow
    sensitivity = float(clipping.bound) * (_ROUNDING * largest + rounding)
    return Noise(multiplier, sensitivity, own * sensitivity)
