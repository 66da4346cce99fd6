# SPDX-License-Identifier: Apache-2.0
"""Compare the robust rules and callables with ByzFL's, where ByzFL is installed and correct.

The tests of the rules write out each difference. ByzFL's Krum counts one neighbour more than the
paper, so fastagg's Krum with f equals ByzFL's with f + 1. Its geometric median starts at zero. Its
Krum, geometric median and clipping return NaN for a NaN row. Its SMEA and CAF take eigenvalues from
one step of the power method, so the result depends on the start vector. (tests/test_robust.py
checks these two in d dimensions with numpy's eigenvalues.)
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
    """Import ``byzfl.aggregators`` alone: the package itself imports a whole training stack."""
    if "byzfl" not in sys.modules:
        spec = importlib.util.find_spec("byzfl")
        assert spec is not None
        sys.modules["byzfl"] = importlib.util.module_from_spec(spec)  # created, not executed
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
        (aggregate("trimmed-mean", rows, num_byzantine=2), byzfl.TrMean(2)(rows)),
        (aggregate("meamed", rows, num_byzantine=2), byzfl.Meamed(2)(rows)),
        (aggregate("median", rows[: n - 1 + n % 2]), byzfl.Median()(rows[: n - 1 + n % 2])),
        (aggregate("bucketing", rows, bucket_size=n), byzfl.Bucketing(n)(rows)[0]),
    ]
    for ours, theirs in pairs:
        # 8e-8 to 1.4e-7 measured: ByzFL computes in float32 throughout
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_byzfl_returns_nan_for_a_nan_row(byzfl: ModuleType) -> None:
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
    # float64: distances from the Gram matrix; float32: ByzFL computes in float32
    tolerance = 1e-8 if kind == "ndarray" else 2e-6
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=tolerance)


def test_krum_equals_byzfls_with_f_plus_one(byzfl: ModuleType) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 60))
    np.testing.assert_array_equal(robust.Krum(2)(rows), byzfl.Krum(3)(rows))


@pytest.mark.parametrize("kind", ["ndarray", "tensor"])
def test_krum_of_nearly_equal_vectors(byzfl: ModuleType, kind: str) -> None:
    """ByzFL takes differences of the vectors (of more than 25 tensors, it multiplies matrices)."""
    equal = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        common = generator.standard_normal(1000)
        rows: Any = (common + 1e-4 * generator.standard_normal((10, 1000))).astype(np.float32)
        rows = torch.from_numpy(rows) if kind == "tensor" else rows
        ours, theirs = robust.Krum(1)(rows), byzfl.Krum(2)(rows)
        equal += int(np.array_equal(np.asarray(ours), np.asarray(theirs)))
    assert equal == 100  # 21 by the plain Gram matrix


@pytest.mark.parametrize("kind", ["ndarray", "tensor"])
def test_the_median_of_an_even_number(byzfl: ModuleType, kind: str) -> None:
    """The mean of the two middle values, in ByzFL 0.0.11 for arrays and for tensors."""
    rows: Any = np.array([[1.0], [10.0], [2.0], [4.0]], dtype=np.float32)
    rows = torch.from_numpy(rows) if kind == "tensor" else rows
    assert robust.Median()(rows).tolist() == byzfl.Median()(rows).tolist() == [3.0]
    rows = np.random.default_rng(0).standard_normal((8, 60)).astype(np.float32)
    rows = torch.from_numpy(rows) if kind == "tensor" else rows
    ours, theirs = np.asarray(robust.Median()(rows)), np.asarray(byzfl.Median()(rows))
    # ByzFL rounds the sum of the two values, which are below 1, to float32.
    np.testing.assert_allclose(ours, theirs, rtol=0.0, atol=1e-7)


def test_the_vector_of_an_attack_is_promoted_as_by_byzfl(byzfl: ModuleType) -> None:
    """``Inf`` sends float64 to clients that send float32."""
    good = np.random.default_rng(0).standard_normal((5, 60)).astype(np.float32)
    attack = importlib.import_module("byzfl.attacks").Inf()
    bad = attack(good)
    assert bad.dtype == np.float64 and np.isinf(bad).all()
    ours = robust.Average(nonfinite="drop")([*good, bad])
    theirs = byzfl.Average()([*good, np.zeros(60)])  # finite, of the same dtype
    assert ours.dtype == theirs.dtype == np.float64
    assert byzfl.Average()([torch.zeros(60), torch.zeros(60).double()]).dtype == torch.float32


def test_byzfls_mixing_takes_any_f_below_n(byzfl: ModuleType) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 60))
    assert byzfl.NNM(3)(rows).shape == (4, 60)
    with pytest.raises(ValueError, match="more than 4"):
        robust.NNM(2)(rows)


@pytest.mark.parametrize("s", [1, 3, 9])
def test_bucketing_up_to_the_draw(byzfl: ModuleType, s: int) -> None:
    """Draws differ: compare buckets of one vector, one bucket for all, and the mean of buckets."""
    rows = np.random.default_rng(0).standard_normal((9, 60))
    ours, theirs = robust.Bucketing(s)(rows), byzfl.Bucketing(s)(rows)
    assert ours.shape == theirs.shape == (9 // s, 60)
    np.testing.assert_allclose(ours.mean(0), theirs.mean(0), rtol=1e-12, atol=1e-12)
    if s != 3:
        np.testing.assert_allclose(np.sort(ours, 0), np.sort(theirs, 0), rtol=1e-12, atol=1e-12)


def test_every_callable_of_byzfl_is_provided_and_compared(byzfl: ModuleType) -> None:
    theirs = {
        name
        for name, value in vars(byzfl).items()
        if isinstance(value, type) and value.__module__.startswith("byzfl.aggregators.")
    }
    assert theirs == set(robust.__all__)
    elsewhere = {"Krum", "MultiKrum", "Bucketing", "SMEA", "CAF"}  # in the neighbouring tests
    assert {name for name, _ in CALLABLES} == theirs - elsewhere


@pytest.mark.parametrize("f", [1, 2, 3])
def test_smea_on_a_line(byzfl: ModuleType, f: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with the direction of the line, the only eigenvector: one power step is exact."""
    direction = np.random.default_rng(0).standard_normal(60)
    monkeypatch.setattr(np.random, "randn", lambda _: direction)
    places = np.array([-30.0, 0.0, 1.0, 2.5, 4.5, 7.0, 11.0])[:, None]
    rows = 3.0 + places * direction
    np.testing.assert_allclose(robust.SMEA(f)(rows), byzfl.SMEA(f)(rows), rtol=1e-12)


@pytest.mark.parametrize("name", ["SMEA", "CAF"])
def test_one_power_step_makes_byzfls_result_depend_on_its_start(
    byzfl: ModuleType, name: str
) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 50))
    rows[8] *= 3.0
    results = []
    for seed in range(20):
        np.random.seed(seed)
        results.append(getattr(byzfl, name)(2)(rows).tobytes())
    assert len(set(results)) > 5  # different results for one input; 11 and 18 measured
    assert len({getattr(robust, name)(2)(rows).tobytes() for _ in range(3)}) == 1


def test_byzfls_caf_with_nothing_to_filter(byzfl: ModuleType) -> None:
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


def test_one_far_vector_keeps_byzfls_caf_from_ending(byzfl: ModuleType) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 50))
    rows[8] *= 1e10  # its weight is 0 after the first step, but ByzFL still compares with it
    with pytest.raises(TimeoutError), at_most(2.0):
        byzfl.CAF(2)(rows)
    with at_most(2.0):  # takes a millisecond
        assert np.linalg.norm(robust.CAF(2)(rows)) < 10.0
