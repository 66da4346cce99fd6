# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise from the cryptographic generator of the operating system.

Numbers of a seeded generator can be guessed or computed back from a part of them, so they protect
nothing. ``os.urandom`` is the generator of the system (ChaCha20 on Linux).

**Rounding.** The floating-point numbers that noise can reach depend on the number that it is added
to, so the low bits of a sum can show that number (Mironov 2012, "On Significance of the Least
Significant Bits for Differential Privacy"). Here the sum is computed in float64 and rounded to a
multiple of a power of two, at most 2^-11 and at least 2^-12 of the standard deviation: all sums lie
on one grid, whatever the aggregate was. This removes the low bits that the attack reads. It is no
proof for the float64 noise itself, whose tail ends at 8.6 standard deviations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fastagg.ops.memory import tensor_of

RandomBytes = Callable[[int], bytes]
"""Number of bytes -> that many random bytes. Only tests use another one than ``os.urandom``."""

_BLOCK = 1 << 16  # columns whose noise is in memory at a time
_GRID = 12  # binary digits of the standard deviation that a sum keeps


@dataclass(frozen=True)
class Noise:
    """The noise of a step, in its report.

    Attributes:
        multiplier: standard deviation / sensitivity of the whole release of the round: of the
            aggregate and, with an :class:`fastagg.AdaptiveClip`, of the count. For accountants.
        sensitivity: largest norm by which one client can change the aggregate, if its update has
            the norm ``StepReport.clip_norm`` at most.
        std: standard deviation of the noise in every column of the aggregate.
    """

    multiplier: float
    sensitivity: float
    std: float


def standard_normal(count: int, random_bytes: RandomBytes = os.urandom) -> np.ndarray:
    """Return independent standard normal numbers, [count] float64, by Box and Muller's method."""
    pairs = -(-count // 2)
    bits = np.frombuffer(random_bytes(16 * pairs), dtype="<u8") >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
    angle = (2.0 * math.pi) * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def add_noise_(vector: Tensor, std: float, random_bytes: RandomBytes = os.urandom) -> Tensor:
    """Add Gaussian noise to ``vector`` [d] float32 in place, and round the sums to a grid.

    The noise is made on the CPU, also for a vector on a GPU.

    Args:
        vector: finite; changed in place.
        std: standard deviation, > 0.
        random_bytes: the source of randomness.

    Returns:
        ``vector``. A sum beyond float32 becomes infinite.
    """
    _, exponent = math.frexp(std)
    grid = math.ldexp(1.0, exponent - _GRID)
    for part in vector.split(_BLOCK):
        total = standard_normal(len(part), random_bytes)  # NumPy starts no threads
        with np.errstate(all="ignore"):  # a sum beyond the range becomes infinite or NaN
            total *= std
            total += part.cpu().numpy()
            total /= grid
            np.rint(total, out=total)
            total *= grid
            if part.is_cpu:
                part.numpy()[:] = total
        if not part.is_cpu:
            part.copy_(tensor_of(total))
    return vector
