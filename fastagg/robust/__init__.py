# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation as plain callables: vectors in, a vector of the same kind out.

    fastagg.robust.GeometricMedian(nu=0.1, T=3)(vectors)

takes an ndarray or tensor [n, d], or a list of n arrays or tensors of the same shape, and returns
one vector of the same kind and dtype. Names, arguments and results are those of ByzFL, unless a
class says otherwise. The pre-aggregators ``NNM``, ``Bucketing``, ``Clipping`` and ``ARC`` return
several vectors [m, ...], which another callable can aggregate.

The input is never changed, and the result never shares memory with it. Distances and norms are
computed in float64 from the Gram matrix. Sums of float32 vectors are accumulated in float32 in
groups of eight and in float64 across groups; sums of float64 vectors are accumulated in float64;
float16 and bfloat16 vectors are converted to float32 first. Results are rounded once to the dtype
of the input. A Gram matrix determines the distance of two vectors only to about 1e-8 of their
norms (for float64 input, too), so ties between almost equal vectors may be broken differently than
in ByzFL.

Every callable takes ``nonfinite``: "raise" raises a ValueError if a vector holds NaN or Inf, "drop"
leaves such vectors out. For state that lasts across rounds, absent clients and GPUs, use the rules
of ``fastagg.make``.
"""

from __future__ import annotations

from fastagg.robust.callables import (
    ARC,
    CAF,
    MDA,
    NNM,
    SMEA,
    Average,
    Bucketing,
    CenteredClipping,
    Clipping,
    GeometricMedian,
    Krum,
    Meamed,
    Median,
    MoNNA,
    MultiKrum,
    TrMean,
)

__all__ = [
    "ARC",
    "CAF",
    "MDA",
    "NNM",
    "SMEA",
    "Average",
    "Bucketing",
    "CenteredClipping",
    "Clipping",
    "GeometricMedian",
    "Krum",
    "Meamed",
    "Median",
    "MoNNA",
    "MultiKrum",
    "TrMean",
]
