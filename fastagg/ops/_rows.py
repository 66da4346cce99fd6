# SPDX-License-Identifier: Apache-2.0
"""One-pass updates of vectors [d] and of what a server remembers of its clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, count_rows, mark_changed, returns_nothing
from fastagg.ops.row_lists import Rows, row_list


def abs_max(rows: Rows) -> Tensor:
    """The largest magnitude in each row: float32 [S]; NaN for a row that holds a NaN."""
    tensors = row_list(rows, "rows")
    return compiled.abs_max(tensors) if tensors else torch.empty(0)


@torch.library.register_fake("fastagg::abs_max")
def _(rows: list[Tensor]) -> Tensor:
    return rows[0].new_empty(count_rows(rows))


def weighted_sum_(
    out: Tensor,
    rows: Rows,
    weights: Tensor,
    beta: float = 1.0,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """``out = beta * out + weights @ rows`` in one pass over the rows, in place.

    Args:
        out: float32 [d]; changed. With ``beta=0`` its old content is not read.
        rows: S rows of d float32 or short, none of which may share memory with ``out``.
        weights: float32 or float64 [S].
        beta: factor of the old content.
        when: bool [], where ``out`` is; if False, nothing changes. On a GPU it may be the result of
            earlier work, for which nobody waits.

    Returns:
        ``out``. Rows are added in their order, in float32 in groups of 8 and in float64 across
        groups.
    """
    compiled.weighted_sum_(out, row_list(rows, "rows"), weights, beta, when)
    mark_changed(out)
    return out


returns_nothing("weighted_sum_")


def mimic_(params: Tensor, updates: Rows, corrections: Rows, clients: Tensor, lr: float) -> Tensor:
    """The server's part of MimiC (Algorithm 1, lines 5 to 10), in one pass and in place.

    With the sign of updates (local model - global model, to be added)::

        v = mean over s of (updates[s] + corrections[clients[s]])
        params += lr * v
        corrections[clients[s]] = v - updates[s]

    Args:
        params: float32 [d]; changed.
        updates: S rows of d float32 or short. With S = 0 nothing changes.
        corrections: float32 [K, d], contiguous, of which the rows of ``clients`` are changed; or
            S tensors [d].
        clients: int64 [S].
        lr: server learning rate.

    Returns:
        ``params``. Rows are added in the order of their client ids: any permutation of
        (updates, clients) gives the same bits.
    """
    own = row_list(corrections, "corrections")
    compiled.mimic_(params, row_list(updates, "updates"), own, clients, lr)
    mark_changed(params, *own)
    return params


returns_nothing("mimic_")


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
    """Remember the updates (or models) received and apply the mean of all remembered, in place.

    What Stale and MIFA (eq. 44 of the adversarial-unavailability paper) need, in one pass::

        m[s] = updates[s]                      # or params + updates[s], with models=True
        total += sum over s of weights[s] * (m[s] - memory[clients[s]])
        memory[clients[s]] = m[s]
        params += lr * norm * total            # or lr * (norm * total - params), with models=True

    Args:
        params: float32 [d]; changed.
        total: float64 [d], the weighted sum of all rows of ``memory``; changed. It is kept in
            float64 so that it stays that sum over any number of rounds.
        memory: float32 [K, d], contiguous, of which the rows of ``clients`` are changed; or S
            tensors [d].
        updates: S rows of d float32 or short.
        clients: int64 [S].
        weights: float32 or float64 [S], the weight of each row's client; the same in every round.
        lr: server learning rate.
        norm: factor that makes ``total`` a mean, for instance 1 / (number of clients seen).
        models: remember local models instead of updates.

    Returns:
        ``params``. Rows are added in the order of their client ids: any permutation of
        (updates, clients, weights) gives the same bits.
    """
    own = row_list(memory, "memory")
    rows = row_list(updates, "updates")
    compiled.memory_update_(params, total, own, rows, clients, weights, lr, norm, models)
    mark_changed(params, total, *own)
    return params


returns_nothing("memory_update_")


# --- the same rounds for a server that keeps the received rows themselves as memory -------------


def mimic_mean_(
    out: Tensor,
    rounded: Tensor,
    peaks: Tensor,
    updates: Rows,
    corrections: Rows,
    clients: Tensor,
    references: Sequence[Tensor | None] | None = None,
    kept: Sequence[Tensor] | None = None,
) -> Tensor:
    """The v of :func:`mimic_`, and its new corrections; nothing that is read is changed.

    ::

        c[s] = corrections[s]                  # or references[s] - corrections[s], where given
        out = mean over s of (updates[s] + c[s])
        kept[s] = out - updates[s]             # where given

    Together with ``add_total_(params, out, lr, 1.0)`` this is :func:`mimic_` to the bit: nothing is
    lost if a server refuses the result. A server that owns ``updates[s]`` can keep that row instead
    of ``kept[s]``: it is the correction of a later round, with ``rounded`` as its reference.

    Args:
        out: float64 [d]; changed, v.
        rounded: float32 [d]; changed, v as the corrections of this round have it.
        peaks: float32 [S]; changed, as :func:`abs_max` of ``updates``.
        updates: S >= 1 rows of d float32 or short.
        corrections: [K, d], contiguous, or S tensors [d], of the dtype of ``updates``.
        clients: int64 [S].
        references: S entries, each float32 [d] or None; None: none.
        kept: S tensors [d] float32, changed; None: none. They share no memory with other arguments.

    Returns:
        ``out``. Rows are added in the order of their client ids.
    """
    rows, own = row_list(updates, "updates"), row_list(corrections, "corrections")
    written = list(kept or [])
    compiled.mimic_mean_(out, rounded, peaks, rows, own, clients, list(references or []), written)
    mark_changed(out, rounded, peaks, *written)
    return out


returns_nothing("mimic_mean_")


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
) -> Tensor:
    """The total of :func:`memory_update_`, and its new rows; nothing that is read is changed.

    ::

        m[s] = updates[s]                      # or params + updates[s], with params
        old[s] = memory[s]                     # or references[s] + memory[s], where given
        out = total + sum over s of weights[s] * (m[s] - old[s])
        kept[s] = m[s]                         # where given

    Together with :func:`add_total_` this is :func:`memory_update_` to the bit: nothing is lost if a
    server refuses the result. A server that owns ``updates[s]`` can keep that row instead of
    ``kept[s]``: as the memory of a later round, or, where models are remembered, with the params of
    this round as its reference.

    Args:
        out: float64 [d]; changed. NaN or infinite where a row is.
        peaks: float32 [S]; changed, as :func:`abs_max` of ``updates``.
        total: float64 [d].
        memory: [K, d], contiguous, or S tensors [d], of the dtype of ``updates``.
        updates: S rows of d float32 or short.
        clients: int64 [S].
        weights: float32 or float64 [S].
        references: S entries, each float32 [d] or None; None: none.
        params: float32 [d], to remember models instead of updates.
        kept: S tensors [d] float32, changed; None: none. They share no memory with other arguments.

    Returns:
        ``out``. Rows are added in the order of their client ids.
    """
    own, rows = row_list(memory, "memory"), row_list(updates, "updates")
    bases, written = list(references or []), list(kept or [])
    compiled.memory_total_(out, peaks, total, own, rows, clients, weights, bases, params, written)
    mark_changed(out, peaks, *written)
    return out


returns_nothing("memory_total_")


def add_total_(
    params: Tensor, total: Tensor, lr: float, norm: float, models: bool = False
) -> Tensor:
    """``params += lr * norm * total``, or ``lr * (norm * total - params)`` with ``models=True``.

    Args:
        params: float32 [d]; changed.
        total: float64 [d].
        lr: server learning rate.
        norm: factor that makes ``total`` a mean.
        models: ``total`` is one of models, not of updates.

    Returns:
        ``params``.
    """
    compiled.add_total_(params, total, lr, norm, models)
    mark_changed(params)
    return params


returns_nothing("add_total_")
