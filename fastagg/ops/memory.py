# SPDX-License-Identifier: Apache-2.0
"""Tensors made of Python's memory, and memory kept free for a commit.

torch.from_numpy and torch.frombuffer end the process if a small allocation fails in them. These
functions raise MemoryError or RuntimeError instead.
"""

from __future__ import annotations

from fastagg._C import reserve as reserve
from fastagg._C import rows as rows_of
from fastagg._C import tensor as tensor_of

__all__ = ["reserve", "rows_of", "tensor_of"]
