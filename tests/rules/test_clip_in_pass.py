# SPDX-License-Identifier: Apache-2.0
"""``clip_norm`` without copies: rows are scaled by their weights, or in the pass over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, ColumnBlocks, clipped_steps
from fastagg.updates.cohort import Cohort

K, D = 6, 23
CLIP = 4.0  # rows of D standard normal numbers have norms of about 4.8
Check = Callable[..., None]
every_rule = pytest.mark.every_rule


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


def as_form(form: str, rows: Tensor, clients: list[int]) -> Any:
    if form == "buffer":
        buffer = fastagg.UpdateBuffer(K, D)
        for client, row in zip(clients, rows, strict=True):
            buffer.row(client).copy_(row)
        return buffer
    if form == "stream":
        return ColumnBlocks(lambda: iter(rows.split(7, dim=1)), num_rows=len(rows), num_params=D)
    return rows


def copies(name: str, options: dict[str, Any]) -> bool:
    """Whether the rule copies rows that are too long, on a CPU; docs/privacy.md lists these."""
    distance = options.get("similarity") == "distance"  # scores of fdms and fdms-soft
    return distance or name in COPYING or (name == "mimic" and options.get("mode") == "client")


COPYING = (
    *("geometric-median", "centered-clip", "krum", "multi-krum", "nnm", "bucketing", "bulyan"),
    *("median", "trimmed-mean", "meamed", "fdms-means", "scaffold", "mifa-client"),
)


@every_rule
@pytest.mark.parametrize("form", ["matrix", "buffer", "stream"])
def test_which_rules_copy_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], form: str
) -> None:
    seen: list[Cohort] = []

    def spy(cohort: Cohort, factors: list[float]) -> Cohort:
        seen.append(cohort)
        return scaled(cohort, factors)

    scaled = clipped_steps.scaled
    monkeypatch.setattr(clipped_steps, "scaled", spy)
    agg, (rows, clients) = make(name, options), rounds(1)[0]
    report = agg.step(torch.zeros(D), as_form(form, rows, clients), clients)
    assert report.clipped is not None and report.clipped.numel()
    assert bool(seen) == copies(name, options)


@every_rule
@pytest.mark.parametrize("form", ["matrix", "buffer", "stream"])
def test_a_step_is_that_with_copies(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any], form: str
) -> None:
    agg, twin_agg = make(name, options), copying(make(name, options))
    params, twin = torch.zeros(D), torch.zeros(D)
    exact = not agg.sums_rows_by_plan
    for rows, clients in rounds(6):
        report = agg.step(params, as_form(form, rows, clients), clients)
        expected = twin_agg.step(twin, as_form(form, rows, clients), clients)
        assert report.clipped is not None and report.clipped.numel()
        if exact:
            same_bits(params, twin)
            same_bits(report.weights, expected.weights)
            continue
        # A copy rounds the factor and each product, by 2^-24 each.
        assert (params - twin).abs().max() <= 2e-6 * twin.abs().max()
        assert (report.weights - expected.weights).abs().max() <= 1e-6
    if exact:
        same_state(agg, twin_agg)
