# SPDX-License-Identifier: Apache-2.0
"""What type checkers read: at run time, this is the module fastagg.ops.reference."""

from fastagg.ops.reference._gram import *
from fastagg.ops.reference._int8_rows import *
from fastagg.ops.reference._memory import *
from fastagg.ops.reference._moments import *
from fastagg.ops.reference._robust import *
from fastagg.ops.reference._row_lists import Rows as Rows
from fastagg.ops.reference._scores import *
from fastagg.ops.reference._sketch import *
from fastagg.ops.reference._sorted import *
from fastagg.ops.reference._sums import *
