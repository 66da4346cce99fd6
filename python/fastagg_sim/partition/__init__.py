# SPDX-License-Identifier: Apache-2.0
"""Partitions: which training samples each client has.

A partition is a function of the labels and the seed. To add one, add a file with a function
`(labels, num_clients, generator, **options) -> Partition` and add the function to PARTITIONS. The
index sets of clients are ranges of one list, or drawn when they are needed (`base.IndexSets`), so
that they cost little for 10^5 clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastagg_sim.partition.base import Partition, kept
from fastagg_sim.partition.clustered import clustered
from fastagg_sim.partition.dirichlet import dirichlet
from fastagg_sim.partition.natural import generated, natural
from fastagg_sim.partition.shards import label_limited, shards
from fastagg_sim.registry import call, lookup
from fastagg_sim.seeds import generator

__all__ = ["PARTITIONS", "Partition", "generated", "partition"]

PARTITIONS: dict[str, Callable[..., Partition]] = {
    "clustered": clustered,
    "shards": shards,
    "label-limited": label_limited,
    "dirichlet": dirichlet,
    "natural": natural,
}


def partition(
    name: str,
    labels: torch.Tensor,
    num_clients: int,
    seed: int,
    *,
    train_fraction: float = 1.0,
    **options: Any,
) -> Partition:
    """Divide a training set among `num_clients` clients with the partition `name`.

    labels: the labels of the training set, int64 [n].
    seed: the seed of the run; random choices use its stream "partition".
    train_fraction: in (0, 1]; each client only keeps this fraction of its samples, from the start
        of its index list. The released FL-FDMS code keeps 0.8, which the paper does not mention. In
        the clustered setting, clients then have fewer samples of their second label (500 + 300 on
        CIFAR-10).
    options: see the function in PARTITIONS.

    Raises ValueError for an unknown name or an impossible partition, TypeError for an unknown
    option.
    """
    make = lookup("partition", name, PARTITIONS)
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise ValueError(
            f"labels: expected int64 [n], got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if num_clients < 1:
        raise ValueError(f"num_clients: expected a positive number, got {num_clients}")
    if not 0.0 < train_fraction <= 1.0:
        raise ValueError(f"train_fraction: expected a number in (0, 1], got {train_fraction}")
    rng = generator(seed, "partition")
    dealt = call("partition", name, make, labels, num_clients, rng, **options)
    sizes = torch.tensor([kept(size, train_fraction) for size in dealt.sizes.tolist()])
    empty = torch.nonzero(sizes == 0).flatten().tolist()
    if empty:
        raise ValueError(
            f"train_fraction: {train_fraction} leaves clients {empty} no sample; use a larger one"
        )
    return Partition(dealt.clients.first(sizes), dealt.groups)
