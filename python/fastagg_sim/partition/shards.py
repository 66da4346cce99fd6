# SPDX-License-Identifier: Apache-2.0
"""Partition into shards of samples with similar labels, which clients draw at random."""

from __future__ import annotations

import torch

from fastagg_sim.partition.base import Drawn, Partition, Ranges, shuffled
from fastagg_sim.seeds import first_of_order, generator

# (number of shards, shards per client); a client always gets 1/100 of all samples.
HETEROGENEITY = {"low": (500, 5), "medium": (200, 2), "high": (100, 1)}


def shards(
    labels: torch.Tensor,
    num_clients: int,
    rng: torch.Generator,
    *,
    num_shards: int | None = None,
    shard_size: int | None = None,
    shards_per_client: int | None = None,
    heterogeneity: str | None = None,
) -> Partition:
    """Shards of samples sorted by label: the general setting of FL-FDMS.

    The samples are sorted by label (samples with the same label keep their order), and the first
    `num_shards * shard_size` samples are cut into shards of equal size. Each client draws
    `shards_per_client` shards without replacement; the remaining shards are not used. The index
    list of a client contains its shards one after the other. A shard may contain two labels if the
    number of samples of a label is not a multiple of the shard size.

    num_shards: 200 by default.
    shard_size: samples per shard; by default the largest possible number.
    shards_per_client: 2 by default.
    heterogeneity: sets num_shards and shards_per_client to the values of FL-FDMS, figure 5: "low"
        (500 shards, 5 per client), "medium" (200, 2) or "high" (100, 1). With CIFAR-10 the shards
        have 100, 250 and 500 samples, and every client has 500.

    Raises ValueError if there are too few samples or shards, or if heterogeneity is given together
    with num_shards or shards_per_client.
    """
    if heterogeneity is not None:
        if num_shards is not None or shards_per_client is not None:
            raise ValueError(
                "heterogeneity: sets num_shards and shards_per_client, so it cannot be combined "
                "with them"
            )
        if heterogeneity not in HETEROGENEITY:
            raise ValueError(
                f"heterogeneity: expected one of {', '.join(HETEROGENEITY)}, got {heterogeneity!r}"
            )
    preset = HETEROGENEITY[heterogeneity or "medium"]
    num_shards = preset[0] if num_shards is None else num_shards
    shards_per_client = preset[1] if shards_per_client is None else shards_per_client
    if num_shards < 1 or shards_per_client < 1:
        raise ValueError(
            f"num_shards, shards_per_client: expected positive numbers, "
            f"got {num_shards} and {shards_per_client}"
        )
    if shard_size is None:
        shard_size = len(labels) // num_shards
    if shard_size < 1 or num_shards * shard_size > len(labels):
        raise ValueError(
            f"shard_size: {num_shards} shards of {shard_size} do not fit: there are "
            f"{len(labels)} samples, enough for shards of {len(labels) // num_shards}"
        )
    if num_clients * shards_per_client > num_shards:
        raise ValueError(
            f"shards_per_client: {num_clients} clients with {shards_per_client} shards each need "
            f"{num_clients * shards_per_client} shards, but num_shards is {num_shards}"
        )
    by_label = torch.argsort(labels, stable=True)[: num_shards * shard_size]
    cut = by_label.reshape(num_shards, shard_size)
    drawn = torch.randperm(num_shards, generator=rng)[: num_clients * shards_per_client]
    sizes = torch.full((num_clients,), shards_per_client * shard_size)
    return Partition(Ranges.consecutive(cut[drawn].flatten(), sizes))


def label_limited(
    labels: torch.Tensor,
    num_clients: int,
    rng: torch.Generator,
    *,
    classes_per_client: int = 2,
    distinct: bool = True,
    shard_size: int | None = None,
    shared: bool = False,
) -> Partition:
    """Shards with one label each, the same number per client: the setting of MimiC, section 7.1.

    The samples of every label are put into random order and cut into K * classes_per_client / C
    shards of `shard_size` samples; the remaining samples are not used. Each client draws
    `classes_per_client` shards without replacement. With 30 clients and 2 classes per client there
    are 60 shards, of 1,000 samples on Fashion-MNIST and of 833 on CIFAR-10. The index list of a
    client contains its shards one after the other.

    classes_per_client: 2 in the paper; 5, 8 and 10 in its table 5.
    distinct: True: the shards of a client have different labels, as the paper's term "classes per
        client" implies. False: they are drawn at random, as in the paper's sentence "assign two
        random shards to each client"; in 8.5 % of the cases both then have the same label.
    shard_size: samples per shard; by default the largest possible number.
    shared: True: every client draws its labels, and the samples of each, on its own. Clients then
        share samples, so there may be more of them than samples; labels are drawn equally often on
        average only. A client's samples are drawn when they are needed. Needs `shard_size`.

    Raises ValueError if the shards cannot be divided equally among the clients, or if a label has
    too few samples.
    """
    classes = torch.unique(labels)
    if classes_per_client < 1 or (distinct and classes_per_client > len(classes)):
        raise ValueError(
            f"classes_per_client: expected 1 to {len(classes)}, the number of labels, "
            f"got {classes_per_client}"
        )
    if shared:
        if not distinct:
            raise ValueError("distinct: expected true with shared = true, got false")
        return _shared_shards(labels, num_clients, rng, classes_per_client, shard_size)
    if num_clients * classes_per_client % len(classes):
        raise ValueError(
            f"classes_per_client: {num_clients} clients with {classes_per_client} shards each need "
            f"{num_clients * classes_per_client} shards, no multiple of the {len(classes)} labels"
        )
    per_class = num_clients * classes_per_client // len(classes)
    samples = {int(c): shuffled(torch.nonzero(labels == c).flatten(), rng) for c in classes}
    smallest = min(samples, key=lambda c: len(samples[c]))
    fits = len(samples[smallest]) // per_class
    if shard_size is None:
        shard_size = fits
    if not 1 <= shard_size <= fits:
        raise ValueError(
            f"shard_size: label {smallest} has {len(samples[smallest])} samples, enough for "
            f"{per_class} shards of {fits}, not of {shard_size}"
        )
    if distinct:
        hands = _deal_distinct(len(classes), num_clients, classes_per_client, rng)
    else:
        deck = torch.repeat_interleave(torch.arange(len(classes)), per_class)
        hands = shuffled(deck, rng).reshape(num_clients, classes_per_client).tolist()
    # The shards of a label are dealt from the last one to the first.
    cut = [samples[int(c)].split(shard_size)[:per_class] for c in classes]
    left = [per_class] * len(classes)
    dealt = []
    for c in (c for hand in hands for c in hand):
        left[c] -= 1
        dealt.append(cut[c][left[c]])
    sizes = torch.full((num_clients,), classes_per_client * shard_size)
    return Partition(Ranges.consecutive(torch.cat(dealt), sizes))


def _shared_shards(
    labels: torch.Tensor,
    num_clients: int,
    rng: torch.Generator,
    classes_per_client: int,
    shard_size: int | None,
) -> Partition:
    """Return the partition `label_limited` with `shared`."""
    samples = [torch.nonzero(labels == c).flatten() for c in torch.unique(labels)]
    fits = min(map(len, samples))
    if shard_size is None or not 1 <= shard_size <= fits:
        raise ValueError(
            f"shard_size: expected 1 to {fits} with shared = true, the samples of the rarest "
            f"label, got {shard_size}"
        )
    stream = int(torch.randint(2**62, (), generator=rng))

    def draw(client: int) -> torch.Tensor:
        own = generator(stream, "client", client)
        chosen = first_of_order(len(samples), classes_per_client, own).tolist()
        return torch.cat(
            [samples[c][first_of_order(len(samples[c]), shard_size, own)] for c in chosen]
        )

    return Partition(Drawn(draw, torch.full((num_clients,), classes_per_client * shard_size)))


def _deal_distinct(
    num_classes: int, num_clients: int, hand: int, rng: torch.Generator
) -> list[list[int]]:
    """Draw `hand` different classes for each client, such that each class is drawn equally often.

    The clients draw one after the other, without replacement, with probability proportional to the
    number of remaining shards of each class. If a class has as many shards left as there are
    clients left, each of these clients must take one. Such classes are taken first, so that no
    class ever has more shards left than there are clients, and the draw always succeeds.
    """
    left = torch.full((num_classes,), num_clients * hand // num_classes)
    hands = []
    for clients_left in range(num_clients, 0, -1):
        forced = torch.nonzero(left == clients_left).flatten()
        others = torch.where(left == clients_left, 0, left).double()
        drawn = forced
        if len(forced) < hand:
            more = torch.multinomial(others, hand - len(forced), generator=rng)
            drawn = torch.cat([forced, more])
        left[drawn] -= 1
        hands.append(drawn.tolist())
    return hands
