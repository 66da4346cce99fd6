# SPDX-License-Identifier: Apache-2.0
"""Callables and float64 vectors whose squares or sums are beyond float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch

import fastagg
from fastagg import robust
from fastagg.robust import callables

N, F, D = 9, 2, 5
MAX = np.finfo(np.float64).max

RULES: dict[str, Callable[[], Any]] = {
    "Average": robust.Average,
    "Median": robust.Median,
    "TrMean": lambda: robust.TrMean(F),
    "GeometricMedian": robust.GeometricMedian,
    "Krum": lambda: robust.Krum(F),
    "MultiKrum": lambda: robust.MultiKrum(F),
    "CenteredClipping": lambda: robust.CenteredClipping(L=3, tau=0.5),
    "MDA": lambda: robust.MDA(F),
    "SMEA": lambda: robust.SMEA(F),
    "CAF": lambda: robust.CAF(F),
    "MoNNA": lambda: robust.MoNNA(F, N - 1),
    "Meamed": lambda: robust.Meamed(F),
    "NNM": lambda: robust.NNM(F),
    "Bucketing": lambda: robust.Bucketing(2),
    "Clipping": robust.Clipping,
    "ARC": lambda: robust.ARC(F),
}
MEANS = ("Average", "NNM", "Bucketing")  # in which a long vector may count in full
COMPOSED: dict[str, Callable[[Any], Any]] = {
    "MultiKrum of NNM": lambda x: robust.MultiKrum(F)(robust.NNM(F)(x)),
    "TrMean of NNM": lambda x: robust.TrMean(F)(robust.NNM(F)(x)),
    "GeometricMedian of Bucketing": lambda x: robust.GeometricMedian()(robust.Bucketing(2)(x)),
    "CenteredClipping of Bucketing": lambda x: robust.CenteredClipping()(robust.Bucketing(2)(x)),
    "Average of Clipping": lambda x: robust.Average()(robust.Clipping()(x)),
    "CAF of ARC": lambda x: robust.CAF(F)(robust.ARC(F)(x)),
}

# What F vectors of the size s send.
ATTACKS: dict[str, Callable[[float], list[Any]]] = {
    "one": lambda s: [np.full(D, s)],
    "one, negative": lambda s: [np.full(D, -s)],
    "one number": lambda s: [np.eye(D)[2] * -s],
    "the same": lambda s: [np.full(D, s)] * F,
    "opposite": lambda s: [np.full(D, s), np.full(D, -s)],
    "of other lengths": lambda s: [np.full(D, s), np.linspace(-1.0, 1.0, D) * s / 1e50],
}
SIZES = [1e78, 1e154, 1.7e308]


def attacked(attack: str, size: float, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((N, D))
    bad = ATTACKS[attack](size)
    x[: len(bad)] = bad
    return x


# --- exact rules ----------------------------------------------------------------------------


def norm(x: Any) -> Decimal:
    return sum((v * v for v in x), Decimal(0)).sqrt()


def mean(rows: Any) -> Any:
    return sum(rows[1:], rows[0]) / Decimal(len(rows))


def exact(name: str, x: np.ndarray) -> Any:
    """Compute the rules as written in the papers, for the parameters of RULES, in decimals."""
    with localcontext(Context(prec=700, Emax=10**6, Emin=-(10**6))):
        rows = np.array([[Decimal(v) for v in row] for row in x.tolist()], dtype=object)
        return np.array(_exact(name, rows), dtype=np.float64)


def _exact(name: str, x: Any) -> Any:
    n, half = len(x), Decimal("0.5")
    if name == "Average":
        return mean(x)
    if name == "GeometricMedian":
        z = x[0] * 0
        for _ in range(3):
            w = [1 / max(Decimal("0.1"), norm(row - z)) for row in x]
            z = sum(a * row for a, row in zip(w, x, strict=True)) / sum(w)
        return z
    if name == "CenteredClipping":
        v = x[0] * 0
        for _ in range(3):
            shares = [half / max(norm(row - v), half) for row in x]
            v = v + mean([(row - v) * share for row, share in zip(x, shares, strict=True)])
        return v
    if name in ("Clipping", "ARC"):
        norms = [norm(row) for row in x]
        bound = Decimal(2) if name == "Clipping" else sorted(norms)[n - 2 * F * (n - F) // n - 1]
        return [row * min(Decimal(1), bound / a) for row, a in zip(x, norms, strict=True)]
    if name in ("Median", "TrMean", "Meamed"):
        columns = [sorted(column) for column in x.T]
        middle = [column[n // 2] for column in columns]  # n is odd
        if name == "Median":
            return middle
        if name == "TrMean":
            return [mean(column[F : n - F]) for column in columns]
        nearest = [
            sorted(column, key=lambda v: abs(v - m))[: n - F]
            for column, m in zip(columns, middle, strict=True)
        ]
        return [mean(column) for column in nearest]
    apart = [[norm(a - b) for b in x] for a in x]
    if name in ("Krum", "MultiKrum"):
        scores = [sum(v * v for v in sorted(row)[1 : n - F - 1]) for row in apart]
        order = sorted(range(n), key=lambda i: scores[i])
        return mean(x[order[: 1 if name == "Krum" else n - F]])
    if name == "MDA":
        sets = [list(s) for s in itertools.combinations(range(n), n - F)]
        return mean(x[min(sets, key=lambda s: max(apart[i][j] for i in s for j in s))])
    nearest = [sorted(range(n), key=lambda j: row[j])[: n - F] for row in apart]
    return mean(x[nearest[-1]]) if name == "MoNNA" else [mean(x[i]) for i in nearest]


EXACT = [name for name in RULES if name not in ("SMEA", "CAF", "Bucketing")]


def test_the_table_has_every_rule() -> None:
    assert set(RULES) == set(robust.__all__)


# --- long vectors of a minority -------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", EXACT)
def test_as_in_exact_arithmetic(name: str, attack: str, size: float) -> None:
    x = attacked(attack, size)
    result, expected = RULES[name]()(x), exact(name, x)
    assert np.isfinite(result).all()
    # Rounding of float64, relative to each result. Where a long vector counts in full (MEANS), that
    # of its length; elsewhere it is 2^128 times as far as the others, so its length is rounding.
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    np.testing.assert_array_less(np.abs(result / largest - expected / largest), 1e-13)
    if name not in MEANS:
        assert np.abs(result).max() < 10.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("attack", [a for a in ATTACKS if a != "of other lengths"])
@pytest.mark.parametrize("name", [name for name in RULES if name not in MEANS])
def test_the_length_of_a_long_vector_does_not_matter(name: str, attack: str, size: float) -> None:
    expected = RULES[name]()(attacked(attack, 2.0**200))  # squared, within the range of float64
    result = RULES[name]()(attacked(attack, size))
    # The directions of "one number" and of equal numbers are the same up to rounding.
    np.testing.assert_allclose(result, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", COMPOSED)
def test_compositions(name: str, attack: str, size: float) -> None:
    result = COMPOSED[name](attacked(attack, size))
    # Of 100 = tau are 2 of 5 buckets; ordinary vectors have numbers of about 1.
    assert np.abs(result).max() < (100.0 if name.startswith("CenteredClipping") else 10.0)


@pytest.mark.parametrize("name", RULES)
def test_vectors_of_float32_beside_one_of_float64(name: str) -> None:
    good = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
    bad = [np.full(D, 1e200), *good[1:]]
    result = RULES[name]()(bad)
    assert result.dtype == np.float64 and np.isfinite(result).all()
    np.testing.assert_array_equal(result, RULES[name]()(np.stack(bad)))
    tensors = RULES[name]()([torch.from_numpy(vector) for vector in bad])
    np.testing.assert_array_equal(tensors.numpy(), result)


@pytest.mark.parametrize("rule", [robust.SMEA, robust.CAF])
@pytest.mark.parametrize("far", [1e70, 1e77, 1e100, 1e300])
@pytest.mark.parametrize("spread", [1.0, 1e-6])
def test_a_long_vector_does_not_hide_a_shorter_one(rule: Any, far: float, spread: float) -> None:
    """Squares of ordinary distances, divided by that of a long one, must not underflow."""
    x = spread * np.random.default_rng(0).standard_normal((N, D))
    x[0], x[1] = far, 100.0 * spread
    assert np.abs(rule(2)(x)).max() < 3.0 * spread  # with the second: 100 / 8 = 12 spreads


def test_clipped_vectors_have_the_norm() -> None:
    x = torch.randn(N, D, dtype=torch.float64)
    x[0], x[1] = 1.7e308, -1e200
    clipped = robust.Clipping(2.0)(x)
    torch.testing.assert_close(clipped[:2].norm(dim=1), torch.full((2,), 2.0).double())
    arc = robust.ARC(1)(x)
    # Only one of two is clipped, to the next norm: 1e200 * sqrt(D). Others stay as they are.
    torch.testing.assert_close(arc[0], torch.full((D,), 1e200, dtype=torch.float64))
    assert torch.equal(arc[1:], x[1:])
    assert torch.equal(robust.Clipping(1e250)(x)[1:], x[1:])
    short = robust.Clipping(1e-100)(x)
    torch.testing.assert_close(short.norm(dim=1) / 1e-100, torch.ones(N, dtype=torch.float64))


@pytest.mark.parametrize("nu", [0.1, 1e90, 1e200, 1e300])
@pytest.mark.parametrize("size", [1e100, 1e199, 1e201, 1e308])
def test_a_large_nu(nu: float, size: float) -> None:
    x = attacked("one number", size)
    norms = [size, *(math.sqrt(float((row**2).sum())) for row in x[1:])]
    weights = [nu / max(nu, value) for value in norms]  # of the first step
    expected = sum((w * row for w, row in zip(weights, x, strict=True)), np.zeros(D)) / sum(weights)
    result = robust.GeometricMedian(nu=nu, T=1)(x)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(result / largest, expected / largest, rtol=1e-13, atol=1e-13)


# --- long vectors of the majority -----------------------------------------------------------


@pytest.mark.parametrize("power", [300, 600, 1000])
@pytest.mark.parametrize("name", RULES)
def test_all_vectors_are_long(name: str, power: int) -> None:
    x, scale = np.random.default_rng(1).standard_normal((N, D)), 2.0**power
    x[0] *= 30.0
    options: dict[str, Callable[[float], Any]] = {
        "GeometricMedian": lambda s: robust.GeometricMedian(nu=0.1 * s),
        "CenteredClipping": lambda s: robust.CenteredClipping(L=3, tau=0.5 * s),
        "Clipping": lambda s: robust.Clipping(2.0 * s),
    }
    build = options.get(name, lambda _: RULES[name]())
    # A power of two changes no bit, in the library of eigenvalues neither.
    np.testing.assert_array_equal(build(scale)(x * scale), build(1.0)(x) * scale)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_sums_beyond_float64(name: str, n: int) -> None:
    """A mean of finite numbers is finite, although their sum is not."""
    rules: dict[str, Any] = {
        "TrMean": robust.TrMean(),
        "Meamed": robust.Meamed(),
        "CenteredClipping": robust.CenteredClipping(tau=math.inf),
        "Clipping": robust.Clipping(MAX),
        "ARC": robust.ARC(),
        "GeometricMedian": robust.GeometricMedian(),
        "MoNNA": robust.MoNNA(),
        "Bucketing": robust.Bucketing(3),
    }
    rule = rules.get(name) or getattr(robust, name)()
    for value in (1.5e308, -MAX):
        x = np.full((n, 1), value)  # norms are in the range
        # n roundings of 2^-53
        np.testing.assert_allclose(rule(x) / MAX, value / MAX, rtol=1e-15 * (n + 1))
        if name == "CenteredClipping":
            rule.m = None
    spread = np.array([[MAX], [-MAX], [0.75 * MAX]])[:n]
    assert np.isfinite(rule(spread)).all()


@pytest.mark.parametrize("name", ["Average", "Median", "TrMean", "Meamed"])
def test_small_numbers_beside_such_sums_keep_their_bits(name: str) -> None:
    x = np.random.default_rng(2).standard_normal((N, D))
    expected = RULES[name]()(x)
    wide = np.concatenate([x, np.full((N, 1), 1.7e308)], axis=1)
    np.testing.assert_array_equal(RULES[name]()(wide)[:D], expected)


# --- the state of centered clipping ---------------------------------------------------------


def test_centered_clipping_recovers() -> None:
    good = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
    rule = robust.CenteredClipping()
    first = rule([np.full(D, 1e200), *good[1:]])
    # The long vector adds tau / N = 100 / 9 in its direction.
    expected = good[1:].sum(0, dtype=np.float64) / N + 100.0 / N / math.sqrt(D)
    np.testing.assert_allclose(first, expected, rtol=1e-12)
    np.testing.assert_allclose(rule(good), good.mean(0, dtype=np.float64), rtol=2e-6)  # float32


def of_length(name: str, length: float) -> Any:
    """Return a callable whose length, if it has one, is ``length``."""
    made: dict[str, Callable[[], Any]] = {
        "GeometricMedian": lambda: robust.GeometricMedian(nu=0.1 * length, T=5),
        "CenteredClipping": lambda: robust.CenteredClipping(L=3, tau=0.5 * length),
        "Clipping": lambda: robust.Clipping(c=length),
    }
    return made.get(name, RULES[name])()


@pytest.mark.parametrize("power", [-300, -540, -900, -1000])
@pytest.mark.parametrize("name", RULES)
def test_short_vectors(name: str, power: int) -> None:
    """Their squares underflow from 2^-537 on, where Krum returned an outlier."""
    vectors = np.random.default_rng(-power).standard_normal((N, D))
    vectors[:F] += 20.0
    scale = 2.0**power
    found = of_length(name, scale)(vectors * scale) / scale
    # Exact but for numbers near 2^-1074, the spacing of denormal numbers.
    tolerance = 1e-12 if power > -1000 else 2.0**-60
    np.testing.assert_allclose(found, of_length(name, 1.0)(vectors), rtol=0, atol=tolerance)


@pytest.mark.parametrize("far", [1.0, 1e300])
@pytest.mark.parametrize("name", ["Krum", "MultiKrum", "MDA", "SMEA", "MoNNA", "GeometricMedian"])
def test_others_beside_short_vectors(name: str, far: float) -> None:
    vectors = np.random.default_rng(1).standard_normal((N, D)) * 2.0**-600
    vectors[:F] = far
    found = of_length(name, 2.0**-600)(vectors) * 2.0**600
    assert np.abs(found).max() < 3.0


def test_meamed_of_two_values_at_the_same_distance() -> None:
    """The rounded median of [a, a, b, b] is nearer to a or b; the smaller one is left in."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        low, high = np.sort(generator.random(2))
        (found,) = robust.Meamed(1)(np.array([[low], [high], [high], [low]]))
        assert found == pytest.approx((2 * low + high) / 3, rel=1e-15)
    values = np.sort(generator.integers(0, 30, (9, 500)), axis=0).astype(np.float64)
    expected = []
    for column in values.T:
        order = sorted(column, key=lambda value: (abs(value - column[4]), value))
        expected.append(np.mean(order[: 9 - 4]))
    np.testing.assert_allclose(robust.Meamed(4)(values), expected, rtol=1e-15)


def test_a_result_beyond_the_dtype_of_the_vectors_is_refused() -> None:
    clip = robust.CenteredClipping(m=torch.full((3,), 1e6), tau=1.0)
    with pytest.raises(ValueError, match=r"m: expected numbers in the range of torch\.float16"):
        clip(torch.ones(4, 3, dtype=torch.float16))
    assert torch.equal(clip.m, torch.full((3,), 1e6))


@pytest.mark.parametrize("nu", [1e-300, 5e-309, 5e-324])
def test_a_tiny_nu(nu: float) -> None:
    vectors = np.array([[1.0], [1.0], [2.0]])  # no mean of them is so near to one of them
    found = robust.GeometricMedian(nu=nu, T=5)(vectors)
    assert found == robust.GeometricMedian(nu=1e-100, T=5)(vectors) != 1.0
    agg = fastagg.make("geometric-median", num_clients=3, num_params=2, nu=nu)
    params = torch.zeros(2)
    report = agg.step(params, torch.ones(3, 2), [0, 1, 2])
    assert params.tolist() == [1.0, 1.0] and report.weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("tau", [100.0, 1e100, 1e200, 1e300, math.inf])
@pytest.mark.parametrize("start", [0.0, 1e90, 1e190, 1e210, -1.7e308])
@pytest.mark.parametrize("size", [1.0, 1e90, 1e205, 1.7e308])
def test_a_step_of_centered_clipping(size: float, start: float, tau: float) -> None:
    """One number per vector: a step adds the mean of the differences, cut off at tau."""
    x = np.array([[size], [1.0], [-2.0], [0.5], [0.25]])
    rule = robust.CenteredClipping(np.array([start]), tau=tau)
    with localcontext(Context(prec=700)):
        bound = Decimal(tau)
        steps = [max(-bound, min(bound, Decimal(v) - Decimal(start))) for v in x[:, 0].tolist()]
        expected = float(Decimal(start) + mean(steps))
    result = rule(x)[0]
    assert rule.m is not None and float(rule.m) == result
    # Rounding of the largest number that is added.
    assert abs(result - expected) <= 1e-15 * max(abs(expected), abs(start), min(tau, size))


def test_a_result_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(N, D)
    rule = robust.CenteredClipping()
    expected = rule(x)
    with monkeypatch.context() as patch:
        patch.setattr(callables, "combine", lambda *_: torch.full((1, D), math.inf))
        with pytest.raises(ValueError, match="result is out of the range"):
            rule(x)
    assert rule.m is not None and torch.equal(rule.m, expected)
    rule.m = torch.full((D,), 1e200, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"m: expected.*float32.*1e\+200"):
        rule(x)
    assert rule.m.max() == 1e200
    rule.m = None
    assert torch.equal(rule(x), expected)
