# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle: every op of :mod:`fastagg.ops` in plain torch, same names and signatures.

Written for readability, not for speed: every value is computed in float64 and rounded once, to the
dtype of the tensor that receives it. The compiled ops are tested against this module; it is never
a fallback for them. Arguments are assumed to be valid; only ``ops`` checks them.

Notation: K clients, S active clients (rows), d parameters.
"""

from __future__ import annotations

# The modules are those of fastagg.ops; the oracles of its _rows are in _sums and _memory.
from fastagg.ops.reference import (
    _gram,
    _int8_rows,
    _memory,
    _moments,
    _robust,
    _scores,
    _sketch,
    _sorted,
    _sums,
)
from fastagg.ops.reference._gram import *  # noqa: F403
from fastagg.ops.reference._int8_rows import *  # noqa: F403
from fastagg.ops.reference._memory import *  # noqa: F403
from fastagg.ops.reference._moments import *  # noqa: F403
from fastagg.ops.reference._robust import *  # noqa: F403
from fastagg.ops.reference._row_lists import Rows
from fastagg.ops.reference._scores import *  # noqa: F403
from fastagg.ops.reference._sketch import *  # noqa: F403
from fastagg.ops.reference._sorted import *  # noqa: F403
from fastagg.ops.reference._sums import *  # noqa: F403

__all__ = ["Rows"]
__all__ += _gram.__all__
__all__ += _int8_rows.__all__
__all__ += _memory.__all__
__all__ += _moments.__all__
__all__ += _robust.__all__
__all__ += _scores.__all__
__all__ += _sketch.__all__
__all__ += _sorted.__all__
__all__ += _sums.__all__
