# SPDX-License-Identifier: Apache-2.0
"""Steps of the robust rules compared with careful eager torch, ByzFL and Flower.

fastagg reads the rows twice, for their Gram matrix and for the aggregate, and needs no temporary of
size S x d. The careful implementations use preallocated scratch memory and compute all distances
from one product of the rows. They have the geometric median in two forms, of which the faster one
depends on S: from the rows, with two passes over them in every iteration; and from their Gram
matrix, as fastagg, with all iterations on S factors and one weighted sum of the rows at the end. In
the second form the rows that nearest-neighbour mixing makes, W X, need no memory: their Gram matrix
is W G W^T. The frameworks follow the definitions literally.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

import fastagg
from benchmarks import peers, products
from benchmarks.harness import Comparison, Contender
from benchmarks.operands import normal, zeros

_ITERATIONS = 8  # of Weiszfeld's algorithm; fastagg's default
_NU = 1e-6
_PEER_BYTES = 2 << 30
"""A contender is left out if it needs a temporary larger than this."""


class Round:
    """The rows of S clients, all active; a tenth of them may be Byzantine."""

    def __init__(self, S: int, d: int) -> None:
        self.S, self.d, self.f = S, d, max(1, S // 10)
        self.rows = normal(S, d).add_(torch.randn(d)).mul_(1e-3)
        self.params = torch.zeros(d)
        self.gram = torch.empty(S, S)
        self.shares = torch.full((S,), 1 / S)

    def step(self, rule_name: str, **options: Any) -> Contender:
        rule = fastagg.RuleName(rule_name)
        agg = fastagg.make(rule, num_clients=self.S, num_params=self.d, **options)
        clients, params = torch.arange(self.S), torch.zeros(self.d)

        def call() -> Tensor:
            agg.step(params, self.rows, clients)
            return params

        return Contender("fastagg", call, "ours")

    def square_distances(self, rows: Tensor, product: products.Product = products.by_mm) -> Tensor:
        product(rows, self.gram)
        squares = self.gram.diagonal()
        return squares[:, None] + squares - 2 * self.gram

    def apply(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Add a linear combination of the rows to the parameters."""
        return torch.addmv(self.params, rows.T, weights, out=self.params)

    def apply_by_numpy(self, weights: Tensor, rows: Tensor, z: Tensor) -> Tensor:
        """Compute what `apply` does with numpy's sum of rows. ``z`` [d] is scratch memory."""
        return self.params.add_(products.by_numpy(rows, weights, z.numpy()))

    def median(self, rows: Tensor, z: Tensor) -> Tensor:
        """Return the factors of the rows in their geometric median. ``z`` [d] is scratch memory."""
        squares = self.gram.diagonal()
        weights = self.shares
        for _ in range(_ITERATIONS):
            torch.mv(rows.T, weights, out=z)
            squared = (squares - 2 * (rows @ z) + z @ z).clamp_min_(0)
            weights = 1 / squared.sqrt_().clamp_min_(_NU)
            weights = weights / weights.sum()
        return weights

    def median_by_gram(self, gram: Tensor) -> Tensor:
        """Compute what `median` does from the Gram matrix of the rows alone."""
        squares = gram.diagonal()
        weights = self.shares
        for _ in range(_ITERATIONS):
            with_mean = gram @ weights
            squared = squares - 2 * with_mean + weights @ with_mean
            weights = 1 / squared.clamp_min_(0).sqrt_().clamp_min_(_NU)
            weights = weights / weights.sum()
        return weights

    def comparison(self, rule: str, contenders: list[Contender]) -> Comparison:
        return Comparison(f"step {rule}", self.S, self.d, contenders, (self.rows,), self.S)


def geometric_median(S: int, d: int) -> Comparison:
    """ByzFL starts from zero instead of the mean; by default it makes three iterations."""
    r = Round(S, d)
    z, ones = torch.empty(d), torch.empty(S)

    def careful() -> Tensor:
        torch.linalg.vector_norm(r.rows, dim=1, out=ones)
        r.gram.diagonal().copy_(ones.square())
        return r.apply(r.median(r.rows, z), r.rows)

    def by_gram() -> Tensor:
        return r.apply(r.median_by_gram(products.by_mm(r.rows, r.gram)), r.rows)

    def by_syrk() -> Tensor:
        weights = r.median_by_gram(products.by_syrk(r.rows, r.gram))
        return r.apply_by_numpy(weights, r.rows, z)

    contenders = [
        r.step("geometric-median", iterations=_ITERATIONS, nu=_NU),
        Contender("careful eager, two passes each", careful),
        Contender("careful eager, Gram, X @ X.T", by_gram),
        Contender("careful eager, Gram, ssyrk", by_syrk),
    ]
    if module := peers.byzfl_aggregators():
        for iterations, repeats in ((_ITERATIONS, None), (3, 3)):
            rule = module.GeometricMedian(nu=_NU, T=iterations)
            name = f"ByzFL GeometricMedian, T = {iterations}"
            call = functools.partial(rule, r.rows)
            contenders.append(Contender(name, call, "peer", None, repeats))
    return r.comparison("geometric-median", contenders)


def multi_krum(S: int, d: int) -> Comparison:
    """ByzFL's score uses one neighbour more than the paper, so it is called with f + 1."""
    r = Round(S, d)
    keep, neighbours = S - r.f - 1, S - r.f - 2

    def careful(product: products.Product) -> Tensor:
        distances = r.square_distances(r.rows, product).fill_diagonal_(math.inf)
        scores = distances.topk(neighbours, largest=False).values.sum(dim=1)
        weights = torch.zeros(S).index_fill_(0, scores.topk(keep, largest=False).indices, 1 / keep)
        return r.apply(weights, r.rows)

    contenders = [
        r.step("multi-krum", num_byzantine=r.f, keep=keep),
        Contender("careful eager, X @ X.T", lambda: careful(products.by_mm)),
        Contender("careful eager, ssyrk", lambda: careful(products.by_syrk)),
    ]
    if module := peers.byzfl_aggregators():
        rule = module.MultiKrum(r.f + 1)
        contenders.append(Contender("ByzFL MultiKrum", lambda: rule(r.rows), "peer"))
    if krum := peers.flower_krum():
        results = peers.one_layer_results(r.rows)
        contenders.append(
            Contender(
                "Flower MultiKrum",
                lambda: peers.as_tensor(krum(results, r.f, keep)),
                "peer",
                repeats=2,
            )
        )
    return r.comparison("multi-krum", contenders)


def nnm(S: int, d: int) -> Comparison:
    """Nearest-neighbour mixing, then the geometric median. ByzFL gathers S (S - f) d values."""
    r = Round(S, d)
    mixed, z, near = zeros(S, d), torch.empty(d), S - r.f

    def mixing(product: products.Product) -> Tensor:
        """Compute the Gram matrix of the rows, too."""
        nearest = r.square_distances(r.rows, product).topk(near, largest=False).indices
        return torch.zeros(S, S).scatter_(1, nearest, 1 / near)

    def factors(product: products.Product) -> Tensor:
        weights = mixing(product)
        return weights.T @ r.median_by_gram(weights @ r.gram @ weights.T)

    def careful() -> Tensor:
        torch.mm(mixing(products.by_mm), r.rows, out=mixed)
        r.gram.diagonal().copy_(torch.linalg.vector_norm(mixed, dim=1).square_())
        return r.apply(r.median(mixed, z), mixed)

    def by_gram() -> Tensor:
        return r.apply(factors(products.by_mm), r.rows)

    def by_syrk() -> Tensor:
        return r.apply_by_numpy(factors(products.by_syrk), r.rows, z)

    options = {"iterations": _ITERATIONS, "nu": _NU}
    contenders = [
        r.step("nnm", num_byzantine=r.f, rule="geometric-median", rule_options=options),
        Contender("careful eager, W @ X", careful),
        Contender("careful eager, Gram, X @ X.T", by_gram),
        Contender("careful eager, Gram, ssyrk", by_syrk),
    ]
    if (module := peers.byzfl_aggregators()) and 4 * S * near * d <= _PEER_BYTES:
        mix, median = module.NNM(r.f), module.GeometricMedian(nu=_NU, T=_ITERATIONS)
        contenders.append(Contender("ByzFL NNM", lambda: median(mix(r.rows)), "peer", repeats=3))
    return r.comparison("nnm", contenders)
