# SPDX-License-Identifier: Apache-2.0
"""Shapes without data: what the operators return to ``torch.compile`` and fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def _fake_square(rows: list[Tensor]) -> int:
    return sum(row.shape[0] if row.dim() == 2 else 1 for row in rows)


@torch.library.register_fake("fastagg::gram")
def _(updates: list[Tensor], pairs: Tensor | None = None, precision: str = "highest") -> Tensor:
    size = _fake_square(updates)
    return updates[0].new_empty(size, size, dtype=torch.float64)


@torch.library.register_fake("fastagg::gram_rows")
def _(updates: list[Tensor], changed: Tensor, precision: str = "highest") -> Tensor:
    shape = changed.shape[0], _fake_square(updates)
    return updates[0].new_empty(shape, dtype=torch.float64)


@torch.library.register_fake("fastagg::replace_rows")
def _(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    return gram.new_empty(rows.shape[1], rows.shape[1])


@torch.library.register_fake("fastagg::bucketed_gram")
def _(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, members = gram.shape[0], order.shape[0]
    count = -(-members // bucket_size)
    size = rows - members + count
    buckets = gram.new_empty(rows, dtype=torch.int64)
    return gram.new_empty(size, size), buckets, gram.new_empty(rows), gram.new_empty(count)


@torch.library.register_fake("fastagg::weiszfeld")
@torch.library.register_fake("fastagg::clip_towards")
def _(gram: Tensor, *args: object) -> Tensor:
    return gram.new_empty(gram.shape[0])


@torch.library.register_fake("fastagg::abs_max")
def _(rows: list[Tensor]) -> Tensor:
    return rows[0].new_empty(_fake_square(rows))


@torch.library.register_fake("fastagg::cosine_scores")
@torch.library.register_fake("fastagg::distance_scores")
def _(gram: Tensor) -> Tensor:
    return torch.empty_like(gram)


@torch.library.register_fake("fastagg::select_friends")
def _(
    scores: Tensor,
    counts: Tensor,
    active: Tensor,
    candidates: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=torch.int64)


@torch.library.register_fake("fastagg::update_scores_")
@torch.library.register_fake("fastagg::eliminate_")
@torch.library.register_fake("fastagg::weighted_sum_")
@torch.library.register_fake("fastagg::gram_and_sum_")
@torch.library.register_fake("fastagg::mimic_")
@torch.library.register_fake("fastagg::memory_update_")
@torch.library.register_fake("fastagg::mimic_mean_")
@torch.library.register_fake("fastagg::memory_total_")
@torch.library.register_fake("fastagg::add_total_")
def _(*args: object, **kwargs: object) -> None:
    return None
