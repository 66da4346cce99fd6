# SPDX-License-Identifier: Apache-2.0
"""The robust rules and callables against ByzFL's, where that is installed and right.

Where it differs, the tests of the rules say how, with the case written out: its Krum counts one
neighbour more than the paper, so that ours with f is its with f + 1; its geometric median starts at
zero; a NaN row comes out of its Krum, geometric median and clipping; and its SMEA and CAF take
eigenvalues from one step of the power method, so that they follow from the vector it starts with.
(tests/test_robust.py has the two in d dimensions, with numpy's eigenvalues.)
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import robust

if importlib.util.find_spec("byzfl") is None:
    pytest.skip("ByzFL is not installed (make bench-peers installs it)", allow_module_level=True)


@pytest.fixture
def byzfl() -> ModuleType:
    """``byzfl.aggregators`` alone: the package itself imports a whole training stack."""
    if "byzfl" not in sys.modules:
        spec = importlib.util.find_spec("byzfl")
        assert spec is not None
        sys.modules["byzfl"] = importlib.util.module_from_spec(spec)  # made, not executed
    return importlib.import_module("byzfl.aggregators")


def aggregate(name: str, rows: Tensor, **options: Any) -> Tensor:
    agg = fastagg.make(name, num_clients=len(rows), num_params=rows.shape[1], **options)
    params = torch.zeros(rows.shape[1])
    agg.step(params, rows, range(len(rows)))
    return params


@pytest.mark.parametrize(("n", "d"), [(9, 50), (20, 1000)])
def test_the_same_results(byzfl: ModuleType, n: int, d: int) -> None:
    rows = torch.randn(n, d) + torch.randn(d)
    clipped: dict[str, Any] = {"rule": "centered-clip", "rule_options": {"tau": 5.0}}
    mixed = byzfl.NNM(2)(rows)
    pairs = [
        (
            aggregate("geometric-median", rows, iterations=200),
            byzfl.GeometricMedian(nu=1e-6, T=200)(rows),
        ),
        (aggregate("centered-clip", rows, tau=5.0), byzfl.CenteredClipping(L=3, tau=5.0)(rows)),
        (aggregate("krum", rows, num_byzantine=2), byzfl.Krum(3)(rows)),
        (
            aggregate("multi-krum", rows, num_byzantine=2, keep=n - 3),
            byzfl.MultiKrum(3)(rows),
        ),
        (
            aggregate("nnm", rows, num_byzantine=2, **clipped),
            byzfl.CenteredClipping(L=3, tau=5.0)(mixed),
        ),
        (aggregate("bucketing", rows, bucket_size=n), byzfl.Bucketing(n)(rows)[0]),
    ]
    for ours, theirs in pairs:
        # 8e-8 to 1.4e-7 measured: theirs is float32 throughout
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_what_a_nan_row_does_there(byzfl: ModuleType) -> None:
    rows = torch.randn(6, 10)
    rows[0] = math.nan
    for rule in (byzfl.Krum(1), byzfl.GeometricMedian(), byzfl.CenteredClipping()):
        assert torch.isnan(rule(rows)).all()
    for name in ("krum", "geometric-median", "nnm"):
        assert torch.isfinite(aggregate(name, rows, nonfinite="drop")).all()


CALLABLES: list[tuple[str, tuple[Any, ...]]] = [
    ("Average", ()),
    ("Median", ()),
    ("TrMean", (2,)),
    ("GeometricMedian", (0.5, 10)),
    ("CenteredClipping", (None, 3, 4.0)),
    ("MDA", (2,)),
    ("MoNNA", (2, 3)),
    ("Meamed", (2,)),
    ("NNM", (2,)),
    ("Clipping", (3.0,)),
    ("ARC", (2,)),
]


@pytest.mark.parametrize("kind", ["ndarray", "tensor"])
@pytest.mark.parametrize(("name", "arguments"), CALLABLES, ids=[name for name, _ in CALLABLES])
def test_the_callables(byzfl: ModuleType, name: str, arguments: tuple[Any, ...], kind: str) -> None:
    rows: Any = torch.randn(9, 60, dtype=torch.float64) + torch.randn(60, dtype=torch.float64)
    rows = rows.numpy() if kind == "ndarray" else rows.float()
    ours = getattr(robust, name)(*arguments)(rows)
    theirs = getattr(byzfl, name)(*arguments)(rows.copy() if kind == "ndarray" else rows.clone())
    assert type(ours) is type(theirs) and ours.dtype == theirs.dtype
    # float64: distances by way of the Gram matrix; float32: theirs is float32 throughout
    tolerance = 1e-8 if kind == "ndarray" else 2e-6
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=tolerance)


def test_krum_is_theirs_with_one_more(byzfl: ModuleType) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 60))
    np.testing.assert_array_equal(robust.Krum(2)(rows), byzfl.Krum(3)(rows))


@pytest.mark.parametrize("s", [1, 3, 9])
def test_bucketing_up_to_the_draw(byzfl: ModuleType, s: int) -> None:
    """Theirs is a permutation: of one vector a bucket, or one for all, and the mean in any case."""
    rows = np.random.default_rng(0).standard_normal((9, 60))
    ours, theirs = robust.Bucketing(s)(rows), byzfl.Bucketing(s)(rows)
    assert ours.shape == theirs.shape == (9 // s, 60)
    np.testing.assert_allclose(ours.mean(0), theirs.mean(0), rtol=1e-12, atol=1e-12)
    if s != 3:
        np.testing.assert_allclose(np.sort(ours, 0), np.sort(theirs, 0), rtol=1e-12, atol=1e-12)


def test_every_callable_of_theirs_is_here_and_compared(byzfl: ModuleType) -> None:
    theirs = {
        name
        for name, value in vars(byzfl).items()
        if isinstance(value, type) and value.__module__.startswith("byzfl.aggregators.")
    }
    assert theirs == set(robust.__all__)
    elsewhere = {"Krum", "MultiKrum", "Bucketing", "SMEA", "CAF"}  # in the tests beside this one
    assert {name for name, _ in CALLABLES} == theirs - elsewhere


@pytest.mark.parametrize("f", [1, 2, 3])
def test_smea_on_a_line(byzfl: ModuleType, f: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started with the only eigenvector there is, one step of the power method is enough."""
    direction = np.random.default_rng(0).standard_normal(60)
    monkeypatch.setattr(np.random, "randn", lambda _: direction)
    places = np.array([-30.0, 0.0, 1.0, 2.5, 4.5, 7.0, 11.0])[:, None]
    rows = 3.0 + places * direction
    np.testing.assert_allclose(robust.SMEA(f)(rows), byzfl.SMEA(f)(rows), rtol=1e-12)


@pytest.mark.parametrize("name", ["SMEA", "CAF"])
def test_what_one_step_of_the_power_method_does_there(byzfl: ModuleType, name: str) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 50))
    rows[8] *= 3.0
    results = []
    for seed in range(20):
        np.random.seed(seed)
        results.append(getattr(byzfl, name)(2)(rows).tobytes())
    assert len(set(results)) > 5  # of one input; 11 and 18 measured
    assert len({getattr(robust, name)(2)(rows).tobytes() for _ in range(3)}) == 1


def test_what_caf_does_there_with_nothing_to_filter(byzfl: ModuleType) -> None:
    with np.errstate(invalid="ignore"):
        assert byzfl.CAF(0)(np.eye(3)) is None
        assert byzfl.CAF(1)(np.ones((3, 4))) is None
    np.testing.assert_allclose(robust.CAF(1)(np.ones((3, 4))), np.ones(4))


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_one_vector_far_away_keeps_caf_there_from_ending(byzfl: ModuleType) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 50))
    rows[8] *= 1e10  # without weight after the first step, and still what the others are held to
    with pytest.raises(TimeoutError), at_most(2.0):
        byzfl.CAF(2)(rows)
    with at_most(2.0):  # takes a millisecond
        assert np.linalg.norm(robust.CAF(2)(rows)) < 10.0
