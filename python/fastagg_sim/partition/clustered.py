# SPDX-License-Identifier: Apache-2.0
"""Partition into groups of clients that have the same labels."""

from __future__ import annotations

import torch

from fastagg_sim.partition.base import Partition, Ranges


def clustered(
    labels: torch.Tensor,
    num_clients: int,
    rng: torch.Generator,
    *,
    num_groups: int = 5,
    samples_per_client: int = 200,
) -> Partition:
    """Groups of clients that share a few labels: the clustered setting of FL-FDMS, section 6.1.

    The labels are divided at random into `num_groups` disjoint sets of equal size, one per group.
    Client k is in group k // (num_clients / num_groups). Each client draws `samples_per_client`
    samples, the same number of every label of its group. No two clients share a sample. The index
    list of a client is sorted by label, in the order in which the group drew its labels; the
    samples of a label are in random order.

    FL-FDMS has 20 clients in 5 groups, with 200 samples per client on MNIST (100 per label) and
    1000 on CIFAR-10 (500 per label).

    Raises ValueError if the labels or the clients cannot be divided equally among the groups, or if
    a label has too few samples.
    """
    if num_groups < 1 or num_clients % num_groups:
        raise ValueError(
            f"num_groups: expected a divisor of num_clients = {num_clients}, got {num_groups}"
        )
    classes = torch.unique(labels)
    if len(classes) % num_groups:
        raise ValueError(
            f"num_groups: expected a divisor of the number of labels, {len(classes)}, "
            f"got {num_groups}"
        )
    labels_per_group = len(classes) // num_groups
    if samples_per_client < 1 or samples_per_client % labels_per_group:
        raise ValueError(
            f"samples_per_client: expected a positive multiple of the {labels_per_group} labels "
            f"per group, got {samples_per_client}"
        )
    group_size = num_clients // num_groups
    per_label = samples_per_client // labels_per_group
    dealt = classes[torch.randperm(len(classes), generator=rng)].reshape(num_groups, -1)
    chosen = []
    for group_labels in dealt:
        drawn = []  # for each label of the group: sample indices [group_size, per_label]
        for label in group_labels:
            samples = torch.nonzero(labels == label).flatten()
            if len(samples) < group_size * per_label:
                raise ValueError(
                    f"samples_per_client: label {int(label)} has {len(samples)} samples, but "
                    f"{group_size} clients need {per_label} each; "
                    f"at most {len(samples) // group_size * labels_per_group} would fit"
                )
            order = torch.randperm(len(samples), generator=rng)[: group_size * per_label]
            drawn.append(samples[order].reshape(group_size, per_label))
        chosen.append(torch.cat(drawn, dim=1).flatten())  # [group_size, samples_per_client]
    sizes = torch.full((num_clients,), samples_per_client)
    groups = [client // group_size for client in range(num_clients)]
    return Partition(Ranges.consecutive(torch.cat(chosen), sizes), groups)
