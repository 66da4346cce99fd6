# SPDX-License-Identifier: Apache-2.0
"""``fastagg.privacy.epsilon`` beside the exact privacy loss of the Gaussian mechanism."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import pytest
import torch

import fastagg
from fastagg import privacy

K, D = 4, 5


def exact_delta(multiplier: float, epsilon: float) -> Any:
    """Return the delta of a Gaussian mechanism (Balle and Wang 2018, theorem 8), to 60 digits."""
    mpmath = importlib.import_module("mpmath")  # dp-accounting needs it, too
    with mpmath.workdps(60):
        z, e = mpmath.mpf(multiplier), mpmath.mpf(epsilon)
        a, b = 1 / (2 * z), e * z
        return mpmath.ncdf(a - b) - mpmath.exp(e) * mpmath.ncdf(-a - b)


def reports(multiplier: float, rounds: int) -> list[fastagg.StepReport]:
    agg = fastagg.FedAvg(num_clients=K, num_params=D, clip_norm=1.0, noise_multiplier=multiplier)
    params = torch.zeros(D)
    return [agg.step(params, torch.randn(K, D), range(K)) for _ in range(rounds)]


needs_library = pytest.mark.flower


@needs_library
@pytest.mark.parametrize(
    ("multipliers", "delta"),
    [
        ([1.0], 1e-5),
        ([4.0] * 50, 1e-6),
        ([1.1] * 100, 1e-5),
        ([0.8, 2.0, 2.0, 5.0], 1e-4),
        ([0.2], 1e-9),
        ([0.03, 0.1], 0.5),  # epsilon is about 600
        ([50.0], 0.3),  # epsilon is 0
        ([1.0], 1e-30),
        ([1e4], 1e-12),
    ],
)
def test_it_is_that_of_one_gaussian_mechanism(multipliers: list[float], delta: float) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (extra dp)")
    whole = sum(z**-2.0 for z in multipliers) ** -0.5  # Gaussian releases together are one
    found = privacy.epsilon(multipliers, delta)
    assert exact_delta(whole, found) <= delta * (1.0 + 1e-9)
    assert found == 0.0 or exact_delta(whole, found * (1.0 - 1e-9)) > delta * (1.0 - 1e-9)


@needs_library
def test_published_value() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (extra dp)")
    # Balle and Wang 2018: epsilon = 1 and delta = 1e-5 need a standard deviation of 3.7306.
    assert privacy.epsilon([3.730632], 1e-5) == pytest.approx(1.0, abs=1e-6)


@needs_library
def test_very_small_and_very_large_multipliers() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (extra dp)")
    assert privacy.epsilon([1e-200], 1e-5) == math.inf
    assert privacy.epsilon([1e200], 1e-5) == 0.0
    # Less noise costs more privacy, so counting a multiplier as a smaller one is safe.
    largest = privacy.epsilon([1e6], 1e-12)
    assert privacy.epsilon([1e160, 1e160], 1e-12) == largest > 0.0
    assert exact_delta(1e6, largest) <= 1e-12 * (1.0 + 1e-9)


@needs_library
def test_reports_count_once_each_and_skipped_rounds_never() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (extra dp)")
    agg = fastagg.FedAvg(num_clients=K, num_params=D, clip_norm=1.0, noise_multiplier=2.0)
    skipped = agg.step(torch.zeros(D), torch.zeros(0, D), [])
    found = privacy.epsilon([*reports(2.0, 3), skipped, *reports(3.0, 2)], 1e-5)
    assert found == privacy.epsilon([2.0] * 3 + [3.0] * 2, 1e-5)
    assert found > privacy.epsilon(reports(2.0, 3), 1e-5)


def test_no_release_loses_nothing() -> None:
    assert privacy.epsilon([], 1e-5) == 0.0


def test_a_round_without_noise_is_an_error() -> None:
    agg = fastagg.FedAvg(num_clients=K, num_params=D)
    report = agg.step(torch.zeros(D), torch.randn(2, D), [0, 1])
    with pytest.raises(ValueError, match=r"^rounds\[1\]: expected a report with noise"):
        privacy.epsilon([2.0, report], 1e-5)


@pytest.mark.parametrize(
    ("rounds", "delta", "error", "match"),
    [
        ([1.0], 0.0, ValueError, "^delta: "),
        ([1.0], 1.0, ValueError, "^delta: "),
        ([1.0], "1", TypeError, "^delta: "),
        ([0.0], 1e-5, ValueError, r"^rounds\[0\]: "),
        ([1.0, None], 1e-5, TypeError, r"^rounds\[1\]: "),
        (1.0, 1e-5, TypeError, "^rounds: expected reports or numbers, got float"),
    ],
)
def test_bad_arguments_are_refused(
    rounds: Any, delta: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        privacy.epsilon(rounds, delta)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'fastagg\[dp\]'"):
        privacy.epsilon([1.0], 1e-5)
