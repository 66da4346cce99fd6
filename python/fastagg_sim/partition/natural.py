# SPDX-License-Identifier: Apache-2.0
"""The partition that is part of a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastagg_sim.partition.base import Counted, Partition, Ranges


def natural(
    labels: torch.Tensor,
    num_clients: int,
    rng: torch.Generator,
    *,
    clients: Sequence[torch.Tensor] | None = None,
) -> Partition:
    """Use the partition that is part of the data set.

    clients: `Dataset.clients`. `rng` is unused.

    Raises ValueError if the data set has no partition, or has another number of clients.
    """
    if clients is None:
        raise ValueError(
            "clients: the partition 'natural' needs a data set that is divided among clients "
            "(for instance synthetic); this one is not, choose another partition"
        )
    if len(clients) != num_clients:
        raise ValueError(
            f"num_clients: expected {len(clients)}, the number of clients of the data set, "
            f"got {num_clients}"
        )
    for client, indices in enumerate(clients):
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(labels):
            raise ValueError(
                f"clients[{client}]: expected indices in [0, {len(labels)}), "
                f"got {int(indices.min())} to {int(indices.max())}"
            )
    return Partition(Ranges.listed(clients))


def generated(
    num_clients: int,
    count: Callable[[], torch.Tensor],
    groups: Sequence[int] | None,
    train_fraction: float = 1.0,
) -> Partition:
    """Return the partition of a data set that is generated client by client.

    Nothing is generated. Sizes are counted when they are first needed.

    count: `count()` returns the number of training samples of each client, int64 [K].
    groups: the group of each client, or None.
    train_fraction: as for `partition`.

    Raises ValueError if a client is left without a sample.
    """
    if not 0.0 < train_fraction <= 1.0:
        raise ValueError(f"train_fraction: expected a number in (0, 1], got {train_fraction}")
    sets = Counted(num_clients, count, train_fraction)
    if train_fraction < 1.0 and int(sets.sizes.min()) == 0:
        client = int(sets.sizes.argmin())
        raise ValueError(
            f"train_fraction: {train_fraction} leaves client {client} no sample; use a larger one"
        )
    return Partition(sets, groups)
