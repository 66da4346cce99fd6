# SPDX-License-Identifier: Apache-2.0
"""What type checkers read: at run time, this is the module fastagg.ops."""

from fastagg.ops._dispatch import MOST_ROWS as MOST_ROWS
from fastagg.ops._dispatch import devices as devices
from fastagg.ops._dispatch import gram_scratch as gram_scratch
from fastagg.ops._gram import *
from fastagg.ops._int8_rows import *
from fastagg.ops._moments import *
from fastagg.ops._robust import *
from fastagg.ops._rows import *
from fastagg.ops._scores import *
from fastagg.ops._sketch import *
from fastagg.ops._sorted import *
from fastagg.ops.row_lists import Rows as Rows
