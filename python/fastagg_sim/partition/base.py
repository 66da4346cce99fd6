# SPDX-License-Identifier: Apache-2.0
"""The type of all partitions, and a helper function."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Partition:
    """The training samples of K clients.

    clients: K int64 tensors, the indices of each client's samples in the training set. No two
        clients share a sample.
    groups: the group of each client, or None if the partition has no groups. Clients of one group
        have the same distribution: they are true friends of each other.
    """

    clients: list[torch.Tensor]
    groups: list[int] | None = None

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @property
    def sizes(self) -> torch.Tensor:
        """The number of samples of each client, int64 [K]."""
        return torch.tensor([len(indices) for indices in self.clients])

    def label_counts(self, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
        """Return how many samples of each label each client has, int64 [K, C].

        labels: the labels of the training set, int64 [n].
        num_classes: C.
        """
        counts = [
            torch.bincount(labels[indices], minlength=num_classes) for indices in self.clients
        ]
        return torch.stack(counts)


def shuffled(values: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Return `values` [n] in random order."""
    return values[torch.randperm(len(values), generator=rng)]
