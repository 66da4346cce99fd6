# SPDX-License-Identifier: Apache-2.0
"""Similarity scores of clients, and who stands in for whom."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, mark_changed, returns_nothing


def cosine_scores(gram: Tensor) -> Tensor:
    """Similarity scores ``(cos + 1) / 2`` in [0, 1] (FL-FDMS, TMLR version, eq. 14).

    Args:
        gram: float32 or float64 [S, S], of which the diagonal holds the squared norms.

    Returns:
        [S, S] of the same dtype. A zero row has no direction: it scores 0.5 with every row.
    """
    return compiled.cosine_scores(gram)


@torch.library.register_fake("fastagg::cosine_scores")
@torch.library.register_fake("fastagg::distance_scores")
def _(gram: Tensor) -> Tensor:
    return torch.empty_like(gram)


def distance_scores(gram: Tensor) -> Tensor:
    """Similarity scores ``-|x_i - x_j|`` (Euclidean), the FL-FDMS paper's alternative to cosine.

    Unbounded and in the units of the updates. Distances much shorter than the rows come out of a
    difference of nearly equal numbers: give ``gram`` in float64.

    Args:
        gram: float32 or float64 [S, S].

    Returns:
        [S, S] of the same dtype, at most 0, with a zero diagonal.
    """
    return compiled.distance_scores(gram)


def update_scores_(
    scores: Tensor,
    counts: Tensor,
    round_scores: Tensor,
    clients: Tensor,
    pairs: Tensor | None = None,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Running mean of the scores of jointly active pairs (FL-FDMS eq. 15), in place.

    For a = clients[i], b = clients[j], i != j (and pairs[i, j], if given)::

        counts[a, b] += 1
        scores[a, b] += (round_scores[i, j] - scores[a, b]) / counts[a, b]

    A count of int16 stops at 32767: from then on the mean moves with weight 1/32767.

    Args:
        scores: float32 [K, K], R in the paper; changed.
        counts: int32 or int16 [K, K], N in the paper; changed.
        round_scores: float32 or float64 [S, S], r in the paper.
        clients: int64 [S].
        pairs: bool [S, S].
        when: bool [], where the scores are; if False, nothing changes.

    Returns:
        ``scores``.
    """
    compiled.update_scores_(scores, counts, round_scores, clients, pairs, when)
    mark_changed(scores, counts)
    return scores


returns_nothing("update_scores_")


def select_friends(
    scores: Tensor,
    counts: Tensor,
    active: Tensor,
    candidates: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    """Who stands in for whom (FL-FDMS, Algorithm 1: the friend of an inactive client).

    Args:
        scores: float32 [K, K].
        counts: int32 or int16 [K, K]; a pair with count 0 was never scored.
        active: bool [K].
        candidates: bool [K, K] or packed bits; row k is the candidate set of client k.
        threshold: candidates that :func:`eliminate_` would remove with it do not count.

    Returns:
        int64 [K]: k itself for an active client k; else the active client i with
        ``counts[k, i] > 0`` (and ``candidates[k, i]``) of the highest ``scores[k, i]``, the lowest
        id on ties; -1 if there is none.
    """
    return compiled.select_friends(scores, counts, active, candidates, threshold)


@torch.library.register_fake("fastagg::select_friends")
def _(
    scores: Tensor,
    counts: Tensor,
    active: Tensor,
    candidates: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=torch.int64)


def eliminate_(
    candidates: Tensor,
    scores: Tensor,
    counts: Tensor,
    threshold: float,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Shrink the candidate sets, in place (FL-FDMS sec. 5.3, steps 1 to 3).

    In row k, with best the highest score among candidates i != k that have been scored: every
    such candidate with ``best - scores[k, i] >= threshold`` is removed, except the best one.
    Candidates never scored with k stay.

    Args:
        candidates: bool [K, K] or packed bits; changed.
        scores: float32 [K, K].
        counts: int32 or int16 [K, K].
        threshold: Theta_t, in units of the scores.
        when: bool [], where the scores are; if False, nothing changes.

    Returns:
        ``candidates``.
    """
    compiled.eliminate_(candidates, scores, counts, threshold, when)
    mark_changed(candidates)
    return candidates


returns_nothing("eliminate_")
