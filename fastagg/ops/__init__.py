# SPDX-License-Identifier: Apache-2.0
"""The functional layer: thin wrappers over the compiled operators ``torch.ops.fastagg``.

Conventions, for all functions here:

* K clients, S of them active (rows), d parameters. ``updates`` and ``rows`` are S rows of d
  float32: one tensor [S, d] (any distance between rows, last dimension contiguous) or a sequence
  of S tensors [d]. Rows are read where they are; nothing is stacked or copied.
* Where "short" rows are allowed, they may be bfloat16 or float16, all of one dtype. Results have
  the bits of float32 rows with the same numbers.
* ``clients`` is int64 [S]: distinct ids in [0, K), ``clients[s]`` being the client of row s.
* What is remembered of clients (``memory``, ``corrections``) is one tensor [K, d], of which the
  rows ``clients`` are used, or a sequence of S tensors [d]: those of ``clients``, in their order.
* ``counts`` [K, K] are int32, or int16; they stop at the largest value of their type.
* ``candidates`` is a set of pairs: bool [K, K], or packed bits, uint8 [K, ceil(K / 8)] as
  :func:`fastagg.bits.pack` gives them.
* A name that ends in ``_`` changes its first argument in place and returns it.
* Results have the same bits for any number of threads (``torch.set_num_threads``), on one
  instruction set (``fastagg.build_info()["isa"]``).
* Shapes, dtypes, devices and ids are checked: ValueError, TypeError or IndexError name the
  argument, what was expected and what came. Values are not: a NaN in gives a NaN out. (The
  aggregators see to finiteness.) After an exception nothing has changed.
* Large tensors are all on the CPU or all on one GPU (CUDA, if :func:`devices` has it), on whose
  current stream the work is put. ``clients``, and the weights of rows, may be on the CPU in either
  case. With them there, no op waits for the GPU; ids on a GPU that choose or order rows have to be
  fetched first, and those given to :func:`update_scores_` are checked by an assertion on the GPU.
* On a GPU results have the same bits from run to run, and ``pairs`` are taken to be symmetric.
* Not differentiable: a Parameter can be changed only under ``torch.no_grad()``.
"""

from __future__ import annotations

from fastagg.ops._dispatch import devices as devices
from fastagg.ops._gram import gram, gram_and_sum_, gram_rows, replace_rows
from fastagg.ops._robust import bucketed_gram, clip_towards, weiszfeld
from fastagg.ops._rows import (
    abs_max,
    add_total_,
    memory_total_,
    memory_update_,
    mimic_,
    mimic_mean_,
    weighted_sum_,
)
from fastagg.ops._scores import (
    cosine_scores,
    distance_scores,
    eliminate_,
    select_friends,
    update_scores_,
)
from fastagg.ops.row_lists import Rows

__all__ = [
    "Rows",
    "abs_max",
    "add_total_",
    "bucketed_gram",
    "clip_towards",
    "cosine_scores",
    "distance_scores",
    "eliminate_",
    "gram",
    "gram_and_sum_",
    "gram_rows",
    "memory_total_",
    "memory_update_",
    "mimic_",
    "mimic_mean_",
    "replace_rows",
    "select_friends",
    "update_scores_",
    "weighted_sum_",
    "weiszfeld",
]
