# SPDX-License-Identifier: Apache-2.0
"""Partition with random label proportions."""

from __future__ import annotations

import numpy as np
import torch

from fastagg_sim.partition.base import Partition, Ranges, shuffled
from fastagg_sim.seeds import generator, numpy_generator


def dirichlet(
    labels: torch.Tensor,
    num_clients: int,
    rng: torch.Generator,
    *,
    alpha: float = 0.5,
    balanced: bool = True,
    samples_per_client: int | None = None,
    min_samples: int = 10,
    redraw: int = 0,
) -> Partition:
    """Label proportions from a symmetric Dirichlet distribution, Dir(alpha, ..., alpha).

    alpha: > 0; the smaller, the more skewed the proportions. 0.1 in Su et al. (Hsu et al. write
        Dir(alpha p) with the distribution p of the labels, so their alpha is C times this one.)
    balanced: whether all clients have the same number of samples.
        True (Su et al., section 6.2, after Hsu et al. 2019): every client draws proportions of the
            C labels. The clients then draw `samples_per_client` samples each, one client after the
            other, without replacement. If a label runs out, a client draws from its other labels in
            proportion; if all of its labels run out, from all remaining samples. If most samples
            are used, the last clients therefore get the proportions of the remaining samples.
        False (Li et al. 2022 and others): every label draws proportions of the K clients and is
            split accordingly, so the clients have different numbers of samples. The proportions are
            drawn again until every client has at least `min_samples`.
    samples_per_client: only if balanced; by default the number of samples divided by K, rounded
        down.
    min_samples: only if not balanced.
    redraw: another number draws other samples with the same proportions and, if not balanced, the
        same sizes. The shadow runs of Su et al. need this.

    Index lists are in random order.

    Raises ValueError for impossible settings, or if after 1000 draws a client still has fewer than
    `min_samples`.
    """
    if not 0.0 < alpha < float("inf"):
        raise ValueError(f"alpha: expected a positive number, got {alpha}")
    if redraw < 0 or min_samples < 0:
        raise ValueError(f"redraw, min_samples: expected 0 or more, got {redraw} and {min_samples}")
    if samples_per_client is not None and not balanced:
        raise ValueError("samples_per_client: only for balanced = true")
    stream = int(torch.randint(2**62, (), generator=rng))
    draws = generator(stream, "samples", redraw)
    classes = torch.unique(labels)
    # The samples of each label in random order; clients take them from the front.
    samples = [shuffled(torch.nonzero(labels == c).flatten(), draws) for c in classes]
    sizes = torch.tensor([len(part) for part in samples])
    proportions = numpy_generator(stream, "proportions")
    if balanced:
        size = len(labels) // num_clients if samples_per_client is None else samples_per_client
        if not 1 <= size <= len(labels) // num_clients:
            raise ValueError(
                f"samples_per_client: expected 1 to {len(labels) // num_clients} "
                f"({len(labels)} samples, {num_clients} clients), got {size}"
            )
        shares = _dirichlet_rows(proportions, alpha, num_clients, len(classes))  # [K, C]
        counts = _take_in_turn(shares, sizes, size, draws)
    else:
        counts = _split_labels(proportions, alpha, sizes, num_clients, min_samples)
    parts = [
        part[: int(used.sum())].split(used.tolist())  # K parts
        for part, used in zip(samples, counts.T, strict=True)
    ]
    clients = [shuffled(torch.cat(part), draws) for part in zip(*parts, strict=True)]
    return Partition(Ranges.listed(clients))


def _dirichlet_rows(
    rng: np.random.RandomState, alpha: float, rows: int, columns: int
) -> torch.Tensor:
    """Draw `rows` independent vectors from Dir(alpha, ..., alpha), float64 [rows, columns].

    Uses Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha) in logarithms, because the numbers themselves
    underflow for small alpha.
    """
    logs = np.log(rng.standard_gamma(alpha + 1.0, (rows, columns)))
    logs += np.log(1.0 - rng.random_sample((rows, columns))) / alpha
    return torch.softmax(torch.from_numpy(logs), dim=1)


def _take_in_turn(
    shares: torch.Tensor, sizes: torch.Tensor, samples: int, rng: torch.Generator
) -> torch.Tensor:
    """Return how many samples of each label each client takes, int64 [K, C], if `balanced`.

    shares: [K, C], the proportions.
    sizes: [C], the number of samples of each label.
    samples: the number of samples per client, the sum of each row of the result.
    """
    left = sizes.clone()
    counts = torch.zeros(shares.shape, dtype=torch.int64)
    for wanted, taken in zip(shares, counts, strict=True):
        while (missing := samples - int(taken.sum())) > 0:
            weights = torch.where(left > 0, wanted, 0.0)
            if float(weights.sum()) <= 0.0:
                weights = left.double()
            drawn = torch.multinomial(weights, missing, replacement=True, generator=rng)
            more = torch.minimum(torch.bincount(drawn, minlength=len(left)), left)
            taken += more
            left -= more
    return counts


def _split_labels(
    rng: np.random.RandomState,
    alpha: float,
    sizes: torch.Tensor,
    num_clients: int,
    min_samples: int,
) -> torch.Tensor:
    """Return how many samples of each label each client takes, int64 [K, C], if not `balanced`.

    The columns of the result sum to `sizes` [C], the number of samples of each label.
    """
    for _ in range(1000):
        shares = _dirichlet_rows(rng, alpha, len(sizes), num_clients)  # [C, K]
        ends = torch.round(shares.cumsum(dim=1) * sizes[:, None]).to(torch.int64)
        ends[:, -1] = sizes
        counts = torch.diff(ends, dim=1, prepend=torch.zeros(len(sizes), 1, dtype=torch.int64)).T
        if int(counts.sum(dim=1).min()) >= min_samples:
            return counts
    raise ValueError(
        f"min_samples: 1000 draws with alpha = {alpha} left one of {num_clients} clients with "
        f"fewer than {min_samples} of {int(sizes.sum())} samples"
    )
