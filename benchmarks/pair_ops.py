# SPDX-License-Identifier: Apache-2.0
"""Contenders for the ops on pairs of clients (scores, candidates, friends), at large K.

fastagg uses int16 counts and packed bits. Eager torch has no packed bits, so its contenders use
bool. They work on blocks of rows, so that their scratch memory fits into a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.harness import Comparison, Contender
from benchmarks.options import Make
from fastagg import ops
from fastagg.ops import bits

_ROWS = 64  # rows per block; 64 rows of K = 10,000 scores are 2.5 MB
_THRESHOLD = 0.5


class Pairs:
    """The state of K clients: every other client is active, and 90 % of the pairs have scores."""

    def __init__(self, K: int) -> None:
        self.K = K
        self.scores = torch.rand(K, K)
        self.counts = (torch.rand(K, K) < 0.9).to(torch.int16)
        self.counts.fill_diagonal_(0)
        self.flags = torch.ones(K, K, dtype=torch.bool)
        self.bits = bits.pack(self.flags)
        self.clients, self.absent = torch.arange(0, K, 2), torch.arange(1, K, 2)
        self.active = torch.zeros(K, dtype=torch.bool).index_fill_(0, self.clients, True)

    def blocks(self) -> Iterator[slice]:
        for begin in range(0, self.K, _ROWS):
            yield slice(begin, begin + _ROWS)

    def comparison(self, op: str, contenders: list[Contender]) -> Comparison:
        return Comparison(op, self.K // 2, self.K, contenders, (self.scores,), self.K)


def select_friends(S: int, K: int) -> Comparison:
    p = Pairs(K)
    friends = torch.arange(K)

    def eager() -> Tensor:
        for ids in p.absent.split(_ROWS):
            usable = (p.counts[ids] > 0).logical_and_(p.flags[ids]).logical_and_(p.active)
            scores = p.scores[ids].masked_fill_(usable.logical_not_(), -math.inf)
            best = scores.max(dim=1)
            friends[ids] = best.indices.masked_fill_(best.values == -math.inf, -1)
        return friends

    def ours() -> Tensor:
        return ops.select_friends(p.scores, p.counts, p.active, p.bits)

    contenders = [Contender("fastagg", ours, "ours"), Contender("careful eager, blocks", eager)]
    return p.comparison("select_friends", contenders)


def eliminate(S: int, K: int) -> Comparison:
    """Candidates are eliminated in the first call; later calls process the same number of pairs."""
    p = Pairs(K)

    def eager() -> Tensor:
        for rows in p.blocks():
            known = (p.counts[rows] > 0).logical_and_(p.flags[rows])
            scores = torch.where(known, p.scores[rows], -math.inf)
            best = scores.max(dim=1, keepdim=True)
            far = (best.values - scores >= _THRESHOLD).logical_and_(known)
            far.scatter_(1, best.indices, False)
            p.flags[rows].logical_and_(far.logical_not_())
        return p.flags

    def ours() -> Tensor:
        return ops.eliminate_(p.bits, p.scores, p.counts, _THRESHOLD)

    contenders = [Contender("fastagg", ours, "ours"), Contender("careful eager, blocks", eager)]
    return p.comparison("eliminate_", contenders)


def update_scores(S: int, K: int) -> Comparison:
    """Eager torch also updates the diagonal, with values that do not change it."""
    p = Pairs(K)
    fresh = torch.rand(K // 2, K // 2, dtype=torch.float64)
    own = p.scores[p.clients, p.clients].double()
    fresh.diagonal().copy_(own)

    def eager() -> Tensor:
        for ids, new in zip(p.clients.split(_ROWS), fresh.split(_ROWS), strict=True):
            pairs = (ids[:, None], p.clients)
            counts = p.counts[pairs].add_(1)
            scores = p.scores[pairs]
            p.counts[pairs] = counts
            p.scores[pairs] = scores.add_((new.float() - scores).div_(counts))
        return p.scores

    def ours() -> Tensor:
        return ops.update_scores_(p.scores, p.counts, fresh, p.clients)

    contenders = [Contender("fastagg", ours, "ours"), Contender("careful eager, blocks", eager)]
    return p.comparison("update_scores_", contenders)


MAKERS: dict[str, Make] = {
    "select_friends": select_friends,
    "eliminate_": eliminate,
    "update_scores_": update_scores,
}
