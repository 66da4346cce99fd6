# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle: every op of :mod:`fastagg.ops` in plain torch, same names and signatures.

Written for readability, not for speed: every value is computed in float64 and rounded once, to the
dtype of the tensor that receives it. The compiled ops are tested against this module; it is never
a fallback for them. Arguments are assumed to be valid; only ``ops`` checks them.

Notation: K clients, S active clients (rows), d parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastagg.ops import bits

Rows = Tensor | Sequence[Tensor]
"""Updates of S clients: one tensor [S, d], or a sequence of S tensors [d]."""


def _float64(rows: Rows) -> Tensor:
    """Copy rows into one float64 tensor [S, d], or [0, 0] if there are none."""
    if isinstance(rows, Tensor):
        return rows.detach().to(torch.float64)
    if len(rows) == 0:
        return torch.zeros(0, 0, dtype=torch.float64, device="cpu")
    return torch.stack([row.detach().to(torch.float64) for row in rows])


def gram(
    updates: Rows,
    *,
    pairs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    precision: str = "highest",
    segment: int | None = None,
) -> Tensor:
    """Compute the inner products of all rows with each other.

    Args:
        updates: S rows of length d.
        pairs: symmetric bool [S, S]; only these pairs and the diagonal are computed, every other
            entry is 0. By default all pairs are computed.
        dtype: dtype of the result, float32 or float64.
        precision: minimum precision; ignored, since float64 exceeds every value.
        segment: columns that are summed together; ignored.

    Returns:
        [S, S], exactly symmetric.
    """
    x = _float64(updates)  # [S, d]
    products = x @ x.T
    products = torch.triu(products) + torch.triu(products, diagonal=1).T  # exactly symmetric
    if pairs is not None:
        wanted = pairs | torch.eye(len(x), dtype=torch.bool, device="cpu")
        products = torch.where(wanted, products, torch.zeros_like(products))
    return products.to(dtype)


def gram_rows(updates: Rows, changed: Tensor, *, precision: str = "highest") -> Tensor:
    """Compute the rows ``changed`` [C] of the Gram matrix of S updates: [C, S] float64."""
    return gram(updates, dtype=torch.float64)[changed]


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
        for i in range(begin[0], end[0]):
            for j in range(begin[1], end[1]):
                product = (queries[query_ids[i]].double() @ rows[row_ids[j]].double()).float()
                value = product * factors[row_ids[j]]
                if best[i] < 0 or value > similarity[i]:
                    best[i], similarity[i] = j, value
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
    allowed = torch.ones(num_clients, num_clients, dtype=torch.bool, device="cpu")
    if candidates is not None:
        allowed = _flags(candidates)
    friends = torch.full((num_clients,), -1, dtype=torch.int64, device="cpu")
    for k in range(num_clients):
        if active[k]:
            friends[k] = k
            continue
        for i in range(num_clients):
            if not active[i] or counts[k, i] == 0 or not allowed[k, i]:
                continue
            if friends[k] < 0 or scores[k, i] > scores[k, friends[k]]:
                friends[k] = i
    return friends


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
        rivals = [
            i for i in range(num_clients) if i != k and bool(flags[k, i]) and counts[k, i] > 0
        ]
        if not rivals:
            continue
        row = scores[k].to(torch.float64).tolist()
        best = max(rivals, key=lambda i: row[i])  # the first of equals
        for i in rivals:
            if i != best and row[best] - row[i] >= threshold:
                flags[k, i] = False
    return candidates.copy_(flags if candidates.dtype == torch.bool else bits.pack(flags))


def weighted_sum_(
    out: Tensor,
    rows: Rows,
    weights: Tensor,
    beta: float = 1.0,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Compute ``out = beta * out + weights @ rows``, in place. Weights are not rounded.

    Args:
        out: [d] float32; changed in place. With ``beta == 0`` its old content is ignored.
        rows: S rows of length d.
        weights: [S] float32 or float64.
        beta: factor of the old content.
        when: [] bool; if False, nothing changes.

    Returns:
        ``out``.
    """
    if when is not None and not bool(when):
        return out
    total = torch.zeros_like(out, dtype=torch.float64)
    if beta != 0.0:
        total += beta * out.to(torch.float64)
    if len(rows) > 0:
        total += weights.to(torch.float64) @ _float64(rows)
    return out.copy_(total)


def apply_weighted_sum_(
    params: Tensor,
    before: Tensor,
    applied: Tensor,
    rows: Rows,
    weights: Tensor,
    lr: float,
    largest: float,
    limit: float,
) -> Tensor:
    """Compute ``params += lr * (weights @ rows)``, in place, unless a result is out of range.

    Args and results are those of :func:`fastagg.ops.apply_weighted_sum_`. Weights are not rounded.
    """
    before.copy_(params)
    total = weighted_sum_(torch.zeros_like(params, dtype=torch.float64), rows, weights, 0.0)
    known, added = (float(x.abs().max()) if len(x) else 0.0 for x in (params, total))
    fits = bool(params.isfinite().all() and total.isfinite().all())
    fits = fits and added <= largest and known + lr * added <= limit
    applied.fill_(fits)
    if fits:
        params.copy_(params.to(torch.float64) + lr * total)
    return params


def gram_and_sum_(
    out: Tensor, gram: Tensor, rows: Rows, weights: Tensor, *, precision: str = "highest"
) -> Tensor:
    """Compute ``gram = rows @ rows.T`` and ``out = weights @ rows``, in place.

    Args:
        out: [d] float32; changed in place. Its old content is ignored.
        gram: [S, S] float64; changed in place.
        rows: S rows of length d.
        weights: [S] float32 or float64.
        precision: minimum precision; ignored, since float64 exceeds every value.

    Returns:
        ``out``.
    """
    x = _float64(rows)
    gram.copy_(x @ x.T)
    return weighted_sum_(out, rows, weights, beta=0.0)


def mimic_(params: Tensor, updates: Rows, corrections: Rows, clients: Tensor, lr: float) -> Tensor:
    """Apply the server's part of a MimiC round (Algorithm 1, lines 5 to 10), in place.

    ``v = mean_s(updates[s] + corrections[clients[s]])``, then ``params += lr * v`` and
    ``corrections[clients[s]] = v - updates[s]``.

    Args:
        params: [d] float32; changed in place.
        updates: S rows of length d, descent directions.
        corrections: [K, d] float32, or S rows; the rows of ``clients`` are changed in place.
        clients: [S] int64, distinct ids.
        lr: server learning rate.

    Returns:
        ``params``.
    """
    if len(clients) == 0:
        return params
    u = _float64(updates)  # [S, d]
    own = _of_clients(corrections, clients)
    v = (u + _float64(own)).mean(dim=0)
    for row, update in zip(own, u, strict=True):
        row.copy_(v - update)
    return params.copy_(params.to(torch.float64) + lr * v)


def memory_update_(
    params: Tensor,
    total: Tensor,
    memory: Rows,
    updates: Rows,
    clients: Tensor,
    weights: Tensor,
    lr: float,
    norm: float,
    models: bool = False,
) -> Tensor:
    """Apply one round of a rule with a memory row per client (MIFA, Stale), in place.

    The memory row of client s becomes its update (``models=False``) or its local model
    ``params + updates[s]``; ``total`` remains ``sum_k weight_k * memory_k``; then
    ``params += lr * norm * total`` or, for models, ``params += lr * (norm * total - params)``
    with the old params on the right.

    Args:
        params: [d] float32; changed in place.
        total: [d] float64; changed in place.
        memory: [K, d] float32, or S rows; the rows of ``clients`` are changed in place.
        updates: S rows of length d, descent directions.
        clients: [S] int64, distinct ids.
        weights: [S] float32 or float64, the weights of ``clients``.
        lr: server learning rate.
        norm: factor that makes ``total`` a mean.
        models: store local models instead of updates.

    Returns:
        ``params``.
    """
    old = params.to(torch.float64)
    if len(clients) > 0:
        rows = _new_memory(updates, params if models else None)
        own = _of_clients(memory, clients)
        total += weights.to(torch.float64) @ (rows.to(torch.float64) - _float64(own))
        for place, row in zip(own, rows, strict=True):
            place.copy_(row)
    step = norm * total - old if models else norm * total
    return params.copy_(old + lr * step)


def _of_clients(memory: Rows, clients: Tensor) -> list[Tensor]:
    """Return the memory rows of ``clients``, as views."""
    if isinstance(memory, Tensor):
        return [memory[k] for k in clients.tolist()]
    return list(memory)


def _scaled(updates: Rows, scales: Tensor | None) -> Rows:
    """Return rows [S, d] times scales [S], rounded to float32; without scales, the rows."""
    if scales is None:
        return updates
    factors = scales.to(torch.float32).to(torch.float64)  # products of float32 are exact
    return (_float64(updates) * factors[:, None]).to(torch.float32)


def _new_memory(updates: Rows, params: Tensor | None) -> Tensor:
    """Return the new memory rows [S, d], rounded to float32: the total is that of rounded rows."""
    rows = _float64(updates)
    return (rows if params is None else rows + params.to(torch.float64)).to(torch.float32)


def mimic_mean_(
    out: Tensor,
    rounded: Tensor,
    peaks: Tensor,
    updates: Rows,
    corrections: Rows,
    clients: Tensor,
    references: Sequence[Tensor | None] | None = None,
    kept: Sequence[Tensor] | None = None,
    *,
    copies: bool = False,
    weights: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute the v of :func:`mimic_` and what a server remembers.

    ``v = mean_s(updates[s] + weights[s] * c[s])``, and ``kept[s]`` is ``v - updates[s]`` or, with
    ``copies``, ``updates[s]``. ``c[s]`` is ``corrections[s]`` or, where a reference is given, the
    float32 difference ``references[s] - corrections[s]``.

    Args:
        out: [d] float64; changed in place.
        rounded: [d] float32; changed in place to v rounded.
        peaks: [S] float32; changed in place to ``abs_max(updates)``.
        updates: S >= 1 rows of length d.
        corrections: [K, d] float32, or S rows.
        clients: [S] int64, distinct ids.
        references: S vectors [d] float32 or None.
        kept: S vectors [d] float32; changed in place. By default nothing is kept.
        copies: keep updates instead of new corrections.
        weights: [S] float; by default all are 1.
        scales: [S] float; the updates are multiplied by them, in float32. By default all are 1.

    Returns:
        ``out``.
    """
    updates = _scaled(updates, scales)
    own = _of_clients(corrections, clients)
    bases = references or [None] * len(own)
    c = [row if base is None else base - row for row, base in zip(own, bases, strict=True)]
    peaks.copy_(abs_max(updates))
    factors = torch.ones(len(own), device="cpu") if weights is None else weights
    corrected = _float64(updates) + factors.to(torch.float64)[:, None] * _float64(c)
    out.copy_(corrected.mean(dim=0))
    rounded.copy_(out)
    for row, update in zip(kept or [], _float64(updates), strict=kept is not None):
        row.copy_(update if copies else rounded.to(torch.float64) - update)
    return out


def memory_total_(
    out: Tensor,
    peaks: Tensor,
    total: Tensor,
    memory: Rows,
    updates: Rows,
    clients: Tensor,
    weights: Tensor,
    references: Sequence[Tensor | None] | None = None,
    params: Tensor | None = None,
    kept: Sequence[Tensor] | None = None,
    *,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute the total and the new rows of :func:`memory_update_`.

    ``out = total + sum_s weights[s] * (m[s] - old[s])`` and ``kept[s] = m[s]``, where ``m[s]`` is
    ``updates[s]``, or ``params + updates[s]`` if params are given, and ``old[s]`` is ``memory[s]``,
    or ``references[s] + memory[s]`` where a reference is given. ``m`` and ``old`` are float32. If
    memory is bfloat16 and updates are float32, ``m`` is rounded to bfloat16 first.

    Args:
        out: [d] float64; changed in place.
        peaks: [S] float32; changed in place to ``abs_max(updates)``.
        total: [d] float64.
        memory: [K, d] float32 or bfloat16, or S rows.
        updates: S rows of length d.
        clients: [S] int64, distinct ids.
        weights: [S] float32 or float64.
        references: S vectors [d] float32 or None.
        params: [d] float32; pass it to store models instead of updates.
        kept: S vectors [d] float32, or bfloat16 as memory; changed in place. By default the new
            rows are not written.
        scales: [S] float; the updates are multiplied by them, in float32. By default all are 1.

    Returns:
        ``out``.
    """
    out.copy_(total)
    if len(clients) == 0:
        return out
    own = _of_clients(memory, clients)
    rounds = own[0].dtype == torch.bfloat16 and updates[0].dtype == torch.float32
    updates = _scaled(updates, scales)
    if rounds:
        updates = [row.to(torch.bfloat16).to(torch.float32) for row in updates]
    bases = references or [None] * len(own)
    old = [row if base is None else base + row for row, base in zip(own, bases, strict=True)]
    peaks.copy_(abs_max(updates))
    new = _new_memory(updates, params)
    for row, value in zip(kept or [], new, strict=kept is not None):
        row.copy_(value)
    change = new.to(torch.float64) - _float64(old)
    return out.add_(weights.to(torch.float64) @ change)


def quantize_(numbers: Sequence[Tensor], scales: Tensor, rows: Rows) -> Sequence[Tensor]:
    """Round rows to int8, with one scale for each block of 256 columns.

    Numbers and scales are defined by float32 arithmetic, so they equal those of the op bit for bit.

    Args:
        numbers: S tensors [d] int8; changed in place.
        scales: [S, ceil(d / 256)] float32; changed in place.
        rows: S rows of length d.

    Returns:
        ``numbers``.
    """
    for s, row in enumerate(rows):
        for b, block in enumerate(row.split(256)):
            peak = block.abs().max()
            scales[s, b] = peak / torch.tensor(127.0, device="cpu")
            halves = torch.tensor(254.0, device="cpu") / peak
            if peak < 2.0**-119:  # the scale would be subnormal
                scales[s, b], halves = 0.0, torch.zeros((), device="cpu")
            steps = ((block.abs() * halves).floor() + 1.0).div(2.0).floor()
            numbers[s][256 * b : 256 * b + len(block)] = steps.copysign(block).to(torch.int8)
    return numbers


def dequantize_(
    out: Sequence[Tensor], numbers: Sequence[Tensor], scales: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Compute ``out[s][k] = numbers[s][k] * scales[s][k // 256]``.

    Args:
        out: S tensors [d] float32; changed in place.
        numbers: S tensors [d] int8.
        scales: S tensors [ceil(d / 256)] float32.

    Returns:
        ``out``.
    """
    for row, own, steps in zip(out, numbers, scales, strict=True):
        row.copy_(own.double() * steps.double().repeat_interleave(256)[: len(own)])
    return out


def quantized_total_(
    out: Tensor,
    peaks: Tensor,
    total: Tensor,
    memory: Sequence[Tensor],
    memory_scales: Sequence[Tensor],
    updates: Rows,
    clients: Tensor,
    weights: Tensor,
    kept: Sequence[Tensor],
    kept_scales: Tensor,
) -> Tensor:
    """Compute :func:`memory_total_` for int8 rows; :func:`quantize_` rounds the new ones.

    Args:
        out: [d] float64; changed in place.
        peaks: [S] float32; changed in place to the largest magnitudes of the rounded rows.
        total: [d] float64.
        memory: S tensors [d] int8.
        memory_scales: S tensors [ceil(d / 256)] float32.
        updates: S rows of length d.
        clients: [S] int64, distinct ids.
        weights: [S] float32 or float64.
        kept: S tensors [d] int8; changed in place.
        kept_scales: [S, ceil(d / 256)] float32; changed in place.

    Returns:
        ``out``.
    """
    quantize_(kept, kept_scales, updates)
    new = torch.empty(len(kept), len(out), device="cpu")
    old = torch.empty_like(new)
    dequantize_(list(new), kept, list(kept_scales))
    dequantize_(list(old), memory, memory_scales)
    return memory_total_(out, peaks, total, list(old), new, clients, weights)


def scaffold_mean_(
    out: Tensor,
    next: Tensor,
    peaks: Tensor,
    mean: Tensor,
    updates: Rows,
    controls: Rows,
    clients: Tensor,
    weights: Tensor,
    steps: Tensor,
    part: float,
    kept: Sequence[Tensor],
) -> Tensor:
    """Compute the server's part of a SCAFFOLD round.

    ``d[s] = steps[s] * updates[s] - mean``, ``out = weights @ updates``,
    ``next = mean + part * sum_s d[s]`` and ``kept[s] = controls[s] + d[s]``.

    Args:
        out: [d] float64; changed in place.
        next: [d] float32; changed in place.
        peaks: [S] float32; changed in place to ``abs_max(updates)``.
        mean: [d] float32.
        updates: S rows of length d.
        controls: [K, d] float32, or S rows.
        clients: [S] int64, distinct ids.
        weights, steps: [S] float32 or float64.
        part: share of one client in the mean.
        kept: S vectors [d] float32; changed in place.

    Returns:
        ``out``.
    """
    u, before = _float64(updates), mean.to(torch.float64)
    changes = steps.to(torch.float64)[:, None] * u - before
    own = _float64(_of_clients(controls, clients))
    peaks.copy_(abs_max(updates))
    out.copy_(weights.to(torch.float64) @ u)
    next.copy_(before + part * changes.sum(dim=0))
    for row, control, change in zip(kept, own, changes, strict=True):
        row.copy_(control + change)
    return out


def lerp_total_(total: Tensor, end: Tensor, weight: float) -> Tensor:
    """Compute ``total += weight * (end - total)``, in place.

    Args:
        total: [d] float64; changed in place.
        end: [d] float64.
        weight: from 0 to 1.

    Returns:
        ``total``.
    """
    return total.copy_(total + weight * (end - total))


def add_total_(
    params: Tensor, total: Tensor, lr: float, norm: float, models: bool = False
) -> Tensor:
    """Compute ``params += lr * norm * total``, in place.

    With ``models=True``: ``params += lr * (norm * total - params)``.

    Args:
        params: [d] float32; changed in place.
        total: [d] float64.
        lr: server learning rate.
        norm: factor that makes ``total`` a mean.
        models: ``total`` is a sum of models, not of updates.

    Returns:
        ``params``.
    """
    old = params.to(torch.float64)
    return params.copy_(old + lr * (norm * total - old if models else norm * total))


def _aggregate(params: Tensor, aggregate: Tensor, norm: float, models: bool) -> Tensor:
    """Return v of a server optimizer, [d] float64."""
    mean = norm * aggregate.to(torch.float64)
    return mean - params.to(torch.float64) if models else mean


def add_momentum_(
    params: Tensor,
    m: Tensor,
    aggregate: Tensor,
    lr: float,
    beta_1: float,
    nesterov: bool = False,
    norm: float = 1.0,
    models: bool = False,
) -> Tensor:
    """Move the parameters along an aggregate with momentum, in place.

    Args:
        params: [d] float32; changed in place.
        m: [d] float32, the momentum; changed in place.
        aggregate: [d] float32 or float64.
        lr: server learning rate.
        beta_1: in [0, 1).
        nesterov: take the step of Nesterov's momentum.
        norm: factor that makes ``aggregate`` a mean.
        models: ``aggregate`` is a sum of models, not of updates.

    Returns:
        ``params``.
    """
    v = _aggregate(params, aggregate, norm, models)
    moment = beta_1 * m.to(torch.float64) + v
    m.copy_(moment)
    return params.copy_(
        params.to(torch.float64) + lr * (v + beta_1 * moment if nesterov else moment)
    )


def add_adaptive_(
    params: Tensor,
    m: Tensor,
    s: Tensor,
    aggregate: Tensor,
    kind: str,
    lr: float,
    beta_1: float,
    beta_2: float,
    tau: float,
    norm: float = 1.0,
    models: bool = False,
) -> Tensor:
    """Move the parameters by an adaptive server optimizer, in place (Reddi et al., Algorithm 2).

    Args:
        params: [d] float32; changed in place.
        m: [d] float32, the first moment; changed in place.
        s: [d] float32, >= 0, the second moment; changed in place.
        aggregate: [d] float32 or float64.
        kind: "adagrad", "adam" or "yogi".
        lr: server learning rate.
        beta_1, beta_2: in [0, 1).
        tau: > 0.
        norm: factor that makes ``aggregate`` a mean.
        models: ``aggregate`` is a sum of models, not of updates.

    Returns:
        ``params``.
    """
    v = _aggregate(params, aggregate, norm, models)
    first, second, square = beta_1 * m.to(torch.float64) + (1.0 - beta_1) * v, s.double(), v * v
    if kind == "adagrad":
        second = second + square
    elif kind == "adam":
        second = beta_2 * second + (1.0 - beta_2) * square
    else:
        second = second - (1.0 - beta_2) * square * torch.sign(second - square)
    m.copy_(first)
    s.copy_(second)
    return params.copy_(params.to(torch.float64) + lr * first / (second.sqrt() + tau))


def difference_gram_and_sum_(
    out: Tensor,
    gram: Tensor,
    models: Sequence[Tensor],
    base: Tensor,
    weights: Tensor,
    begin: int = 0,
) -> Tensor:
    """Compute :func:`gram_and_sum_` of models [S, D], in parts, minus the base [D], in place."""
    count = len(models) // max(1, len(weights))
    wide = [torch.cat([*models[s : s + count]]) for s in range(0, len(models), count)]
    here = slice(begin, begin + len(out))
    rows = [model.to(torch.float64)[here] - base.to(torch.float64)[here] for model in wide]
    return gram_and_sum_(out, gram, torch.stack(rows), weights)


def difference_sum_(
    out: Tensor, squares: Tensor, rows: Rows, base: Tensor, weights: Tensor
) -> Tensor:
    """Compute ``out = weights @ (rows - base)`` [d] and the squared norms [S], in place."""
    differences = torch.stack([row.to(torch.float64) - base.to(torch.float64) for row in rows])
    squares.copy_(differences.square().sum(dim=1))
    return out.copy_(weights.to(torch.float64) @ differences)


def abs_max(rows: Rows) -> Tensor:
    """Compute the largest magnitude of each row; NaN if the row holds a NaN.

    Args:
        rows: S rows of length d.

    Returns:
        [S] float32.
    """
    x = _float64(rows).abs()  # [S, d]
    if x.numel() == 0:
        return torch.zeros(len(x), dtype=torch.float32, device="cpu")
    return x.amax(dim=1).to(torch.float32)


def sketch_(out: Tensor, squares: Tensor, rows: Rows, seed: int, begin: int = 0) -> Tensor:
    """Add the sketches [S, k] and the squared norms [S] of S rows, in place.

    Args and results are those of :func:`fastagg.ops.sketch_`.
    """
    x, k = _float64(rows), out.shape[1]
    columns = begin + np.arange(x.shape[1], dtype=np.int64)
    blocks = columns // k
    first = blocks * (1 + 8 * -(-k // 512))  # the number of a block's first output
    turns = (_split_mix(seed, first) >> np.uint64(32)).astype(np.int64) * k >> 32
    buckets = (columns % k + turns) % k
    lanes = buckets % 16
    outputs = _split_mix(seed, first + 1 + buckets // 512 * 8 + lanes // 2)
    places = lanes % 2 * 32 + 31 - buckets % 512 // 16  # the bit of the sign
    signs = 1.0 - 2.0 * (outputs >> places.astype(np.uint64) & np.uint64(1)).astype(np.float64)
    sums = torch.zeros(len(x), k, dtype=torch.float64, device="cpu")
    sums.index_add_(1, torch.from_numpy(buckets), x * torch.from_numpy(signs))
    squares += x.square().sum(dim=1)
    return out.add_(sums)


def sketch_and_sum_(
    sum: Tensor,
    out: Tensor,
    squares: Tensor,
    rows: Rows,
    weights: Tensor,
    seed: int,
    begin: int = 0,
) -> Tensor:
    """Compute :func:`sketch_`, and ``sum = weights @ rows`` [d], in place."""
    sketch_(out, squares, rows, seed, begin)
    return weighted_sum_(sum, rows, weights, beta=0.0)


def _split_mix(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return the outputs ``numbers`` of the generator SplitMix64: int64 -> uint64."""
    z = np.uint64(seed % 2**64) + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def trimmed_mean_(
    out: Tensor, peak: Tensor, rows: Rows, trim: int, scales: Tensor | None = None
) -> Tensor:
    """Set ``out`` to the mean of each column without its extreme values, in place.

    Args:
        out: [d] float32; changed in place.
        peak: [1] float32; changed in place: the largest magnitude in all rows.
        rows: S >= 1 rows of length d.
        trim: values left out at each end, 0 <= 2 trim < S.
        scales: [S] float; the rows are multiplied by them, in float32. By default all are 1.

    Returns:
        ``out``.
    """
    x = _float64(_scaled(rows, scales))
    _write_peak(peak, x)
    ascending = x.sort(dim=0).values
    return out.copy_(ascending[trim : len(x) - trim].mean(dim=0))


def meamed_(
    out: Tensor, peak: Tensor, rows: Rows, keep: int, scales: Tensor | None = None
) -> Tensor:
    """Set ``out`` to the mean of the values of each column nearest to its median, in place.

    Args:
        out, peak, rows: as for :func:`trimmed_mean_`.
        keep: number of values in the mean, 1 <= keep <= S. The smaller one of two values at the
            same distance is nearer.
        scales: as for :func:`trimmed_mean_`.

    Returns:
        ``out``.
    """
    x = _float64(_scaled(rows, scales))
    _write_peak(peak, x)
    ascending = x.sort(dim=0).values
    median = (ascending[(len(x) - 1) // 2] + ascending[len(x) // 2]) / 2.0
    nearest = (ascending - median).abs().sort(dim=0, stable=True).indices[:keep]
    return out.copy_(ascending.gather(0, nearest).mean(dim=0))


def _write_peak(peak: Tensor, rows: Tensor) -> None:
    peak.fill_(rows.abs().max() if rows.numel() > 0 else 0.0)


# --- computations of the robust rules on a Gram matrix ------------------------------------------


def replace_rows(gram: Tensor, changed: Tensor, rows: Tensor) -> Tensor:
    """Return a Gram matrix [m, m] with the rows and columns ``changed`` replaced: [n, n].

    Args:
        gram: [m, m] float64.
        changed: [C] int64, distinct positions, among them all in [m, n).
        rows: [C, n] float64.
    """
    result = torch.full((rows.shape[1],) * 2, torch.nan, dtype=torch.float64, device="cpu")
    result[: len(gram), : len(gram)] = gram
    result[changed], result[:, changed] = rows, rows.T
    return result


def bucketed_gram(
    gram: Tensor, order: Tensor, weights: Tensor, bucket_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the Gram matrix of weighted means of buckets of rows.

    Args and results are those of :func:`fastagg.ops.bucketed_gram`.
    """
    n, further = len(order), range(len(order), len(gram))
    pieces = sorted(sorted(piece.tolist()) for piece in order.split(bucket_size)) if n else []
    mixing = torch.zeros(len(pieces) + len(further), len(gram), dtype=torch.float64, device="cpu")
    for bucket, piece in enumerate(pieces):
        mixing[bucket, piece] = weights[piece]
    sums = mixing[: len(pieces)].sum(dim=1)
    mixing[: len(pieces)] /= sums[:, None]
    for bucket, row in enumerate(further, len(pieces)):
        mixing[bucket, row] = 1.0
    return mixing @ gram @ mixing.T, (mixing > 0).int().argmax(dim=0), mixing.sum(dim=0), sums


def _square_distances(gram: Tensor) -> Tensor:
    """Return the squared distances of all pairs of rows, [n, n], with -1 on the diagonal."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares - 2.0 * gram).clamp_min(0)
    return distances.fill_diagonal_(-1.0)


def krum_scores(gram: Tensor, num_byzantine: int) -> Tensor:
    """Add the squared distances of each row to its max(1, n - f - 2) nearest others: [n]."""
    count = max(1, len(gram) - num_byzantine - 2)
    return _square_distances(gram).sort(dim=1).values[:, 1 : 1 + count].sum(dim=1)


def krum_selection(gram: Tensor, num_byzantine: int, count: int) -> Tensor:
    """Choose ``count`` rows, each by its Krum score among the rows that are left: [count]."""
    left, chosen = list(range(len(gram))), []
    for _ in range(count):
        scores = krum_scores(gram[left][:, left], num_byzantine).tolist()
        chosen.append(left.pop(scores.index(min(scores))))
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")


def nearest_means(gram: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute the Gram matrix of the means of rows with their nearest ones, and the shares.

    Args and results are those of :func:`fastagg.ops.nearest_means`.
    """
    n = len(weights)
    order = _square_distances(gram[:n, :n]).sort(dim=1, stable=True).indices
    mixing = torch.eye(len(gram), dtype=torch.float64, device="cpu")
    for i in range(n):
        mixing[i, i] = 0.0
        nearest = order[i, :count]
        mixing[i, nearest] = weights[nearest] / weights[nearest].sum()
    return mixing @ gram @ mixing.T, mixing


def _distances_to(gram: Tensor, factors: Tensor) -> Tensor:
    """Return the distances |x_i - z| of the rows to z = sum_i factors[i] * x_i, [n]."""
    products = gram @ factors
    return (gram.diagonal() - 2 * products + factors @ products).clamp_min(0).sqrt()


def weiszfeld(gram: Tensor, weights: Tensor, start: Tensor, nu: float, iterations: int) -> Tensor:
    """Apply steps of the smoothed Weiszfeld algorithm to the factors ``start``: [n]."""
    factors = start
    for _ in range(iterations):
        factors = weights / _distances_to(gram, factors).clamp_min(nu)
        factors = factors / factors.sum()
    return factors.clone()


def clip_towards(gram: Tensor, weights: Tensor, tau: float, iterations: int) -> Tensor:
    """Apply steps of centered clipping (Su et al. eq. 43) from the last row: factors [n + 1]."""
    factors = torch.zeros(len(gram), dtype=torch.float64, device="cpu")
    factors[-1] = 1.0
    for _ in range(iterations):
        scale = weights * (tau / _distances_to(gram, factors)[:-1]).clamp_max(1.0)
        own = torch.cat([scale, 1.0 - scale.sum(dim=0, keepdim=True)])
        factors = own[-1] * factors + torch.cat([scale, scale.new_zeros(1)])
    return factors
