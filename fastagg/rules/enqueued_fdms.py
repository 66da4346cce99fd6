# SPDX-License-Identifier: Apache-2.0
"""FDMS rounds on a GPU without waiting for the GPU.

``FDMS.step`` waits for the GPU because it returns a report, and because it raises an exception if
an update must be refused. Here the GPU itself decides whether the round takes effect: the ops that
change state take that decision as ``when=``. So the CPU never waits, every allocation has a size
that the CPU knows, and a round can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastagg import ops
from fastagg.norm_bound import AdaptiveNorm
from fastagg.ops import Rows, bits
from fastagg.options import FLOAT32_LIMIT
from fastagg.rules._share_cap import even_parts, round_cap
from fastagg.rules.fdms import FDMS
from fastagg.signals import SignalsDeferred
from fastagg.updates.columns import Columns
from fastagg.updates.small import either_way


class EnqueuedFDMS:
    """Enqueue rounds of an FDMS aggregator on a GPU without waiting for the GPU.

    Experimental (docs/cuda.md).

    A round does what ``aggregator.step`` does, with two differences. It returns no report. And if
    ``step`` would raise or reject a row (NaN, Inf, a norm above ``max_norm``, parameters out of the
    range of float32), the whole round is cancelled: parameters and state do not change. Client
    shares are added in another order, so parameters may differ from those of ``step`` in their last
    bits.

    The GPU checks the ids, too. A round with an id outside [0, K), or with an id twice, is
    cancelled, and the next :meth:`settle` raises the error that ``step`` would have raised.

    With ``max_share``, the GPU makes S passes over the scores of absent clients, because the CPU
    does not know after how many passes every share is taken. They need scratch of S x K numbers.

    A CUDA graph that captured a round uses the values that ``rows`` and ``clients`` hold at each
    replay. Server learning rate and threshold are those of the capture.

    Args:
        aggregator: an FDMS rule with similarity "cosine" and no sketch. A round changes its
            ``scores``, ``counts`` and ``candidates`` in place; :meth:`settle` changes its
            ``rounds``.
        params: [d] float32, contiguous, on the aggregator's device; changed in place.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    def __init__(self, aggregator: FDMS, params: Tensor) -> None:
        if type(aggregator) is not FDMS:
            raise TypeError(f"aggregator: expected FDMS, got {type(aggregator).__name__}")
        if aggregator.similarity != "cosine":
            raise ValueError(
                f'aggregator: expected similarity "cosine", got {aggregator.similarity!r}'
            )
        if aggregator.sketch is not None:
            raise ValueError(
                "aggregator: expected sketch=None, because a CUDA graph would replay one seed, got "
                f"sketch={aggregator.sketch}"
            )
        if type(aggregator.columns) is not Columns:
            raise ValueError("aggregator: expected all columns in this process, got a shard")
        _check_changeable(aggregator)
        device = aggregator.device
        expected = (torch.float32, (aggregator.num_params,), device.type)
        got = (params.dtype, tuple(params.shape), params.device.type)
        if got != expected or not params.is_contiguous():
            raise ValueError(
                f"params: expected a contiguous float32 tensor [{aggregator.num_params}] on "
                f"{device}, got {got[0]} {list(got[1])} on {params.device}"
            )
        self.aggregator, self.params = aggregator, params
        weights = aggregator.client_weights
        self._shares = (weights / weights.sum()).to(params.device)  # [K] float64
        self._active = torch.zeros(aggregator.num_clients, dtype=torch.bool, device=params.device)
        self._aggregate = torch.zeros_like(params)
        self._server_lr = aggregator.server_lr
        self._rate = torch.full((1,), self._server_lr, dtype=torch.float64, device=params.device)
        # Since the last call of settle: rounds that happened, ids that came twice in a round, and
        # the lowest and highest ids (or 0).
        self._seen = torch.zeros(4, dtype=torch.int64, device=params.device)
        self._happened, self._repeats, self._lowest, self._highest = self._seen.unbind()
        self._allowed = torch.arange(aggregator.num_clients, device=params.device)
        self._enqueued = 0  # rounds since the last call of settle

    @torch.no_grad()
    def enqueue(self, rows: Rows, clients: Tensor, threshold: float | None = None) -> Tensor:
        """Enqueue a round.

        Args:
            rows: [S, d] float32, or S tensors [d], on the device; row s is that of ``clients[s]``.
            clients: [S] int64 on the device: distinct ids in [0, K), ascending. The CPU does not
                see the values: wrong ids are an error of :meth:`settle`.
            threshold: Theta_t, for an aggregator with ``elimination``; None: the aggregator's own,
                for t = 1 + its rounds + the rounds enqueued since :meth:`settle`.

        Returns:
            [] bool on the device, whether the round takes effect. Reading it waits for the GPU.

        Raises:
            TypeError, ValueError: a shape, dtype or device is wrong, or an option of the aggregator
                was set to a value with which no EnqueuedFDMS can be made. Nothing has changed.
        """
        agg = self.aggregator
        if agg.num_clients != len(self._active):
            raise ValueError(
                f"aggregator: expected {len(self._active)} clients as before, got "
                f"{agg.num_clients}; make another EnqueuedFDMS after it has grown"
            )
        _check_changeable(agg)
        if clients.dtype != torch.int64 or clients.ndim != 1:
            raise TypeError(
                f"clients: expected int64 [S], got {clients.dtype} {list(clients.shape)}"
            )
        if clients.device != self.params.device or len(clients) != len(rows) or not len(rows):
            raise ValueError(
                f"clients: expected one id on {self.params.device} for each of {len(rows)} rows, "
                f"at least one, got {len(clients)} on {clients.device}"
            )
        if len(clients) > agg.num_clients:
            raise ValueError(
                f"clients: expected at most {agg.num_clients} distinct ids, got {len(clients)}"
            )
        if threshold is None:
            threshold = agg.threshold(int(agg.rounds) + self._enqueued + 1)
        if agg.server_lr != self._server_lr:
            self._server_lr = agg.server_lr
            self._rate.fill_(self._server_lr)
        ordered = clients.sort().values
        low, high, repeats = ordered[0], ordered[-1], (ordered[1:] == ordered[:-1]).sum()
        right = (low >= 0) & (high < agg.num_clients) & (repeats == 0)
        # No op may get wrong ids, not even in a cancelled round: torch's would stop the process.
        clients = torch.where(right, clients, self._allowed[: len(clients)])
        active = self._active.zero_().index_fill_(0, clients, True)
        wanted = None
        if agg.candidates is not None:
            needed = bits.pick(agg.candidates, clients, clients).fill_diagonal_(False)
            wanted = either_way(needed)
        if agg.max_share is None:
            friends = ops.select_friends(agg.scores, agg.counts, active, agg.candidates)
            weights = self._weights(friends, clients)
        else:
            weights = self._capped(active, clients, round_cap(agg.max_share, len(clients)))
        agg.columns.weighted_sum_(self._aggregate, rows, weights, beta=0.0)
        gram = agg.columns.gram(rows, pairs=wanted, precision=agg.precision)
        fresh = ops.cosine_scores(gram)
        peaks = ops.abs_max([self.params, self._aggregate]).double()
        # False if any value is NaN: comparisons with NaN are false.
        happens = right & (peaks[0] + self._server_lr * peaks[1] <= FLOAT32_LIMIT)
        squares = gram.diagonal()
        happens &= squares.isfinite().all()
        largest = agg._largest_row()
        if isinstance(agg.max_norm, float):
            largest = min(largest, agg.max_norm)
        if math.isfinite(largest):
            happens &= (squares.sqrt() <= largest).all()
        with SignalsDeferred():
            ops.weighted_sum_(self.params, [self._aggregate], self._rate, when=happens)
            ops.update_scores_(agg.scores, agg.counts, fresh, clients, wanted, when=happens)
            if agg.candidates is not None:
                ops.eliminate_(agg.candidates, agg.scores, agg.counts, threshold, when=happens)
            self._happened += happens
            self._repeats += repeats
            torch.minimum(self._lowest, low, out=self._lowest)
            torch.maximum(self._highest, high, out=self._highest)
            self._enqueued += 1
        return happens

    def settle(self) -> int:
        """Wait for the enqueued rounds, and update ``aggregator.rounds``; call it before a save.

        Returns:
            Number of rounds that took effect since the last call, replays of a graph included.

        Raises:
            IndexError, ValueError: rounds had ids outside [0, K), or an id twice. They have been
                cancelled. This is said once: the next call counts the other rounds.
        """
        happened, repeats, lowest, highest = self._seen.tolist()
        K = self.aggregator.num_clients
        if lowest < 0 or highest >= K or repeats:
            with SignalsDeferred():
                self._seen[1:].zero_()
            if lowest < 0 or highest >= K:
                raise IndexError(
                    f"clients: expected ids in [0, {K}), got {lowest if lowest < 0 else highest} "
                    "in an enqueued round, which was cancelled"
                )
            raise ValueError(
                "clients: expected distinct ids, got an id twice in an enqueued round, which was "
                "cancelled"
            )
        with SignalsDeferred():
            self._seen.zero_()
            self._enqueued = 0
            self.aggregator.rounds += happened
        return happened

    def _weights(self, friends: Tensor, clients: Tensor) -> Tensor:
        """Return factors [S] float64; shares of clients without a friend go to all rows evenly."""
        zero = self._shares.new_zeros(())
        substitutes = clients[:, None] == friends  # [S, K]
        orphans = torch.where(friends < 0, self._shares, zero).sum() / len(clients)
        return torch.where(substitutes, self._shares, zero).sum(dim=1) + orphans

    def _capped(self, active: Tensor, clients: Tensor, cap: float) -> Tensor:
        """Return factors [S] of at most ``cap``: :func:`.._share_cap.divide`, without waiting."""
        agg, own = self.aggregator, self._shares.index_select(0, clients)
        weights, room = own.clone(), (cap - own).clamp(min=0.0)
        rest = torch.where(active, self._shares.new_zeros(()), self._shares)  # [K]
        open_rows = torch.zeros_like(active)
        for _ in range(len(clients)):  # a pass that leaves a proposal fills a row
            open_rows.index_copy_(0, clients, room > 0.0)
            friends = ops.select_friends(agg.scores, agg.counts, open_rows, agg.candidates)
            best = agg.scores.gather(1, friends.clamp(min=0)[:, None])[:, 0]
            order = best.sort(descending=True, stable=True).indices  # on ties the lowest id first
            asked = torch.where(clients[:, None] == friends[order], rest[order], 0.0)  # [S, K]
            before = asked.cumsum(dim=1) - asked
            taken = torch.minimum(asked, (room[:, None] - before).clamp(min=0.0))
            weights += taken.sum(dim=1)
            whole = asked.sum(dim=1)
            room = torch.where(whole < room, room - whole, 0.0)
            rest = rest.index_add(0, order, taken.sum(dim=0), alpha=-1.0)
        return weights + even_parts(room, rest.clamp(min=0.0).sum())


def _check_changeable(aggregator: FDMS) -> None:
    """Check the options that may change between rounds.

    Raises:
        ValueError: one of them needs something that the CPU does not know.
    """
    if isinstance(aggregator.max_norm, AdaptiveNorm):
        raise ValueError(
            "aggregator: expected a number or None as max_norm, because an adaptive one needs "
            "norms that the CPU does not know"
        )
    if aggregator.server_optimizer.name != "sgd" or aggregator.min_active > 1:
        raise ValueError(
            "aggregator: expected server_optimizer='sgd' and min_active=1, because only the "
            "GPU knows whether an enqueued round takes effect, got "
            f"{aggregator.server_optimizer.name!r} and {aggregator.min_active}"
        )
    if aggregator.clip_norm is not None:
        raise ValueError(
            "aggregator: expected clip_norm=None, because clipping needs norms that the CPU "
            f"does not know, got {aggregator.clip_norm}"
        )
