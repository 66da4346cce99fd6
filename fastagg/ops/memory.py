# SPDX-License-Identifier: Apache-2.0
"""Tensors made of Python's memory, the arguments of a step, and memory kept free for a commit.

torch.from_numpy and torch.frombuffer end the process if a small allocation fails in them. These
functions raise MemoryError or RuntimeError instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastagg._C import count_of as count_of
from fastagg._C import count_up_ as count_up_
from fastagg._C import diagonal as diagonal
from fastagg._C import dot as dot
from fastagg._C import flags as flags
from fastagg._C import float_tensor as float_tensor
from fastagg._C import int_tensor as int_tensor
from fastagg._C import picked as picked
from fastagg._C import replaced as replaced
from fastagg._C import reserve as reserve
from fastagg._C import rounded as rounded
from fastagg._C import rows as rows_of
from fastagg._C import shared_row as shared_row
from fastagg._C import shares_by_friend as shares_by_friend
from fastagg._C import shares_of as shares_of
from fastagg._C import take_rows as take_rows
from fastagg._C import tensor as tensor_of
from fastagg._C import uninitialized as uninitialized
from fastagg._C import usual_cohort as usual_cohort

__all__ = [
    "count_of",
    "count_up_",
    "diagonal",
    "dot",
    "flags",
    "float_tensor",
    "int_tensor",
    "memory_errors",
    "picked",
    "replaced",
    "reserve",
    "rounded",
    "rows_of",
    "shared_row",
    "shares_by_friend",
    "shares_of",
    "take_rows",
    "tensor_of",
    "uninitialized",
    "usual_cohort",
]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where torch's allocators raise RuntimeError because memory ran out."""
    try:
        yield
    except RuntimeError as error:  # a subclass of it for GPUs, but none for the CPU
        if "allocate memory" in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise MemoryError(str(error)) from error
        raise
