# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation as plain callables: vectors in, a vector of the same kind out.

    fastagg.robust.GeometricMedian(nu=0.1, T=3)(vectors)

takes an ndarray or tensor [n, d], or a list of n arrays or tensors of the same shape, and returns
one vector of the same kind and dtype. Names, arguments and results are those of ByzFL, unless a
class says otherwise. The pre-aggregators ``NNM``, ``Bucketing``, ``Clipping`` and ``ARC`` return
several vectors [m, ...], which another callable can aggregate.

The input is never changed, and the result never shares memory with it. Vectors of a list may have
different floating-point dtypes. They are then converted to the dtype to which torch promotes all of
them (``torch.promote_types``; float32 and float64 give float64), which is the dtype of the result.
Vectors that ``nonfinite="drop"`` leaves out count as well, so the dtype depends on dtypes alone.
(ByzFL promotes arrays in the same way, and converts all tensors to float32.)

Sums of float32 vectors are accumulated in float32 in groups of eight and in float64 across groups;
sums of float64 vectors are accumulated in float64; float16 and bfloat16 vectors are converted to
float32 first. Results are rounded once to the dtype of the input.

Norms and distances are computed in float64 from Gram matrices. In that of float32 vectors, the
error of a distance can be 2e-4 of the norms of the two vectors, or 6e-4 for less than 1000 numbers
(float64: 2e-7). If two vectors are closer than 0.18 of their norms (float64: 0.001), and
subtracting one vector from all at least halves these norms, a second Gram matrix, of the
differences, is computed. The error of a distance is then at most 2e-4 (6e-4, 2e-7) of the distances
of the two vectors from the subtracted one. If more than half of the
vectors are close to each other, it is close to all of these; less than half, however large, cannot
change that. ``fastagg.rules.common_row`` derives the bounds. So ties between vectors whose
scores agree to about 1e-6 may be broken differently than in ByzFL.

Float64 vectors may have any finite numbers. If one has numbers beyond 2^256 (1e77), which none of
float32 has, norms and distances are computed from vectors that are divided by powers of two, so
that squares are finite; ``fastagg.robust.row_units`` says how. The errors above then hold for the
majority, and such a vector is as far from it as in exact arithmetic, up to rounding. Only the
distances of several such vectors from each other are not kept: if there are more than f, a rule may
choose others of them than in exact arithmetic. Results are finite in any case.

Every callable takes ``nonfinite``: "raise" raises a ValueError if a vector holds NaN or Inf, "drop"
leaves such vectors out. For state that lasts across rounds, absent clients and GPUs, use the rules
of ``fastagg.make``.
"""

from __future__ import annotations

from fastagg.robust import callables
from fastagg.robust.callables import *  # noqa: F403

__all__: list[str] = []
__all__ += callables.__all__
