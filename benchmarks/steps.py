# SPDX-License-Identifier: Apache-2.0
"""``steps``: whole server steps with half of K clients active, against eager torch and frameworks.

A step of fastagg also checks shapes, ids and finiteness, and changes nothing if it fails. The other
contenders only do the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import fastagg
from benchmarks import peers, products, robust
from benchmarks.harness import Comparison, Contender
from benchmarks.memory_ops import memory_update as memory_op
from benchmarks.memory_ops import mimic as mimic_op
from benchmarks.operands import normal, zeros
from benchmarks.options import Case, Options
from benchmarks.sketches import BUCKETS

SHAPES = [(20, 1_000_000), (100, 1_000_000), (500, 200_000)]  # S of K = 2 S, d
ROBUST_SHAPES = [(100, 1_000_000), (500, 200_000)]
SKETCH_SHAPES = [(100, 1_000_000), (1000, 1_000_000)]  # S of K = 2 S, d
NNM_SHAPES = [(20, 1_000_000), *ROBUST_SHAPES]  # ByzFL only runs the first; others need 36 GB


def cases(options: Options) -> list[Case]:
    """Return all comparisons of this subcommand."""
    shapes = [(S, options.width(d)) for S, d in SHAPES]
    robust_shapes = [(S, options.width(d)) for S, d in ROBUST_SHAPES]
    return [
        *(Case("step fdms", S, d, fdms) for S, d in shapes),
        *(Case("step fdms, sketch", S, options.width(d), sketched) for S, d in SKETCH_SHAPES),
        *(Case("step fedavg", S, d, fedavg) for S, d in shapes),
        *(Case("step mimic", S, d, mimic) for S, d in shapes),
        *(Case("step mimic-aged", S, d, mimic_aged) for S, d in shapes),
        *(Case("step mifa", S, d, mifa) for S, d in shapes),
        *(Case("step mifa, int8", S, d, mifa_of_int8) for S, d in shapes),
        *(Case("step stale", S, d, stale) for S, d in shapes),
        *(Case("step fedvarp", S, d, fedvarp) for S, d in shapes),
        *(Case("step geometric-median", S, d, robust.geometric_median) for S, d in robust_shapes),
        *(Case("step multi-krum", S, d, robust.multi_krum) for S, d in robust_shapes),
        *(Case("step nnm", S, options.width(d), robust.nnm) for S, d in NNM_SHAPES),
    ]


class FdmsState:
    """FL-FDMS in eager torch: the mean similarities R, the joint rounds N, and its step."""

    def __init__(self, K: int, S: int, d: int) -> None:
        self.K, self.S = K, S
        self.scores, self.counts = torch.rand(K, K), torch.randint(1, 5, (K, K), dtype=torch.int32)
        self.scores, self.counts = (t.triu(1) + t.triu(1).T for t in (self.scores, self.counts))
        self.params = torch.randn(d)
        self.gram = torch.empty(S, S)

    def give_to(self, agg: fastagg.Aggregator) -> None:
        """Copy the scores and counts to an aggregator of fastagg."""
        state = agg.state_dict()
        counts = self.counts.to(state["counts"].dtype)
        rounds = counts.max().to(torch.int64)
        agg.load_state_dict(state | {"scores": self.scores, "counts": counts, "rounds": rounds})

    def update_means(self, similarity: Tensor, clients: Tensor) -> None:
        """Update R and N of all pairs of active clients (eq. 15); similarity is [S, S]."""
        pairs = (clients[:, None], clients)
        counts = self.counts[pairs] + 1
        scores = self.scores[pairs]
        scores += (similarity - scores) / counts
        self.counts.index_put_(pairs, counts)
        self.scores.index_put_(pairs, scores)

    def absent(self, clients: Tensor) -> Tensor:
        present = torch.zeros(self.K, dtype=torch.bool)
        present[clients] = True
        return (~present).nonzero().squeeze(1)

    def careful_step(
        self, updates: Tensor, clients: Tensor, product: products.Product = products.by_mm
    ) -> Tensor:
        """Run a step on the active rows: one weight per row, then one pass over the rows.

        Assumes that every absent client has a friend.
        """
        product(updates, self.gram)
        norms = self.gram.diagonal().sqrt()
        similarity = self.gram.div_(torch.outer(norms, norms)).add_(1).mul_(0.5)
        known = self.absent(clients)[:, None], clients
        seen = self.counts[known] > 0
        friends = self.scores[known].masked_fill_(~seen, -1.0).argmax(dim=1)
        weights = torch.full((self.S,), 1 / self.K)
        weights.index_add_(0, friends, torch.full((len(friends),), 1 / self.K))
        torch.addmv(self.params, updates.T, weights, out=self.params)
        self.update_means(similarity, clients)
        return self.params

    def naive_step(self, all_rows: Tensor, clients: Tensor) -> Tensor:
        """Run a step on all K rows with masks, copying every substitute.

        ``all_rows``: [K, d], the rows of all clients.
        """
        unit = all_rows / all_rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
        similarity = (unit @ unit.T + 1) / 2
        active = torch.zeros(self.K, dtype=torch.bool)
        active[clients] = True
        usable = active & (self.counts > 0)
        friends = torch.where(usable, self.scores, -1.0).argmax(dim=1)
        friends = torch.where(active, torch.arange(self.K), friends)
        self.params += all_rows[friends].mean(dim=0)
        both = torch.outer(active, active).fill_diagonal_(False)
        self.counts += both
        change = (similarity - self.scores) / self.counts.clamp_min(1)
        self.scores += torch.where(both, change, 0.0)
        return self.params


def half_of(K: int) -> Tensor:
    """Return the ids of K / 2 random clients, ascending."""
    return torch.randperm(K)[: K // 2].sort().values


def fdms(S: int, d: int) -> Comparison:
    K = 2 * S
    clients = half_of(K)
    updates = normal(S, d).add_(torch.randn(d))  # correlated, as real updates are
    updates.mul_(1e-3)  # small, so that the parameters stay in range over many steps
    all_rows = zeros(K, d)
    all_rows[clients] = updates
    separate = [zeros(1, d)[0].copy_(row) for row in updates]
    state = FdmsState(K, S, d)
    agg = fastagg.make("fdms", num_clients=K, num_params=d)
    state.give_to(agg)
    own_params = state.params.clone()
    naive = FdmsState(K, S, d)
    naive.scores, naive.counts = state.scores.clone(), state.counts.clone()
    naive.params = state.params.clone()

    def ours(rows: Tensor | list[Tensor]) -> Tensor:
        agg.step(own_params, rows, clients)
        return own_params

    contenders = [
        Contender("fastagg", lambda: ours(updates), "ours"),
        Contender("fastagg, separate rows", lambda: ours(separate), "variant"),
        Contender("careful eager", lambda: state.careful_step(updates, clients)),
        Contender(
            "careful eager, ssyrk",
            lambda: state.careful_step(updates, clients, products.by_syrk),
        ),
        Contender("naive eager", lambda: naive.naive_step(all_rows, clients), "naive", repeats=3),
    ]
    return Comparison("step fdms", S, d, contenders, (updates,), K)


def sketched(S: int, d: int) -> Comparison:
    """Similarities from sketches, against exact ones."""
    K = 2 * S
    clients = half_of(K)
    updates = normal(S, d).add_(torch.randn(d)).mul_(1e-3)
    state = FdmsState(K, S, d)
    rules = [fastagg.make("fdms", num_clients=K, num_params=d, sketch=k) for k in (BUCKETS, None)]
    for rule in rules:
        state.give_to(rule)
    params = [state.params.clone() for _ in rules]

    def step(which: int) -> Tensor:
        rules[which].step(params[which], updates, clients)
        return params[which]

    contenders = [
        Contender("fastagg", lambda: step(0), "ours"),
        Contender("fastagg, exact", lambda: step(1), "variant"),
        Contender("careful eager", lambda: state.careful_step(updates, clients), repeats=9),
    ]
    return Comparison("step fdms, sketch", S, d, contenders, (updates,), K)


def fedavg(S: int, d: int) -> Comparison:
    """The frameworks only return the mean; the other contenders add it to the parameters."""
    K = 2 * S
    clients, updates = half_of(K), normal(S, d).mul_(1e-3)
    params, eager = torch.zeros(d), torch.zeros(d)
    agg = fastagg.make("fedavg", num_clients=K, num_params=d)
    shares, scratch = torch.full((S,), 1 / S), np.empty(d, np.float32)

    def ours() -> Tensor:
        agg.step(params, updates, clients)
        return params

    contenders = [
        Contender("fastagg", ours, "ours"),
        Contender("torch.addmv", lambda: torch.addmv(eager, updates.T, shares, out=eager)),
        Contender("numpy w @ X", lambda: eager.add_(products.by_numpy(updates, shares, scratch))),
        Contender("naive eager", lambda: eager.add_(updates.mean(dim=0)), "naive"),
    ]
    if aggregate := peers.flower_aggregate():
        results = peers.one_layer_results(updates)
        contenders.append(
            Contender("Flower aggregate", lambda: peers.as_tensor(aggregate(results)), "peer")
        )
    if module := peers.byzfl_aggregators():
        average = module.Average()
        contenders.append(Contender("ByzFL Average", lambda: average(updates), "peer"))
    return Comparison("step fedavg", S, d, contenders, (updates,), K)


def mimic(S: int, d: int) -> Comparison:
    return _with_step("mimic", mimic_op(S, d))


def mifa(S: int, d: int) -> Comparison:
    return _with_step("mifa", memory_op(S, d))


def mifa_of_int8(S: int, d: int) -> Comparison:
    """Rows of int8 against rows of the other dtypes; those of the eager contenders are float32."""
    op, K = memory_op(S, d), 2 * S
    params, updates, clients = torch.zeros(d), op.operands[-1], torch.arange(0, K, 2)

    def step(dtype: str) -> Callable[[], Tensor]:
        agg = fastagg.make("mifa", num_clients=K, num_params=d, server_lr=1e-3, memory_dtype=dtype)

        def call() -> Tensor:
            agg.step(params, updates, clients)
            return params

        return call

    contenders = [
        Contender("fastagg", step("int8"), "ours"),
        Contender("fastagg, bfloat16", step("bfloat16"), "variant"),
        Contender("fastagg, float32", step("float32"), "variant"),
        *(c for c in op.contenders if c.role != "ours"),
    ]
    return Comparison("step mifa, int8", S, d, contenders, (zeros(S, d), *op.operands), K)


def mimic_aged(S: int, d: int) -> Comparison:
    return _with_step("mimic-aged", mimic_op(S, d))


def stale(S: int, d: int) -> Comparison:
    return _with_step("stale", memory_op(S, d))


def fedvarp(S: int, d: int) -> Comparison:
    """The eager contenders are those of mifa: they save the pass over d that fedvarp needs more."""
    return _with_step("fedvarp", memory_op(S, d))


def _with_step(rule: str, op: Comparison) -> Comparison:
    """Compare the eager contenders of an op with the whole step of the rule that uses the op.

    The eager contenders change the memory in place. A step writes the new rows beside the old ones,
    because these must stay as they are if a value is not finite. Its ceiling writes beside, too.
    """
    S, d, K = op.S, op.d, 2 * op.S
    name = fastagg.RuleName(rule)
    agg = fastagg.make(name, num_clients=K, num_params=d, server_lr=1e-3)
    params, updates = torch.zeros(d), op.operands[-1]
    clients = torch.arange(0, K, 2)

    def ours() -> Tensor:
        agg.step(params, updates, clients)
        return params

    # In every step the rule takes ownership of the buffer's rows and gives back those that it took
    # in the step before, so every step has the same work.
    keeper = fastagg.make(name, num_clients=K, num_params=d, server_lr=1e-3)
    buffer, kept_params = fastagg.UpdateBuffer(K, d), torch.zeros(d)
    for row, update in zip(buffer.rows(clients.tolist()), updates, strict=True):
        row.copy_(update)

    def taking_ownership() -> Tensor:
        keeper.step(kept_params, buffer, clients)
        return kept_params

    others = [c for c in op.contenders if c.role != "ours"]
    contenders = [
        Contender("fastagg", ours, "ours"),
        Contender("fastagg, takes ownership", taking_ownership, "variant"),
        *others,
    ]
    return Comparison(f"step {rule}", S, d, contenders, (zeros(S, d), *op.operands), K)
