# SPDX-License-Identifier: Apache-2.0
"""Random arguments for every op, used by the self-check and the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExampleData:
    """The tensors of one random round: K clients, S of them active, d parameters."""

    updates: Tensor  # float32 [S, d], correlated, as real updates are
    clients: Tensor  # int64 [S]
    active: Tensor  # bool [K], True for `clients`
    weights: Tensor  # float64 [S], > 0
    params: Tensor  # float32 [d]
    memory: Tensor  # float32 [K, d]
    references: list[Tensor | None]  # S entries, float32 [d] or None
    total: Tensor  # float64 [d], the sum of `memory`
    mean: Tensor  # float64 [d], zeros: an output
    faded: Tensor  # float64 [d], zeros: an output
    peaks: Tensor  # float32 [S], zeros: an output
    kept: list[Tensor]  # S float32 [d], zeros: outputs
    scores: Tensor  # float32 [K, K]
    counts: Tensor  # int32 [K, K]
    candidates: Tensor  # bool [K, K], all True
    gram: Tensor  # float64 [S, S], of `updates`
    round_scores: Tensor  # float64 [S, S], the cosine scores of `gram`
    pairs: Tensor  # bool [S, S], symmetric
    words: Tensor  # int8 [S, min(d, 1024)]
    factors: Tensor  # float32 [S], > 0
    order: Tensor  # int64 [S - 1], a permutation
    some: Tensor  # int64 [S // 4], distinct positions in [0, S)
    splits: Tensor  # int64 [3, 2], groups of `order` and of `some`
    last: Tensor  # int64 [S // 4], the last positions, descending

    @classmethod
    def random(cls, K: int, S: int, d: int, seed: int = 0) -> ExampleData:
        """Draw the data of one round."""
        g = torch.Generator().manual_seed(seed)
        common = torch.randn(d, generator=g, device="cpu")
        updates = torch.randn(S, d, generator=g, device="cpu") + common
        clients = torch.randperm(K, generator=g, device="cpu")[:S]
        active = torch.zeros(K, dtype=torch.bool, device="cpu")
        active[clients] = True
        params = torch.randn(d, generator=g, device="cpu")
        memory = torch.randn(K, d, generator=g, device="cpu")
        gram = updates.double() @ updates.double().T
        gram = (gram + gram.T) / 2.0  # exactly symmetric
        norms = gram.diagonal().sqrt()
        return cls(
            updates=updates,
            clients=clients,
            active=active,
            weights=torch.rand(S, generator=g, dtype=torch.float64, device="cpu"),
            params=params,
            memory=memory,
            references=[params.clone() if s % 3 else None for s in range(S)],
            total=memory.double().sum(dim=0),
            mean=torch.zeros(d, dtype=torch.float64, device="cpu"),
            faded=torch.zeros(d, dtype=torch.float64, device="cpu"),
            peaks=torch.zeros(S, device="cpu"),
            kept=list(torch.zeros(S, d, device="cpu")),
            scores=torch.rand(K, K, generator=g, device="cpu"),
            counts=torch.randint(0, 4, (K, K), generator=g, dtype=torch.int32, device="cpu"),
            candidates=torch.ones(K, K, dtype=torch.bool, device="cpu"),
            gram=gram,
            round_scores=(gram / torch.outer(norms, norms) + 1.0) / 2.0,
            pairs=torch.arange(S, device="cpu")[:, None] % 2 == torch.arange(S, device="cpu") % 2,
            words=(updates[:, :1024] * 20.0).clamp(-127, 127).to(torch.int8),
            factors=1.0 / norms.float(),
            order=torch.randperm(S - 1, generator=g, device="cpu"),
            some=torch.randperm(S, generator=g, device="cpu")[: S // 4],
            splits=torch.tensor([[0, 0], [S // 2, S // 8], [S - 1, S // 4]], device="cpu"),
            last=torch.arange(S - 1, S - 1 - S // 4, -1, device="cpu"),
        )
