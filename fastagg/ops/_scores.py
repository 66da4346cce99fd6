# SPDX-License-Identifier: Apache-2.0
"""Similarity scores of clients, and the choice of friends by them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, mark_changed, op

__all__ = [
    "cosine_scores",
    "distance_scores",
    "eliminate_",
    "most_similar",
    "select_friends",
    "update_scores_",
]


@op(
    example=lambda f, x: f(x.gram),
    fake=torch.empty_like,
    bound=1e-12,
)
def cosine_scores(gram: Tensor) -> Tensor:
    """Compute similarity scores ``(cos + 1) / 2`` in [0, 1] (FL-FDMS, TMLR version, eq. 14).

    Args:
        gram: float32 or float64 [S, S]; the diagonal holds the squared norms of the rows.

    Returns:
        [S, S] of the same dtype. A zero row has no direction: it scores 0.5 with every row.
    """
    return compiled.cosine_scores(gram)


@op(
    example=lambda f, x: f(x.gram),
    fake=torch.empty_like,
    bound=1e-12,
)
def distance_scores(gram: Tensor) -> Tensor:
    """Compute similarity scores ``-|x_i - x_j|`` (Euclidean), FL-FDMS's alternative to cosine.

    Scores are unbounded and in the units of the updates. A distance that is much shorter than the
    rows is computed as a difference of nearly equal numbers: pass ``gram`` in float64.

    Args:
        gram: float32 or float64 [S, S].

    Returns:
        [S, S] of the same dtype, at most 0, with a zero diagonal.
    """
    return compiled.distance_scores(gram)


@op(
    example=lambda f, x: (
        f(x.scores, x.counts, x.round_scores, x.clients),
        f(x.scores, x.counts.to(torch.int16), x.round_scores, x.clients, x.pairs),
    )
)
def update_scores_(
    scores: Tensor,
    counts: Tensor,
    round_scores: Tensor,
    clients: Tensor,
    pairs: Tensor | None = None,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Update the running mean scores of the pairs active in this round (FL-FDMS eq. 15), in place.

    For a = clients[i], b = clients[j], i != j (and pairs[i, j], if given)::

        counts[a, b] += 1
        scores[a, b] += (round_scores[i, j] - scores[a, b]) / counts[a, b]

    An int16 count stops at 32767: from then on the mean moves with weight 1/32767.

    Args:
        scores: float32 [K, K], R in the paper; changed in place.
        counts: int32 or int16 [K, K], N in the paper; changed in place.
        round_scores: float32 or float64 [S, S], r in the paper.
        clients: int64 [S], distinct ids in [0, K), on the CPU or on the device of the scores.
        pairs: bool [S, S], symmetric; by default all pairs are updated.
        when: bool [], on the device of the scores; if False, nothing changes. If ``clients`` is on
            a GPU, wrong ids have the effect of False, because an error would have to wait.

    Returns:
        ``scores``.
    """
    compiled.update_scores_(scores, counts, round_scores, clients, pairs, when)
    mark_changed(scores, counts)
    return scores


def _fake_select_friends(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=torch.int64)


@op(
    example=lambda f, x: f(x.scores, x.counts, x.active, x.candidates),
    fake=_fake_select_friends,
)
def select_friends(
    scores: Tensor,
    counts: Tensor,
    active: Tensor,
    candidates: Tensor | None = None,
) -> Tensor:
    """Choose the substitute of every client (FL-FDMS, Algorithm 1: an inactive client's friend).

    Args:
        scores: float32 [K, K].
        counts: int32 or int16 [K, K]. A pair with count 0 was never scored and is not chosen.
        active: bool [K].
        candidates: bool [K, K] or packed bits; row k is the candidate set of client k.

    Returns:
        int64 [K]. For an active client k: k itself. For an inactive client k: the active client i
        with ``counts[k, i] > 0`` (and ``candidates[k, i]``) that has the highest ``scores[k, i]``,
        the lowest id on ties; -1 if there is none.
    """
    return compiled.select_friends(scores, counts, active, candidates)


@op(example=lambda f, x: f(x.candidates, x.scores, x.counts, 0.4))
def eliminate_(
    candidates: Tensor,
    scores: Tensor,
    counts: Tensor,
    threshold: float,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Remove poor candidates from the candidate sets, in place (FL-FDMS sec. 5.3, steps 1 to 3).

    In row k, let best be the highest score among the candidates i != k that have been scored with
    k. Every such candidate with ``best - scores[k, i] >= threshold`` is removed, except the best
    one. Candidates that were never scored with k stay.

    Args:
        candidates: bool [K, K] or packed bits; changed in place.
        scores: float32 [K, K].
        counts: int32 or int16 [K, K].
        threshold: Theta_t in the paper, in units of the scores.
        when: bool [], on the device of the scores; if False, nothing changes.

    Returns:
        ``candidates``.
    """
    compiled.eliminate_(candidates, scores, counts, threshold, when)
    mark_changed(candidates)
    return candidates


def _fake_most_similar(
    queries: Tensor,
    rows: Tensor,
    factors: Tensor,
    query_ids: Tensor | None = None,
    row_ids: Tensor | None = None,
    splits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    size = (queries if query_ids is None else query_ids).shape[0]
    return queries.new_empty(size, dtype=torch.int64), factors.new_empty(size)


@op(
    example=lambda f, x: (
        f(x.words, x.words[:3], x.factors[:3]),
        f(x.words, x.words[:3], x.factors[:3], x.some, x.some % 3),
        f(x.words, x.words, x.factors, x.order, x.some, x.splits),
    ),
    fake=_fake_most_similar,
)
def most_similar(
    queries: Tensor,
    rows: Tensor,
    factors: Tensor,
    query_ids: Tensor | None = None,
    row_ids: Tensor | None = None,
    splits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find, for each query, the row with the largest scaled inner product.

    Let q_i be row ``query_ids[i]`` of ``queries``, and r_j be row ``row_ids[j]`` of ``rows``::

        similarity[i] = max over j of factors[row_ids[j]] * (q_i @ r_j)

    With 1 / |r_j| as factors, the largest one belongs to the row with the highest cosine. With
    ``splits``, queries and rows are divided into G groups, and a query is compared with the rows of
    its group alone.

    Inner products are whole numbers, and exact, so results have the same bits for any instruction
    set, thread count and device. No matrix of Q x R numbers is made.

    Args:
        queries: int8 [N, k], k at most 1024.
        rows: int8 [S, k].
        factors: float32 [S], finite.
        query_ids: int64 [Q], in [0, N), on the CPU or on the device of the queries; None: all
            queries in order.
        row_ids: int64 [R], in [0, S), likewise; None: all rows in order.
        splits: int64 [G + 1, 2] on the CPU. Group g has the queries i with
            ``splits[g, 0] <= i < splits[g + 1, 0]``, and the rows j with
            ``splits[g, 1] <= j < splits[g + 1, 1]``. None: one group.

    Returns:
        The positions j, int64 [Q], the lowest one on ties, and the similarities, float32 [Q]. They
        are -1 and -inf if a group has no rows.
    """
    best, similarity = compiled.most_similar(queries, rows, factors, query_ids, row_ids, splits)
    return best, similarity
