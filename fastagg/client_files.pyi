# SPDX-License-Identifier: Apache-2.0
"""What type checkers read: at run time, this is the module fastagg.updates.files."""

from fastagg.updates.files import *
