# SPDX-License-Identifier: Apache-2.0
"""Bucketing before a robust rule (Karimireddy, He and Jaggi 2022)."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import ReuseOptions
from fastagg.rules._wrapper_rule import WrapperRule
from fastagg.rules.gram_policy import Around, Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack


def draw_order(num_rows: int, seed: int, t: int) -> Tensor:
    """A random permutation of the rows, int64 [n], a function of its arguments alone, on every
    platform: Python promises the numbers of ``Random(str).random()``."""
    draw = random.Random(f"fastagg bucketing {seed} {t}").random
    keys = [draw() for _ in range(num_rows)]
    return torch.frombuffer(
        array("q", sorted(range(num_rows), key=keys.__getitem__)), dtype=torch.int64
    )


def draw_buckets(num_rows: int, bucket_size: int, seed: int, t: int) -> list[list[int]]:
    """A random partition of the rows into ``ceil(num_rows / bucket_size)`` buckets, pieces of
    :func:`draw_order`. Rows ascend within a bucket and buckets by their first row."""
    order = draw_order(num_rows, seed, t).tolist()
    return sorted(
        sorted(order[start : start + bucket_size]) for start in range(0, num_rows, bucket_size)
    )


class BucketMixing(Around):
    """Rows in random buckets become their weighted means, with the weights of the buckets."""

    def __init__(self, policy: Policy, bucket_size: int, seed: int) -> None:
        super().__init__(policy)
        self.uses_round = True
        self.bucket_size = bucket_size
        self.seed = seed

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        order = draw_order(len(weights), self.seed, t)
        # The previous aggregate, if there is one, stays as it is.
        means, buckets, shares, sums = ops.bucketed_gram(gram, order, weights, self.bucket_size)
        return shares * self.policy(means, sums, t)[buckets]


@register("bucketing")
class Bucketing(WrapperRule):
    """Random buckets of updates are averaged, then ``rule`` aggregates the averages.

    The updates of a round are put into buckets of ``bucket_size``, the last one perhaps smaller;
    an average has the weight of all its members. Each round draws anew, from ``seed`` and the
    number of the round, not from the order in which updates arrive. ``bucket_size=1`` is the rule
    itself, a bucket for all the weighted mean. Only Gram matrices are averaged, never updates.

    Args:
        bucket_size: >= 1; what Su et al. call "2 buckets" are buckets of 2.
        seed: >= 0.
        rule: the rule that aggregates the averages, by name.
        rule_options: its own options, by name. A ``num_byzantine`` in it counts buckets.
        reuse: remember the last update of every client and use it again (:class:`GramRule`).
        client_weights: [K] relative weights, in the averages and in the rule; None: equal.
        **options: those of :class:`fastagg.aggregator.Aggregator`.
    """

    def __init__(
        self,
        *,
        bucket_size: int = 2,
        seed: int = 0,
        rule: str = "geometric-median",
        rule_options: Mapping[str, Any] | None = None,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        self.bucket_size = read_count("bucket_size", bucket_size, least=1)
        self.seed = read_count("seed", seed, least=0)
        super().__init__(
            lambda policy: BucketMixing(policy, self.bucket_size, self.seed),
            rule=rule,
            rule_options=rule_options,
            reuse=reuse,
            client_weights=client_weights,
            **options,
        )
