# SPDX-License-Identifier: Apache-2.0
"""Bucketing before a robust rule (Karimireddy, He and Jaggi 2022)."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastagg import ops
from fastagg.ops.memory import tensor_of
from fastagg.options import read_count
from fastagg.registry import register
from fastagg.rules._gram_rule import ReuseOptions
from fastagg.rules._wrapper_rule import WrapperRule
from fastagg.rules.gram_policy import Around, Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack


def draw_order(num_rows: int, seed: int, t: int) -> Tensor:
    """Return a random permutation of the rows, [n] int64.

    It depends on the arguments only, on every platform: Python guarantees that
    ``Random(str).random()`` yields the same numbers everywhere.
    """
    draw = random.Random(f"fastagg bucketing {seed} {t}").random
    keys = [draw() for _ in range(num_rows)]
    return tensor_of(array("q", sorted(range(num_rows), key=keys.__getitem__)))


def draw_buckets(num_rows: int, bucket_size: int, seed: int, t: int) -> list[list[int]]:
    """Return a random partition of the rows into ``ceil(num_rows / bucket_size)`` buckets.

    Buckets are consecutive parts of :func:`draw_order`. Rows are sorted within a bucket, and
    buckets are sorted by their first row.
    """
    order = draw_order(num_rows, seed, t).tolist()
    return sorted(
        sorted(order[start : start + bucket_size]) for start in range(0, num_rows, bucket_size)
    )


class BucketMixing(Around):
    """Replace rows by the weighted means of random buckets; a mean has the weight of its bucket."""

    def __init__(self, policy: Policy, bucket_size: int, seed: int) -> None:
        super().__init__(policy)
        self.uses_round = True
        self.bucket_size = bucket_size
        self.seed = seed

    def __call__(self, gram: Tensor, weights: Tensor, t: int) -> Tensor:
        order = draw_order(len(weights), self.seed, t)
        # The previous aggregate, if the policy uses it, is in no bucket.
        means, buckets, shares, sums = ops.bucketed_gram(gram, order, weights, self.bucket_size)
        return shares * self.policy(means, sums, t)[buckets]


@register("bucketing")
class Bucketing(WrapperRule):
    """Average the updates of random buckets, then aggregate the averages with ``rule``.

    Each bucket has ``bucket_size`` updates; one bucket of a round may have fewer. An average has
    the sum of the weights of its updates. The buckets of a round depend on ``seed`` and the round
    number, and are invariant to arrival order. ``bucket_size=1`` gives ``rule`` itself; a single
    bucket gives the weighted mean. The rule averages only the Gram matrix, never the updates.
    Source: Karimireddy, He and Jaggi 2022.

    Args:
        bucket_size: number of updates in a bucket, >= 1. "2 buckets" of Su et al. means 2 here.
        seed: of the random buckets, >= 0.
        rule: name of the rule that aggregates the averages.
        rule_options: options of that rule, by name. Its ``num_byzantine`` counts buckets.
        reuse: use the last updates of absent clients as well; see :class:`GramRule`.
        client_weights: [K] relative weights, in the averages and in the rule; None: equal.
        **options: ``memory_dtype``, ``memory_folder`` and ``max_age`` (:class:`GramRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).
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
