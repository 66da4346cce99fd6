# SPDX-License-Identifier: Apache-2.0
"""``when``: work that a flag calls off, and a round of FDMS that commits only if all is well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.enqueued import EnqueuedRound
from fastagg import FDMS, ops

K, D = 5, 40
YES, NO = torch.tensor(True), torch.tensor(False)


def state() -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    scores = torch.rand(K, K, generator=g)
    counts = torch.ones(K, K, dtype=torch.int16)
    return [torch.randn(D, generator=g), scores, counts, torch.ones(K, K, dtype=torch.bool)]


def commit(changed: list[Tensor], rows: Tensor, **when: Tensor) -> None:
    params, scores, counts, candidates = changed
    clients = torch.tensor([4, 0, 2])
    ops.weighted_sum_(params, rows, torch.ones(3), 0.5, **when)
    ops.update_scores_(scores, counts, torch.rand(3, 3), clients, **when)
    ops.eliminate_(candidates, scores, counts, 0.2, **when)


def test_true_is_as_if_it_were_not_there_and_false_changes_nothing(isa: str) -> None:
    rows = torch.randn(3, D)
    results = []
    for when in ({}, {"when": YES}, {"when": NO}):
        torch.manual_seed(0)
        results.append(state())
        commit(results[-1], rows, **when)
    plain, yes, no = results
    assert all(torch.equal(a, b) for a, b in zip(plain, yes, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(no, state(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(plain, no, strict=True))


def test_false_keeps_what_would_have_been_ignored(isa: str) -> None:
    out = torch.arange(4.0)
    ops.weighted_sum_(out, torch.full((1, 4), torch.nan), torch.ones(1), beta=0.0, when=NO)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("when", "error", "message"),
    [
        (torch.ones(1, dtype=torch.bool), ValueError, r"when: expected shape \[\]"),
        (torch.tensor(1), TypeError, "when: expected dtype Bool"),
    ],
)
def test_what_is_refused(when: Tensor, error: type[Exception], message: str) -> None:
    changed = state()
    with pytest.raises(error, match=message):
        ops.weighted_sum_(changed[0], torch.ones(1, D), torch.ones(1), when=when)
    with pytest.raises(error, match=message):
        ops.update_scores_(changed[1], changed[2], torch.ones(1, 1), torch.tensor([0]), when=when)
    with pytest.raises(error, match=message):
        ops.eliminate_(changed[3], changed[1], changed[2], 0.1, when=when)
    assert all(torch.equal(a, b) for a, b in zip(changed, state(), strict=True))


@pytest.mark.parametrize("options", [{}, {"elimination": lambda t: 0.1, "precision": "tf32"}])
def test_enqueued_rounds_are_those_of_the_aggregator(options: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(1)
    one, two = (
        FDMS(num_clients=9, num_params=D, server_lr=0.5, client_weights=range(1, 10), **options)
        for _ in range(2)
    )
    params, theirs = torch.zeros(D), torch.zeros(D)
    for t in range(12):
        clients = torch.randperm(9, generator=g)[:5].sort().values
        rows = torch.randn(5, D, generator=g) + torch.randn(D, generator=g)
        if t == 6:  # a round that must not happen
            rows[2, 3] = torch.nan
        if t == 9:
            rows *= 1e38
        happened = EnqueuedRound(one, params, clients)(rows, 0.1 if options else float("inf"))
        assert bool(happened) == (t not in (6, 9))
        if happened:
            two.step(theirs, rows, clients)
        # Weights differ by rounding in float64, so the aggregate, in float32, hardly ever does.
        torch.testing.assert_close(params, theirs, rtol=1e-6, atol=1e-6)
        for name in ("scores", "counts", *(("candidates",) if options else ())):
            assert torch.equal(getattr(one, name), getattr(two, name)), (t, name)
    assert params.abs().min() > 0
    if options:
        assert two.candidates is not None and two.candidates.sum() < 9 * (255 + 1)
