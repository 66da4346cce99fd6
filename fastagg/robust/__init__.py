# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation as plain callables: vectors in, a vector of the same kind out.

    fastagg.robust.GeometricMedian(nu=0.1, T=3)(vectors)

takes an ndarray or tensor [n, d], or a list of n arrays or tensors of one shape, and returns one
vector in the kind and dtype that came. Names, arguments and results are those of ByzFL, except
where a class says otherwise; ``NNM``, ``Bucketing``, ``Clipping`` and ``ARC`` give one vector for
each (or for some) of those that came.

The input is never changed, and never shares memory with the result. Distances and norms come from
the Gram matrix, in float64; float32 vectors are summed in float32 in groups of eight and in float64
across groups, float64 ones in float64, float16 and bfloat16 ones as float32. Results are rounded
once to the dtype of the vectors. A Gram matrix knows the distance of two vectors to about 1e-8 of
their norms (float64: 1e-8, too), so ties of almost equal vectors may fall differently from ByzFL's.

``nonfinite``, for all: "raise" a ValueError if a vector holds NaN or Inf, or "drop" such vectors.
For rules with a state that lasts over rounds, absent clients and GPUs: ``fastagg.make``.
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
