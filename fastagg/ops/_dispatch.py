# SPDX-License-Identifier: Apache-2.0
"""What every wrapper in :mod:`fastagg.ops` uses: the compiled operators, their fakes, versions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg import _C

compiled = torch.ops.fastagg
"""The operators that the extension registers when it is imported."""


def devices() -> tuple[str, ...]:
    """The types of device that have kernels in this build and are there: "cpu", perhaps "cuda"."""
    cuda = bool(_C.build_info()["cuda_archs"]) and torch.cuda.is_available()
    return ("cpu", "cuda") if cuda else ("cpu",)


def mark_changed(*tensors: Tensor) -> None:
    """Tell autograd that these were changed behind its back; inference tensors keep no version."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def count_rows(rows: list[Tensor]) -> int:
    """S, of a list whose items have one row (1-D) or many (2-D)."""
    return sum(row.shape[0] if row.dim() == 2 else 1 for row in rows)


def returns_nothing(name: str) -> None:
    """Register the fake kernel of an operator that changes its arguments and returns nothing."""

    @torch.library.register_fake(f"fastagg::{name}")
    def _(*args: object, **kwargs: object) -> None:
        return None
