# SPDX-License-Identifier: Apache-2.0
"""Rows as callers pass them, and as the oracle computes with them: in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Rows = Tensor | Sequence[Tensor]
"""Updates of S clients: one tensor [S, d], or a sequence of S tensors [d]."""


def float64_rows(rows: Rows) -> Tensor:
    """Copy rows into one float64 tensor [S, d], or [0, 0] if there are none."""
    if isinstance(rows, Tensor):
        return rows.detach().to(torch.float64)
    if len(rows) == 0:
        return torch.zeros(0, 0, dtype=torch.float64, device="cpu")
    return torch.stack([row.detach().to(torch.float64) for row in rows])


def scaled(updates: Rows, scales: Tensor | None) -> Rows:
    """Return rows [S, d] times scales [S], rounded to float32; without scales, the rows."""
    if scales is None:
        return updates
    factors = scales.to(torch.float32).to(torch.float64)  # products of float32 are exact
    return (float64_rows(updates) * factors[:, None]).to(torch.float32)
