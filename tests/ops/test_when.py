# SPDX-License-Identifier: Apache-2.0
"""``when``: a flag that cancels an op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastagg import ops

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


def test_true_has_no_effect_and_false_changes_nothing(isa: str) -> None:
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
def test_wrong_flags_are_refused(when: Tensor, error: type[Exception], message: str) -> None:
    changed = state()
    with pytest.raises(error, match=message):
        ops.weighted_sum_(changed[0], torch.ones(1, D), torch.ones(1), when=when)
    with pytest.raises(error, match=message):
        ops.update_scores_(changed[1], changed[2], torch.ones(1, 1), torch.tensor([0]), when=when)
    with pytest.raises(error, match=message):
        ops.eliminate_(changed[3], changed[1], changed[2], 0.1, when=when)
    assert all(torch.equal(a, b) for a, b in zip(changed, state(), strict=True))
