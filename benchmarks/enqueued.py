# SPDX-License-Identifier: Apache-2.0
"""A round of FDMS in ``fastagg.ops`` alone, which a GPU can be given in advance.

``FDMS.step`` waits for the GPU, since it raises where a round must not happen. Here the GPU finds
out, and calls off what would change anything (``when=``). So nobody waits, nothing but memory of
known sizes is taken, and the round can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastagg import FDMS, bits, ops
from fastagg.options import FLOAT32_LIMIT


class EnqueuedRound:
    """Rounds of the same S active clients, by the state of an aggregator.

    What ``agg.step`` does, but for ``agg.rounds`` and a report: where that would raise, nothing
    changes. (Weights are added in another order, and may differ in their last bits.)

    Args:
        agg: with similarity "cosine"; its ``scores``, ``counts`` and ``candidates`` are changed.
            Its ``server_lr`` is taken as it is now.
        params: [d] float32, on the aggregator's device; changed.
        clients: [S] int64 there, distinct and ascending.
    """

    def __init__(self, agg: FDMS, params: Tensor, clients: Tensor) -> None:
        self.agg, self.params, self.clients = agg, params, clients
        device = params.device
        self.shares = (agg.client_weights / agg.client_weights.sum()).to(device)  # [K] float64
        self.active = torch.zeros(agg.num_clients, dtype=torch.bool, device=device)
        self.active[clients] = True
        self.server_lr = agg.server_lr
        self.lr = torch.full((1,), self.server_lr, dtype=torch.float64, device=device)
        self.aggregate = torch.zeros_like(params)

    def __call__(self, rows: Tensor, threshold: float = math.inf) -> Tensor:
        """Enqueue a round; returns whether it happened, [] bool on the device.

        Args:
            rows: [S, d] float32, row s being that of ``clients[s]``.
            threshold: Theta_t, where the aggregator has ``elimination``.
        """
        agg = self.agg
        wanted = None
        if agg.candidates is not None:
            needed = bits.pick(agg.candidates, self.clients, self.clients).fill_diagonal_(False)
            wanted = needed | needed.T
        friends = ops.select_friends(agg.scores, agg.counts, self.active, agg.candidates, threshold)
        ops.weighted_sum_(self.aggregate, rows, self._weights(friends), beta=0.0)
        gram = ops.gram(rows, pairs=wanted, dtype=torch.float64, precision=agg.precision)
        fresh = ops.cosine_scores(gram)
        peaks = ops.abs_max([self.params, self.aggregate]).double()
        # False for a NaN anywhere, as comparisons with one are.
        happens = peaks[0] + self.server_lr * peaks[1] <= FLOAT32_LIMIT
        happens &= gram.diagonal().isfinite().all()
        ops.weighted_sum_(self.params, [self.aggregate], self.lr, when=happens)
        ops.update_scores_(agg.scores, agg.counts, fresh, self.clients, wanted, when=happens)
        if agg.candidates is not None:
            ops.eliminate_(agg.candidates, agg.scores, agg.counts, threshold, when=happens)
        return happens

    def _weights(self, friends: Tensor) -> Tensor:
        """[S] float64: each client's share on its friend's row, orphans' on all rows evenly."""
        zero = self.shares.new_zeros(())
        stands_in = self.clients[:, None] == friends  # [S, K]
        orphans = torch.where(friends < 0, self.shares, zero).sum() / len(self.clients)
        return torch.where(stands_in, self.shares, zero).sum(dim=1) + orphans
