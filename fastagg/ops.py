# SPDX-License-Identifier: Apache-2.0
"""The functional layer: thin wrappers over the compiled operators ``torch.ops.fastagg``.

Conventions, for all functions here:

* K clients, S of them active (rows), d parameters. ``updates`` and ``rows`` are S rows of d
  float32: one tensor [S, d] (any distance between rows, last dimension contiguous) or a sequence
  of S tensors [d]. Rows are read where they are; nothing is stacked or copied.
* Where "short" rows are allowed, they may be bfloat16 or float16, all of one dtype. Results have
  the bits of float32 rows with the same numbers.
* ``clients`` is int64 [S]: distinct ids in [0, K), ``clients[s]`` being the client of row s.
* What is remembered of clients (``memory``, ``corrections``) is one tensor [K, d], of which the
  rows ``clients`` are used, or a sequence of S tensors [d]: those of ``clients``, in their order.
* ``counts`` [K, K] are int32, or int16; they stop at the largest value of their type.
* ``candidates`` is a set of pairs: bool [K, K], or packed bits, uint8 [K, ceil(K / 8)] as
  :func:`fastagg.bits.pack` gives them.
* A name that ends in ``_`` changes its first argument in place and returns it.
* Results have the same bits for any number of threads (``torch.set_num_threads``), on one
  instruction set (``fastagg.build_info()["isa"]``).
* Shapes, dtypes, devices and ids are checked: ValueError, TypeError or IndexError name the
  argument, what was expected and what came. Values are not: a NaN in gives a NaN out. (The
  aggregators see to finiteness.) After an exception nothing has changed.
* Large tensors are all on the CPU or all on one GPU (CUDA, if :func:`devices` has it), on whose
  current stream the work is put. ``clients``, and the weights of rows, may be on the CPU in either
  case. With them there, no op waits for the GPU; ids on a GPU that choose or order rows have to be
  fetched first, and those given to :func:`update_scores_` are checked by an assertion on the GPU.
* On a GPU results have the same bits from run to run, and ``pairs`` are taken to be symmetric.
* Not differentiable: a Parameter can be changed only under ``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Importing these registers the operators, and what they are to torch.compile.
from fastagg import (
    _C,
    fake_kernels,  # noqa: F401
)
from fastagg.robust_ops import (
    bucketed_gram,
    clip_towards,
    gram_rows,
    replace_rows,
    weiszfeld,
)
from fastagg.row_lists import Rows
from fastagg.row_lists import row_list as _row_list

__all__ = [
    "Rows",
    "abs_max",
    "add_total_",
    "bucketed_gram",
    "clip_towards",
    "cosine_scores",
    "distance_scores",
    "eliminate_",
    "gram",
    "gram_and_sum_",
    "gram_rows",
    "memory_total_",
    "memory_update_",
    "mimic_",
    "mimic_mean_",
    "replace_rows",
    "select_friends",
    "update_scores_",
    "weighted_sum_",
    "weiszfeld",
]

_ops = torch.ops.fastagg


def devices() -> tuple[str, ...]:
    """The types of device that have kernels in this build and are there: "cpu", perhaps "cuda"."""
    cuda = bool(_C.build_info()["cuda_archs"]) and torch.cuda.is_available()
    return ("cpu", "cuda") if cuda else ("cpu",)


def _changed(*tensors: Tensor) -> None:
    """Tell autograd that these were changed behind its back; inference tensors keep no version."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


# --- reductions over d ------------------------------------------------------------------------


def gram(
    updates: Rows,
    *,
    pairs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    precision: str = "highest",
) -> Tensor:
    """Inner products of the updates: ``out[i, j] = <updates[i], updates[j]>``.

    Args:
        updates: S rows of d float32.
        pairs: bool [S, S], symmetric. Only these entries and the diagonal are computed, in tiles
            of a few rows (rows are ordered internally so that tiles are dense); all others are 0.
        dtype: float32 or float64, of the result. Sums are float64 across blocks of up to 768
            columns in either case; float64 also holds the squares of rows of any magnitude.
        precision: "highest" or "tf32": the least that will do. With "tf32" a GPU rounds elements to
            10 bits of mantissa: entry (i, j) is then off by at most 2^-10 + 2^-18, times the sum of
            |updates[i, k] * updates[j, k]| over k. Such errors average out over many elements of
            any sign, but do not between rows of few values. The CPU has nothing faster than
            "highest" and computes that.

    Returns:
        [S, S], exactly symmetric. Each entry depends on its two rows alone, bit for bit: not on
        the order of rows, on other rows, on ``pairs`` or on threads. A row with a NaN or an
        infinity has a non-finite diagonal entry, and only such a row (in float64).
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    rows = _row_list(updates, "updates")
    if not rows:
        return torch.empty(0, 0, dtype=dtype)
    return _ops.gram(rows, pairs, precision).to(dtype)


def abs_max(rows: Rows) -> Tensor:
    """The largest magnitude in each row: float32 [S]; NaN for a row that holds a NaN."""
    tensors = _row_list(rows, "rows")
    return _ops.abs_max(tensors) if tensors else torch.empty(0)


# --- policy on [S, S] and [K, K] --------------------------------------------------------------


def cosine_scores(gram: Tensor) -> Tensor:
    """Similarity scores ``(cos + 1) / 2`` in [0, 1] (FL-FDMS, TMLR version, eq. 14).

    Args:
        gram: float32 or float64 [S, S], of which the diagonal holds the squared norms.

    Returns:
        [S, S] of the same dtype. A zero row has no direction: it scores 0.5 with every row.
    """
    return _ops.cosine_scores(gram)


def distance_scores(gram: Tensor) -> Tensor:
    """Similarity scores ``-|x_i - x_j|`` (Euclidean), the FL-FDMS paper's alternative to cosine.

    Unbounded and in the units of the updates. Distances much shorter than the rows come out of a
    difference of nearly equal numbers: give ``gram`` in float64.

    Args:
        gram: float32 or float64 [S, S].

    Returns:
        [S, S] of the same dtype, at most 0, with a zero diagonal.
    """
    return _ops.distance_scores(gram)


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
    _ops.update_scores_(scores, counts, round_scores, clients, pairs, when)
    _changed(scores, counts)
    return scores


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
    return _ops.select_friends(scores, counts, active, candidates, threshold)


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
    _ops.eliminate_(candidates, scores, counts, threshold, when)
    _changed(candidates)
    return candidates


# --- one-pass updates of [d] and of what is remembered ----------------------------------------


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
        weights: float32 or float64 [S]; rounded to float32 before they are multiplied.
        beta: factor of the old content.
        when: bool [], where ``out`` is; if False, nothing changes. On a GPU it may be the result of
            earlier work, for which nobody waits.

    Returns:
        ``out``. Rows are added in their order, in float32 in groups of 8 and in float64 across
        groups.
    """
    _ops.weighted_sum_(out, _row_list(rows, "rows"), weights, beta, when)
    _changed(out)
    return out


def gram_and_sum_(
    out: Tensor, gram: Tensor, rows: Rows, weights: Tensor, *, precision: str = "highest"
) -> Tensor:
    """``gram = rows @ rows.T`` and ``out = weights @ rows`` in one pass over the rows, in place.

    For rules whose weights do not depend on this round's similarities: rows come from memory once
    (on a GPU still twice).
    The bits are those of :func:`gram` and of :func:`weighted_sum_` with ``beta=0``.

    Args:
        out: float32 [d]; changed. Its old content is not read.
        gram: float64 [S, S], contiguous; changed.
        rows: S rows of d float32, none of which may share memory with ``out``.
        weights: float32 or float64 [S]; rounded to float32 before they are multiplied.
        precision: of the Gram matrix, as in :func:`gram`.

    Returns:
        ``out``.
    """
    _ops.gram_and_sum_(out, gram, _row_list(rows, "rows"), weights, precision)
    _changed(out, gram)
    return out


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
    own = _row_list(corrections, "corrections")
    _ops.mimic_(params, _row_list(updates, "updates"), own, clients, lr)
    _changed(params, *own)
    return params


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
    own = _row_list(memory, "memory")
    rows = _row_list(updates, "updates")
    _ops.memory_update_(params, total, own, rows, clients, weights, lr, norm, models)
    _changed(params, total, *own)
    return params


# --- the same rounds for a server that keeps the received rows themselves as memory -------------


def mimic_mean_(
    out: Tensor,
    rounded: Tensor,
    peaks: Tensor,
    updates: Rows,
    corrections: Rows,
    clients: Tensor,
    references: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """The v of :func:`mimic_`, alone: rows are read and nothing but the outputs is written.

    ::

        c[s] = corrections[s]                  # or references[s] - corrections[s], where given
        out = mean over s of (updates[s] + c[s])

    A server that keeps ``updates[s]`` itself instead of ``v - updates[s]`` gives it back in a later
    round as the correction, with ``rounded`` of the earlier round as its reference; together with
    ``add_total_(params, out, lr, 1.0)`` that is :func:`mimic_` to the bit.

    Args:
        out: float64 [d]; changed, v.
        rounded: float32 [d]; changed, v as the corrections of this round have it.
        peaks: float32 [S]; changed, as :func:`abs_max` of ``updates``.
        updates: S >= 1 rows of d float32 or short.
        corrections: [K, d], contiguous, or S tensors [d], of the dtype of ``updates``.
        clients: int64 [S].
        references: S entries, each float32 [d] or None; None: none.

    Returns:
        ``out``. Rows are added in the order of their client ids.
    """
    rows, own = _row_list(updates, "updates"), _row_list(corrections, "corrections")
    _ops.mimic_mean_(out, rounded, peaks, rows, own, clients, list(references or []))
    _changed(out, rounded, peaks)
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
) -> Tensor:
    """The total of :func:`memory_update_`, beside the old one: rows are read and never written.

    ::

        m[s] = updates[s]                      # or params + updates[s], with params
        old[s] = memory[s]                     # or references[s] + memory[s], where given
        out = total + sum over s of weights[s] * (m[s] - old[s])

    Together with :func:`add_total_` that is :func:`memory_update_` to the bit, for a server that
    keeps ``updates[s]`` itself: as the memory of a later round, or, where models are remembered,
    with the params of this round as its reference.

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

    Returns:
        ``out``. Rows are added in the order of their client ids.
    """
    own, rows = _row_list(memory, "memory"), _row_list(updates, "updates")
    bases = list(references or [])
    _ops.memory_total_(out, peaks, total, own, rows, clients, weights, bases, params)
    _changed(out, peaks)
    return out


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
    _ops.add_total_(params, total, lr, norm, models)
    _changed(params)
    return params
