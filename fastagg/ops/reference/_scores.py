# SPDX-License-Identifier: Apache-2.0
"""Similarity scores of clients, and the choice of friends by them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fastagg.ops import bits

__all__ = [
    "cosine_scores",
    "distance_scores",
    "eliminate_",
    "most_similar",
    "select_friends",
    "update_scores_",
]


def cosine_scores(gram: Tensor) -> Tensor:
    """Compute cosine scores (cos + 1) / 2 in [0, 1] from a Gram matrix (FL-FDMS eq. 14).

    A zero row scores 0.5 with every row, itself included.

    Args:
        gram: [S, S] float32 or float64.

    Returns:
        [S, S] of the same dtype.
    """
    g = gram.to(torch.float64)
    norms = g.diagonal().sqrt()
    scale = torch.outer(norms, norms)
    cosine = torch.where(scale > 0, g / scale, torch.zeros_like(g)).clamp(-1.0, 1.0)
    cosine.diagonal().copy_((norms > 0).to(torch.float64))
    return ((cosine + 1.0) / 2.0).to(gram.dtype)


def distance_scores(gram: Tensor) -> Tensor:
    """Compute negative distances -|x_i - x_j| from a Gram matrix (FL-FDMS, before eq. 14).

    Args:
        gram: [S, S] float32 or float64.

    Returns:
        [S, S] of the same dtype, at most 0, with a zero diagonal.
    """
    g = gram.to(torch.float64)
    squares = g.diagonal()
    squared_distance = (squares[:, None] + squares[None, :] - 2.0 * g).clamp_min(0.0)
    scores = -squared_distance.sqrt()
    scores.fill_diagonal_(0.0)
    return scores.to(gram.dtype)


def update_scores_(
    scores: Tensor,
    counts: Tensor,
    round_scores: Tensor,
    clients: Tensor,
    pairs: Tensor | None = None,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Update the running mean scores with the scores of one round, in place (FL-FDMS eq. 15).

    For every pair i != j of active clients (in ``pairs``, if given): the count grows by one, unless
    it is the largest value of its dtype, and the mean moves by (r - mean) / count.

    Args:
        scores: [K, K] float32, the running means; changed in place.
        counts: [K, K] int32 or int16, the number of rounds in each mean; changed in place.
        round_scores: [S, S] float32 or float64.
        clients: [S] int64, distinct ids.
        pairs: symmetric bool [S, S]; by default all pairs are updated.
        when: [] bool; if False, nothing changes.

    Returns:
        ``scores``.
    """
    if when is not None and not bool(when):
        return scores
    ids = clients.tolist()
    most = torch.iinfo(counts.dtype).max
    for a, i in enumerate(ids):
        for b, j in enumerate(ids):
            if i == j or (pairs is not None and not bool(pairs[a, b])):
                continue
            counts[i, j] = min(int(counts[i, j]) + 1, most)
            mean = float(scores[i, j])
            scores[i, j] = mean + (float(round_scores[a, b]) - mean) / int(counts[i, j])
    return scores


def most_similar(
    queries: Tensor,
    rows: Tensor,
    factors: Tensor,
    query_ids: Tensor | None = None,
    row_ids: Tensor | None = None,
    splits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find, for each query, the row with the largest scaled inner product.

    Args:
        queries: [N, k] int8.
        rows: [S, k] int8.
        factors: [S] float32.
        query_ids: [Q] int64; None: all queries.
        row_ids: [R] int64; None: all rows.
        splits: [G + 1, 2] int64, where the queries and the rows of each group begin and end; None:
            one group.

    Returns:
        [Q] int64, positions in ``row_ids`` (-1 if the group has no rows), and [Q] float32, inner
        products (whole numbers) times factors, rounded to float32 once.
    """
    query_ids = torch.arange(len(queries), device="cpu") if query_ids is None else query_ids
    row_ids = torch.arange(len(rows), device="cpu") if row_ids is None else row_ids
    if splits is None:
        splits = torch.tensor([[0, 0], [len(query_ids), len(row_ids)]], device="cpu")
    best = torch.full((len(query_ids),), -1, device="cpu")
    similarity = torch.full((len(query_ids),), -torch.inf, device="cpu")
    for begin, end in itertools.pairwise(splits.tolist()):
        chosen = row_ids[begin[1] : end[1]]
        if len(chosen) == 0:
            continue
        for i in range(begin[0], end[0]):
            products = rows[chosen].double() @ queries[query_ids[i]].double()  # exact
            values = products.float() * factors[chosen]
            first = int(values.argmax())  # of equals
            best[i], similarity[i] = begin[1] + first, values[first]
    return best, similarity


def select_friends(
    scores: Tensor,
    counts: Tensor,
    active: Tensor,
    candidates: Tensor | None = None,
) -> Tensor:
    """Choose the substitute of every client (FL-FDMS section 5.1).

    Args:
        scores: [K, K] float32.
        counts: [K, K] int32 or int16; a pair that was never scored is not chosen.
        active: [K] bool.
        candidates: [K, K] bool or packed bits; row k is the candidate set of client k. By default
            every client is a candidate.

    Returns:
        [K] int64: an active client's own id; for an inactive client k the active candidate with
        the highest score in row k, the lowest id on ties; -1 if there is none.
    """
    num_clients = len(active)
    allowed = active[None, :] & (counts > 0)
    if candidates is not None:
        allowed &= _flags(candidates)
    friends = []
    for k in range(num_clients):
        row: list[float] = scores[k].tolist()
        chosen = [i for i, flag in enumerate(allowed[k].tolist()) if flag]
        best = max(chosen, key=row.__getitem__, default=-1)  # the first of equals
        friends.append(k if active[k] else best)
    return torch.tensor(friends, dtype=torch.int64, device="cpu")


def _flags(pairs: Tensor) -> Tensor:
    """Return a copy of a set of pairs as [K, K] bool."""
    return pairs.clone() if pairs.dtype == torch.bool else bits.unpack(pairs, len(pairs))


def eliminate_(
    candidates: Tensor,
    scores: Tensor,
    counts: Tensor,
    threshold: float,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Remove poor candidates, in place (FL-FDMS section 5.3).

    In row k, the best candidate is the one with the highest score among the candidates i != k that
    were scored at least once (the lowest id on ties). Candidates whose score is ``threshold`` or
    more below the best are removed. The best one and candidates that were never scored stay.

    Args:
        candidates: [K, K] bool or packed bits; changed in place.
        scores: [K, K] float32.
        counts: [K, K] int32 or int16.
        threshold: Theta_t in the paper, in units of the scores.
        when: [] bool; if False, nothing changes.

    Returns:
        ``candidates``.
    """
    if when is not None and not bool(when):
        return candidates
    flags = _flags(candidates)
    num_clients = len(flags)
    for k in range(num_clients):
        known: list[bool] = (flags[k] & (counts[k] > 0)).tolist()
        rivals = [i for i in range(num_clients) if i != k and known[i]]
        if not rivals:
            continue
        row: list[float] = scores[k].tolist()
        best = max(rivals, key=row.__getitem__)  # the first of equals
        for i in rivals:
            if i != best and row[best] - row[i] >= threshold:
                flags[k, i] = False
    return candidates.copy_(flags if candidates.dtype == torch.bool else bits.pack(flags))
