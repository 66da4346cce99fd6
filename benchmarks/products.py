# SPDX-License-Identifier: Apache-2.0
"""Products of rows with the libraries at hand, in memory that is allocated before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.linalg.blas import ssyrk
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, d], out [S, S]) -> ``out``, the inner products of all pairs of rows."""


def by_mm(rows: Tensor, out: Tensor) -> Tensor:
    """Compute both triangles with torch."""
    return torch.mm(rows, rows.T, out=out)


def triangle(rows: Tensor, out: Tensor) -> Tensor:
    """Compute the lower triangle with scipy's BLAS: half of the multiply-adds."""
    # The rows are the columns of a Fortran matrix A, and ``out`` is A^T A. Its upper triangle is
    # the lower one of a matrix in the order of C.
    ssyrk(1.0, rows.numpy().T, beta=0.0, c=out.numpy().T, trans=1, overwrite_c=1)
    return out


def by_syrk(rows: Tensor, out: Tensor) -> Tensor:
    """Compute the lower :func:`triangle`, and mirror it."""
    triangle(rows, out).tril_()
    diagonal = out.diagonal().clone()
    out.add_(out.T.clone())
    out.diagonal().copy_(diagonal)
    return out


def by_numpy(rows: Tensor, weights: Tensor, out: np.ndarray) -> Tensor:
    """Compute the weighted sum of rows with numpy, into ``out`` [d]."""
    return torch.from_numpy(np.matmul(weights.numpy(), rows.numpy(), out=out))
