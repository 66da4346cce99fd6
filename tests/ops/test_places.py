# SPDX-License-Identifier: Apache-2.0
"""The bits of a column do not depend on its place: in a step of vectors, or in what is left of one.

A compiler may fuse one of two products with their addition, and chooses for each loop. Without a
fixed choice, equal columns of a model would get different updates.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastagg import ops

D = 64 + 16 + 5  # a step, a vector of each instruction set, and single columns
Tensors = dict[str, torch.Tensor]


def weighted_sum(t: Tensors) -> torch.Tensor:
    return ops.weighted_sum_(t["start"].clone(), t["rows"], t["weights"], 0.7)


def mimic_mean(t: Tensors, referring: Callable[[int], bool]) -> torch.Tensor:
    S, d = t["rows"].shape
    references = [t["references"][s] if referring(s) else None for s in range(S)]
    rounded, peaks = torch.zeros(d), torch.zeros(S)
    out = torch.zeros(d, dtype=torch.float64)
    clients = torch.arange(S)
    return ops.mimic_mean_(
        *(out, rounded, peaks, t["rows"], t["memory"], clients, references), weights=t["weights"]
    )


def memory_total(t: Tensors) -> torch.Tensor:
    S, d = t["rows"].shape
    out, peaks = torch.zeros(d, dtype=torch.float64), torch.zeros(S)
    total = t["start"].double()
    clients = torch.arange(S)
    return ops.memory_total_(out, peaks, total, t["memory"], t["rows"], clients, t["weights"])


def scaffold_mean(t: Tensors) -> torch.Tensor:
    S, d = t["rows"].shape
    out, following = torch.zeros(d, dtype=torch.float64), torch.zeros(d)
    peaks, kept = torch.zeros(S), [torch.zeros(d) for _ in range(S)]
    steps = torch.arange(1, S + 1, dtype=torch.float64)
    ops.scaffold_mean_(
        *(out, following, peaks, t["start"], t["rows"], t["memory"], torch.arange(S)),
        *(t["weights"], steps, 0.3, kept),
    )
    return torch.stack([out, following.double(), *(row.double() for row in kept)])


OPS = {
    "weighted_sum": weighted_sum,
    "mimic_mean": lambda t: mimic_mean(t, lambda s: False),
    "mimic_mean, every reference": lambda t: mimic_mean(t, lambda s: True),
    "mimic_mean, some references": lambda t: mimic_mean(t, lambda s: s % 3 != 1),
    "memory_total": memory_total,
    "scaffold_mean": scaffold_mean,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("S", [1, 2, 4, 15])
def test_a_column_alone_has_the_same_bits(isa: str, op: str, S: int) -> None:
    generator = torch.Generator().manual_seed(S)
    tensors = {
        name: torch.randn(S, D, generator=generator) for name in ("rows", "memory", "references")
    }
    tensors["start"] = torch.randn(D, generator=generator)
    weights = torch.rand(S, generator=generator, dtype=torch.float64) + 0.1
    whole = OPS[op](tensors | {"weights": weights})
    for k in range(D):
        column = {n: t[..., k : k + 1].contiguous() for n, t in tensors.items()}
        alone = OPS[op](column | {"weights": weights})
        assert torch.equal(alone[..., 0], whole[..., k]), f"column {k}"
