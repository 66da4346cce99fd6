# SPDX-License-Identifier: Apache-2.0
"""Rounds of the rules that remember a float row per client: MimiC, MIFA, Stale, SCAFFOLD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.ops.reference._row_lists import Rows, float64_rows, scaled
from fastagg.ops.reference._sums import abs_max

__all__ = ["memory_total_", "memory_update_", "mimic_", "mimic_mean_", "scaffold_mean_"]


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
    u = float64_rows(updates)  # [S, d]
    own = _of_clients(corrections, clients)
    v = (u + float64_rows(own)).mean(dim=0)
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
        total += weights.to(torch.float64) @ (rows.to(torch.float64) - float64_rows(own))
        for place, row in zip(own, rows, strict=True):
            place.copy_(row)
    step = norm * total - old if models else norm * total
    return params.copy_(old + lr * step)


def _of_clients(memory: Rows, clients: Tensor) -> list[Tensor]:
    """Return the memory rows of ``clients``, as views."""
    if isinstance(memory, Tensor):
        return [memory[k] for k in clients.tolist()]
    return list(memory)


def _new_memory(updates: Rows, params: Tensor | None) -> Tensor:
    """Return the new memory rows [S, d], rounded to float32: the total is that of rounded rows."""
    rows = float64_rows(updates)
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
    updates = scaled(updates, scales)
    own = _of_clients(corrections, clients)
    bases = references or [None] * len(own)
    c = [row if base is None else base - row for row, base in zip(own, bases, strict=True)]
    peaks.copy_(abs_max(updates))
    factors = torch.ones(len(own), device="cpu") if weights is None else weights
    corrected = float64_rows(updates) + factors.to(torch.float64)[:, None] * float64_rows(c)
    out.copy_(corrected.mean(dim=0))
    rounded.copy_(out)
    for row, update in zip(kept or [], float64_rows(updates), strict=kept is not None):
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
    faded: Tensor | None = None,
    faded_weights: Tensor | None = None,
    fading: float = 1.0,
) -> Tensor:
    """Compute the total and the new rows of :func:`memory_update_`.

    ``out = total + sum_s weights[s] * (m[s] - old[s])`` and ``kept[s] = m[s]``, where ``m[s]`` is
    ``updates[s]``, or ``params + updates[s]`` if params are given, and ``old[s]`` is ``memory[s]``,
    or ``references[s] + memory[s]`` where a reference is given. ``m`` and ``old`` are float32. If
    memory is bfloat16 and updates are float32, ``m`` is rounded to bfloat16 first.

    With ``faded``, also
    ``faded = fading * total + sum_s faded_weights[s] * (m[s] - fading * old[s])``.

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
        faded: [d] float64; changed in place.
        faded_weights: [S] float32 or float64.
        fading: factor of total and old rows in ``faded``.

    Returns:
        ``out``.
    """
    out.copy_(total)
    if faded is not None:
        torch.mul(total, fading, out=faded)
    if len(clients) == 0:
        return out
    own = _of_clients(memory, clients)
    rounds = own[0].dtype == torch.bfloat16 and updates[0].dtype == torch.float32
    updates = scaled(updates, scales)
    if rounds:
        updates = [row.to(torch.bfloat16).to(torch.float32) for row in updates]
    bases = references or [None] * len(own)
    old = [row if base is None else base + row for row, base in zip(own, bases, strict=True)]
    peaks.copy_(abs_max(updates))
    new = _new_memory(updates, params)
    for row, value in zip(kept or [], new, strict=kept is not None):
        row.copy_(value)
    change = new.to(torch.float64) - float64_rows(old)
    if faded is not None:
        assert faded_weights is not None
        faded.add_(faded_weights.to(torch.float64) @ (new - fading * float64_rows(old)))
    return out.add_(weights.to(torch.float64) @ change)


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
    before = mean.to(torch.float64)
    u = float64_rows(updates).reshape(len(updates), len(before))
    changes = steps.to(torch.float64)[:, None] * u - before
    own = float64_rows(_of_clients(controls, clients))
    peaks.copy_(abs_max(updates))
    out.copy_(weights.to(torch.float64) @ u)
    next.copy_(before + part * changes.sum(dim=0))
    for row, control, change in zip(kept, own, changes, strict=True):
        row.copy_(control + change)
    return out
