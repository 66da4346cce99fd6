# SPDX-License-Identifier: Apache-2.0
"""Contenders for the ops that update a memory of K rows: MimiC, and Stale or MIFA.

There are three careful implementations. "by rows" needs no temporary, but many passes over one
vector. "scratch" needs few passes, with a temporary of size S x d. "blocks" does the same on blocks
of columns that fit into a cache. Which is fastest depends on S and d; the fastest is the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import Comparison, Contender
from benchmarks.operands import normal, zeros
from fastagg import ops

LR = 1e-3
_BLOCK = 1 << 15  # columns: enough for torch to use all threads, few enough for a cache


class Operands:
    """The operands for K = 2 S clients, of which every other one is active."""

    def __init__(self, S: int, d: int) -> None:
        self.S = S
        self.updates, self.params = normal(S, d), torch.randn(d)
        self.memory, self.clients = normal(2 * S, d), torch.arange(0, 2 * S, 2)
        self.ids = self.clients.tolist()
        self.scratch, self.v = zeros(S, d), torch.empty(d)
        # Eager torch uses a float32 running mean of the memory, fastagg a float64 total.
        self.mean = self.memory.sum(dim=0) / S
        self.total = self.memory.sum(dim=0, dtype=torch.float64)
        self.weights = torch.ones(S)

    def blocks(self) -> list[Block]:
        """Return views of all operands, split into blocks of columns."""
        d = len(self.v)
        whole = torch.empty(self.S, min(_BLOCK, d))
        rest = torch.empty(self.S, d % _BLOCK)  # contiguous, for the last block
        found = []
        for begin in range(0, d, _BLOCK):
            at = slice(begin, min(begin + _BLOCK, d))
            scratch = whole if at.stop - begin == whole.shape[1] else rest
            found.append(
                Block(
                    self.params[at], self.updates[:, at], self.memory[:, at], self.v[at],
                    self.mean[at], scratch,
                )
            )  # fmt: skip
        return found

    @property
    def probed(self) -> tuple[Tensor, Tensor]:
        """The operands for the ceilings: as many memory rows as the op changes, and the updates."""
        return self.memory[: self.S], self.updates


@dataclass(frozen=True)
class Block:
    params: Tensor  # [n]
    updates: Tensor  # [S, n]
    memory: Tensor  # [K, n]
    v: Tensor  # [n]
    mean: Tensor  # [n]
    scratch: Tensor  # [S, n]


Result = tuple[Tensor, ...]


def _compiled(*calls: Callable[[], Result]) -> Contender:
    """Return a contender that compiles the functions separately and calls them in turn."""
    torch.compiler.reset()
    compiled = [torch.compile(call, dynamic=False) for call in calls]

    def all_of_them() -> Result:
        for call in compiled:
            result = call()
        return result

    return Contender("torch.compile", all_of_them, "compiled")


def mimic(S: int, d: int, *, with_compile: bool = False) -> Comparison:
    m = Operands(S, d)
    blocks = m.blocks()

    def ours() -> Result:
        ops.mimic_(m.params, m.updates, m.memory, m.clients, LR)
        return m.params, m.memory

    def by_rows() -> Result:
        torch.sum(m.updates, 0, out=m.v)
        for i in m.ids:
            m.v.add_(m.memory[i])
        m.v.div_(S)
        m.params.add_(m.v, alpha=LR)
        for s, i in enumerate(m.ids):
            torch.sub(m.v, m.updates[s], out=m.memory[i])
        return m.params, m.memory

    def with_scratch() -> Result:
        torch.index_select(m.memory, 0, m.clients, out=m.scratch)
        m.scratch.add_(m.updates)
        torch.mean(m.scratch, 0, out=m.v)
        m.params.add_(m.v, alpha=LR)
        torch.sub(m.v, m.updates, out=m.scratch)
        m.memory.index_copy_(0, m.clients, m.scratch)
        return m.params, m.memory

    def by_blocks() -> Result:
        for b in blocks:
            torch.index_select(b.memory, 0, m.clients, out=b.scratch)
            b.scratch.add_(b.updates)
            torch.mean(b.scratch, 0, out=b.v)
            b.params.add_(b.v, alpha=LR)
            torch.sub(b.v, b.updates, out=b.scratch)
            b.memory.index_copy_(0, m.clients, b.scratch)
        return m.params, m.memory

    def naive() -> Result:
        v = (m.updates + m.memory[m.clients]).mean(dim=0)
        m.params.add_(v, alpha=LR)
        m.memory[m.clients] = v - m.updates
        return m.params, m.memory

    contenders = [
        Contender("fastagg", ours, "ours"),
        Contender("careful eager, by rows", by_rows),
        Contender("careful eager, scratch", with_scratch),
        Contender("careful eager, blocks", by_blocks),
        Contender("naive eager", naive, "naive"),
        *([_compiled(naive)] if with_compile else []),
    ]
    return Comparison("mimic_", S, d, contenders, m.probed)


def memory_update(S: int, d: int, *, with_compile: bool = False) -> Comparison:
    """Contenders update the mean of the memory by the changed rows; ``naive`` recomputes it."""
    m = Operands(S, d)
    blocks = m.blocks()

    def ours() -> Result:
        ops.memory_update_(m.params, m.total, m.memory, m.updates, m.clients, m.weights, LR, 1 / S)
        return m.params, m.memory

    def by_rows() -> Result:
        for s, i in enumerate(m.ids):
            m.mean.add_(m.updates[s], alpha=1 / S).sub_(m.memory[i], alpha=1 / S)
            m.memory[i].copy_(m.updates[s])
        m.params.add_(m.mean, alpha=LR)
        return m.params, m.memory

    def with_scratch() -> Result:
        torch.index_select(m.memory, 0, m.clients, out=m.scratch)
        torch.sub(m.updates, m.scratch, out=m.scratch)
        torch.mean(m.scratch, 0, out=m.v)
        m.memory.index_copy_(0, m.clients, m.updates)
        m.params.add_(m.mean.add_(m.v), alpha=LR)
        return m.params, m.memory

    def by_blocks() -> Result:
        for b in blocks:
            torch.index_select(b.memory, 0, m.clients, out=b.scratch)
            torch.sub(b.updates, b.scratch, out=b.scratch)
            torch.mean(b.scratch, 0, out=b.v)
            b.memory.index_copy_(0, m.clients, b.updates)
            b.params.add_(b.mean.add_(b.v), alpha=LR)
        return m.params, m.memory

    def move_mean() -> Result:
        m.mean.add_((m.updates - m.memory[m.clients]).mean(dim=0))
        m.params.add_(m.mean, alpha=LR)
        return m.params, m.memory

    def remember() -> Result:
        m.memory[m.clients] = m.updates
        return m.params, m.memory

    def naive() -> Result:
        m.memory[m.clients] = m.updates
        m.params.add_(m.memory.sum(dim=0) / S, alpha=LR)
        return m.params, m.memory

    contenders = [
        Contender("fastagg", ours, "ours"),
        Contender("careful eager, by rows", by_rows),
        Contender("careful eager, scratch", with_scratch),
        Contender("careful eager, blocks", by_blocks),
        Contender("naive eager", naive, "naive"),
        # Compiled as one function, the whole memory would be copied, which is six times slower.
        *([_compiled(move_mean, remember)] if with_compile else []),
    ]
    return Comparison("memory_update_", S, d, contenders, m.probed)
