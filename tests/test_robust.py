# SPDX-License-Identifier: Apache-2.0
"""Robust rules as callables: ByzFL's test cases, then cases that ByzFL does not test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import robust

VECTORS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]

# The cases of ByzFL's unit tests and what they expect, for the vectors above: the rule, the result
# and the allowed relative error. ByzFL has no tests of CAF and SMEA: those are its docs' examples.
BYZFL = {
    "Average": (robust.Average(), [4.0, 5.0, 6.0], 0.0),
    "Median": (robust.Median(), [4.0, 5.0, 6.0], 0.0),
    "TrMean": (robust.TrMean(1), [4.0, 5.0, 6.0], 0.0),
    "GeometricMedian": (robust.GeometricMedian(), [3.78788764, 4.78788764, 5.78788764], 1e-5),
    "Krum": (robust.Krum(1), [1.0, 2.0, 3.0], 0.0),
    "MultiKrum": (robust.MultiKrum(1), [2.5, 3.5, 4.5], 1e-5),
    "CenteredClipping": (
        robust.CenteredClipping,
        [4.0, 5.0, 6.0],
        0.0,
    ),  # a new instance: the rule has a state
    "MDA": (robust.MDA(1), [2.5, 3.5, 4.5], 1e-5),
    "SMEA": (robust.SMEA(1), [2.5, 3.5, 4.5], 1e-5),
    "CAF": (robust.CAF(1), [4.0, 5.0, 6.0], 1e-5),
    "MoNNA": (robust.MoNNA(1, 1), [2.5, 3.5, 4.5], 1e-5),
    "Meamed": (robust.Meamed(1), [2.5, 3.5, 4.5], 1e-5),
    "NNM": (robust.NNM(1), [[2.5, 3.5, 4.5], [2.5, 3.5, 4.5], [5.5, 6.5, 7.5]], 1e-5),
    "Clipping": (
        robust.Clipping(2.0),
        [
            [0.53452248, 1.06904497, 1.60356745],
            [0.91168461, 1.13960576, 1.36752692],
            [1.00514142, 1.14873305, 1.29232469],
        ],
        1e-5,
    ),
    "ARC": (
        robust.ARC(1),
        [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [4.41004009, 5.04004582, 5.67005155]],
        1e-5,
    ),
}

KINDS: dict[str, Callable[[Any], Any]] = {
    "ndarray": np.array,
    "tensor": torch.tensor,
    "list of ndarrays": lambda rows: [np.array(row) for row in rows],
    "list of tensors": lambda rows: [torch.tensor(row) for row in rows],
}


def fresh(rule: Any) -> Any:
    return rule() if isinstance(rule, type) else rule


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BYZFL)
def test_byzfls_own_cases(name: str, kind: str) -> None:
    rule, expected, tolerance = BYZFL[name]
    result = fresh(rule)(KINDS[kind](VECTORS))
    assert isinstance(result, torch.Tensor if "tensor" in kind else np.ndarray)
    assert str(result.dtype).endswith("float32" if "tensor" in kind else "float64")
    np.testing.assert_allclose(np.asarray(result), expected, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_byzfls_example_of_bucketing(kind: str) -> None:
    """Buckets are drawn at random in both; ByzFL's pages show two of the three results."""
    rule = robust.Bucketing(2)
    results = [rule(KINDS[kind](VECTORS)) for _ in range(20)]
    assert all(isinstance(r, torch.Tensor if "tensor" in kind else np.ndarray) for r in results)
    assert {tuple(sorted(map(tuple, result.tolist()))) for result in results} == {
        ((2.5, 3.5, 4.5), (7.0, 8.0, 9.0)),
        ((4.0, 5.0, 6.0), (4.0, 5.0, 6.0)),
        ((1.0, 2.0, 3.0), (5.5, 6.5, 7.5)),
    }


# --- kinds and dtypes -----------------------------------------------------------------------

RULES: dict[str, Callable[..., Any]] = {
    "Average": robust.Average,
    "Median": robust.Median,
    "TrMean": lambda **k: robust.TrMean(1, **k),
    "GeometricMedian": robust.GeometricMedian,
    "Krum": lambda **k: robust.Krum(1, **k),
    "MultiKrum": lambda **k: robust.MultiKrum(1, **k),
    "CenteredClipping": lambda **k: robust.CenteredClipping(L=3, tau=0.5, **k),
    "MDA": lambda **k: robust.MDA(1, **k),
    "SMEA": lambda **k: robust.SMEA(1, **k),
    "CAF": lambda **k: robust.CAF(1, **k),
    "MoNNA": lambda **k: robust.MoNNA(1, 2, **k),
    "Meamed": lambda **k: robust.Meamed(1, **k),
    "NNM": lambda **k: robust.NNM(1, **k),
    "Bucketing": lambda **k: robust.Bucketing(2, **k),
    "Clipping": robust.Clipping,
    "ARC": lambda **k: robust.ARC(1, **k),
}


def test_the_table_has_every_rule() -> None:
    assert set(RULES) == set(robust.__all__)
    assert set(BYZFL) == set(robust.__all__) - {"Bucketing"}  # random: tested separately


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", RULES)
def test_inputs_stay_as_they_are(name: str, dtype: Any) -> None:
    array = np.random.default_rng(0).standard_normal((5, 40)).astype(dtype)
    array.flags.writeable = False
    tensor = torch.tensor(array)
    before = array.copy()
    for vectors in (array, list(array), tensor, list(tensor)):
        result = RULES[name]()(vectors)
        of_torch = isinstance(vectors[0], torch.Tensor)
        assert isinstance(result, torch.Tensor if of_torch else np.ndarray)
        assert result.dtype == (tensor if of_torch else array).dtype
        result[...] = 7.0  # is the caller's own
        np.testing.assert_array_equal(array, before)
        np.testing.assert_array_equal(tensor.numpy(), before)


@pytest.mark.parametrize("name", RULES)
def test_all_layouts_give_the_same_result(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((6, 30)).astype(np.float32)
    expected = RULES[name]()(values)
    spread = np.zeros((12, 60), np.float32)
    spread[::2, ::2] = values
    for vectors in (
        np.asfortranarray(values),
        spread[::2, ::2],
        values[:, ::-1].copy()[:, ::-1],
        values.astype(">f4"),
        torch.from_numpy(values.copy()).t().contiguous().t(),
        [torch.from_numpy(v.copy()).requires_grad_() for v in values],
        tuple(values),
    ):
        np.testing.assert_array_equal(np.asarray(RULES[name]()(vectors)), np.asarray(expected))


@pytest.mark.parametrize("name", RULES)
def test_vectors_of_any_shape(name: str) -> None:
    flat = np.random.default_rng(2).standard_normal((6, 24)).astype(np.float32)
    expected = RULES[name]()(flat)
    result = RULES[name]()(flat.reshape(6, 2, 3, 4))
    assert result.shape == (*expected.shape[:-1], 2, 3, 4)
    np.testing.assert_array_equal(result.reshape(expected.shape), expected)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_use_more_precision_than_the_dtype(name: str, dtype: torch.dtype) -> None:
    vectors = (torch.randn(9, 500) + 3.0).to(dtype)
    result = RULES[name]()(vectors)
    exact = RULES[name]()(vectors.double())
    # Rounded once to the dtype, from a float32 sum: eps / 2 and a little; 0.52 eps measured.
    bound = 0.5 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    scale = vectors.double().abs().amax()
    assert (result.double() - exact).abs().max() <= bound * scale


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("dtypes", "result"),
    [
        ([F32, F64], F64),
        ([F64, F32], F64),
        ([F16, F32], F32),
        ([BF16, F16], F32),
        ([BF16, F16, F64], F64),
        ([BF16, BF16], BF16),
    ],
)
def test_dtypes_are_promoted(name: str, dtypes: list[torch.dtype], result: torch.dtype) -> None:
    values = torch.randn(7, 20)
    vectors = [value.to(dtypes[i % len(dtypes)]) for i, value in enumerate(values)]
    expected = RULES[name]()([vector.to(result) for vector in vectors])
    found = RULES[name]()(vectors)
    assert found.dtype == result
    assert torch.equal(found, expected)
    if BF16 not in dtypes:
        arrays = RULES[name]()([vector.numpy() for vector in vectors])
        assert arrays.dtype == expected.numpy().dtype
        np.testing.assert_array_equal(arrays, expected.numpy())


@pytest.mark.parametrize("name", RULES)
def test_the_dtype_depends_on_dtypes_alone(name: str) -> None:
    """ByzFL's attack Inf sends float64. A dropped vector promotes as one that is kept."""
    good = np.random.default_rng(0).standard_normal((7, 20)).astype(np.float32)
    bad = np.full(20, np.inf)
    result = RULES[name](nonfinite="drop")([*good, bad])
    assert result.dtype == np.float64
    np.testing.assert_array_equal(result, RULES[name]()(good.astype(np.float64)))


# --- nearly equal vectors -------------------------------------------------------------------


def nearly_equal(n: int, d: int, spread: float, seed: int, dtype: Any) -> np.ndarray:
    generator = np.random.default_rng(seed)
    common = generator.standard_normal(d)
    return (common + spread * generator.standard_normal((n, d))).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "spread"), [(np.float32, 1e-4), (np.float32, 1e-6), (np.float64, 1e-9)]
)
def test_krum_picks_the_vector_of_the_oracle(dtype: Any, spread: float) -> None:
    """The oracle takes differences of vectors first, and computes in longdouble."""
    picked = 0
    for seed in range(100):
        x = nearly_equal(11, 300, spread, seed, dtype)
        best = plain("Krum", x.astype(np.longdouble))
        chosen = robust.Krum(1)(x)
        picked += int(np.array_equal(chosen, best.astype(dtype)))
    assert picked == 100  # 15, 4 and 8 by the plain Gram matrix


NEARLY_EQUAL = [name for name in RULES if name not in ("Bucketing", "Clipping", "ARC")]
MEANS = ("Average", "GeometricMedian", "CenteredClipping")  # which a far vector can move


@pytest.mark.parametrize(
    ("name", "far"),
    [(name, 0.0) for name in NEARLY_EQUAL]
    + [(name, 1e30) for name in NEARLY_EQUAL if name not in MEANS],
)
@pytest.mark.parametrize(
    ("dtype", "spread"), [(np.float32, 1e-4), (np.float64, 1e-4), (np.float64, 1e-9)]
)
def test_nearly_equal_vectors(name: str, dtype: Any, spread: float, far: float) -> None:
    x = nearly_equal(7, 60, spread, 5, dtype)
    if far:
        x[0] = far
    expected = plain(name, x.astype(np.longdouble).astype(np.float64))
    result = np.asarray(RULES[name]()(x))
    if name == "NNM" and far:
        result, expected = result[1:], expected[1:]
    # Rounding of the vectors themselves, of which a wrong choice is 1e-4 or 1e-9 away.
    eps = np.finfo(dtype).eps
    assert np.abs(result - expected).max() <= 8 * eps * np.abs(expected).max()


# --- NaN and Inf ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", RULES)
def test_a_broken_vector(name: str, bad: float) -> None:
    vectors = np.random.default_rng(3).standard_normal((7, 20))
    vectors[4, 11] = bad
    with pytest.raises(ValueError, match=r"NaN or Inf at \[4\]"):
        RULES[name]()(vectors)
    without = RULES[name]()(np.delete(vectors, 4, axis=0))
    np.testing.assert_array_equal(RULES[name](nonfinite="drop")(vectors), without)
    with pytest.raises(ValueError, match="all 2"):
        RULES[name](nonfinite="drop")(np.full((2, 3), bad))


def test_the_trusted_vector_may_not_be_dropped() -> None:
    vectors = np.eye(5)
    vectors[2] = math.nan
    with pytest.raises(ValueError, match="idx"):
        robust.MoNNA(1, 2, nonfinite="drop")(vectors)
    np.testing.assert_array_equal(
        robust.MoNNA(0, 4, nonfinite="drop")(vectors), robust.MoNNA(0, 3)(vectors[[0, 1, 3, 4]])
    )


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e150])
@pytest.mark.parametrize("name", [n for n in RULES if n not in ("Clipping", "CenteredClipping")])
def test_huge_and_tiny_numbers(name: str, scale: float) -> None:
    vectors = np.random.default_rng(4).standard_normal((7, 20))
    options = {"nu": 0.1 * scale} if name == "GeometricMedian" else {}
    result = RULES[name](**options)(vectors * scale)
    base = RULES[name]()(vectors)
    # float64 with the same operations; powers of ten are not exact: a few eps
    np.testing.assert_allclose(result / scale, base, rtol=1e-12, atol=1e-12)


# --- against a plain implementation, and against the server's rules -------------------------


def covariance(x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """[d, d], divided by the number (or by the sum of weights)."""
    return np.atleast_2d(np.cov(x.T, bias=True, aweights=weights))


def caf(x: np.ndarray, f: int) -> np.ndarray:
    """Compute CAF in d dimensions, as in the docstring of robust.CAF."""
    c, best, smallest = np.ones(len(x)), x.mean(0), math.inf
    while c.sum() > len(x) - 2 * f:
        values, vectors = np.linalg.eigh(covariance(x, c))
        mean = (c[:, None] * x).sum(0) / c.sum()
        if values[-1] < smallest:
            best, smallest = mean, values[-1]
        along = ((x - mean) @ vectors[:, -1]) ** 2
        c = c * (1.0 - along / along[c > 0].max())
    return best


def plain(name: str, x: np.ndarray) -> np.ndarray:
    """Compute the rules as written in the papers, in numpy, for the parameters of RULES."""
    n, f = len(x), 1
    d2 = ((x[:, None] - x[None]) ** 2).sum(-1)
    if name == "GeometricMedian":
        z = np.zeros(x.shape[1])
        for _ in range(3):
            w = 1.0 / np.maximum(0.1, np.linalg.norm(x - z, axis=1))
            z = (w[:, None] * x).sum(0) / w.sum()
        return z
    if name in ("Krum", "MultiKrum"):
        scores = np.sort(d2, axis=1)[:, 1 : max(1, n - f - 2) + 1].sum(1)
        return x[scores.argsort(kind="stable")[: 1 if name == "Krum" else n - f]].mean(0)
    if name == "CenteredClipping":
        v = np.zeros(x.shape[1])
        for _ in range(3):
            norms = np.linalg.norm(x - v, axis=1)
            v = v + ((x - v) * np.minimum(1.0, 0.5 / norms)[:, None]).mean(0)
        return v
    if name == "MDA":
        sets = [list(s) for s in itertools.combinations(range(n), n - f)]
        return x[min(sets, key=lambda s: d2[np.ix_(s, s)].max())].mean(0)
    if name == "SMEA":
        sets = [list(s) for s in itertools.combinations(range(n), n - f)]
        return x[min(sets, key=lambda s: np.linalg.eigvalsh(covariance(x[s]))[-1])].mean(0)
    if name == "CAF":
        return caf(x, f)
    if name == "MoNNA":
        return x[d2[2].argsort(kind="stable")[: n - f]].mean(0)
    if name == "Meamed":
        order = np.abs(x - np.median(x, 0)).argsort(0, kind="stable")[: n - f]
        return np.take_along_axis(x, order, 0).mean(0)
    if name == "NNM":
        return np.stack([x[row.argsort(kind="stable")[: n - f]].mean(0) for row in d2])
    if name == "TrMean":
        return np.sort(x, 0)[f : n - f].mean(0)
    if name == "Clipping":
        return x * np.minimum(1.0, 2.0 / np.linalg.norm(x, axis=1))[:, None]
    if name == "ARC":
        norms = np.linalg.norm(x, axis=1)
        threshold = np.sort(norms)[n - int(2 * f / n * (n - f)) - 1]
        return x * np.minimum(1.0, threshold / norms)[:, None]
    return {"Average": np.mean, "Median": np.median}[name](x, axis=0)


@settings(max_examples=20)
@given(st.integers(3, 8), st.integers(1, 40), st.integers(0, 2**31))
@pytest.mark.parametrize("name", [name for name in RULES if name != "Bucketing"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.slow
def test_as_written_in_the_papers(name: str, dtype: Any, n: int, d: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((n, d)).astype(dtype)
    expected = plain(name, x.astype(np.float64))
    # float32: rounding of the result and of sums in groups of eight. float64: distances from
    # the Gram matrix, 1e-8 for the closest vectors, whose factors they set.
    tolerance = 1e-6 if dtype == np.float32 else 1e-8
    np.testing.assert_allclose(RULES[name]()(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("callable_", "rule", "options"),
    [
        (robust.Average(), "fedavg", {}),
        (robust.Krum(2), "krum", {"num_byzantine": 2}),
        (robust.MultiKrum(2), "multi-krum", {"num_byzantine": 2}),
        (robust.CenteredClipping(L=3, tau=2.0), "centered-clip", {"iterations": 3, "tau": 2.0}),
    ],
)
def test_the_same_as_the_servers_rules(callable_: Any, rule: str, options: Any) -> None:
    agg = fastagg.make(rule, num_clients=9, num_params=700, **options)
    for _ in range(3):  # the state of centered clipping, too
        rows = torch.randn(9, 700)
        params = torch.zeros(700)
        agg.step(params, rows, range(9))
        assert (callable_(rows) - params).norm() <= 1e-6 * params.norm()  # float32


def test_buckets_are_of_s_and_drawn_anew() -> None:
    vectors = np.eye(7)
    rule = robust.Bucketing(3, seed=5)
    calls = [rule(vectors) for _ in range(2)]
    for result in calls:
        assert result.shape == (3, 7)
        sizes = sorted(np.count_nonzero(result, axis=1))
        assert sizes == [1, 3, 3]
        np.testing.assert_allclose(result.sum(1), 1.0, rtol=1e-15)
        assert (np.count_nonzero(result, axis=0) == 1).all()
    assert not np.array_equal(*calls)
    np.testing.assert_array_equal(robust.Bucketing(3, seed=5)(vectors), calls[0])
    np.testing.assert_array_equal(np.sort(robust.Bucketing(1)(vectors), 0), np.sort(vectors, 0))


def test_clipping_continues_from_its_last_result() -> None:
    vectors = np.random.default_rng(6).standard_normal((5, 8)) + 4.0
    once, twice = robust.CenteredClipping(L=2, tau=1.0), robust.CenteredClipping(tau=1.0)
    twice(vectors)[...] = math.nan  # the caller's, not the rule's
    np.testing.assert_allclose(twice(vectors), once(vectors), rtol=1e-12)
    start = np.ones(8)
    given_start = robust.CenteredClipping(start, tau=1.0)
    given_start(vectors)
    np.testing.assert_array_equal(start, np.ones(8))
    with pytest.raises(ValueError, match="8 numbers each"):
        given_start(np.zeros((3, 9)))


def test_a_starting_point_can_be_assigned() -> None:
    vectors = torch.randn(5, 4, 2)
    start = torch.full((4, 2), 3.0)
    made, assigned = robust.CenteredClipping(start, tau=1.0), robust.CenteredClipping(tau=1.0)
    first = made(vectors)
    for value in (start, start.numpy(), start.double()):
        assigned(vectors)
        assigned.m = value  # type: ignore[assignment]
        assert torch.equal(assigned(vectors), first)
    assert torch.equal(start, torch.full((4, 2), 3.0))
    with pytest.raises(TypeError, match="floating-point"):
        assigned.m = torch.ones(8, dtype=torch.int64)
    assigned.m = None
    assert torch.equal(assigned(vectors), robust.CenteredClipping(tau=1.0)(vectors))


def test_zero_vectors() -> None:
    zeros = np.zeros((5, 4))
    for name, make in RULES.items():
        assert not make()(zeros).any(), name


@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        ("vectors", TypeError, "ndarray"),
        (3, TypeError, "ndarray"),
        ([[1.0, 2.0]], TypeError, "ndarray"),
        ([np.zeros(2), torch.zeros(2)], TypeError, "ndarray"),
        ([], ValueError, "at least one"),
        (np.zeros((0, 3)), ValueError, "at least one"),
        (np.zeros((3, 0)), ValueError, "at least one number"),
        (np.float64(3.0), TypeError, "ndarray"),
        (torch.tensor(3.0), ValueError, "at least one"),
        (np.zeros((3, 2), int), TypeError, "floating-point"),
        (np.zeros((3, 2), complex), TypeError, "floating-point"),
        (np.array([["a"]]), TypeError, "floating-point"),
        ([np.zeros(2), np.zeros(3)], ValueError, r"vectors\[1\]"),
        ([np.zeros(2), np.zeros(2, int)], TypeError, r"vectors\[1\].*floating-point"),
        ([torch.zeros(2).bool(), torch.zeros(2)], TypeError, r"vectors\[0\].*floating-point"),
        (torch.zeros(3, 2, device="meta"), ValueError, "device"),
        ([torch.zeros(2).to_sparse()], TypeError, "dense tensor, got layout torch.sparse_coo"),
    ],
)
def test_values_that_are_not_vectors_are_refused(
    vectors: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        robust.Average()(vectors)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: robust.Krum(-1), ValueError, "f:"),
        (lambda: robust.Krum(1.0), TypeError, "f:"),  # type: ignore[arg-type]
        (lambda: robust.GeometricMedian(nu=0.0), ValueError, "nu"),
        (lambda: robust.GeometricMedian(T=-1), ValueError, "T:"),
        (lambda: robust.CenteredClipping(tau=-1.0), ValueError, "tau"),
        (lambda: robust.Bucketing(0), ValueError, "s:"),
        (lambda: robust.Average(nonfinite="ignore"), ValueError, "nonfinite"),
        (lambda: robust.Krum(2)(np.eye(4)), ValueError, "^vectors: .* more than 4, twice f"),
        (lambda: robust.TrMean(2)(np.eye(4)), ValueError, "^vectors: .* more than 4, twice f"),
        (lambda: robust.NNM(2)(np.eye(4)), ValueError, "^vectors: .* more than 4, twice f"),
        (lambda: robust.SMEA(2)(np.eye(4)), ValueError, "^vectors: .* more than 4, twice f"),
        (lambda: robust.CAF(2)(np.eye(4)), ValueError, "^vectors: .* more than 4, twice f"),
        (lambda: robust.MDA(2)(np.eye(4)), ValueError, "^vectors: .* more than 4, twice f"),
        (lambda: robust.MoNNA(2)(np.eye(4)), ValueError, "^vectors: .* more than 4, twice f"),
        (lambda: robust.MoNNA(1, 9)(np.eye(4)), ValueError, "idx"),
        (lambda: robust.ARC(5)(np.eye(4)), ValueError, "at least 5"),
        (lambda: robust.ARC(2)(np.eye(3)[:2]), None, ""),
    ],
)
def test_wrong_arguments(
    build: Callable[[], object], error: type[Exception] | None, message: str
) -> None:
    if error is None:
        build()
        return
    with pytest.raises(error, match=message):
        build()
