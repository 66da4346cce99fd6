# SPDX-License-Identifier: Apache-2.0
"""``clip_norm`` without copies: rows are scaled by their weights, or in the pass over them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, ColumnBlocks, clipped_steps
from fastagg.updates.columns import Columns
from fastagg.updates.differences import Differences
from tests.rules.conftest import as_form
from tests.scripts import HANG, ROOT

K, D = 6, 23
CLIP = 4.0  # rows of D standard normal numbers have norms of about 4.8
Check = Callable[..., None]
clipping_rule = pytest.mark.clipping_rule


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, clip_norm=CLIP, **(options | more))


def copying(agg: Aggregator) -> Aggregator:
    """Return the aggregator, which now copies rows that are too long, as any rule may."""
    agg.sums_rows_by_plan = False
    agg._scales_rows = lambda cohort: False  # type: ignore[method-assign]
    return agg


def rounds(count: int, seed: int = 11) -> list[tuple[Tensor, list[int]]]:
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        clients = torch.randperm(K, generator=generator)[:4].tolist()
        lengths = 2.0 * torch.rand(4, 1, generator=generator)
        found.append((lengths * torch.randn(4, D, generator=generator), clients))
    return found


@clipping_rule
@pytest.mark.parametrize("form", ["matrix", "list", "buffer", "stream", "float64", "bfloat16"])
def test_no_rule_copies_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], form: str
) -> None:
    monkeypatch.setattr(clipped_steps, "scaled", None)
    agg, (rows, clients) = make(name, options), rounds(1)[0]
    given = as_form(form, rows, clients, K)
    if form in ("float64", "bfloat16"):  # models of clients, minus that of the server
        dtype = getattr(torch, form)
        given = Differences([[row.to(dtype)] for row in rows], torch.zeros(D))
    report = agg.step(torch.zeros(D), given, clients)
    assert report.clipped is not None and report.clipped.numel()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
def test_the_peak_of_memory_is_that_without_copies() -> None:
    """A rule for each way of scaling rows; without names, the program measures all rules."""
    rules = ["fdms", "krum", "median", "mimic", "scaffold"]
    command = [sys.executable, "-m", "tests.rules.clip_peaks", *rules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 6 * 10 + 1  # six forms of ten configurations


@clipping_rule
@pytest.mark.parametrize("form", ["matrix", "buffer", "stream"])
def test_a_step_is_that_with_copies(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any], form: str
) -> None:
    agg, twin_agg = make(name, options), copying(make(name, options))
    params, twin = torch.zeros(D), torch.zeros(D)
    weighted = agg.sums_rows_by_plan or name in IN_WEIGHTS or options.get("mode") == "client"
    exact = not weighted or bool(options.get("reuse"))
    for rows, clients in rounds(6):
        report = agg.step(params, as_form(form, rows, clients, K), clients)
        expected = twin_agg.step(twin, as_form(form, rows, clients, K), clients)
        assert report.clipped is not None and report.clipped.numel()
        if exact:
            same_bits(params, twin)
            same_bits(report.weights, expected.weights)
            continue
        # A copy rounds the factor and each product, by 2^-24 each. Robust rules judge by distances,
        # whose relative errors are those of the rows times the ratio of norms and distances.
        assert (params - twin).abs().max() <= 2e-6 * twin.abs().max()
        assert (report.weights - expected.weights).abs().max() <= 1e-6
    if exact:
        same_state(agg, twin_agg)


IN_WEIGHTS = (
    *("geometric-median", "centered-clip", "krum", "multi-krum", "nnm", "bucketing"),
    *("fdms", "fdms-soft", "fdms-means", "bulyan", "scaffold"),
)


def test_krum_by_hand() -> None:
    agg, params = fastagg.Krum(num_clients=3, num_params=2, clip_norm=5.0), torch.zeros(2)
    # (6, 8) becomes (3, 4), which is nearest to the row (3, 4); the lower id wins the tie. (0, 50)
    # becomes (0, 5), which is at a distance of sqrt(10) from both.
    rows = torch.tensor([[6.0, 8.0], [0.0, 50.0], [3.0, 4.0]])
    report = agg.step(params, rows, [0, 1, 2])
    assert params.tolist() == [3.0, 4.0]
    assert report.weights.tolist() == [0.5, 0.0, 0.0]  # of the rows as they came
    assert report.clipped is not None and report.clipped.tolist() == [0, 1]


@pytest.mark.parametrize("sketch", [None, 64])
def test_equal_rows_that_are_too_long_have_the_distance_zero(sketch: int | None) -> None:
    # Three of five rows are equal, so the score of each of them is 0, whatever factors are.
    rows = torch.randn(5, D, generator=torch.Generator().manual_seed(3)) * 30.0
    rows[[1, 3, 4]] = rows[1].clone()
    for bound in (0.1, 1.0, 3.7):
        agg = fastagg.Krum(
            num_clients=5, num_params=D, num_byzantine=1, sketch=sketch, clip_norm=bound
        )
        assert agg.step(torch.zeros(D), rows, range(5)).weights.nonzero().tolist() == [[1]]


def near(n: int, d: int, spread: float, seed: int) -> Tensor:
    """n rows [d] of different lengths whose directions differ by about ``spread``."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(d, generator=g) + spread * torch.randn(n, d, generator=g)
    return rows * (1.0 + torch.rand(n, 1, generator=g))


@pytest.mark.parametrize("spread", [1e-3, 1e-4, 1e-5])
def test_rows_that_are_close_after_clipping(spread: float) -> None:
    # Their distances come from the rows minus one of them, each times its factor in float32.
    n, d, bound = 9, 700, 20.0
    for seed in range(20):
        rows = near(n, d, spread, seed)
        agg = fastagg.Krum(num_clients=n, num_params=d, num_byzantine=2, clip_norm=bound)
        report = agg.step(torch.zeros(d), rows, range(n))
        assert report.clipped is not None and len(report.clipped) == n
        factors = (bound / rows.double().norm(dim=1)).float()
        x = (rows * factors[:, None]).double()
        squares = (x[:, None] - x).square().sum(dim=-1).numpy()
        scores = np.sort(squares, axis=1)[:, 1 : n - 3].sum(axis=1)
        chosen = int(report.weights.argmax())
        # The square norms behind the factors are rounded, by 1e-8: so are lengths, by 1e-8 of 20.
        assert scores[chosen] <= scores.min() + 1e-6 * spread * bound * bound


@pytest.mark.parametrize("d", [1, 63, 700, (1 << 16) + 5])
def test_differences_have_the_bits_of_scaled_rows(same_bits: Check, d: int) -> None:
    rows = near(7, d, 1e-3, seed=1)
    scales = torch.linspace(0.1, 1.0, 7, dtype=torch.float64)
    copied = rows * scales.float()[:, None]
    for columns in (Columns(1 << 20), Columns(1 << 10)):
        found = columns.gram_around(rows, 2, scales)
        same_bits(found, columns.gram_around(copied, 2))
        streamed = ColumnBlocks(lambda: iter(rows.split(99, 1)), num_rows=7, num_params=d)
        if columns.segment > d:
            same_bits(found, columns.gram_around(streamed.rows, 2, scales))


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "meamed"])
def test_medians_by_hand(name: str) -> None:
    agg, params = fastagg.make(name, num_clients=3, num_params=2, clip_norm=5.0), torch.zeros(2)
    # (6, 8) becomes (3, 4), and (0, -50) becomes (0, -5).
    rows = torch.tensor([[6.0, 8.0], [0.0, -50.0], [3.0, 4.0]])
    report = agg.step(params, rows, [0, 1, 2])
    assert params.tolist() == ([3.0, 4.0] if name == "median" else [2.0, 1.0])
    assert report.weights.tolist() == pytest.approx([1 / 6, 1 / 30, 1 / 3])


def test_max_norm_limits_the_norms_of_rows_as_they_came() -> None:
    for options in ({}, {"sketch": 64}):
        agg = fastagg.Krum(
            num_clients=3, num_params=2, clip_norm=5.0, max_norm=20.0, nonfinite="drop", **options
        )
        rows = torch.tensor([[6.0, 8.0], [0.0, 50.0], [3.0, 4.0]])
        report = agg.step(torch.zeros(2), rows, [0, 1, 2])
        assert report.rejected.tolist() == [1]
        assert report.clipped is not None and report.clipped.tolist() == [0]
