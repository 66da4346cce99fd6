# SPDX-License-Identifier: Apache-2.0
"""Rows of int8 numbers, with one float32 scale for each block of 256 columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.ops._dispatch import compiled, mark_changed, op
from fastagg.ops._examples import ExampleData
from fastagg.ops.row_lists import Rows, row_list
from fastagg.ops.scales import num_scales

__all__ = ["dequantize_", "quantize_", "quantized_total_"]


def _numbers(x: ExampleData, seed: int) -> list[Tensor]:
    """Return S rows of int8 [d]."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(x.clients), len(x.params))
    return list(torch.randint(-127, 128, shape, generator=g, device="cpu").to(torch.int8))


def _scales(x: ExampleData) -> Tensor:
    """Return scales of S rows, float32 [S, ceil(d / 256)]."""
    return x.weights.float()[:, None] * torch.ones(num_scales(len(x.params)), device="cpu")


@op(example=lambda f, x: f(_numbers(x, 0), _scales(x), x.updates))
def quantize_(numbers: Sequence[Tensor], scales: Tensor, rows: Rows) -> Sequence[Tensor]:
    """Round rows to int8, with one scale for each block of 256 columns, in place.

    ::

        a = max |x| of a block
        scale = a / 127  # rounded so that 127 * scale is finite
        number = x / scale, rounded to the nearest integer, halves away from zero

    An element of the rounded row is ``number * scale``. It is off by at most
    ``(1 + 2^-14) * a / 254``. A block with ``a < 2^-119`` (1.5e-36) becomes zero. If an element of
    a block is NaN or infinite, its scale is not finite and its numbers are 0. All instruction sets,
    and GPUs, give the same bits.

    Args:
        numbers: S tensors [d] int8; changed in place to numbers in [-127, 127].
        scales: float32 [S, ceil(d / 256)], contiguous; changed in place.
        rows: S rows of d float32. None may share memory with ``numbers`` or ``scales``.

    Returns:
        ``numbers``.
    """
    written = list(numbers)
    compiled.quantize_(written, scales, row_list(rows, "rows"))
    mark_changed(scales, *written)
    return numbers


@op(example=lambda f, x: f(x.kept, _numbers(x, 1), list(_scales(x))))
def dequantize_(
    out: Sequence[Tensor], numbers: Sequence[Tensor], scales: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Compute ``out[s][k] = numbers[s][k] * scales[s][k // 256]``, in place.

    Args:
        out: S tensors [d] float32; changed in place.
        numbers: S tensors [d] int8.
        scales: S tensors [ceil(d / 256)] float32.

    Returns:
        ``out``.
    """
    written, own, steps = list(out), list(numbers), list(scales)
    if written or own or steps:  # otherwise no tensor tells the device
        compiled.dequantize_(written, own, steps)
        mark_changed(*written)
    return out


@op(
    example=lambda f, x: [
        f(
            x.mean,
            x.peaks,
            x.total,
            _numbers(x, 0),
            list(_scales(x)),
            x.updates,
            x.clients,
            x.weights,
            _numbers(x, 1),
            _scales(x),
            **second,
        )
        for second in ({}, {"faded": x.faded, "faded_weights": -x.weights, "fading": 0.5})
    ]
)
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
    """Compute the total and the new rows of a memory of int8 rows; nothing read is changed.

    One pass does what :func:`quantize_` of the updates and then :func:`memory_total_` of the
    rounded rows would do, with the same bits::

        kept[s], kept_scales[s] = updates[s], rounded to int8
        out = total + sum over s of weights[s] * (kept row s - memory row s)

    It reads 5 bytes and writes 1 byte for each element of the updates; on a GPU it reads the new
    rows again.

    Args:
        out: float64 [d]; changed in place. NaN or infinite in the blocks where a row is.
        peaks: float32 [S]; changed in place to the largest magnitudes of the rounded rows.
        total: float64 [d].
        memory: S tensors [d] int8, those of ``clients``.
        memory_scales: S tensors [ceil(d / 256)] float32, their scales.
        updates: S rows of d float32.
        clients: int64 [S].
        weights: float32 or float64 [S].
        kept: S tensors [d] int8 that share no memory with any other argument; changed in place.
        kept_scales: float32 [S, ceil(d / 256)], contiguous; changed in place.
        faded, faded_weights, fading: a second sum, as for :func:`memory_total_`.

    Returns:
        ``out``. Rows are added in the order of their client ids.
    """
    written = list(kept)
    compiled.quantized_total_(
        out,
        peaks,
        total,
        list(memory),
        list(memory_scales),
        row_list(updates, "updates"),
        clients,
        weights,
        written,
        kept_scales,
        faded,
        faded_weights,
        fading,
    )
    mark_changed(out, peaks, kept_scales, *written, *([] if faded is None else [faded]))
    return out
