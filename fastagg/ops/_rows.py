# SPDX-License-Identifier: Apache-2.0
"""One-pass updates of vectors [d] and of memory rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, count_rows, mark_changed, op
from fastagg.ops.row_lists import Rows, row_list

__all__ = [
    "abs_max",
    "add_total_",
    "apply_aggregate_",
    "apply_weighted_sum_",
    "difference_sum_",
    "lerp_total_",
    "memory_total_",
    "memory_update_",
    "mimic_",
    "mimic_mean_",
    "scaffold_mean_",
    "weighted_sum_",
]


def _fake_abs_max(rows: list[Tensor]) -> Tensor:
    return rows[0].new_empty(count_rows(rows))


@op(example=lambda f, x: f(x.updates), fake=_fake_abs_max)
def abs_max(rows: Rows) -> Tensor:
    """Compute the largest magnitude in each row.

    Args:
        rows: S rows of d float32.

    Returns:
        float32 [S]; NaN for a row that holds a NaN.
    """
    tensors = row_list(rows, "rows")
    if not tensors:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return compiled.abs_max(tensors)


@op(
    example=lambda f, x: (
        f(x.params, x.updates, x.weights, 0.5),
        f(x.params, list(x.updates), x.weights.float()),
    )
)
def weighted_sum_(
    out: Tensor,
    rows: Rows,
    weights: Tensor,
    beta: float = 1.0,
    *,
    when: Tensor | None = None,
) -> Tensor:
    """Compute ``out = beta * out + weights @ rows`` in one pass over the rows, in place.

    Args:
        out: float32 [d]; changed in place. With ``beta=0`` its old content is not read.
        rows: S rows of d float32 or short. None may share memory with ``out``.
        weights: float32 or float64 [S]. Their common factor is applied in float64, and the
            quotients are rounded to float32. Equal weights, and small multiples of the smallest
            one, are therefore not rounded. Weights whose magnitudes add up to more than 2^960 are
            rounded to float32 themselves: those above its range are infinite.
        beta: factor of the old content.
        when: bool [], on the device of ``out``; if False, nothing changes. On a GPU it may be the
            result of work that is still queued; the call does not wait for it.

    Returns:
        ``out``. Rows are added in the given order, in float32 within groups of 8 rows and in
        float64 across groups.
    """
    compiled.weighted_sum_(out, row_list(rows, "rows"), weights, beta, when)
    mark_changed(out)
    return out


@op(
    example=lambda f, x: (
        f(x.params, x.memory[0], x.active[0], x.updates, x.weights, 0.5, 1e38, 1e38),
        f(x.params, x.memory[0], x.active[0], list(x.updates), x.weights.float(), 0.5, 1e38, 0.0),
    )
)
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
    """Compute ``params += lr * (weights @ rows)``, in place, unless a result would be out of range.

    With v the weighted sum, ``params`` change if both are finite, ``max |v| <= largest`` and
    ``max |params| + lr max |v| <= limit``; otherwise they keep their bits. A NaN or an Inf in a
    row makes v not finite, whatever the weight. On a CPU this is one pass over the rows, which
    writes the parameters as it goes and, if necessary, restores them at its end.

    Args:
        params: float32 [d]; changed in place.
        before: float32 [d]; changed in place: the parameters from before.
        applied: bool []; changed in place: whether the parameters have changed.
        rows: S rows of d float32 or short. None may share memory with what is changed.
        weights: float32 or float64 [S]; rounded as in :func:`weighted_sum_`.
        lr: the factor of the sum.
        largest: the largest magnitude in a sum that is applied.
        limit: the largest magnitude that a parameter may have after the step.

    Returns:
        ``params``, with the bits of two calls of :func:`weighted_sum_`: one computes v in float32,
        and one adds v times ``lr``.
    """
    compiled.apply_weighted_sum_(
        params, before, applied, row_list(rows, "rows"), weights, lr, largest, limit
    )
    mark_changed(params, before, applied)
    return params


@op(
    example=lambda f, x: (
        f(x.params, x.weights.clone(), x.updates, x.memory[0], x.weights),
        f(x.params, x.weights.clone(), list(x.updates), x.memory[0], x.weights.float()),
    )
)
def difference_sum_(
    out: Tensor, squares: Tensor, rows: Rows, base: Tensor, weights: Tensor
) -> Tensor:
    """Compute the weighted sum and the squared norms of ``rows - base``, in one pass, in place.

    For a server that receives models: ``out = weights @ (rows - base)`` is the mean of the updates,
    and no update is written anywhere. On a GPU, all differences are computed first.

    Args:
        out: float32 [d]; changed in place. Its old content is not read.
        squares: float64 [S]; changed in place: squared Euclidean norms of the differences. Their
            relative error is at most 1e-6 if the largest difference of a row is above 1e-15. They
            are computed in float32: infinite for a row whose squares leave its range (differences
            above 1e18), even if the norm does not, and too small, down to 0, for tiny differences.
        rows: S rows of d float32 or short, at any address. None may share memory with ``out``.
        base: float32 [d].
        weights: float32 or float64 [S]; rounded as in :func:`weighted_sum_`.

    Returns:
        ``out``, with the bits of :func:`weighted_sum_` for the differences, rounded to float32.
    """
    compiled.difference_sum_(out, squares, row_list(rows, "rows"), base, weights)
    mark_changed(out, squares)
    return out


@op(
    example=lambda f, x: (
        f(x.params, x.updates, x.memory, x.clients, 0.7),
        f(x.params, list(x.updates), list(x.memory[x.clients]), x.clients, 0.7),
    )
)
def mimic_(params: Tensor, updates: Rows, corrections: Rows, clients: Tensor, lr: float) -> Tensor:
    """Apply the server's part of a MimiC round (Algorithm 1, lines 5 to 10), in one pass, in place.

    With the sign of updates (local model - global model, to be added)::

        v = mean over s of (updates[s] + corrections[clients[s]])
        params += lr * v
        corrections[clients[s]] = v - updates[s]

    Args:
        params: float32 [d]; changed in place.
        updates: S rows of d float32 or short. With S = 0 nothing changes.
        corrections: float32 [K, d], contiguous, or S tensors [d], those of ``clients``. The rows of
            ``clients`` are changed in place.
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


@op(
    example=lambda f, x: (
        f(x.params, x.total, x.memory, x.updates, x.clients, x.weights, 0.7, 1 / len(x.memory)),
        f(x.params, x.total, x.memory, x.updates, x.clients, x.weights, 0.7, 0.1, True),
    )
)
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
    """Store the received updates (or models) and apply the mean of all memory rows, in place.

    One pass does the round of Stale and MIFA (eq. 44 of the adversarial-unavailability paper)::

        m[s] = updates[s]              # or params + updates[s], with models=True
        total += sum over s of weights[s] * (m[s] - memory[clients[s]])
        memory[clients[s]] = m[s]
        params += lr * norm * total    # with models: lr * (norm * total - params)

    Args:
        params: float32 [d]; changed in place.
        total: float64 [d], the weighted sum of all rows of ``memory``; changed in place. It is
            float64 so that it remains that sum over any number of rounds.
        memory: float32 [K, d], contiguous, or S tensors [d], those of ``clients``. The rows of
            ``clients`` are changed in place.
        updates: S rows of d float32 or short.
        clients: int64 [S].
        weights: float32 or float64 [S], the weight of each row's client. A client must have the
            same weight in every round.
        lr: server learning rate.
        norm: factor that makes ``total`` a mean, for instance 1 / (number of clients seen).
        models: store local models instead of updates.

    Returns:
        ``params``. Rows are added in the order of their client ids: any permutation of
        (updates, clients, weights) gives the same bits.
    """
    own = row_list(memory, "memory")
    rows = row_list(updates, "updates")
    compiled.memory_update_(params, total, own, rows, clients, weights, lr, norm, models)
    mark_changed(params, total, *own)
    return params


_Item = TypeVar("_Item", bound=Tensor | None)


def _listed(rows: Sequence[_Item] | None) -> list[_Item]:
    """Return optional rows as a list. A matrix has no truth value, or that of its only number."""
    return [] if rows is None else list(rows)


# --- the same rounds, without a write to anything that is read -----------------------------------


@op(
    example=lambda f, x: (
        f(x.mean, x.params, x.peaks, x.updates, x.memory, x.clients, x.references, x.kept),
        f(x.mean, x.params, x.peaks, list(x.updates), list(x.memory[x.clients]), x.clients),
        f(x.mean, x.params, x.peaks, x.updates, x.memory, x.clients, weights=x.weights),
        f(x.mean, x.params, x.peaks, x.updates, x.memory, x.clients, scales=x.weights),
        f(
            x.mean,
            x.params,
            x.peaks,
            x.updates,
            x.memory,
            x.clients,
            x.references,
            x.kept,
            copies=True,
        ),
    )
)
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
    """Compute the v of :func:`mimic_` and what a server remembers; nothing read is changed.

    ::

        c[s] = corrections[s]            # references[s] - corrections[s], if given
        out = mean over s of (updates[s] + weights[s] * c[s])
        kept[s] = rounded - updates[s]   # if given; with copies, updates[s]

    Without ``weights``, followed by ``add_total_(params, out, lr, 1.0)``, the result has the bits
    of :func:`mimic_`, but a server can still refuse it after this call: nothing is lost.

    The new correction of a client is ``rounded - updates[s]``. A server can store the update
    instead: its own row, or a copy (``copies``). In the client's next round it passes the stored
    row as the correction, and the ``rounded`` of the round in which the row was stored as its
    reference. Then the updates are read once.

    Args:
        out: float64 [d]; changed in place to v.
        rounded: float32 [d]; changed in place to v rounded to float32, the value that the
            corrections of this round are taken from.
        peaks: float32 [S]; changed in place to ``abs_max(updates)``.
        updates: S >= 1 rows of d float32 or short.
        corrections: [K, d], contiguous, or S tensors [d], those of ``clients``; of the dtype of
            ``updates``.
        clients: int64 [S].
        references: S entries, each float32 [d] or None; by default all are None.
        kept: S tensors [d] float32 that share no memory with any other argument; changed in place.
            By default nothing is kept.
        copies: keep copies of the updates instead of the new corrections.
        weights: float32 or float64 [S], rounded to float32; by default all are 1. The factor
            1 / S is not rounded.
        scales: float32 or float64 [S], rounded to float32: ``updates[s]`` stands for the float32
            product ``scales[s] * updates[s]``. By default all are 1. On a GPU, float32 updates are
            copied, and others are refused.

    Returns:
        ``out``. Rows are added in the order of their client ids.
    """
    rows, own = row_list(updates, "updates"), row_list(corrections, "corrections")
    bases, written = _listed(references), _listed(kept)
    compiled.mimic_mean_(
        out, rounded, peaks, rows, own, clients, bases, written, copies, weights, scales
    )
    mark_changed(out, rounded, peaks, *written)
    return out


@op(
    example=lambda f, x: (
        f(x.mean, x.peaks, x.total, x.memory, x.updates, x.clients, x.weights),
        f(x.mean, x.peaks, x.total, x.memory, x.updates, x.clients, x.weights, scales=x.weights),
        f(
            x.mean,
            x.peaks,
            x.total,
            list(x.memory[x.clients]),
            x.updates,
            x.clients,
            x.weights,
            x.references,
            x.params,
            x.kept,
        ),
        f(
            x.mean,
            x.peaks,
            x.total,
            x.memory,
            x.updates,
            x.clients,
            x.weights,
            kept=x.kept,
            faded=x.faded,
            faded_weights=-x.weights,
            fading=0.5,
        ),
    )
)
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
    faded: Tensor | None = None,
    faded_weights: Tensor | None = None,
    fading: float = 1.0,
) -> Tensor:
    """Compute the total and the new rows of :func:`memory_update_`; nothing read is changed.

    ::

        m[s] = updates[s]     # params + updates[s], with params
        old[s] = memory[s]    # references[s] + memory[s], if references are given
        out = total + sum over s of weights[s] * (m[s] - old[s])
        kept[s] = m[s]        # if given
        faded = fading * total
                + sum over s of faded_weights[s] * (m[s] - fading * old[s])

    Followed by :func:`add_total_`, the result has the bits of :func:`memory_update_`, but a server
    can still refuse it after this call: nothing is lost.

    Memory rows may be bfloat16 while updates are float32, on the CPU. Then ``m[s]`` is the update
    rounded to the nearest bfloat16, ties to even, in the total and in the peaks, too; and there are
    no references and no params.

    ``faded`` is a second sum in the same pass, for rules whose aggregate has other weights than the
    total. It takes no references and no params.

    A server that owns ``updates[s]`` can store that row instead of ``kept[s]``. In the client's
    next round it passes the row as the memory row and, if models are stored, the params of the
    round in which the row was stored as its reference.

    Args:
        out: float64 [d]; changed in place. NaN or infinite where a row is.
        peaks: float32 [S]; changed in place to ``abs_max(updates)``, of rounded ones if they are.
        total: float64 [d].
        memory: [K, d], contiguous, or S tensors [d], those of ``clients``; of the dtype of
            ``updates``, or bfloat16.
        updates: S rows of d float32 or short.
        clients: int64 [S].
        weights: float32 or float64 [S].
        references: S entries, each float32 [d] or None; by default all are None.
        params: float32 [d]; pass it to store models instead of updates.
        kept: S tensors [d] that share no memory with any other argument; changed in place. They are
            float32, or bfloat16 if updates are rounded. By default the new rows are not written.
        scales: float32 or float64 [S], rounded to float32: ``updates[s]`` stands for the float32
            product ``scales[s] * updates[s]``. By default all are 1. On a GPU, float32 updates are
            copied, and others are refused.
        faded: float64 [d]; changed in place. By default there is no second sum.
        faded_weights: float32 or float64 [S]; given if ``faded`` is.
        fading: factor of ``total`` and old rows in ``faded``.

    Returns:
        ``out``. Rows are added in the order of their client ids.
    """
    own, rows = row_list(memory, "memory"), row_list(updates, "updates")
    bases, written = _listed(references), _listed(kept)
    compiled.memory_total_(
        out,
        peaks,
        total,
        own,
        rows,
        clients,
        weights,
        bases,
        params,
        written,
        scales,
        faded,
        faded_weights,
        fading,
    )
    mark_changed(out, peaks, *written, *([] if faded is None else [faded]))
    return out


@op(
    example=lambda f, x: (
        f(
            x.mean,
            x.params,
            x.peaks,
            x.memory[0],
            x.updates,
            x.memory,
            x.clients,
            x.weights,
            -x.weights,
            1 / len(x.memory),
            x.kept,
        ),
    )
)
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
    """Compute the server's part of a SCAFFOLD round in one pass; nothing read is changed.

    ::

        d[s] = steps[s] * updates[s] - mean    # the change of a control variate
        out = sum over s of weights[s] * updates[s]
        next = mean + part * (sum over s of d[s])
        kept[s] = controls[clients[s]] + d[s]

    Args:
        out: float64 [d]; changed in place.
        next: float32 [d]; changed in place to the new mean control variate.
        peaks: float32 [S]; changed in place to ``abs_max(updates)``.
        mean: float32 [d], the mean control variate.
        updates: S rows of d float32.
        controls: float32 [K, d], contiguous, or S tensors [d], the control variates of ``clients``.
        clients: int64 [S].
        weights: float32 or float64 [S].
        steps: float32 or float64 [S], -1 / (number of local steps * local learning rate).
        part: the share of one client in the mean, 1 / K.
        kept: S tensors [d] float32 that share no memory with any other argument; changed in place.

    Returns:
        ``out``. Products and sums are float64; rows are added in the order of their client ids.
    """
    rows, own, written = row_list(updates, "updates"), row_list(controls, "controls"), list(kept)
    compiled.scaffold_mean_(
        out, next, peaks, mean, rows, own, clients, weights, steps, part, written
    )
    mark_changed(out, next, peaks, *written)
    return out


@op(example=lambda f, x: (f(x.total, x.mean, 0.3), f(x.total, x.mean, 0.75)))
def lerp_total_(total: Tensor, end: Tensor, weight: float) -> Tensor:
    """Compute ``total += weight * (end - total)``, in place; exactly ``end`` for a weight of 1.

    Args:
        total: float64 [d]; changed in place.
        end: float64 [d].
        weight: from 0 to 1.

    Returns:
        ``total``.
    """
    compiled.lerp_total_(total, end, weight)
    mark_changed(total)
    return total


@op(
    example=lambda f, x: (
        f(x.params, x.total, 0.7, 1 / len(x.memory)),
        f(x.params, x.total, 0.7, 1 / len(x.memory), True),
    )
)
def add_total_(
    params: Tensor, total: Tensor, lr: float, norm: float, models: bool = False
) -> Tensor:
    """Compute ``params += lr * norm * total``, in place.

    With ``models=True``: ``params += lr * (norm * total - params)``.

    Args:
        params: float32 [d]; changed in place.
        total: float64 [d].
        lr: server learning rate.
        norm: factor that makes ``total`` a mean.
        models: ``total`` is a sum of models, not of updates.

    Returns:
        ``params``.
    """
    compiled.add_total_(params, total, lr, norm, models)
    mark_changed(params)
    return params


@op(
    example=lambda f, x: (
        f(x.params, x.active[0], x.memory[0], 0.7, 1.0, 1e38, 1e38),
        f(x.params, x.active[0], x.memory[0], 0.7, 1.0, 1e38, 0.0),
        f(x.params, x.active[0], x.total, 0.7, 1 / len(x.memory), 1e30, 1e38),
        f(x.params, x.active[0], x.total, 0.7, 1 / len(x.memory), 1e30, 0.0),
    )
)
def apply_aggregate_(
    params: Tensor,
    applied: Tensor,
    aggregate: Tensor,
    lr: float,
    norm: float,
    peak: float,
    limit: float,
) -> Tensor:
    """Compute ``params += lr * norm * aggregate``, in place, unless a result is out of range.

    ``params`` change if they are finite and ``max |params| + lr * largest <= limit``, where
    ``largest`` is the largest magnitude in a float32 aggregate, which must be at most ``peak``, or
    ``peak`` itself. Otherwise they keep their bits.

    Args:
        params: float32 [d]; changed in place.
        applied: bool []; changed in place: whether ``params`` have changed.
        aggregate: float32 or float64 [d].
        lr: server learning rate.
        norm: factor that makes ``aggregate`` a mean; 1 if it is float32.
        peak: the largest magnitude in a float32 aggregate that is applied; an upper bound of those
            in ``norm * aggregate``, if that is float64.
        limit: the largest magnitude that a parameter may have after the step.

    Returns:
        ``params``, with the bits of :func:`weighted_sum_` of the float32 aggregate with the weight
        ``lr``, or of :func:`add_total_`.
    """
    compiled.apply_aggregate_(params, applied, aggregate, lr, norm, peak, limit)
    mark_changed(params, applied)
    return params
