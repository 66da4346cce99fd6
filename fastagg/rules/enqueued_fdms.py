# SPDX-License-Identifier: Apache-2.0
"""Rounds of FDMS that a GPU is given in advance.

``FDMS.step`` waits for the GPU, since it raises where a round must not happen and reports what it
did. Here the GPU finds out, and calls off what would change anything (``when=`` of the ops). So
nobody waits, nothing but memory of known sizes is taken, and a round can be captured in a CUDA
graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg import ops
from fastagg.ops import Rows, bits
from fastagg.options import FLOAT32_LIMIT
from fastagg.rules.fdms import FDMS
from fastagg.updates.columns import Columns


class EnqueuedFDMS:
    """Rounds of an FDMS aggregator that wait for nobody, on its state and some parameters.

    A round is what ``aggregator.step`` does, but for the report: where that would raise or leave
    a row out (NaN, Inf, a norm above ``max_norm``, a step out of the range of float32), the whole
    round is called off, and nothing changes. Each client's weight is added in another order,
    so parameters may differ from those of ``step`` in their last bits.

    In a CUDA graph, a captured round is repeated with what ``rows`` and ``clients`` then hold, for
    the same server learning rate and threshold.

    Args:
        aggregator: with similarity "cosine"; its ``scores``, ``counts`` and ``candidates`` are
            changed in place, and its ``rounds`` by :meth:`settle`.
        params: [d] float32, contiguous, on the aggregator's device; changed in place.

    Raises:
        TypeError, ValueError: one of them is not as described.
    """

    def __init__(self, aggregator: FDMS, params: Tensor) -> None:
        if type(aggregator) is not FDMS:
            raise TypeError(f"aggregator: expected FDMS, got {type(aggregator).__name__}")
        if aggregator.similarity != "cosine":
            raise ValueError(
                f'aggregator: expected similarity "cosine", got {aggregator.similarity!r}'
            )
        if type(aggregator.columns) is not Columns:
            raise ValueError("aggregator: expected all columns in this process, got a shard")
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
        self._happened = torch.zeros((), dtype=torch.int64, device=params.device)
        self._enqueued = 0  # since the last time that somebody waited

    @torch.no_grad()
    def enqueue(self, rows: Rows, clients: Tensor, threshold: float | None = None) -> Tensor:
        """Enqueue a round.

        Args:
            rows: S rows of d float32 on the device, row s being that of ``clients[s]``.
            clients: [S] int64 on the device, distinct and ascending ids in [0, K). What they hold
                cannot be checked without waiting.
            threshold: Theta_t of an aggregator with ``elimination``; None: its own, of a round
                that counts those enqueued so far.

        Returns:
            Whether the round happens: [] bool on the device. To read it is to wait.

        Raises:
            TypeError, ValueError: shapes, dtypes or devices do not fit. Nothing has changed.
        """
        agg = self.aggregator
        if clients.dtype != torch.int64 or clients.ndim != 1:
            raise TypeError(
                f"clients: expected int64 [S], got {clients.dtype} {list(clients.shape)}"
            )
        if clients.device != self.params.device or len(clients) != len(rows) or not len(rows):
            raise ValueError(
                f"clients: expected one id on {self.params.device} for each of {len(rows)} rows, "
                f"at least one, got {len(clients)} on {clients.device}"
            )
        if threshold is None:
            threshold = agg.threshold(int(agg.rounds) + self._enqueued + 1)
        if agg.server_lr != self._server_lr:
            self._server_lr = agg.server_lr
            self._rate.fill_(self._server_lr)
        active = self._active.zero_().index_fill_(0, clients, True)
        wanted = None
        if agg.candidates is not None:
            needed = bits.pick(agg.candidates, clients, clients).fill_diagonal_(False)
            wanted = needed | needed.T
        friends = ops.select_friends(agg.scores, agg.counts, active, agg.candidates, threshold)
        weights = self._weights(friends, clients)
        agg.columns.weighted_sum_(self._aggregate, rows, weights, beta=0.0)
        gram = agg.columns.gram(rows, pairs=wanted, precision=agg.precision)
        fresh = ops.cosine_scores(gram)
        peaks = ops.abs_max([self.params, self._aggregate]).double()
        # False for a NaN anywhere, as comparisons with one are.
        happens = peaks[0] + self._server_lr * peaks[1] <= FLOAT32_LIMIT
        squares = gram.diagonal()
        happens &= squares.isfinite().all()
        if agg.max_norm is not None:
            happens &= (squares.sqrt() <= agg.max_norm).all()
        ops.weighted_sum_(self.params, [self._aggregate], self._rate, when=happens)
        ops.update_scores_(agg.scores, agg.counts, fresh, clients, wanted, when=happens)
        if agg.candidates is not None:
            ops.eliminate_(agg.candidates, agg.scores, agg.counts, threshold, when=happens)
        self._happened += happens
        self._enqueued += 1
        return happens

    def settle(self) -> int:
        """Wait for the rounds enqueued so far, and add those that happened to
        ``aggregator.rounds``, as a checkpoint wants it.

        Returns:
            How many have happened since the last call, replays of a graph included.
        """
        happened = int(self._happened)
        self._happened.zero_()
        self._enqueued = 0
        self.aggregator.rounds += happened
        return happened

    def _weights(self, friends: Tensor, clients: Tensor) -> Tensor:
        """[S] float64: each client's share on its friend's row, orphans' on all rows evenly."""
        zero = self._shares.new_zeros(())
        stands_in = clients[:, None] == friends  # [S, K]
        orphans = torch.where(friends < 0, self._shares, zero).sum() / len(clients)
        return torch.where(stands_in, self._shares, zero).sum(dim=1) + orphans
