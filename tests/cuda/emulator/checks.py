# SPDX-License-Identifier: Apache-2.0
"""Run by test_emulated.py in a process of its own, where ``fastagg`` is the emulated one."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from fastagg import ops, reference, selfcheck

F64 = torch.float64


def gram(rows: Tensor, pairs: Tensor | None = None) -> Tensor:
    return ops.gram(rows, pairs=pairs, dtype=F64)


def every_op() -> None:
    for K, S, d in ((9, 5, 1_003), (60, 50, 530), (150, 135, 301)):
        for check in selfcheck.run(K, S, d):
            bound = 1e-5 if check.op.startswith("gram") else check.bound  # see selfcheck
            assert check.error <= bound, check


def entries_depend_on_their_rows_alone() -> None:
    rows = torch.randn(140, 530)
    full = gram(rows)
    assert torch.equal(full, full.T)
    order = torch.randperm(140)
    for count in (1, 16, 17, 40, 64, 65, 140):  # either kernel, any part of a tile
        some = order[:count]
        assert torch.equal(gram(rows[some]), full[some][:, some])
    group = torch.arange(140) // 50
    pairs = group[:, None] == group
    assert torch.equal(gram(rows, pairs), torch.where(pairs, full, 0.0))


def any_alignment() -> None:
    rows = torch.randn(20, 531)
    for offset in (1, 2, 4):
        shifted = torch.zeros(20 * 536 + offset)[offset:].view(20, 536)[:, :531]
        shifted.copy_(rows)
        assert torch.equal(gram(shifted), gram(rows))
        assert torch.equal(ops.abs_max(shifted), ops.abs_max(rows))


def rows_out_of_range() -> None:
    for count in (4, 70):
        scale = torch.tensor([1e-30, 1.0, 1e25, 0.0])[torch.arange(count) % 4]
        rows = torch.randn(count, 530) * scale[:, None]
        x = rows.double().abs()
        error = (gram(rows) - reference.gram(rows, dtype=F64)).abs()
        assert (error <= 1.05e-5 * (x @ x.T)).all()  # see test_gram.py
        rows[2, 77] = torch.nan
        assert gram(rows).diagonal().isfinite().tolist() == [s != 2 for s in range(count)]


def rounds_in_two_halves() -> None:
    for S, d in ((1, 1), (9, 70), (40, 999), (700, 37)):  # 700: more than a thread holds
        updates, memory = torch.randn(S, d), torch.randn(S, d)
        params, clients = torch.randn(d), torch.randperm(S)
        one, own = params.clone(), list(memory.clone())
        ops.mimic_(one, updates, own, clients, 0.7)
        out, rounded, peaks = torch.empty(d, dtype=F64), torch.empty(d), torch.empty(S)
        ops.mimic_mean_(out, rounded, peaks, updates, list(memory), clients)
        two = ops.add_total_(params.clone(), out, 0.7, 1.0)
        assert torch.equal(one, two) and torch.equal(peaks, ops.abs_max(updates))
        assert torch.equal(torch.stack(own), rounded - updates)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
