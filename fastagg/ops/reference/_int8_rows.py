# SPDX-License-Identifier: Apache-2.0
"""Rows of int8 numbers, with one float32 scale for each block of 256 columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.ops.reference._memory import memory_total_
from fastagg.ops.reference._row_lists import Rows

__all__ = ["dequantize_", "quantize_", "quantized_total_"]


def quantize_(numbers: Sequence[Tensor], scales: Tensor, rows: Rows) -> Sequence[Tensor]:
    """Round rows to int8, with one scale for each block of 256 columns.

    Numbers and scales are defined by float32 arithmetic, so they equal those of the op bit for bit.

    Args:
        numbers: S tensors [d] int8; changed in place.
        scales: [S, ceil(d / 256)] float32; changed in place.
        rows: S rows of length d.

    Returns:
        ``numbers``.
    """
    for s, row in enumerate(rows):
        for b, block in enumerate(row.split(256) if len(row) else ()):
            peak = block.abs().max()
            scales[s, b] = peak / torch.tensor(127.0, device="cpu")
            if peak.isfinite() and not (127.0 * scales[s, b]).isfinite():
                scales[s, b] = torch.nextafter(scales[s, b], torch.zeros((), device="cpu"))
            halves = torch.tensor(254.0, device="cpu") / peak
            if peak < 2.0**-119:  # the scale would be subnormal
                scales[s, b], halves = 0.0, torch.zeros((), device="cpu")
            if not peak.isfinite():
                halves.zero_()
            steps = ((block.abs() * halves).nan_to_num().floor() + 1.0).div(2.0).floor()
            numbers[s][256 * b : 256 * b + len(block)] = steps.copysign(block).to(torch.int8)
    return numbers


def dequantize_(
    out: Sequence[Tensor], numbers: Sequence[Tensor], scales: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Compute ``out[s][k] = numbers[s][k] * scales[s][k // 256]``.

    Args:
        out: S tensors [d] float32; changed in place.
        numbers: S tensors [d] int8.
        scales: S tensors [ceil(d / 256)] float32.

    Returns:
        ``out``.
    """
    for row, own, steps in zip(out, numbers, scales, strict=True):
        row.copy_(own.double() * steps.double().repeat_interleave(256)[: len(own)])
    return out


def quantized_total_(
    out: Tensor,
    peaks: Tensor,
    total: Tensor,
    memory: Sequence[Tensor],
    memory_scales: Sequence[Tensor],
    updates: Rows,
    clients: Tensor,
    weights: Tensor,
    kept: Sequence[Tensor],
    kept_scales: Tensor,
    *,
    faded: Tensor | None = None,
    faded_weights: Tensor | None = None,
    fading: float = 1.0,
) -> Tensor:
    """Compute :func:`memory_total_` for int8 rows; :func:`quantize_` rounds the new ones.

    Args:
        out: [d] float64; changed in place.
        peaks: [S] float32; changed in place to the largest magnitudes of the rounded rows.
        total: [d] float64.
        memory: S tensors [d] int8.
        memory_scales: S tensors [ceil(d / 256)] float32.
        updates: S rows of length d.
        clients: [S] int64, distinct ids.
        weights: [S] float32 or float64.
        kept: S tensors [d] int8; changed in place.
        kept_scales: [S, ceil(d / 256)] float32; changed in place.
        faded, faded_weights, fading: as for :func:`memory_total_`.

    Returns:
        ``out``.
    """
    quantize_(kept, kept_scales, updates)
    new = torch.empty(len(kept), len(out), device="cpu")
    old = torch.empty_like(new)
    dequantize_(list(new), kept, list(kept_scales))
    dequantize_(list(old), memory, memory_scales)
    return memory_total_(
        out,
        peaks,
        total,
        list(old),
        new,
        clients,
        weights,
        faded=faded,
        faded_weights=faded_weights,
        fading=fading,
    )
