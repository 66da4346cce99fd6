# SPDX-License-Identifier: Apache-2.0
"""The functional layer: thin wrappers over the compiled operators ``torch.ops.fastagg``.

Notation: K clients, S of them active (rows), d parameters.

Rows:

* ``updates`` and ``rows`` are S rows of d float32: one tensor [S, d] (with any stride between rows
  and a contiguous last dimension) or a sequence of S tensors [d]. They are read in place, never
  stacked or copied.
* Where "short" rows are allowed, rows may be bfloat16 or float16, all of one dtype. Results have
  the bits that float32 rows with the same values would give.
* ``clients`` is int64 [S]: distinct ids in [0, K). ``clients[s]`` is the client of row s.
* ``memory`` and ``corrections`` hold what the server remembers of clients: one tensor [K, d], of
  which the rows ``clients`` are used, or a sequence of S tensors [d], the s-th for ``clients[s]``.

State of pairs of clients:

* ``counts`` [K, K] are int32 or int16. They stop at the largest value of their dtype.
* ``candidates`` is a set of pairs: bool [K, K], or packed bits, uint8 [K, ceil(K / 8)], as
  :func:`fastagg.ops.bits.pack` returns them.

Results and errors:

* An op whose name ends in ``_`` changes its first argument in place and returns it.
* Results are invariant to the thread count (``torch.set_num_threads``), bit for bit, on one
  instruction set (``fastagg.build_info()["isa"]``).
* Shapes, dtypes, devices and ids are checked. A ValueError, TypeError or IndexError names the
  argument, what was expected and what came. After one of these nothing has changed. If memory runs
  out in an op (MemoryError; RuntimeError if it is torch's allocator that has none), the tensors
  that it changes may hold anything.
* Values are not checked: a NaN in the input gives a NaN in the result. (The aggregators check that
  rows are finite.)
* The ops are not differentiable. Those that change tensors raise RuntimeError outside of
  ``torch.no_grad()`` if one of their tensors requires gradients, such as a Parameter. A backward
  pass through a result of the others raises it.

Devices:

* Large tensors must all be on the CPU or all on one GPU (CUDA, if :func:`devices` lists it). Work
  for a GPU is queued on its current stream.
* ``clients`` and the weights of rows may be on the CPU in both cases. If they are, no op waits for
  the GPU. Ids on a GPU are copied to the CPU, which waits for the GPU, and checked there. With
  ``when``, :func:`update_scores_` does not wait: if ids on a GPU are wrong, nothing changes, and
  there is no exception.
* On a GPU results have the same bits from run to run, and ``pairs`` are assumed to be symmetric.
"""

from __future__ import annotations

from fastagg.ops import _gram, _int8_rows, _moments, _robust, _rows, _scores, _sketch, _sorted
from fastagg.ops._dispatch import MOST_ROWS as MOST_ROWS
from fastagg.ops._dispatch import devices as devices
from fastagg.ops._dispatch import gram_scratch as gram_scratch
from fastagg.ops._gram import *  # noqa: F403
from fastagg.ops._int8_rows import *  # noqa: F403
from fastagg.ops._moments import *  # noqa: F403
from fastagg.ops._robust import *  # noqa: F403
from fastagg.ops._rows import *  # noqa: F403
from fastagg.ops._scores import *  # noqa: F403
from fastagg.ops._sketch import *  # noqa: F403
from fastagg.ops._sorted import *  # noqa: F403
from fastagg.ops.row_lists import Rows

__all__ = ["Rows"]
__all__ += _gram.__all__
__all__ += _int8_rows.__all__
__all__ += _moments.__all__
__all__ += _robust.__all__
__all__ += _rows.__all__
__all__ += _scores.__all__
__all__ += _sketch.__all__
__all__ += _sorted.__all__
