# SPDX-License-Identifier: Apache-2.0
"""How many scales a row of int8 numbers has (``kScaleBlock`` in ``csrc/kernels/int8_rows.h``)."""

from __future__ import annotations

SCALE_BLOCK = 256
"""Number of columns that share a scale."""


def num_scales(num_params: int) -> int:
    """Return the number of scales of a row of d numbers, ceil(d / 256)."""
    return -(-num_params // SCALE_BLOCK)
