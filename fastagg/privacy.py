# SPDX-License-Identifier: Apache-2.0
"""The privacy loss of a run with ``noise_multiplier``, by Google's library ``dp-accounting``."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fastagg.options import read_positive
from fastagg.report import StepReport

_MOST = 1e6
"""Larger multipliers count as this one, which only makes epsilon larger. Delta is the difference of
two numbers that are nearly equal with so much noise: beyond 1e6 its rounding error would count."""


def epsilon(rounds: Iterable[StepReport | float], delta: float) -> float:
    """Return the epsilon for ``delta`` of all rounds together, for every client.

    Every round counts for every client, as if it had been active in it: who is active is taken for
    public, and no privacy is gained from sampling. docs/privacy.md says what is guaranteed.

    Args:
        rounds: the reports of all rounds of the run, or their noise multipliers. Skipped rounds
            release nothing.
        delta: in (0, 1).

    Returns:
        The epsilon of all releases, 0 if there is none. Gaussian mechanisms of multipliers z_i are
        together one of multiplier ``(sum over i of z_i^-2)^-1/2``, whose delta has a closed form
        (Balle and Wang 2018, theorem 8), computed in float64. Infinity, if no float64 number is as
        large. A whole multiplier above 1e6 counts as 1e6.

    Raises:
        ImportError: dp-accounting is not installed.
        TypeError, ValueError: an argument is not as described, or a round has no noise.
    """
    chance = read_positive("delta", delta)
    if chance >= 1.0:
        raise ValueError(f"delta: expected a number in (0, 1), got {chance}")
    if not isinstance(rounds, Iterable):
        raise TypeError(
            f"rounds: expected reports or numbers, got {type(rounds).__name__}; pass that of one "
            "round in a list"
        )
    counts = Counter(_multiplier(number, each) for number, each in enumerate(rounds))
    del counts[None]
    if not counts:
        return 0.0
    smallest = min(multiplier for multiplier in counts if multiplier is not None)
    # In units of the smallest one, so that no square is too large.
    ratios = sum(count * (smallest / z) ** 2 for z, count in counts.items() if z is not None)
    whole = min(smallest / math.sqrt(ratios), _MOST)
    loss = _mechanisms().GaussianPrivacyLoss(whole)

    def enough(value: float) -> bool:
        return float(loss.get_delta_for_epsilon(value)) <= chance

    low, high = 0.0, 1.0
    if enough(low):
        return low
    while not enough(high):
        low, high = high, 2.0 * high
        if math.isinf(high):
            return high
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _multiplier(number: int, each: StepReport | float) -> float | None:
    """Return the noise multiplier of a round; None if it was skipped."""
    if not isinstance(each, StepReport):
        return read_positive(f"rounds[{number}]", each)
    if each.skipped:
        return None
    if each.noise is None:
        raise ValueError(
            f"rounds[{number}]: expected a report with noise, got one of a step without "
            "noise_multiplier, which guarantees nothing"
        )
    return each.noise.multiplier


def _mechanisms() -> Any:
    """Return the module of single mechanisms."""
    try:
        return importlib.import_module("dp_accounting.pld.privacy_loss_mechanism")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"fastagg.privacy needs dp-accounting (pip install 'fastagg[dp]'): {error}"
        ) from error
