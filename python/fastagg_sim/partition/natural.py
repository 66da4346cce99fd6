# SPDX-License-Identifier: Apache-2.0
"""The partition that is part of a data set."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastagg_sim.partition.base import Partition


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
    return Partition(list(clients))
