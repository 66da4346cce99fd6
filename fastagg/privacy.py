# SPDX-License-Identifier: Apache-2.0
"""The privacy loss of a run with ``noise_multiplier``, by Google's library ``dp-accounting``."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fastagg.options import read_positive
from fastagg.report import StepReport


def epsilon(rounds: Iterable[StepReport | float], delta: float) -> float:
    """Return the epsilon for ``delta`` of all rounds together, for every client.

    Every round counts for every client, as if it had been active in it: who is active is taken for
    public, and no privacy is gained from sampling. docs/privacy.md says what is guaranteed.

    Args:
        rounds: the reports of all rounds of the run, or their noise multipliers. Skipped rounds
            release nothing.
        delta: in (0, 1).

    Returns:
        The epsilon of the composition of Gaussian mechanisms, by privacy loss distributions; 0 if
        there is no release.

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
    library = _library()
    accountant = library.pld.PLDAccountant()
    for multiplier, count in sorted(counts.items()):
        accountant.compose(library.GaussianDpEvent(multiplier), count)
    return float(accountant.get_epsilon(chance))


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


def _library() -> Any:
    try:
        importlib.import_module("dp_accounting.pld")
        return importlib.import_module("dp_accounting")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"fastagg.privacy needs dp-accounting (pip install 'fastagg[dp]'): {error}"
        ) from error
