# SPDX-License-Identifier: Apache-2.0
"""The option ``staleness``: values of the functions, forms, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastagg
from fastagg import Staleness
from fastagg.staleness import read_staleness

AGES = torch.tensor([0, 1, 3, 4, 5, 8, 1 << 40])


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [
        (Staleness(), [1.0] * 7),
        (Staleness("polynomial"), [1.0, 0.5**0.5, 0.5, 5**-0.5, 6**-0.5, 1 / 3, 2.0**-20]),
        (Staleness("polynomial", a=2.0), [1.0, 1 / 4, 1 / 16, 1 / 25, 1 / 36, 1 / 81, 2.0**-80]),
        (Staleness("hinge"), [1.0, 1.0, 1.0, 1.0, 1 / 11, 1 / 41, 0.1 * 2.0**-40]),
        (Staleness("hinge", a=0.5, b=0), [1.0, 2 / 3, 0.4, 1 / 3, 2 / 7, 0.2, 2.0**-39]),
        (Staleness("hinge", a=0.0), [1.0] * 7),
        (Staleness("polynomial", a=1e9), [1.0] + [1e-100] * 6),
    ],
)
def test_values(staleness: Staleness, expected: list[float]) -> None:
    found = staleness.factors(AGES)
    # float64 functions of numbers up to 2^40, whose neighbours differ by 2^-40 of them
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0
    )


def test_forms() -> None:
    hinge = Staleness("hinge", a=2.0, b=1)
    assert read_staleness(None) is None
    assert read_staleness("hinge") == Staleness("hinge", a=10.0, b=4)
    assert read_staleness(hinge) is hinge
    assert read_staleness({"name": "hinge", "a": 2.0, "b": 1}) == hinge
    assert read_staleness({"kind": "Staleness", "name": "hinge", "a": 2, "b": 1}) == hinge


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("linear", ValueError, "staleness: expected one of"),
        (1, TypeError, "staleness: expected None, one of"),
        ({"nome": "hinge"}, ValueError, "staleness: expected some of"),
        ({"kind": "AdaptiveNorm", "name": "hinge"}, ValueError, "staleness: expected some of"),
        ({"name": "constant", "a": 1.0}, ValueError, "staleness: a: expected None"),
        ({"name": "polynomial", "b": 1}, ValueError, "staleness: b: expected None"),
        ({"name": "polynomial", "a": -1.0}, ValueError, "staleness: a"),
        ({"name": "polynomial", "a": float("nan")}, ValueError, "staleness: a"),
        ({"name": "polynomial", "a": True}, TypeError, "staleness: a"),
        ({"name": "hinge", "b": -1}, ValueError, "staleness: b"),
        ({"name": "hinge", "b": 1.5}, TypeError, "staleness: b"),
    ],
)
def test_wrong_values(value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastagg.make("fedavg", num_clients=2, num_params=1, staleness=value)


def test_max_staleness_needs_staleness() -> None:
    with pytest.raises(ValueError, match="max_staleness: expected None without staleness"):
        fastagg.make("fedavg", num_clients=2, num_params=1, max_staleness=2)
    for wrong in (-1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="max_staleness"):
            fastagg.make(
                "fedavg", num_clients=2, num_params=1, staleness="constant", max_staleness=wrong
            )


@pytest.mark.parametrize(
    ("name", "options", "staleness", "reason"),
    [
        ("scaffold", {"local_work": 1.0}, "constant", "control variates of its own round"),
        ("stale-models", {}, "constant", 'use the rule "stale"'),
        ("mimic", {"mode": "client"}, "constant", "only the v of the last round"),
        ("mimic", {}, "polynomial", "equal weights"),
        ("mifa", {}, "hinge", "however old it is"),
        ("krum", {}, "polynomial", "as it is"),
        ("bulyan", {}, "polynomial", "no weights of rows"),
        ("median", {}, "polynomial", "sorts the values"),
        ("geometric-median", {"reuse": True}, "polynomial", "however old it is"),
    ],
)
def test_a_rule_says_why_it_cannot(
    name: str, options: dict[str, Any], staleness: str, reason: str
) -> None:
    with pytest.raises(
        ValueError, match=f"staleness: expected None.*, got '{staleness}': .*{reason}"
    ):
        fastagg.make(name, num_clients=2, num_params=1, staleness=staleness, **options)


def test_late_rows_are_an_error_by_default() -> None:
    agg, params = fastagg.make("fedavg", num_clients=3, num_params=1), torch.zeros(1)
    with pytest.raises(ValueError, match=r"ages: expected zeros, got 2 .* client 1 .*staleness="):
        agg.step(params, torch.ones(2, 1), [0, 1], ages=[0, 2])
    assert params.tolist() == [0.0] and agg.committed == 0
    agg.step(params, torch.ones(2, 1), [0, 1], ages=[0, 0])
    assert params.tolist() == [1.0]


@pytest.mark.parametrize(
    ("ages", "error"),
    [
        ([0], ValueError),
        ([0, -1], ValueError),
        ([0, 1 << 62], ValueError),
        ([0, 1.0], TypeError),
        ([0, True], TypeError),
        (torch.zeros(2), TypeError),
        (torch.zeros(2, 1, dtype=torch.int64), ValueError),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError),
        ("01", TypeError),
        (3, TypeError),
    ],
)
def test_wrong_ages(ages: Any, error: type[Exception]) -> None:
    agg = fastagg.make("fedavg", num_clients=3, num_params=1, staleness="constant")
    with pytest.raises(error, match="ages"):
        agg.step(torch.zeros(1), torch.ones(2, 1), [0, 1], ages=ages)


def test_repr_shows_it() -> None:
    agg = fastagg.make("fedavg", num_clients=3, num_params=1, staleness="constant", max_staleness=2)
    assert "staleness=Staleness(name='constant', a=None, b=None), max_staleness=2" in repr(agg)
    assert "staleness" not in repr(fastagg.make("fedavg", num_clients=3, num_params=1))
